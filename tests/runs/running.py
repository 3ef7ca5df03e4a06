"""What several tests of ``streamq run`` need."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import KINDS
from tests.support.waiting import is_alive, wait_until

EMBEDDED = pytest.mark.skipif(KINDS[0].startswith("secure"), reason="is about the embedded server")
Streamq = Callable[..., "subprocess.CompletedProcess[str]"]
Begin = Callable[..., "subprocess.Popen[str]"]
COMMAND = [sys.executable, "-m", "streamq.cli"]


def begin_slowly(
    begin: Begin, folder: Path, size: int, *options: str
) -> "tuple[subprocess.Popen[str], Path]":
    """A run whose output has grown beyond the size, with more to come; and that output.

    Its lines take so long that much is to come also after a pause of this process. Those of a
    run that goes on later do not.
    """
    words = ["in.txt", "--map", "job:slow", "-o", "out.txt", "-p", "2", "--lines", "10"]
    running = begin(*words, *options, PAUSE_S="0.01")
    output = folder / "out.txt"
    wait_until(lambda: output.exists() and output.stat().st_size > size, 60)
    # What is written first may not be committed yet. What is written next comes after that.
    first = output.stat().st_size
    wait_until(lambda: output.stat().st_size > first, 60)
    return running, output


def run_left_in(folder: Path) -> str:
    """The id of the run that can be gone on with there."""
    (home,) = (folder / ".streamq").iterdir()
    return home.name


def go_on(streamq: Streamq, said: str, folder: Path) -> None:
    """Do as a run that was stopped said, to its end."""
    request_id = run_left_in(folder)
    assert f"go on with: streamq run --resume {request_id}" in said
    done = streamq("run", "--resume", request_id)
    assert done.returncode == 0, done.stderr


def descendants(pid: int) -> list[int]:
    """Ids of the processes below one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def program(path: Path, text: str) -> None:
    """A shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def wait_for_the_end_of(pids: list[int]) -> None:
    """Nothing of a killed run is left after a moment."""
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 15)
