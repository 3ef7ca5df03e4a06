"""Running times of parts by handler, and the speed of each worker, from heartbeats."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from streamq.queue.fleet import WorkerDetails
from streamq.telemetry.metrics import BOUNDS_S, CLASSES

#: How many handlers are shown: the ones that ran the most parts.
MOST_HANDLERS = 12
#: The shortest time that a speed is measured over (ms). Two heartbeats in quick succession would
#: make a spike.
LEAST_MS = 4_000


class HandlerRan(msgspec.Struct, kw_only=True):
    """What all live workers did for a handler since they started."""

    name: str
    done: int = 0
    failed: int = 0
    retried: int = 0
    seconds: float = 0.0
    #: How many parts are in each class of running time (``BOUNDS_S``).
    classes: list[int]
    #: About the median and the 95th percentile of the running time (s).
    p50_s: float = 0.0
    p95_s: float = 0.0


def times_of_handlers(workers: Iterable[WorkerDetails]) -> list[HandlerRan]:
    """Return what was done for each handler, those with the most parts first."""
    found: dict[str, HandlerRan] = {}
    for worker in workers:
        for name, tally in worker.tallies.items():
            ran = found.setdefault(name, HandlerRan(name=name, classes=[0] * CLASSES))
            ran.done += tally.done
            ran.failed += tally.failed
            ran.retried += tally.retried
            ran.seconds += tally.seconds
            for number, count in enumerate(tally.classes[:CLASSES]):
                ran.classes[number] += count
    most = sorted(found.values(), key=lambda ran: -sum(ran.classes))[:MOST_HANDLERS]
    for ran in most:
        ran.p50_s, ran.p95_s = (
            quantile_of_times(ran.classes, 0.5),
            quantile_of_times(ran.classes, 0.95),
        )
    return most


def quantile_of_times(classes: Sequence[int], share: float) -> float:
    """Return about the quantile of the running time (s): this share of the parts ran no longer."""
    sums = list(accumulate(classes))
    if not sums or not sums[-1]:
        return 0.0
    wanted = share * sums[-1]
    number = bisect_left(sums, wanted)
    if number >= len(BOUNDS_S):
        return BOUNDS_S[-1]
    low = BOUNDS_S[number - 1] if number else 0.0
    before = sums[number - 1] if number else 0
    inside = (wanted - before) / max(1, classes[number])
    return low + (BOUNDS_S[number] - low) * inside


class Speeds:
    """Parts a second of each worker, lately."""

    def __init__(self) -> None:
        #: By worker: the beat and the count that its speed is counted from, and the speed so far.
        self._from: dict[str, tuple[int, int, float | None]] = {}

    def of(self, workers: Iterable[WorkerDetails]) -> dict[str, float | None]:
        """Return the speed of each worker; None while it is not known."""
        now: dict[str, tuple[int, int, float | None]] = {}
        for worker in workers:
            count = sum(tally.done + tally.failed for tally in worker.tallies.values())
            at, before, speed = self._from.get(worker.name, (worker.beat_ms, count, None))
            if worker.beat_ms - at >= LEAST_MS:
                speed = max(0, count - before) / (worker.beat_ms - at) * 1e3
                at, before = worker.beat_ms, count
            now[worker.name] = (at, before, speed)
        self._from = now
        return {name: speed for name, (_, _, speed) in now.items()}


def row_of_times(worker: WorkerDetails, speed: float | None) -> dict[str, Any]:
    """Return what a row of the table of workers tells."""
    told = ("name", "host", "pid", "version", "handlers", "slots", "busy", "levels", "running")
    return {
        **{name: getattr(worker, name) for name in told},
        "started_ms": worker.started_ms,
        "beat_ms": worker.beat_ms,
        "done": sum(tally.done for tally in worker.tallies.values()),
        "failed": sum(tally.failed for tally in worker.tallies.values()),
        "speed": speed,
    }
