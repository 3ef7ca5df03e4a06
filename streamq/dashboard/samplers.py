"""Topics that can be watched: what each reads, how often, and what it tells.

A topic is named by a letter and what it is about: ``q:QUEUE``, ``t:QUEUE?FILTERS``, ``r:REQUEST``,
``m:REQUEST``, ``f:REQUEST``, ``w:QUEUE``, ``x:QUEUE``, ``h:QUEUE``, ``l:QUEUE``. Everybody who
watches a topic shares one sampler, so a topic costs the server the same however many watch it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from typing import Protocol as Shape

import msgspec
from msgspec.structs import replace

from streamq import units
from streamq.admin.doctor import Doctor
from streamq.admin.server_checks import Finding
from streamq.dashboard import notices, rows, times, why
from streamq.dashboard.census import Census, limit_of_stages, records_foreseen
from streamq.dashboard.curve import Curve, Ending, Point, curve_of
from streamq.dashboard.failures import read_failure_groups
from streamq.dashboard.input_map import read_map
from streamq.dashboard.timeline import Timeline
from streamq.errors import Damaged, InvalidValue, RequestUnknown
from streamq.model import Spec, StageStatus, Status
from streamq.protocol.protocol import Protocol
from streamq.protocol.snapshot import Snapshot
from streamq.queue.backlog import Backlog, slots_wanted
from streamq.queue.changes import read_changes
from streamq.queue.flow_status import status_of_request_or_flow
from streamq.records.splitting import records_in_all

#: The requests of a queue that are told with its overview: those with the most parts that run.
TOP = 12


class Sampler(Shape):
    """Reads one topic. One thread at a time uses it."""

    #: How often the topic is read (s).
    every_s: float
    #: The queue it is about; "" if that is known only from what is read.
    queue: str
    #: The request it is about, or "".
    request_id: str

    def read(self) -> Any:
        """Read the server, and return what to tell; it is absolute."""

    def past(self) -> Any:
        """Return what a new watcher is told of the time before, or None."""


class CensusesForSamplers:
    """The censuses of the queues, one for each."""

    def __init__(
        self, protocol: Protocol, sizes_of: Callable[[Spec], Sequence[int]] = lambda _: ()
    ) -> None:
        """``sizes_of``: the sizes of a request's files, where these are on this machine."""
        self.sizes_of = sizes_of
        self._protocol = protocol
        self._lock = threading.Lock()
        self._of: dict[str, Census] = {}

    def of(self, queue: str) -> Census:
        """Return the census of a queue."""
        with self._lock:
            if queue not in self._of:
                self._of[queue] = Census(self._protocol, queue)
            return self._of[queue]


class _QueueSampler:
    every_s = 1.0
    request_id = ""

    def __init__(self, protocol: Protocol, censuses: CensusesForSamplers, queue: str) -> None:
        self.queue = units.name(queue, "queue")
        self._protocol = protocol
        self._census = censuses.of(self.queue)

    def past(self) -> Any:
        return None


class OverviewSampler(_QueueSampler):
    """Tells how a queue stands."""

    def read(self) -> Any:
        """Return counts, slots, levels, what needs attention, and the busiest requests."""
        census = self._census
        census.look()
        found = [known.status for known in census.requests.values()]
        wholes = census.wholes()
        first = [each.status for each in wholes]
        workers = census.pools
        top = sorted(wholes, key=lambda each: (-each.status.parts.running, -each.speed))[:TOP]
        served = {handler for each in workers for handler in each.handlers}
        return {
            "t": round(time.time() * 1e3),
            "queue": census.queue,
            "open": census.open,
            "unread": census.unread,
            "age_ms": census.age_ms,
            "requests": {
                "loading": sum(each.state == "loading" and not each.paused for each in first),
                "open": sum(each.state == "open" and not each.paused for each in first),
                "paused": sum(each.paused for each in first),
            },
            "parts": {
                name: sum(getattr(each.parts, name) for each in found)
                for name in ("waiting", "running", "retry", "failed")
            },
            "slots": {
                "busy": sum(each.busy for each in workers),
                "total": sum(each.slots for each in workers),
                "wanted": sum(map(slots_wanted, found)),
            },
            "workers": len(workers),
            "handlers": sorted(served),
            "rate": census.curve.speed(),
            "point": census.curve.points[-1:],
            "levels": census.levels(),
            "notices": notices.notices_that_need_attention(census),
            "handlers_ran": times.times_of_handlers(workers),
            "top": [rows.row_of_request(each, census) for each in top],
        }

    def past(self) -> Any:
        """Return the points of the queue's curve so far."""
        return {"points": self._census.curve.points}


class TableSampler(_QueueSampler):
    """Tells one page of a table of requests."""

    def __init__(self, protocol: Protocol, censuses: CensusesForSamplers, about: str) -> None:
        queue, _, filters = about.partition("?")
        super().__init__(protocol, censuses, queue)
        self._filters = rows.Filters.of(filters)
        self._ended = rows.EndedRows(protocol, self.queue)

    def read(self) -> Any:
        """Return the rows of the page, each read anew."""
        self._census.look()
        return rows.page_of_rows(self._protocol, self._census, self._ended, self._filters)


