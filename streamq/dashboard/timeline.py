"""The timeline of leases: which slot has served which request.

Workers tell the leases of their slots that are over, while somebody looks: they learn of it with
their heartbeats. Beside that one look a second is taken at who holds leases now. It shows what is
not over yet, and leases of workers that tell nothing.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from streamq.dashboard.census import Census
from streamq.errors import UNREADABLE, ServerRefused
from streamq.protocol import glances
from streamq.protocol.protocol import Protocol
from streamq.queue.told import SpansTold, ToldSpan, slot_of_told_span

log = logging.getLogger(__name__)

#: How many looks are kept.
LOOKS = 180
#: Of how many requests a look reads leases (those with the most parts that run), and how many
#: leases of one request.
MOST_REQUESTS, MOST_LEASES = 100, 500
#: How many spans all workers together may tell in a second, and how many are kept.
SPANS_A_SECOND, MOST_SPANS = 2_000, 20_000
#: The time of which a frame has spans, how many it has at most, and how many a watcher gets in its
#: first frame.
FRAME_MS, MOST_IN_FRAME, MOST_TOLD = 8_000, 2_000, 6_000
#: How often workers are told that somebody looks at the timeline (s), and how long they believe it
#: (ms).
WATCH_EVERY_S, WATCH_TTL_MS = 5.0, 20_000
#: How many entries of the workers' log one look reads.
_MOST_READ = 1_000


class EndedTimelineSpan(msgspec.Struct, frozen=True, array_like=True):
    """A lease that is over: its slot, its times, its request, and how many parts ran."""

    worker: str
    slot: str
    from_ms: int
    to_ms: int
    request: str
    done: int
    failed: int
    retried: int


class Timeline:
    """Knows the leases of one queue."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self.looks: deque[dict[str, Any]] = deque(maxlen=LOOKS)
        self.spans: deque[EndedTimelineSpan] = deque(maxlen=MOST_SPANS)
        self._watched_at = 0.0
        self._after = ""
        self._left_out = 0

    def look(self, census: Census) -> dict[str, Any]:
        """Return the leases of this moment, and those that ended in the last seconds."""
        self._watch(census)
        self._read(census.queue)
        now_ms = round(time.time() * 1e3)
        now = {"t": now_ms, "slots": self._held_now(census)}
        self.looks.append(now)
        recent = [span for span in self.spans if span.to_ms > now_ms - FRAME_MS]
        return {**now, "spans": recent[-MOST_IN_FRAME:], "left_out": self._left_out}

    def told(self) -> list[EndedTimelineSpan]:
        """Return what a new watcher is told of leases that are over."""
        return list(self.spans)[-MOST_TOLD:]

    def _watch(self, census: Census) -> None:
        """Have workers tell what their slots do."""
        if time.monotonic() - self._watched_at < WATCH_EVERY_S:
            return
        self._watched_at = time.monotonic()
        most = max(5, SPANS_A_SECOND // max(1, len(census.pools)))
        try:
            self._protocol.watch(census.queue, most, WATCH_TTL_MS)
        except ServerRefused as error:  # a user that may only read cannot ask workers to tell
            log.debug("workers are not told that somebody looks: %s", error)

    def _read(self, queue: str) -> None:
        """Read what workers have told since the last look."""
        after = self._after or f"{round(time.time() * 1e3) - 60_000}-0"
        try:
            found = glances.glance_at_spans(self._protocol, queue, after, _MOST_READ)
        except ServerRefused as error:  # its ACL is of an earlier version
            log.debug("spans cannot be read: %s", error)
            return
        self._left_out = 0
        for entry, text in found:
            self._after = entry
            try:
                told = msgspec.json.decode(text, type=SpansTold)
            except UNREADABLE:
                continue
            self._left_out += told.left_out
            self.spans.extend(_ended_timeline_span(told.worker, span) for span in told.spans)

    def _held_now(self, census: Census) -> list[tuple[str, str, str]]:
        """Return for each slot that holds a lease now: its worker, its name, and the request."""
        busy = sorted(
            (known.status for known in census.requests.values() if known.status.parts.running),
            key=lambda status: -status.parts.running,
        )[:MOST_REQUESTS]
        ids = [status.id for status in busy]
        pools = {each.pool: name for name, each in census.workers.items() if each.pool}
        slots: list[tuple[str, str, str]] = []
        for request_id, holders in zip(
            ids, glances.glance_at_holders(self._protocol, ids, MOST_LEASES), strict=True
        ):
            for holder in holders:
                slots.append((*_timeline_slot_of_span(holder, pools), request_id))
        return sorted(slots)


def _timeline_slot_of_span(holder: str, pools: Mapping[str, str]) -> tuple[str, str]:
    """Return the worker and the slot of a holder."""
    pool, slot = slot_of_told_span(holder)
    return pools.get(pool, pool[:12]), slot


def _ended_timeline_span(worker: str, span: ToldSpan) -> EndedTimelineSpan:
    return EndedTimelineSpan(worker, *msgspec.structs.astuple(span))
