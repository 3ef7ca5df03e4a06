"""The processes of ``streamq run`` are forked from it, before it has threads."""

import json
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from streamq.worker.forking import can_fork
from tests.runs.running import COMMAND, EMBEDDED, Begin, Streamq, descendants, wait_for_the_end_of
from tests.support.waiting import IS_TRACED, wait_until

pytestmark = [pytest.mark.commands, EMBEDDED]

CODE = '''
import os, pathlib, sys, time
BEGAN_WITH = sys.argv, sys.path[0], sys.stdin.read(), os.getpgrp() == os.getpid()
def seen(line: str) -> dict:
    """What a handler sees of its process."""
    commands = pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\\0")
    return {
        "is_forked": commands == pathlib.Path("/proc/self/cmdline").read_bytes().split(b"\\0"),
        "argv": BEGAN_WITH[0][0], "path": sys.path[1], "stdin": BEGAN_WITH[2],
        "leads": BEGAN_WITH[3], "main": hasattr(sys.modules["__main__"], "__file__"),
    }
def waits(line: str) -> str:
    pathlib.Path(f"began{os.getpid()}").touch()
    time.sleep(1000)
def dies_once(line: str) -> int:
    if line == "3" and not pathlib.Path("died").exists():
        pathlib.Path("died").touch()
        os.kill(os.getpid(), 9)
    return os.getpid()
def forks(line: str) -> int:
    if line == "3":
        os.fork()
    return int(line)
'''


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "forked.py").write_text(CODE)
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{n}\n" for n in range(20)))
    return path


def working_in(folder: Path) -> list[int]:
    """Ids of the processes whose folder this is."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (each / "cwd").readlink() == folder:
                found.append(int(each.name))
    return found


def outcome(streamq: Streamq, function: str, source: Path) -> list[str]:
    done = streamq("run", source, "--map", f"forked.py:{function}", "-o", "out", "-p", "2")
    assert done.returncode == 0, done.stderr
    return (source.parent / "out").read_text().splitlines()


def test_a_parent_that_ignores_the_ends_of_its_children_hands_that_on_to_nobody(
    environment: dict[str, str], source: Path
) -> None:
    line = [*COMMAND, "run", str(source), "--map", "forked.py:forks", "-o", "out", "-p", "2"]
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    ignoring += "os.execvp(sys.argv[1], sys.argv[1:])"

    done = subprocess.run(
        [sys.executable, "-c", ignoring, *line],
        env=environment,
        cwd=source.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert (source.parent / "out").read_text().split() == [f"{n}" for n in range(20)]
    assert not (source.parent / ".streamq").exists()


@pytest.mark.skipif(IS_TRACED, reason="coverage has a thread, so nothing is forked")
def test_handler_sees_a_process_as_if_it_were_new(streamq: Streamq, source: Path) -> None:
    for line in outcome(streamq, "seen", source):
        assert json.loads(line) == {
            "is_forked": True,
            "argv": "-c",
            "path": "",
            "stdin": "",
            "leads": True,
            "main": False,
        }


def test_when_the_parent_is_killed_all_processes_end(begin: Begin, source: Path) -> None:
    running = begin(source, "--map", "forked.py:waits", "-o", "out", "-p", "4", "--lines", "1")
    wait_until(lambda: len(list(source.parent.glob("began*"))) == 4, 60)
    pids = descendants(running.pid)

    running.kill()

    running.communicate()
    wait_for_the_end_of(pids)


def test_a_process_that_dies_is_replaced_by_a_new_one(streamq: Streamq, source: Path) -> None:
    pids = outcome(streamq, "dies_once", source)

    assert len(pids) == 20
    assert (source.parent / "died").exists()


def test_copies_that_a_handler_makes_do_not_go_on_as_workers(
    streamq: Streamq, source: Path
) -> None:
    assert outcome(streamq, "forks", source) == [f"{n}" for n in range(20)]


def test_processes_nobody_took_are_ended(streamq: Streamq, source: Path) -> None:
    done = streamq("run", source.with_name("missing"), "--map", "forked.py:waits", "-o", "out")

    assert "missing" in done.stderr
    wait_until(lambda: not working_in(source.parent), 15)


def test_a_program_with_another_thread_is_not_copied() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert not can_fork()
    finally:
        end.set()
        thread.join()


def test_who_profiles_the_command_gets_what_was_found(
    environment: dict[str, str], source: Path
) -> None:
    words = [sys.executable, "-m", "cProfile", "-o", "found", "-m", "streamq.cli", "run"]
    words += [str(source), "--map", "forked.py:forks", "-o", "out", "-p", "1"]

    done = subprocess.run(
        words, cwd=source.parent, env=environment, capture_output=True, check=False, timeout=100
    )

    assert done.returncode == 0, done.stderr
    assert (source.parent / "found").stat().st_size > 10_000
