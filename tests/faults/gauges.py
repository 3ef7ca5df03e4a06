"""What processes and a server use, sampled over time, and whether it stays flat."""

import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

MIB = 2**20
_TICKS = os.sysconf("SC_CLK_TCK")


class Rule(NamedTuple):
    """How much more the last quarter's median may be than the second quarter's."""

    share: float
    room: float
    unit: str


MEMORY = Rule(0.10, 4.0, "MiB")
COUNT = Rule(0.0, 4.0, "")


def status_of(pid: int) -> dict[str, str]:
    """What /proc says of a process; nothing when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def mebibytes(pid: int, field: str = "VmRSS") -> float:
    """Memory of a process: VmRSS now, VmHWM at most."""
    words = status_of(pid).get(field, "0 kB").split()
    return int(words[0]) / 1024


def threads(pid: int) -> int:
    """Threads of a process."""
    return int(status_of(pid).get("Threads", "0"))


def descriptors(pid: int) -> int:
    """Open files of a process."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  only their number counts
    except OSError:
        return 0


def children(pid: int) -> list[int]:
    """Ids of a process's own processes."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of those it has buried."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, words[11:15])) / _TICKS


def peak_mebibytes(running: "subprocess.Popen[bytes]", until: float = float("inf")) -> float:
    """The most memory a command has had, looked at until it ends or the time is over."""
    most = 0.0
    while running.poll() is None and time.monotonic() < until:
        most = max(most, mebibytes(running.pid, "VmHWM"))
        time.sleep(0.02)
    return most


class Throttle:
    """Keeps everything together within a share of one core."""

    def __init__(self, share: float, pids: Callable[[], Iterable[int]]) -> None:
        self._share = share
        self._pids = pids
        self._began = time.monotonic()
        self._before = self.used_s()

    def used_s(self) -> float:
        """CPU seconds of this process, of all it has started and ended, and of the others."""
        return sum(os.times()[:4]) + sum(map(cpu_s, self._pids()))

    def share(self) -> float:
        """Of one core, since the beginning."""
        return (self.used_s() - self._before) / max(0.1, time.monotonic() - self._began)

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Return when there is room for more, or when all is over."""
        while self.share() > self._share and not is_over():
            time.sleep(0.2)


class Gauges:
    """Samples of many things, each with the time it was taken at."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._rules: dict[str, Rule] = {}

    def note(self, name: str, value: float, rule: Rule) -> None:
        """Add a sample."""
        self._rules[name] = rule
        self._samples[name].append((time.monotonic() - self.began, value))

    def rows(self, seconds: float) -> "list[Row]":
        """Each gauge by quarters of the time."""
        return [self._row(name, seconds) for name in self._samples]

    def _row(self, name: str, seconds: float) -> "Row":
        quarters: list[list[float]] = [[], [], [], []]
        for at, value in self._samples[name]:
            quarters[min(3, int(4 * at / seconds))].append(value)
        medians: list[float] = []
        # A quarter without a sample is like the one before, or like the first that has one.
        before = next(quarter for quarter in quarters if quarter)
        for quarter in quarters:
            before = quarter or before
            medians.append(statistics.median(before))
        most = max(value for _, value in self._samples[name])
        return Row(name, self._rules[name], medians, most, sum(map(len, quarters)))


class Row(NamedTuple):
    """A gauge: the median of each quarter, and the most."""

    name: str
    rule: Rule
    medians: list[float]
    most: float
    samples: int

    @property
    def is_flat(self) -> bool:
        """Whether the last quarter stays within the rule."""
        second, last = self.medians[1], self.medians[3]
        return last <= second * (1 + self.rule.share) + self.rule.room

    def cells(self) -> list[str]:
        """The row of a table."""
        form = "{:.1f}" if self.rule.unit else "{:.0f}"
        figures = [form.format(value) for value in (*self.medians, self.most)]
        name = f"{self.name} ({self.rule.unit})" if self.rule.unit else self.name
        return [name, *figures, "yes" if self.is_flat else "**no**"]
