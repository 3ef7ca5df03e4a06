"""``streamq set``, ``pause``, ``resume``, ``cancel`` and ``retry``."""

import subprocess
from collections.abc import Callable

import pytest

from streamq import Client
from tests.cli.common import ALL_KINDS, rows
from tests.support.by_hand import HANDLER, RequestByHand
from tests.support.command import Streamq, Terminal
from tests.support.waiting import wait_until

pytestmark = pytest.mark.commands


def test_set_pause_and_resume(streamq: Streamq, submitted: RequestByHand) -> None:
    ran = streamq("set", submitted.id, "--priority", "10", "--limit", "2", "--rate", "5/s")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert ran.stderr == f"{submitted.id}: level 10, limit 2, rate 5/s\n"
    assert [submitted.meta(f) for f in ("level", "limit", "rate_ms")] == ["10", "2", "200"]
    assert submitted.tokens(10) == [submitted.id, submitted.id]

    ran = streamq("set", submitted.id, "--weight", "4")
    assert ran.stderr == f"{submitted.id}: weight 4\n"
    assert "weight     4" in streamq("status", submitted.id).stdout
    refused = streamq("set", submitted.id, "--weight", "65")
    assert refused.returncode == 2
    assert refused.stderr == "streamq: weight 65 is out of range: 1 to 64\n"

    assert streamq("pause", submitted.id).stderr == f"{submitted.id}: paused\n"
    assert [row[2] for row in rows(streamq("ls", "--state", "paused").stdout)] == ["paused"]
    assert streamq("resume", submitted.id).stderr == f"{submitted.id}: resumed\n"
    assert streamq("set", submitted.id, "--rate", "off").returncode == 0
    assert [submitted.meta(f) for f in ("paused", "rate_ms")] == ["0", "0"]


def test_what_has_ended_cannot_be_steered(streamq: Streamq, done: RequestByHand) -> None:
    ran = streamq("set", done.id, "--level", "10")

    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == f"streamq: {done.id}: the request is done\n"


def test_one_that_refuses_does_not_stop_the_others(
    streamq: Streamq, submitted: RequestByHand
) -> None:
    ran = streamq("pause", "nobody-knows-it", submitted.id)

    assert ran.returncode == 5
    assert submitted.meta("paused") == "1"


def test_cancel(streamq: Streamq, submitted: RequestByHand) -> None:
    ran = streamq("cancel", submitted.id)

    assert (ran.returncode, ran.stdout) == (0, "")
    assert ran.stderr == f"{submitted.id}: cancelled, 3 parts not finished\n"
    assert submitted.meta("state") == "cancelled"


def test_cancel_asks_on_a_terminal_when_there_are_several(
    running: Callable[..., subprocess.Popen[str]], client: Client, submitted: RequestByHand
) -> None:
    other = client.submit([b"1"], handler=HANDLER, queue=submitted.queue)

    with Terminal() as terminal:
        files = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.file)
        asking = running("cancel", submitted.id, other.id, **files)
        wait_until(lambda: "Cancel 2 requests?" in terminal.seen(), timeout=30)
        terminal.type("n\n")
        assert asking.wait(timeout=30) == 1
        assert submitted.meta("state") == "open"

        sure = running("cancel", submitted.id, other.id, "--yes", **files)
        assert sure.wait(timeout=30) == 0

    assert submitted.meta("state") == "cancelled"


@ALL_KINDS
def test_retry_runs_again_what_failed(streamq: Streamq, failed: RequestByHand) -> None:
    ran = streamq("retry", failed.id)

    assert (ran.returncode, ran.stdout) == (0, "2 parts run again\n")
    assert failed.meta("state") == "open"
