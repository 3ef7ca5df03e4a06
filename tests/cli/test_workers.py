"""``streamq workers``: who works, and on what."""

import json

import msgspec
import pytest

from streamq import Protocol
from streamq.queue.fleet import WorkerDetails
from tests.cli.common import beat, rows
from tests.support.by_hand import HANDLER
from tests.support.command import Streamq

pytestmark = pytest.mark.commands


def test_workers(streamq: Streamq, protocol: Protocol, queue: str) -> None:
    worker = beat(protocol, queue)
    protocol.beat(queue, "stranger", 60_000, b"of another version")

    text = streamq("workers").stdout
    listed = json.loads(streamq("workers", "--json").stdout)

    stranger, known = rows(text)
    assert known[:6] == ["web-3.4711", "web-3", "4711", "1.2.3", HANDLER, "1/8"]
    assert known[6].partition("m")[0] in ("1", "2"), "1m30s, and the time the command takes"
    assert known[-2:] == ["nightly/17", known[-1]]
    assert known[-1] == "59s", "as long as it had run at the heartbeat, 2 s ago"
    assert stranger[0] == "stranger"
    (running,) = worker.running
    running = msgspec.structs.replace(running, progress=40)
    beat(protocol, queue, running=[running], beat_ms=worker.beat_ms)
    assert rows(streamq("workers").stdout)[1][-4:] == ["nightly/17", "59s", "40", "%"]
    assert msgspec.convert(listed[1], WorkerDetails) == worker
