"""``streamq load``: what it warns of. What it loads is in ``tests/runs``."""

from pathlib import Path

import msgspec
import pytest

from streamq import Protocol
from streamq.queue.fleet import WorkerDetails
from tests.support.command import Streamq

pytestmark = pytest.mark.commands


def test_load_warns_of_a_handler_that_no_worker_has(
    streamq: Streamq, protocol: Protocol, queue: str, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("a line\n")

    def warned(*handlers: str) -> str:
        details = WorkerDetails(name="w", queue=queue, handlers=list(handlers))
        protocol.beat(queue, "w", 60_000, msgspec.json.encode(details))
        ran = streamq("load", str(tmp_path / "in.txt"), "--handler", "shuot")
        assert ran.returncode == 0
        return ran.stderr

    assert "warning" not in warned(), "a pool that has just started"
    assert "there is shout" in warned("shout")
    assert "warning" not in warned("shuot")
