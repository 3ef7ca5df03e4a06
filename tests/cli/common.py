"""What several tests of commands need: a live worker, the lines of a table."""

import time
from typing import Any

import msgspec
import pytest

from streamq import Protocol
from streamq.queue.fleet import Running, WorkerDetails
from tests.conftest import KINDS
from tests.support.by_hand import HANDLER

ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
STATUS = ["id", "queue", "handler", "state", "paused", "level", "limit", "parts", "records"]
STATUS += ["created_ms", "started_ms", "finished_ms", "rate", "eta_s", "labels", "held_until_ms"]
STATUS += ["rate_limit", "max_failures", "max_percent", "retried", "results", "keep_ms"]
STATUS += ["weight", "canary", "waits_for_release", "deadline_ms", "reason", "callbacks"]


def beat(protocol: Protocol, queue: str, /, **changes: Any) -> WorkerDetails:
    """A live worker."""
    now = round(time.time() * 1e3)
    values: dict[str, Any] = {
        "name": "web-3.4711",
        "host": "web-3",
        "pid": 4711,
        "version": "1.2.3",
        "queue": queue,
        "handlers": [HANDLER],
        "slots": 8,
        "busy": 1,
        "started_ms": now - 90_000,
        "beat_ms": now - 2_000,
        "levels": "0-99",
        "running": [
            Running(request="nightly", part=17, since_ms=now - 61_000, handler=HANDLER, pid=4712)
        ],
    }
    details = WorkerDetails(**(values | changes))
    protocol.beat(queue, details.name, 60_000, msgspec.json.encode(details))
    return details


def rows(text: str) -> list[list[str]]:
    """The words of a table's lines, without the headers."""
    return [line.split() for line in text.splitlines()[1:]]
