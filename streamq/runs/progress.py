"""The progress of a run: how far it has come, how fast it is, and when it will be done."""

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from streamq.model import StageStatus, Status
from streamq.protocol.protocol import Protocol
from streamq.queue.flow_status import stages_of_flow
from streamq.records.splitting import records_in_all, sizes_of_inputs
from streamq.runs.plan import Plan
from streamq.worker.pool import Pool

#: The rate is measured over the last 10 seconds, or over as long as it takes until 10 readings
#: showed more finished records than the one before them. With 4 readings a second it is at most an
#: hour.
_LATELY_S = 10.0
_STEPS = 10
_READINGS = 4 * 3_600


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come."""

    status: Status
    #: The finished fraction of the whole; None where the whole is not known.
    done: float | None
    #: How many records there are, and whether they are counted: while files are still being read
    #: it is estimated from the bytes read so far. None where it is not known.
    total: int | None
    is_counted: bool
    eta_s: float | None
    #: Records per second, lately.
    rate: float
    busy: int
    slots: int
    #: How many parts were run again so far.
    retried: int
    #: Of a flow: its stages. ``done`` and ``rate`` are of inputs on their way through all of them.
    stages: list[StageStatus] = []


class Speed:
    """Says how many records are finished per second, lately, from readings of how many there are.

    The time before anything runs does not count: processes start then, and read the user's code.
    Where records take long, few are finished in ten seconds, or many at one moment. Then a longer
    time is looked at.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=_READINGS)

    def read(self, now: float, finished: float, *, is_busy: bool) -> float:
        """Add a reading, with whether anything runs. Return the records per second."""
        if len(self._seen) == 1 and not is_busy and finished == self._seen[0][1]:
            self._seen.clear()
        self._seen.append((now, finished))
        then, least, steps = now, finished, 0
        for then, before in reversed(self._seen):
            steps += before < least
            least = before
            if now - then >= _LATELY_S and steps >= _STEPS:
                break
        return (finished - least) / (now - then) if now > then else 0.0


class ProgressMeter:
    """Reads how far a run has come."""

    def __init__(self, protocol: Protocol, plan: Plan, pool: Pool) -> None:
        self._protocol = protocol
        self._plan = plan
        self._pool = pool
        self._speed = Speed()
        #: Bytes of each file; empty if a file is compressed or cannot be read.
        self._sizes = sizes_of_inputs(plan.policy.spec)

    def read(self) -> Progress:
        """Return how far the run has come."""
        found = self._protocol.inspect(self._plan.id)
        status, stages = found.status(), stages_of_flow(self._protocol, found)
        total = self._total(status, found.optional_text("cursor"))
        finished: float = status.records.done + status.records.failed
        if stages:
            finished = progress_through_inputs(stages, total or status.records.total)
        busy = self._pool.busy
        rate = self._speed.read(time.monotonic(), finished, is_busy=busy > 0)
        left = None if total is None else max(0.0, total - finished)
        return Progress(
            status=status,
            done=finished / total if total else None,
            total=None if total is None else round(total),
            is_counted=status.state != "loading",
            eta_s=left / rate if left is not None and rate > 0 else None,
            rate=rate,
            busy=busy,
            slots=self._plan.processes * self._plan.slots,
            retried=self._pool.retried,
            stages=stages,
        )

    def _total(self, status: Status, cursor: str) -> float | None:
        """Return how many records there are: counted, or estimated from the bytes read so far."""
        if status.state != "loading":
            return status.records.total
        return records_in_all(status.records.total, cursor, self._sizes)


def progress_through_inputs(stages: Sequence[StageStatus], total: float) -> float:
    """Return how many of a flow's inputs are through it, where each stage is an equal share.

    How many parts a later stage will have is not known before they are there. So of what a stage
    hands over the same fraction is counted as finished that is finished of what has arrived.
    """
    through, share = 1.0, 0.0
    for number, stage in enumerate(stages):
        records = stage.records
        expected = total if number == 0 else records.total
        finished = records.done + records.failed
        if expected:
            through *= min(1.0, finished / expected)
        elif stage.state.is_live:
            through = 0.0
        share += through
    return share / len(stages) * total
