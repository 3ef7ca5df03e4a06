"""How far a job is, how fast it goes, and when it will be done."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamq.model import Status
from streamq.protocol.protocol import Protocol
from streamq.records.inputs import COMPRESSED
from streamq.records.splitting import Cursor
from streamq.runs.plan import Plan
from streamq.worker.pool import Pool

#: How many readings the rate is of: with four in a second, those of ten seconds.
_LATELY = 40


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a job is."""

    status: Status
    #: Part of the whole that is finished, where that can be told.
    done: float | None
    eta_s: float | None
    #: Records in a second, of late.
    rate: float
    busy: int
    slots: int
    #: Parts that were run again so far.
    retried: int


class Meter:
    """Reads how far a job is."""

    def __init__(self, protocol: Protocol, plan: Plan, pool: Pool) -> None:
        self._protocol = protocol
        self._plan = plan
        self._pool = pool
        self._seen: deque[tuple[float, int]] = deque(maxlen=_LATELY)
        #: Bytes of each file; none where it is not known how many records they hold.
        self._sizes = _sizes(plan.policy.spec.files)

    def read(self) -> Progress:
        """Return how far it is now."""
        found = self._protocol.inspect(self._plan.id)
        status = found.status()
        finished = status.records.done + status.records.failed
        self._seen.append((time.monotonic(), finished))
        (then, before), (now, _) = self._seen[0], self._seen[-1]
        rate = (finished - before) / (now - then) if now > then else 0.0
        total = self._total(status, found.optional_text("cursor"))
        left = None if total is None else max(0.0, total - finished)
        return Progress(
            status=status,
            done=finished / total if total else None,
            eta_s=left / rate if left is not None and rate > 0 else None,
            rate=rate,
            busy=self._pool.busy,
            slots=self._plan.processes * self._plan.slots,
            retried=self._pool.retried,
        )

    def _total(self, status: Status, cursor: str) -> float | None:
        """How many records there are in all: counted, or told by how much of the files is read."""
        if status.state != "loading":
            return status.records.total
        try:
            place = msgspec.json.decode(cursor, type=Cursor)
        except msgspec.DecodeError:
            return None
        loaded = sum(self._sizes[: place.file]) + place.offset
        if not loaded or not self._sizes:
            return None
        return status.records.total * sum(self._sizes) / loaded


def _sizes(files: Sequence[str]) -> list[int]:
    if any(Path(name).suffix.lower() in COMPRESSED for name in files):
        return []
    try:
        return [Path(name).stat().st_size for name in files]
    except OSError:
        return []
