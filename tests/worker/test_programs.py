"""Programs as handlers of a pool: ``streamq worker --exec``."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from streamq import Client, Request
from tests.conftest import KINDS, ONE_KIND
from tests.support.fleet import Fleet
from tests.support.waiting import allowed_s, is_alive, wait_until

pytestmark = pytest.mark.commands
#: Where the server matters little; but routing to nodes must do what one server does.
TWO_KINDS = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "redis"], indirect=True
)
#: It notes its own process, one that it waits for, and one that has nothing of its pipes.
FAMILY = """
sleep 1000 & echo $! >>pids
sleep 1000 </dev/null >/dev/null 2>&1 & echo $! >>pids
echo $$ >>pids
wait
"""


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """A shell script; returns how it is given."""

    def program(text: str) -> str:
        path = tmp_path / "program"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return "./program"

    return program


@pytest.fixture
def serve(fleet: Fleet, tmp_path: Path) -> Any:
    """A pool that runs a program as the handler ``count``."""

    def serve(command: str, *options: str) -> "subprocess.Popen[bytes]":
        words = ("--exec", command, "--handler", "count", *options)
        pool = fleet.ready(*words, target="", cwd=tmp_path)
        assert pool.poll() is None, fleet.errors(pool)
        return pool

    return serve


@pytest.fixture
def submit(client: Client, queue: str) -> Any:
    """Submit to the program."""

    def submit(*payloads: bytes, **options: Any) -> Request:
        return client.submit(payloads, handler="count", queue=queue, **options)

    return submit


def pids(folder: Path, count: int) -> list[int]:
    """The processes that programs have noted, when there are so many."""
    path = folder / "pids"
    wait_until(lambda: path.exists() and len(path.read_text().split()) == count, 20)
    found = [int(pid) for pid in path.read_text().split()]
    assert all(map(is_alive, found))
    return found


@TWO_KINDS
def test_requests_call_a_program_by_its_name(
    fleet: Fleet, serve: Any, submit: Any, tmp_path: Path
) -> None:
    serve("wc -l", "-p", "2")

    request = submit(b"a\nb\n", b"c\n", b"")

    assert [result.split() for _, result in request.results(timeout=20)] == [[b"2"], [b"1"], [b"0"]]
    assert [worker["handlers"] for worker in fleet.command("workers")] == [["count"]]


@TWO_KINDS
def test_files_go_through_it(
    url: str, serve: Any, client: Client, queue: str, tmp_path: Path
) -> None:
    text = b"".join(b"line %d\n" % n for n in range(5_000))
    (tmp_path / "in.txt").write_bytes(text)
    serve("tr a-z A-Z", "-p", "2")

    command = [sys.executable, "-m", "streamq.cli", "load", "in.txt", "--handler", "count"]
    options = ["--queue", queue, "--url", url, "--lines", "100"]
    loaded = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
    request = client.get(loaded.stdout.strip())

    assert request.wait(20).records.done == 5_000
    assert b"".join(result for _, result in request.results()) == text.upper()


@TWO_KINDS
@pytest.mark.parametrize(
    ("text", "grace"),
    [
        pytest.param(FAMILY, "60s", id="as programs are"),
        pytest.param("exec >/dev/null 2>&1\n" + FAMILY, "60s", id="with its output closed"),
        pytest.param("trap '' TERM\n" + FAMILY, "1s", id="that do not care, after the grace time"),
    ],
)
def test_cancelled_they_end_with_all_they_started(
    serve: Any, submit: Any, program: Any, tmp_path: Path, text: str, grace: str
) -> None:
    pool = serve(program(text), "-c", "2", "--cancel-grace", grace)
    request = submit(b"", b"")
    running = pids(tmp_path, 6)

    request.cancel()

    wait_until(lambda: not any(map(is_alive, running)), 20)
    assert pool.poll() is None


@TWO_KINDS
def test_over_its_time_it_ends_with_all_it_started(
    serve: Any, submit: Any, program: Any, tmp_path: Path
) -> None:
    serve(program("trap '' TERM\n" + FAMILY))

    request = submit(b"", timeout="1s", retries=0)

    running = pids(tmp_path, 3)
    assert request.wait(20).parts.failed == 1
    wait_until(lambda: not any(map(is_alive, running)), 20)
    assert [failure.error for failure in request.errors()] == ["Timeout"]


@ONE_KIND
def test_stopped_pool_leaves_no_program(
    serve: Any, submit: Any, program: Any, tmp_path: Path
) -> None:
    pool = serve(program(FAMILY), "--grace", "500ms")
    request = submit(b"")
    running = pids(tmp_path, 3)

    begun = time.monotonic()
    pool.send_signal(signal.SIGTERM)

    assert pool.wait(20) == 0
    assert time.monotonic() - begun < allowed_s(15), "not after the grace time that is usual"
    wait_until(lambda: not any(map(is_alive, running)), 20)
    assert request.status().parts.waiting == 1, "handed back"


@ONE_KIND
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--exec", "cat"), 2, "--handler NAME"),
        (("--handler", "count"), 2, "--handler NAME"),
        (("tasks:app", "--exec", "cat", "--handler", "count"), 2, "--handler NAME"),
        (("--exec", "tr 'a", "--handler", "count"), 2, "No closing quotation"),
        (("--exec", "cat", "--handler", "a b"), 2, "--handler 'a b' is not"),
        (("--exec", "no-such-program", "--handler", "count"), 4, "no program 'no-such-program'"),
    ],
)
def test_mistakes_are_named(url: str, words: tuple[str, ...], code: int, says: str) -> None:
    command = [sys.executable, "-m", "streamq.cli", "worker", "--url", url, *words]

    done = subprocess.run(command, capture_output=True, text=True, timeout=30)

    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
