"""Counts the work of a queue, for metrics and scale: slots wanted, ages, requests by level."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import msgspec

from streamq import units
from streamq.errors import Damaged, RequestUnknown, ServerError, ServerUnreachable
from streamq.model import LAST_LEVEL, Status
from streamq.protocol.protocol import Protocol
from streamq.queue.fleet import WorkerDetails, live_workers
from streamq.telemetry.metrics import Samples

log = logging.getLogger(__name__)

#: A reading is returned again for 5 s, or for 20 times as long as it took, if that is more.
FRESH_S = 5.0
_TIMES = 20
#: A caller waits no longer than this for queues to be read.
PATIENCE_S = 2.0


def slots_wanted(status: Status) -> int:
    """Return how many slots could run parts of a request now, within its limit.

    None if it is paused, or held by a delay or a snooze.
    """
    parts = status.parts
    if not status.state.is_live or status.paused or status.held_until_ms:
        return 0
    return min(status.limit, parts.waiting + parts.running + parts.retry)


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """The unfinished requests and live workers of a queue at one moment."""

    queue: str
    #: Requests that are not finished.
    requests: list[Status]
    #: Requests that cannot be read, and why.
    damaged: list[tuple[str, Damaged]]
    workers: list[WorkerDetails]
    #: The server's clock.
    now_ms: int

    def wanted(self, handlers: Collection[str] | None, levels: Collection[int]) -> int:
        """Return how many slots requests of these handlers (None: any) and levels could use now."""
        return sum(
            slots_wanted(status)
            for status in self.requests
            if (handlers is None or status.handler in handlers) and status.level in levels
        )

    def unserved(self) -> list[Status]:
        """Return the requests whose handler no live worker has."""
        served = {name for worker in self.workers for name in worker.handlers}
        return [status for status in self.requests if status.handler not in served]

    def samples(self) -> Samples:
        """Return the backlog as metrics."""
        found = self.requests
        states = Counter("paused" if each.paused else each.state.value for each in found)
        tens = Counter(each.level // 10 for each in found)
        oldest_ms = min((each.created_ms for each in found), default=self.now_ms)
        label = {"queue": self.queue}
        return {
            "streamq_queue_requests": [
                ({**label, "state": state}, states[state])
                for state in ("loading", "open", "paused")
            ],
            "streamq_queue_level_requests": [
                ({**label, "levels": f"{ten}0-{ten}9" if ten else "0-9"}, tens[ten])
                for ten in range(10)
            ],
            "streamq_queue_parts": [
                ({**label, "state": state}, sum(getattr(each.parts, state) for each in found))
                for state in ("waiting", "running", "retry", "failed")
            ],
            "streamq_queue_oldest_age_seconds": [(label, (self.now_ms - oldest_ms) / 1e3)],
            "streamq_queue_slots_wanted": [(label, self.wanted(None, range(LAST_LEVEL + 1)))],
            "streamq_queue_workers": [(label, len(self.workers))],
            "streamq_queue_unserved_requests": [(label, len(self.unserved()))],
        }


def read_backlog(
    protocol: Protocol, queue: str, on_read: Callable[[int, int], None] = lambda *_: None
) -> Backlog:
    """Read what a queue has to do now, request after request.

    ``on_read`` is called before each request, with its number and how many there are.
    """
    requests, damaged = [], []
    now_ms = 0
    ids = protocol.ids(units.name(queue, "queue"))
    for number, request_id in enumerate(ids, 1):
        on_read(number, len(ids))
        try:
            found = protocol.inspect(request_id)
            status = found.status()
        except RequestUnknown:  # registered and not opened yet, or just purged
            continue
        except Damaged as error:
            damaged.append((request_id, error))
            continue
        now_ms = found.count("now_ms")
        if status.state.is_live:
            requests.append(status)
    return Backlog(
        queue=queue,
        requests=requests,
        damaged=damaged,
        workers=live_workers(protocol, queue),
        now_ms=now_ms or round(time.time() * 1e3),
    )


class BacklogCache:
    """Reads queues for callers that ask often, and returns recent readings again.

    One thread reads, so that a server that is away holds up a caller for ``PATIENCE_S`` at most.
    The thread reads for no more than a twentieth of its time.
    """

    def __init__(self, protocol: Protocol, queues: Iterable[str]) -> None:
        self._protocol = protocol
        self._queues = list(queues)
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "backlog")
        self._reading: Future[list[Backlog]] | None = None
        self._good_until = 0.0

    def backlogs(self) -> list[Backlog]:
        """Return what each queue has to do.

        Raises:
            ServerError: the server does not answer, or not soon enough.
        """
        with self._lock:
            if self._reading is None or (
                self._reading.done() and time.monotonic() >= self._good_until
            ):
                self._reading = self._thread.submit(self._read_all)
            current = self._reading
        try:
            return current.result(PATIENCE_S)
        except NotYet:
            raise ServerUnreachable("the server has not answered yet") from None

    def close(self) -> None:
        """Stop reading."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read_all(self) -> list[Backlog]:
        begun = time.monotonic()
        # A failed reading is returned again for a while, too.
        self._good_until = begun + FRESH_S
        try:
            return [read_backlog(self._protocol, queue) for queue in self._queues]
        finally:
            now = time.monotonic()
            self._good_until = now + max(FRESH_S, _TIMES * (now - begun))

    def samples(self) -> Samples:
        """Return what the queues have to do, as metrics; nothing while the server is away."""
        found: Samples = {}
        try:
            for backlog in self.backlogs():
                for name, more in backlog.samples().items():
                    found.setdefault(name, []).extend(more)
        except (ServerError, Damaged) as error:
            log.debug("no metrics of queues: %s", error)
        return found
