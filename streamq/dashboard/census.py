"""Keeps a list of a queue's requests and workers up to date, at a bounded cost.

A look reads two pages of requests: first those whose parts run, then those that were read longest
ago. So a look at a queue of 10,000 requests costs as much as one at 500, and a census says
how many of the requests it knows.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec.structs import astuple, replace

from streamq import units
from streamq.admin.probe import Probe
from streamq.dashboard.curve import Curve, Point
from streamq.errors import Damaged
from streamq.model import PartCounts, RecordCounts, Status
from streamq.protocol import glances
from streamq.protocol.protocol import Protocol
from streamq.queue.fleet import WorkerDetails, read_worker_details

#: How long a look may take: the first, and the others until every request was read once.
FIRST_LOOK_S, UNREAD_LOOK_S = 0.1, 0.2
#: Requests that are read in one round trip. From then on a look reads two pages.
PAGE = 250
#: The most requests and workers that a census knows: the newest.
MOST_REQUESTS, MOST_WORKERS = 20_000, 2_000
#: How many workers one look reads.
WORKERS_A_LOOK = 200
#: Names of workers that are gone stay in the index for a day: older ones than this are not read.
HEARD_MS = 60_000
#: How often the server's memory and the janitors are looked at (s), and the share of memory above
#: which the server counts as nearly full.
PROBE_EVERY_S, FULL_SHARE = 15.0, 0.85
#: A census is not taken more often than this.
EVERY_S = 0.9


class KnownRequest(msgspec.Struct):
    """A request as it was read last, and how fast it went lately."""

    status: Status
    read_at: float
    curve: Curve | None = None
    #: When something of it was finished last, as far as this census has seen.
    moved_at: float = msgspec.field(default_factory=time.monotonic)

    @property
    def speed(self) -> float:
        """Records a second, lately if that is known."""
        lately = self.curve.speed() if self.curve else None
        return self.status.rate if lately is None else lately

    @property
    def peak(self) -> int:
        """How many of its parts ran at once lately."""
        return self.curve.peak() if self.curve else 0


class Whole(msgspec.Struct, frozen=True):
    """A request as users see it: a flow with all its stages is one."""

    status: Status
    speed: float
    peak: int
    #: What does the work: the handler, or those of all stages.
    handlers: str


class Census:
    """Knows one queue. Threads may share it: one of them looks, the others get what is known."""

    def __init__(self, protocol: Protocol, queue: str) -> None:
        self._protocol = protocol
        self.queue = units.name(queue, "queue")
        self._lock = threading.Lock()
        self._looked_at = 0.0
        #: All requests of the index: some have ended, and a janitor has not closed them yet.
        self._known: dict[str, KnownRequest] = {}
        #: Requests that are not finished, by id, the newest first.
        self.requests: dict[str, KnownRequest] = {}
        #: Requests that cannot be read.
        self.damaged: list[str] = []
        #: Requests of the index of which nothing is known: damaged, not opened yet, or just purged.
        self._blank: set[str] = set()
        #: How many requests are open, and how many of them were not read yet.
        self.open = 0
        self.unread = 0
        self.workers: dict[str, WorkerDetails] = {}
        self._workers_at: dict[str, float] = {}
        #: All records of the queue that were finished since the first look.
        self.finished = 0
        self.failed = 0
        self.curve = Curve()
        #: Servers that use most of their memory: the name, and the share that is used.
        self.nearly_full: list[tuple[str, float]] = []
        #: How long (ms) the janitor's next look is overdue.
        self.unswept_ms = 0.0
        self._probe = Probe(protocol.connection, protocol.prefix)
        self._probed_at = 0.0

    @property
    def age_ms(self) -> int:
        """How old the oldest reading is that is shown."""
        oldest = min((each.read_at for each in self.requests.values()), default=self._looked_at)
        return round((time.monotonic() - oldest) * 1e3)

    def look(self) -> None:
        """Read what is due, unless somebody else does so now, or did within ``EVERY_S``.

        Raises:
            ServerError: the server does not answer.
        """
        if not self._lock.acquire(blocking=not self._looked_at):
            return
        try:
            if time.monotonic() - self._looked_at >= EVERY_S:
                self._look()
                self._looked_at = time.monotonic()
        finally:
            self._lock.release()

    def _look(self) -> None:
        begun = time.monotonic()
        protocol = self._protocol
        ids = protocol.latest(self.queue, MOST_REQUESTS, with_stages=True)
        size = protocol.index_size(self.queue)
        if size <= MOST_REQUESTS:  # all ids were read: count requests without stages of flows
            size = sum("/" not in each for each in ids)
        self._blank &= set(ids)
        unread = [each for each in ids if each not in self._known and each not in self._blank]
        gone = self._known.keys() - set(ids)
        self._read(list(gone)[:PAGE])  # their last records count, too
        for each in gone:
            self._known.pop(each, None)
        until = begun + (UNREAD_LOOK_S if self._looked_at else FIRST_LOOK_S)
        known = sorted(
            (each for each in ids if each in self._known),
            key=lambda each: (
                not self._known[each].status.parts.running,
                self._known[each].read_at,
            ),
        )
        blank = [each for each in self._blank if each not in self.damaged]
        self._read([*blank[:PAGE], *known[:PAGE]])
        others = [*unread, *known[PAGE:]]
        for first in range(0, len(others), PAGE):
            self._read(others[first : first + PAGE])
            if not unread or time.monotonic() >= until:
                break
        self.unread = sum(each not in self._known and each not in self._blank for each in ids)
        self.damaged = [each for each in self.damaged if each in self._blank]
        # In the order of the index.
        self._known = {each: self._known[each] for each in ids if each in self._known}
        self.requests = {
            each: known for each, known in self._known.items() if known.status.state.is_live
        }
        over = sum("/" not in each for each in self._known.keys() - self.requests.keys())
        self.open = size - over
        self._look_at_workers()
        self._look_at_server()
        running = sum(each.status.parts.running for each in self.requests.values())
        now_ms = round(time.time() * 1e3)
        self.curve.add(Point(now_ms, self.finished - self.failed, self.failed, running, 0))

    def _read(self, ids: list[str]) -> None:
        if not ids:
            return
        now, now_ms = time.monotonic(), round(time.time() * 1e3)
        for request_id, found in zip(
            ids, glances.glance_at_rows(self._protocol, ids, now_ms), strict=True
        ):
            self._blank.add(request_id)
            if found is None:  # registered and not opened yet, or just purged
                continue
            try:
                status = found.status()
            except Damaged:
                self.damaged = [*self.damaged, request_id][-100:]
                continue
            self._blank.discard(request_id)
            self._note(request_id, status, now, now_ms)

    def _note(self, request_id: str, status: Status, now: float, now_ms: int) -> None:
        records = status.records
        before = self._known.get(request_id)
        if before is None:
            before = self._known[request_id] = KnownRequest(status, now)
        else:
            was = before.status.records
            self.finished += max(0, records.done + records.failed - was.done - was.failed)
            self.failed += max(0, records.failed - was.failed)
            if (records, status.parts.done) != (was, before.status.parts.done) or status.paused:
                before.moved_at = now
        before.status, before.read_at = status, now
        if before.curve is None and status.parts.running:
            before.curve = Curve()
        if before.curve is not None:
            before.curve.add(
                Point(now_ms, records.done, records.failed, status.parts.running, records.total)
            )

    def _look_at_workers(self) -> None:
        names = self._protocol.heard_lately(self.queue, MOST_WORKERS, HEARD_MS)
        self._workers_at = {name: self._workers_at.get(name, 0.0) for name in names}
        chosen = sorted(names, key=lambda name: self._workers_at[name])[:WORKERS_A_LOOK]
        now = time.monotonic()
        workers = {name: each for name, each in self.workers.items() if name in self._workers_at}
        for name, text in zip(chosen, self._protocol.details(self.queue, chosen), strict=True):
            self._workers_at[name] = now
            if text is None:
                workers.pop(name, None)
            else:
                workers[name] = read_worker_details(name, text, self.queue)
        self.workers = dict(sorted(workers.items()))

    def _look_at_server(self) -> None:
        """See whether a janitor sweeps, and whether the server is nearly full; now and then."""
        if self._probed_at and time.monotonic() - self._probed_at < PROBE_EVERY_S:
            return
        self._probed_at = time.monotonic()
        now_ms = round(time.time() * 1e3)
        self.unswept_ms = self._probe.overdue_ms(self.queue, now_ms) if self._known else 0.0
        full = []
        for node in self._probe.primaries():
            found = self._probe.info(node, "memory")
            used, most = int(found.get("used_memory", 0)), int(found.get("maxmemory", 0))
            if most and used > FULL_SHARE * most:
                full.append((self._probe.name(node), used / most))
        self.nearly_full = full

    # What follows from it

    @property
    def pools(self) -> list[WorkerDetails]:
        """The workers that run parts: a gateway or a janitor has no slots."""
        return [each for each in self.workers.values() if each.slots or each.handlers]

    @property
    def has_slots(self) -> bool:
        """Whether a live worker can run anything."""
        return bool(self.pools)

    def wholes(self) -> list[Whole]:
        """Return the requests that are not finished, the newest first, each flow as one."""
        stages: dict[str, list[KnownRequest]] = {}
        for request_id, known in self._known.items():
            if "/" in request_id:
                stages.setdefault(request_id.partition("/")[0], []).append(known)
        found = [
            _census_of_stages([known, *stages.pop(request_id, ())])
            for request_id, known in self.requests.items()
            if "/" not in request_id
        ]
        # Where the first stage of a flow is in another queue, its other stages are shown one by
        # one.
        others = [known for some in stages.values() for known in some]
        return found + [_census_of_stages([each]) for each in others if each.status.state.is_live]

    def slots_of(self, handler: str) -> tuple[int, int]:
        """Return how many slots can run the handler, and how many of these are busy."""
        able = [each for each in self.workers.values() if handler in each.handlers]
        return sum(each.slots for each in able), sum(each.busy for each in able)

    def has_handler(self, handler: str) -> bool:
        """Return whether a live worker has the handler."""
        return any(handler in each.handlers for each in self.workers.values())

    def waiting_before(self, level: int) -> int:
        """Return how many parts wait at better levels than this, and could run."""
        return sum(
            status.parts.waiting
            for status in (known.status for known in self.requests.values())
            if status.level < level
            and not (status.paused or status.waits_for_release or status.held_until_ms)
            and self.has_handler(status.handler)
        )

    def levels(self) -> list[tuple[int, int, int, int]]:
        """Return each level in use: its number, its requests, parts that wait, parts that run."""
        counts: Counter[tuple[int, str]] = Counter()
        for known in self.requests.values():
            status = known.status
            counts[status.level, "requests"] += "/" not in status.id
            counts[status.level, "waiting"] += status.parts.waiting
            counts[status.level, "running"] += status.parts.running
        return [
            (
                level,
                counts[level, "requests"],
                counts[level, "waiting"],
                counts[level, "running"],
            )
            for level in sorted({level for level, _ in counts})
        ]


def records_foreseen(stages: Sequence[Status]) -> int:
    """Return how many records the stages of a flow will have in all, as far as can be told.

    A stage will get of the rest of the one before as much as it got of what that has finished.
    """
    whole = left = 0.0
    for number, stage in enumerate(stages):
        records = stage.records
        if number:
            before = stages[number - 1].records
            finished = before.done + before.failed
            left *= records.total / finished if finished else 1
        expected = records.total + left
        whole += expected
        left = expected - records.done - records.failed
    return round(whole)


def limit_of_stages(stages: Sequence[Status]) -> int:
    """Return how many parts of a flow may run at once: of the stages that have any to run."""
    able = [each for each in stages if each.parts.waiting or each.parts.running]
    return sum(each.limit for each in able or stages[:1])


def _census_of_stages(found: list[KnownRequest]) -> Whole:
    found.sort(key=lambda each: int(each.status.id.partition("/")[2] or 1))
    stages = [each.status for each in found]
    status = stages[0]
    if len(stages) > 1:
        parts = PartCounts(*map(sum, zip(*(astuple(each.parts) for each in stages), strict=True)))
        records = RecordCounts(
            *map(sum, zip(*(astuple(each.records) for each in stages), strict=True))
        )
        more = records_foreseen(stages) - records.total
        status = replace(
            status,
            parts=replace(parts, total=parts.total + more),
            records=replace(records, total=records.total + more),
            limit=limit_of_stages(stages),
        )
    speed = sum(each.speed for each in found if each.status.state.is_live)
    handlers = " → ".join(each.handler.removesuffix(f"-{status.id}") for each in stages)
    return Whole(status, speed, sum(each.peak for each in found), handlers)
