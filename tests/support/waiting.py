"""Waiting for what another process or thread does."""

import os
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


#: Whether coverage is measured. Processes then take several times as long.
IS_TRACED = any(name.startswith("COVERAGE_PROCESS") for name in os.environ)


def allowed_s(seconds: float) -> float:
    """How long to wait for what takes at most so long where nothing is measured."""
    return seconds * 5 if IS_TRACED else seconds


def wait_until(condition: Callable[[], T], timeout: float = 5.0) -> T:
    """The first true value of the condition, or a failed test when the time is over."""
    deadline = time.monotonic() + allowed_s(timeout)
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still {value!r} after {timeout} s"
        time.sleep(0.005)
    return value


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is not only waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_on_the_way(
    command: list[str], environment: Mapping[str, str], how_far: Callable[[], int], total: int
) -> int:
    """How often the command, started again and again, was killed at a random point of its way."""
    wanted = int(os.environ.get("STREAMQ_TEST_KILLS", "4"))
    chance = random.Random(wanted)
    kills = 0
    for mark in sorted(chance.randrange(total) for _ in range(wanted)):
        running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        while running.poll() is None and how_far() <= mark:
            time.sleep(0.002)
        running.kill()
        kills += running.wait() != 0
    print(f"{kills} kills")
    return kills