class LevelsSampler(_QueueSampler):
    """Tells of each level: its requests, and what of them waits."""

    #: Cards that are told: in all, and of one level at least and at most.
    CARDS, LEAST, MOST = 100, 2, 50

    def read(self) -> Any:
        """Return the levels in use, with the requests that have the most parts waiting."""
        census = self._census
        census.look()
        cards: dict[int, list[Status]] = {}
        for known in census.requests.values():
            if "/" not in known.status.id:  # a stage is changed with its request
                cards.setdefault(known.status.level, []).append(known.status)
        shown = max(self.LEAST, min(self.MOST, self.CARDS // max(1, len(cards))))
        busy = [
            status.level
            for status in map(_sampled_status, census.requests.values())
            if _sample_has_running_parts(status)
        ]
        return {
            "serving": min(busy, default=None),
            "unread": census.unread,
            "levels": [
                {
                    "level": level,
                    "requests": requests,
                    "waiting": waiting,
                    "running": running,
                    "cards": [
                        rows.short_row_of_request(each)
                        for each in sorted(
                            cards.get(level, []), key=lambda each: -each.parts.waiting
                        )
                    ][:shown],
                }
                for level, requests, waiting, running in census.levels()
            ],
        }


def _sampled_status(known: Any) -> Status:
    return known.status  # type: ignore[no-any-return]


def _sample_has_running_parts(status: Status) -> bool:
    return status.parts.running > 0


class WorkersSampler(_QueueSampler):
    """Tells of the workers of a queue."""

    every_s = 2.0
    #: How many workers are shown in full. Of the others only their busy slots are shown.
    MOST = 200

    def __init__(self, protocol: Protocol, censuses: CensusesForSamplers, queue: str) -> None:
        super().__init__(protocol, censuses, queue)
        self._speeds = times.Speeds()

    def read(self) -> Any:
        """Return the workers, by name."""
        self._census.look()
        pools = self._census.pools
        # A gateway or a janitor has no slots: such come last.
        found = sorted(
            self._census.workers.values(), key=lambda each: not (each.slots or each.handlers)
        )
        speeds = self._speeds.of(found)
        return {
            "t": round(time.time() * 1e3),
            "count": len(pools),
            "told": min(len(pools), self.MOST),
            "versions": sorted({each.version for each in found}),
            "strip": [[each.name, each.busy, each.slots] for each in pools],
            "workers": [times.row_of_times(each, speeds[each.name]) for each in found[: self.MOST]],
        }


class LogSampler(_QueueSampler):
    """Tells who changed what of the queue's requests."""

    every_s = 2.0
    #: How many changes are shown.
    MOST = 300

    def read(self) -> Any:
        """Return the changes, the last one first, without the addresses that they came from."""
        found = read_changes(self._protocol, self.queue, self.MOST)
        return {"changes": [replace(each, address="") for each in found]}


class LeasesSampler(_QueueSampler):
    """Tells which slot has served which request, by what workers say and by one look a second."""

    def __init__(self, protocol: Protocol, censuses: CensusesForSamplers, queue: str) -> None:
        super().__init__(protocol, censuses, queue)
        self._timeline = Timeline(protocol)

    def read(self) -> Any:
        """Return who holds leases now, and the leases that ended in the last seconds."""
        self._census.look()
        return self._timeline.look(self._census)

    def past(self) -> Any:
        """Return the looks so far, and the leases that ended."""
        return {"looks": list(self._timeline.looks), "spans": self._timeline.told()}


class HealthSampler(_QueueSampler):
    """Tells what the doctor finds."""

    every_s = 60.0
    #: How many requests the doctor checks, and how many findings of one check are shown.
    BOOKS, ALIKE = 100, 10

    def read(self) -> Any:
        """Return the findings, the worst first."""
        doctor = Doctor(
            self._protocol,
            self._protocol.prefix,
            backlog_of=self._backlog,
            most_books=self.BOOKS,
        )
        begun = time.monotonic()
        findings: dict[tuple[str, str], list[Finding]] = {}
        for each in doctor.examine([self.queue]):
            findings.setdefault((each.check, each.verdict), []).append(each)
        told = [each for some in findings.values() for each in self._first(some)]
        order = {"fail": 0, "warn": 1, "ok": 2}
        return {
            "t": round(time.time() * 1e3),
            "took_ms": round((time.monotonic() - begun) * 1e3),
            "findings": sorted(told, key=lambda each: order[each.verdict]),
        }

    def _first(self, alike: list[Finding]) -> list[Finding]:
        more = len(alike) - self.ALIKE
        if more <= 0:
            return alike
        rest = replace(alike[-1], says=f"{more:,} more like these", remedy="")
        return [*alike[: self.ALIKE], rest]

    def _backlog(self, queue: str) -> Backlog:
        """Return what the census knows: it need not be read again for this."""
        census = self._census
        census.look()
        damaged = []
        for request_id in census.damaged[: self.ALIKE]:
            try:
                self._protocol.inspect(request_id).status()
            except Damaged as error:
                damaged.append((request_id, error))
            except RequestUnknown:
                continue
        return Backlog(
            queue=queue,
            requests=[known.status for known in reversed(census.requests.values())],
            damaged=damaged,
            workers=list(census.workers.values()),
            now_ms=round(time.time() * 1e3),
        )


class _RequestSampler:
    every_s = 5.0
    queue = ""

    def __init__(self, protocol: Protocol, censuses: CensusesForSamplers, request_id: str) -> None:
        self.request_id = units.name(request_id, "request id")
        self._protocol = protocol
        self._censuses = censuses

    def past(self) -> Any:
        return None


class OneRequestSampler(_RequestSampler):
    """Tells how a request stands."""

    every_s = 1.0

    def __init__(self, protocol: Protocol, censuses: CensusesForSamplers, request_id: str) -> None:
        super().__init__(protocol, censuses, request_id)
        self._curve = Curve()
        self._sizes: Sequence[int] | None = None

    def read(self) -> Any:
        """Return its status, its speed, when it ends, and what holds it back."""
        snapshot = self._protocol.inspect(self.request_id)
        status = status_of_request_or_flow(self._protocol, snapshot)
        census = self._censuses.of(status.queue)
        if not self._curve.points and not status.stages:
            for each in curve_of(self._protocol, self.request_id):
                self._curve.add(each)
        if status.state.is_live:
            census.look()
        records = status.records
        now_ms = snapshot.count("now_ms")
        whole, is_known = self._records_in_all(snapshot, status)
        point = Point(now_ms, records.done, records.failed, status.parts.running, whole)
        points = self._curve.points
        if status.state.is_live or not points or point.finished != points[-1].finished:
            self._curve.add(point)  # after its end a request stands still
        speed = self._curve.speed()
        ending: Ending | None = None
        if is_known and not (status.paused or status.waits_for_release):
            ending = self._curve.ending(status.rate)
        slots, busy = census.slots_of(status.handler)
        return {
            "t": now_ms,
            "status": status,
            "speed": status.rate if speed is None or not status.state.is_live else speed,
            "ending": ending,
            "why": why.reason_held_back(_sample_with_limit(status), census, self._curve.peak()),
            "slots": {"able": slots, "busy": busy},
            "spec": snapshot.spec,
            "point": point,
            #: Also the records that are not loaded yet, and that later stages of a flow do not
            #: have yet, as far as can be told.
            "foreseen": whole,
        }

    def _records_in_all(self, snapshot: Snapshot, status: Status) -> tuple[int, bool]:
        """Return how many records there will be, and whether that can be told already."""
        stages, total = list(status.stages or ()), status.records.total
        is_known = status.state == "open"
        if status.state == "loading":
            if self._sizes is None:
                self._sizes = self._censuses.sizes_of(snapshot.spec)
            first = stages[0].records.total if stages else total
            found = records_in_all(first, snapshot.optional_text("cursor"), self._sizes)
            if is_known := found is not None:
                total = round(found or 0)
                stages[:1] = [_stage_of_so_many(each, total) for each in stages[:1]]
        return records_foreseen(stages) if stages else total, is_known

    def past(self) -> Any:
        """Return the points of its curve so far."""
        return {"points": self._curve.points}


def _stage_of_so_many(stage: StageStatus, records: int) -> StageStatus:
    return replace(stage, records=replace(stage.records, total=records))


def _sample_with_limit(status: Status) -> Status:
    if not status.stages:
        return status
    return replace(status, limit=limit_of_stages(status.stages))


class MapSampler(_RequestSampler):
    """Tells where along the input parts are done, run and failed."""

    def read(self) -> Any:
        """Return the map."""
        return read_map(self._protocol, self.request_id)


class FailuresSampler(_RequestSampler):
    """Tells a request's failures in groups."""

    def read(self) -> Any:
        """Return the groups."""
        return read_failure_groups(self._protocol, self.request_id, traces=False)


_KINDS: dict[str, Callable[[Protocol, CensusesForSamplers, str], Sampler]] = {
    "q": OverviewSampler,
    "t": TableSampler,
    "v": LevelsSampler,
    "w": WorkersSampler,
    "x": LeasesSampler,
    "h": HealthSampler,
    "l": LogSampler,
    "r": OneRequestSampler,
    "m": MapSampler,
    "f": FailuresSampler,
}


def sampler_of_topic(protocol: Protocol, censuses: CensusesForSamplers, topic: str) -> Sampler:
    """Return what reads the topic.

    Raises:
        InvalidValue: there is no such topic.
    """
    kind, colon, about = topic.partition(":")
    if kind not in _KINDS or not colon or len(topic) > 500:
        raise InvalidValue(f"there is no topic {topic!r:.80}: {', '.join(_KINDS)}")
    return _KINDS[kind](protocol, censuses, about)


def event_of_sample(topic: str, event: str, told: Any) -> bytes:
    """Return an event as a browser gets it; the bytes are the same for all."""
    data = msgspec.json.encode({"topic": topic, "told": told})
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"
