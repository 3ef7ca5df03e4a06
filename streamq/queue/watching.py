"""Watching a queue: its requests, levels and workers, again and again at a bounded cost.

A look reads what is shown and, in turn, some of what is not. So its cost does not grow with the
queue: ``MOST_COMMANDS`` says how many commands a look sends at most.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from streamq import units
from streamq.errors import Damaged, RequestUnknown
from streamq.model import State, Status
from streamq.protocol.protocol import Protocol
from streamq.protocol.snapshot import Snapshot
from streamq.queue.fleet import WorkerDetails, read_worker_details

#: How many open requests are known (the newest), and how many workers.
MOST_REQUESTS = 1_000
MOST_WORKERS = 1_000
#: The most requests, workers and lists of tokens that one look reads.
REQUESTS_A_LOOK = 60
WORKERS_A_LOOK = 60
LISTS_A_LOOK = 60
#: The indexes of requests, of workers and of lists in use; and how many requests are open.
_INDEXES = 4
MOST_COMMANDS = REQUESTS_A_LOOK + WORKERS_A_LOOK + LISTS_A_LOOK + _INDEXES
#: Names of workers that are gone stay in the index for a day: older ones than this are not read.
HEARD_MS = 60_000
#: The speed of a request is that of about the last 10 s.
SPEED_S = 10.0
#: How long a request that has ended is still shown.
ENDED_S = 30.0


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it was seen last."""

    status: Status
    #: Records finished per second lately; since its start if it was seen only once.
    rate: float
    eta_s: float | None

    @property
    def progress(self) -> float:
        """The share of its records that is finished, 0 to 1."""
        records = self.status.records
        return (records.done + records.failed) / max(1, records.total)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What a look found, and what earlier ones did."""

    queue: str
    requests: list[Watched]
    #: How many requests the index has; more than ``requests`` if not all are known yet.
    open: int
    #: Tokens that wait, by level.
    levels: dict[int, int]
    workers: list[WorkerDetails]


class _KnownRequest:
    """What is known of one request: how it was seen last, and how far it was at some looks."""

    def __init__(self) -> None:
        self.seen: Watched | None = None
        self.ended_at = 0.0
        #: The server's clock (ms) and records finished.
        self._points: deque[tuple[float, int]] = deque()

    def note(self, found: Snapshot) -> None:
        """Take in a new look at the request."""
        status, now_ms = found.status(), found.number("now_ms")
        records = status.records
        points, finished = self._points, records.done + records.failed
        if points and (finished < points[-1][1] or now_ms < points[-1][0]):
            points.clear()  # it runs again, or the server's clock went back
        points.append((now_ms, finished))
        while len(points) > 2 and now_ms - points[1][0] >= SPEED_S * 1e3:
            points.popleft()
        since_ms, before = points[0]
        is_old = now_ms - since_ms >= 500
        rate = (finished - before) / (now_ms - since_ms) * 1e3 if is_old else status.rate
        left = records.total - finished
        has_eta = status.state is State.OPEN and rate > 0
        if not status.state.is_live:
            self.ended_at = self.ended_at or time.monotonic()
            rate = status.rate
        else:
            self.ended_at = 0.0
        self.seen = Watched(status=status, rate=rate, eta_s=left / rate if has_eta else None)


class Watch:
    """Looks at one queue, as often as it is asked to."""

    def __init__(self, protocol: Protocol, queue: str) -> None:
        self._protocol = protocol
        self._queue = units.name(queue, "queue")
        self._known: dict[str, _KnownRequest] = {}
        self._open: frozenset[str] = frozenset()
        #: Requests and workers, the one that was read longest ago first.
        self._turns: dict[str, float] = {}
        self._workers: dict[str, tuple[float, WorkerDetails | None]] = {}
        self._lists: dict[str, tuple[float, int]] = {}

    def look(self, shown: Sequence[str] = ()) -> View:
        """Look once. The requests ``shown`` are read first, then those read longest ago.

        Raises:
            ServerError: the server does not answer.
        """
        protocol, queue = self._protocol, self._queue
        self._look_at_requests(protocol.latest(queue, MOST_REQUESTS), shown)
        self._look_at_workers()
        self._look_at_lists()
        now = time.monotonic()
        found = [
            known.seen
            for known in self._known.values()
            if known.seen and not (known.ended_at and now - known.ended_at > ENDED_S)
        ]
        levels: dict[int, int] = {}
        for name, (_, tokens) in self._lists.items():
            if tokens:
                level = int(name[-2:])
                levels[level] = levels.get(level, 0) + tokens
        return View(
            queue=queue,
            requests=found,
            open=protocol.index_size(queue),
            levels=dict(sorted(levels.items())),
            workers=[details for _, details in self._workers.values() if details],
        )

    @property
    def unread(self) -> bool:
        """Whether there are requests or workers that no look has read yet."""
        return any(not at for at in self._turns.values()) or any(
            not at for at, _ in (*self._workers.values(), *self._lists.values())
        )

    def _look_at_requests(self, ids: Sequence[str], shown: Sequence[str]) -> None:
        self._keep_up(ids)
        first = [each for each in shown if self._is_open_to_change(each)]
        others = sorted(
            filter(self._is_open_to_change, self._known), key=lambda each: self._turns[each]
        )
        # Of the others, too, some are read at each look. Of those that were never read the newest
        # come first: the order of ``ids``, which sorting keeps.
        chosen = list(dict.fromkeys([*first[: REQUESTS_A_LOOK // 2], *others]))[:REQUESTS_A_LOOK]
        now = time.monotonic()
        for request_id, found in zip(chosen, self._protocol.inspect_all(chosen), strict=True):
            self._turns[request_id] = now
            if isinstance(found, RequestUnknown):  # not opened yet, or purged
                if self._known[request_id].seen:
                    self._forget(request_id)
            elif isinstance(found, Snapshot):
                with suppress(Damaged):
                    self._known[request_id].note(found)

    def _keep_up(self, ids: Sequence[str]) -> None:
        """Know these requests, and forget others that ended long enough ago or never were."""
        for request_id in ids:
            if request_id not in self._known:
                self._known[request_id] = _KnownRequest()
                self._turns[request_id] = 0.0
        self._open, now = frozenset(ids), time.monotonic()
        for request_id, known in list(self._known.items()):
            is_over = known.ended_at and now - known.ended_at > ENDED_S
            if request_id not in self._open and (is_over or known.seen is None):
                self._forget(request_id)

    def _is_open_to_change(self, request_id: str) -> bool:
        """Return whether a look may find something new: an ended request may run again."""
        known = self._known.get(request_id)
        return known is not None and (not known.ended_at or request_id in self._open)

    def _forget(self, request_id: str) -> None:
        del self._known[request_id]
        del self._turns[request_id]

    def _look_at_workers(self) -> None:
        names = self._protocol.heard_lately(self._queue, MOST_WORKERS, HEARD_MS)
        self._workers = {name: self._workers.get(name, (0.0, None)) for name in sorted(names)}
        chosen = sorted(self._workers, key=lambda name: self._workers[name][0])[:WORKERS_A_LOOK]
        now = time.monotonic()
        for name, text in zip(chosen, self._protocol.details(self._queue, chosen), strict=True):
            details = None if text is None else read_worker_details(name, text, self._queue)
            self._workers[name] = now, details

    def _look_at_lists(self) -> None:
        lists = self._protocol.waiting_lists(self._queue)
        self._lists = {name: self._lists.get(name, (0.0, 0)) for name in lists}
        chosen = sorted(self._lists, key=lambda name: self._lists[name][0])[:LISTS_A_LOOK]
        now = time.monotonic()
        for name, tokens in zip(chosen, self._protocol.tokens_in(self._queue, chosen), strict=True):
            self._lists[name] = now, tokens
