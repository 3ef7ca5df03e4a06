"""``streamq janitor``: what it puts back, what it says, how it ends."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from streamq.protocol.replies import Token
from streamq.servers.local import LocalServer
from tests.cli.common import ALL_KINDS
from tests.support.by_hand import RequestByHand
from tests.support.command import COMMAND, Streamq, environment

pytestmark = pytest.mark.commands


@ALL_KINDS
def test_the_janitor_puts_back_a_lost_token(streamq: Streamq, submitted: RequestByHand) -> None:
    for _ in range(3):
        assert submitted.protocol.take(submitted.queue, ("h",), 1.0) == Token(submitted.id, "h", 50)
    assert submitted.tokens() == []

    ran = streamq("janitor", "--once")

    assert (ran.returncode, ran.stdout) == (0, "")
    assert len(submitted.tokens()) == 3


def test_the_janitor_says_what_it_took_back(streamq: Streamq, submitted: RequestByHand) -> None:
    holder, _ = submitted.claim()
    submitted.expire(holder)

    ran = streamq("janitor", "--once", STREAMQ_LOG_FORMAT="json")

    # A server that does not have all scripts yet gets them, and the janitor says so.
    lines = [json.loads(each) for each in ran.stderr.splitlines()]
    [line] = [each for each in lines if each["logger"] != "streamq.protocol.script_cache"]
    assert line["event"] == f"reaped 1 parts of {submitted.id}"
    assert (line["level"], line["logger"]) == ("info", "streamq.queue.janitor")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_janitor_ends_politely(
    number: signal.Signals, running: Callable[..., subprocess.Popen[str]]
) -> None:
    janitor = running("janitor", "--interval", "1m")
    assert janitor.stderr is not None
    assert "sweeping" in janitor.stderr.readline()

    janitor.send_signal(number)

    _, rest = janitor.communicate(timeout=30)
    assert janitor.returncode == 0
    assert rest.count("\n") == 1
    assert rest.endswith(" stopped\n")


def test_the_janitor_outlives_its_server(tmp_path: Path) -> None:
    with LocalServer.start(tmp_path) as server:
        janitor = subprocess.Popen(
            [*COMMAND, "janitor", "--interval", "100ms", "--url", server.url],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert janitor.stderr is not None
        assert "sweeping" in janitor.stderr.readline()
    lost = janitor.stderr.readline()
    while "loaded" in lost:  # of the first sweep, on a busy machine
        lost = janitor.stderr.readline()
    with LocalServer.start(tmp_path):
        found = [janitor.stderr.readline()]
        while "loaded" in found[-1]:  # the scripts, which the new server does not have
            found.append(janitor.stderr.readline())
        janitor.terminate()
        _, rest = janitor.communicate(timeout=30)

    assert "queue default: unix:" in lost
    assert "queue default is swept again" in found[-1]
    assert rest.splitlines()[-1].endswith("stopped")
    assert janitor.returncode == 0
