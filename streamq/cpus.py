"""How many CPUs this process may use: a container or a task set may have fewer than the machine."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Where Linux shows what groups of processes may use, and which groups we are in.
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable() -> int:
    """How many CPUs may be busy at once on our behalf; at least one."""
    return max(1, min(_allowed(), *(math.ceil(quota) for quota in _quotas())))


def _allowed() -> int:
    """CPUs that we may run on."""
    if hasattr(os, "process_cpu_count"):  # from Python 3.13 on
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas() -> Iterator[float]:
    """What each of our groups may use, in CPUs; no less than any number where nothing is said."""
    yield 2.0**31
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2 has one tree for everything
                for folder in _upwards(GROUPS, path):
                    yield from _quota(folder / "cpu.max")
            elif "cpu" in controllers.split(","):
                for name in (controllers, "cpu"):
                    for folder in _upwards(GROUPS / name, path):
                        yield from _quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """Our group's folder and those above it, whose limits hold for us too.

    In a container the path may be the host's, and only the last of them be there.
    """
    own = Path(path.strip("/"))
    yield from (root / each for each in (own, *own.parents))


def _quota(*files: Path) -> Iterator[float]:
    """CPU time for each period of time, from files that hold the two; nothing without a limit."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        time, period = (int(word) for file in files for word in file.read_text().split())
        if time > 0:
            yield time / period
