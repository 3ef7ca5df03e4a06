"""Several processes of one gateway, which share its port."""

import os
import signal
from collections.abc import Callable

from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.support.command import run
from tests.support.waiting import wait_until

pytestmark = ONE_KIND


def children(gate: Gate) -> list[int]:
    path = f"/proc/{gate.process.pid}/task/{gate.process.pid}/children"
    with open(path) as file:  # noqa: PTH123
        return [int(word) for word in file.read().split()]


def test_processes_share_port_and_secret_and_the_dead_are_replaced(
    serve: Callable[..., Gate],
) -> None:
    gate = serve("-p", "2")
    wait_until(lambda: gate.log.count("serving at") == 2, 60)
    gate.submit(["x"] * 8, limit=8)
    for _ in range(8):  # each call on a connection of its own comes to either of them
        granted = gate.take().json
        done = [{"part": granted["parts"][0]["number"]}]
        assert gate.post("/v1/report", {"ticket": granted["ticket"], "done": done}).status == 200
    first, second = children(gate)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: gate.log.count("serving at") == 3, 60)
    assert gate.get("/livez").status == 200
    assert gate.stop() == 0
    for pid in (first, second):
        assert not os.path.exists(f"/proc/{pid}")  # noqa: PTH110


def test_processes_end_when_the_command_that_started_them_is_killed(
    serve: Callable[..., Gate],
) -> None:
    gate = serve("-p", "2")
    wait_until(lambda: gate.log.count("serving at") == 2, 60)
    started = children(gate)

    gate.process.kill()
    gate.process.wait()

    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started), 30)  # noqa: PTH110


def test_options_that_cannot_be_end_all_of_them(url: str) -> None:
    ran = run("serve", "--url", url, "-p", "2", "--listen", "0.0.0.0:0")
    assert (ran.returncode, "without keys" in ran.stderr) == (2, True)
