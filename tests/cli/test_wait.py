"""``streamq wait``: for the end of a request, and what its code says of it."""

import signal
import subprocess
from collections.abc import Callable

import pytest

from streamq import Client, Protocol
from tests.cli.common import ALL_KINDS
from tests.support.by_hand import HANDLER, RequestByHand
from tests.support.command import Streamq, Terminal
from tests.support.waiting import wait_until

pytestmark = pytest.mark.commands


def test_wait_for_what_is_done(streamq: Streamq, done: RequestByHand) -> None:
    ran = streamq("wait", done.id)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert f"{done.id}: done, 3 records, 0 failed" in ran.stderr


@ALL_KINDS
def test_wait_until_it_is_done(
    running: Callable[..., subprocess.Popen[str]], submitted: RequestByHand, protocol: Protocol
) -> None:
    waiting = running("wait", submitted.id, "--quiet")
    holder, _ = submitted.claim(3)
    submitted.finish(holder, [1, 2, 3])

    _, err = waiting.communicate(timeout=30)
    assert (waiting.returncode, err) == (0, "")


def test_wait_tells_failures_from_cancelled(
    streamq: Streamq, client: Client, failed: RequestByHand
) -> None:
    cancelled = client.submit([b"1"], handler=HANDLER, queue=failed.queue)
    cancelled.cancel()

    assert streamq("wait", failed.id).returncode == 1
    assert streamq("wait", failed.id, cancelled.id).returncode == 5


def test_wait_no_longer_than_asked(streamq: Streamq, submitted: RequestByHand) -> None:
    ran = streamq("wait", submitted.id, "--timeout", "200ms")

    assert (ran.returncode, ran.stdout) == (124, "")
    assert ran.stderr == f"streamq: request {submitted.id} is not finished\n"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),
    ],
)
def test_wait_shows_progress_on_a_terminal_and_can_be_stopped(
    running: Callable[..., subprocess.Popen[str]], submitted: RequestByHand, number: int, code: int
) -> None:
    with Terminal() as terminal:
        files = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.file)
        waiting = running("wait", submitted.id, **files)
        wait_until(lambda: "0/3 records" in terminal.seen(), timeout=30)

        waiting.send_signal(number)

        assert waiting.wait(timeout=30) == code
        wait_until(lambda: "the same command waits again" in terminal.seen())
        assert "Traceback" not in terminal.seen()
