"""Counts the CPUs that this process may use: a container may have fewer than the machine."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Where Linux shows the CPU limits of control groups, and the groups that this process is in.
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Return how many CPUs this process and its children may keep busy at once; at least 1."""
    return max(1, min(_scheduler_cpus(), *(math.ceil(quota) for quota in _group_cpu_limits())))


def _scheduler_cpus() -> int:
    """Return the number of CPUs that the scheduler may put this process on."""
    if hasattr(os, "process_cpu_count"):  # from Python 3.13 on
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _group_cpu_limits() -> Iterator[float]:
    """Yield the limit of each of our control groups, in CPUs. The first one yielded is no limit."""
    yield 2.0**31
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # cgroup version 2: one tree for all controllers
                for folder in _control_group_folders(GROUPS, path):
                    yield from _cpu_limit_in(folder / "cpu.max")
            elif "cpu" in controllers.split(","):
                for name in (controllers, "cpu"):
                    for folder in _control_group_folders(GROUPS / name, path):
                        yield from _cpu_limit_in(
                            folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
                        )


def _control_group_folders(root: Path, path: str) -> Iterator[Path]:
    """Yield the folder of our group and those above it: their limits hold for us, too.

    In a container the path may be the one on the host. Then only ``root`` itself exists here.
    """
    own = Path(path.strip("/"))
    yield from (root / each for each in (own, *own.parents))


def _cpu_limit_in(*files: Path) -> Iterator[float]:
    """Yield the limit in CPUs: time per period, read from the files. No limit: yield nothing."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        time, period = (int(word) for file in files for word in file.read_text().split())
        if time > 0:
            yield time / period
