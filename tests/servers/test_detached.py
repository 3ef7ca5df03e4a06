"""``streamq server --detach`` and ``--stop``: one server in a folder, which keeps its data."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamq.errors import ServerError
from streamq.servers import detached
from tests.servers.common import ask, is_gone
from tests.support.command import COMMAND, Ran, environment
from tests.support.waiting import wait_until

Server = Callable[..., Ran]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Runs ``streamq server`` in a folder of the test; whatever it started is stopped."""

    def run(*words: str) -> Ran:
        return subprocess.run(
            [*COMMAND, "server", *words],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    yield run
    for folder in (tmp_path / detached.HOME, tmp_path / "other"):
        detached.stop_detached(folder)


def started(server: Server, *words: str) -> dict[str, Any]:
    ran = server("--detach", "--json", *words)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_a_detached_server_outlives_its_command_and_keeps_its_data(
    server: Server, tmp_path: Path
) -> None:
    first = server("--detach")
    url = first.stdout.strip()
    assert ask(url, "SET", "key", "value")
    serving = detached.find_detached(tmp_path / detached.HOME)
    assert serving is not None

    stopped = server("--stop")
    nobody = server("--stop")
    second = started(server)

    assert first.stderr == (
        f"started, process {serving.pid}; data in .streamq-server; streamq server --stop\n"
    )
    assert stopped.stderr == f"stopped, process {serving.pid}; data stay in .streamq-server\n"
    assert is_gone(serving.pid)
    assert (nobody.returncode, nobody.stderr) == (
        3,
        "streamq: no server runs in .streamq-server\n",
    )
    assert (second["url"], second["new"]) == (url, True)
    assert ask(url, "GET", "key") == "value"
    assert (tmp_path / detached.HOME).stat().st_mode & 0o777 == 0o700


def test_a_second_start_finds_the_first(server: Server) -> None:
    one = started(server, "--dir", "other")

    again = server("--detach", "--dir", "other")
    elsewhere = started(server)
    at_a_port = server("--detach", "--dir", "other", "--port", "7777")

    assert again.stdout.strip() == one["url"]
    assert again.stderr.startswith(f"runs already, process {one['pid']}; data in other; ")
    assert again.stderr.endswith("streamq server --stop --dir other\n")
    assert elsewhere["url"] != one["url"]
    assert (at_a_port.returncode, "a server runs in other already" in at_a_port.stderr) == (3, True)


def test_of_starts_at_the_same_moment_one_serves(server: Server, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: started(server), range(3)))

    assert len({each["pid"] for each in found}) == 1
    assert sum(each["new"] for each in found) == 1
    assert ask(found[0]["url"], "PING") is True
    # None of the others waits for the folder to be free.
    os.kill(found[0]["pid"], signal.SIGKILL)
    wait_until(lambda: detached.find_detached(tmp_path / detached.HOME) is None)
    assert started(server)["new"]


def test_a_server_that_was_killed_leaves_nothing_that_hinders_the_next(
    server: Server, tmp_path: Path
) -> None:
    killed = started(server)
    os.kill(killed["pid"], signal.SIGKILL)
    wait_until(lambda: is_gone(killed["pid"]))

    assert detached.find_detached(tmp_path / detached.HOME) is None
    assert server("--stop").returncode == 3, "its process id may be that of another by now"
    after = started(server, "--port", "0")

    assert after["new"]
    assert after["url"].startswith("redis://127.0.0.1:")


def test_a_server_in_the_foreground_is_found_and_stopped_too(
    server: Server, tmp_path: Path
) -> None:
    words = [*COMMAND, "server", "--dir", "other"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    ) as foreground:
        assert foreground.stdout is not None
        url = foreground.stdout.readline().strip()

        assert started(server, "--dir", "other")["url"] == url
        assert json.loads(server("--stop", "--dir", "other", "--json").stdout)["url"] == url
        assert foreground.wait(10) == 0


def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = ["/bin/sh", "-c", "echo there is no such program >&2; exit 3"]

    with pytest.raises(ServerError, match="did not start: there is no such program"):
        detached.start_detached(tmp_path / "folder", command)


@pytest.mark.parametrize(
    "words", [("--detach", "--cluster", "3"), ("--stop", "--detach"), ("--stop", "--port", "1")]
)
def test_options_that_do_not_go_together(server: Server, words: tuple[str, ...]) -> None:
    ran = server(*words)

    assert (ran.returncode, " go" in ran.stderr) == (2, True)
