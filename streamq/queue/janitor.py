"""Taking back what the dead left, and keeping the queue's indexes true.

Every step is idempotent: any number of janitors may sweep one queue at once.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

from streamq.errors import Damaged, RequestOpen, RequestUnknown, ServerBusy, ServerUnreachable
from streamq.model import Audit, State, Tick, Tokens
from streamq.protocol.protocol import Protocol
from streamq.telemetry.metrics import Samples

log = logging.getLogger(__name__)

#: A request that was registered and never opened is forgotten after this.
FORGET_UNOPENED_MS = 3_600_000
#: So many damaged requests are remembered, so that each is reported once.
MOST_REPORTED = 1_000
#: How often lists of tokens go that only workers and clients of an earlier version use.
FORMER_EVERY_S = 3_600.0
#: So many requests of one sweep may be on nodes that do not answer.
MOST_AWAY = 3


class Janitor:
    """Sweeps one queue."""

    def __init__(self, protocol: Protocol, queue: str = "default", every_ms: int = 5_000) -> None:
        self._protocol = protocol
        self.queue = queue
        self._every_ms = every_ms
        #: How far the server's clock is ahead of this process's monotonic one.
        self.ahead_ms = 0.0
        #: Parts that were taken back so far, and when the last sweep ended (s since 1970).
        self.reaped = 0
        self.swept_at = 0.0
        #: Requests that it closed, by their last state.
        self.closed: Counter[State] = Counter()
        self._reported: set[str] = set()
        #: Requests of the last tick that were looked at, and until when it had them.
        self._looked: list[str] = []
        self._lent = 0
        self._former_at = time.monotonic() + FORMER_EVERY_S

    def sweep(self) -> int:
        """Look at every request that is due. Returns the ms until the next one is."""
        tick = self._tick()
        self.ahead_ms = tick.now_ms - time.monotonic() * 1e3
        self._looked, self._lent = [], tick.now_ms + self._every_ms
        away = 0
        looks = [partial(self.look, request_id, score, tick) for request_id, score in tick.due]
        for look in looks + [partial(self._purge, request_id) for request_id in tick.purgeable]:
            try:
                look()
                self._looked.append(look.args[0])
            except (ServerBusy, ServerUnreachable) as error:
                # Others may be on a node that is well; but the sweep is not to take for ever.
                away += 1
                if away > MOST_AWAY:
                    raise
                log.warning("cannot look at %s: %s", look.args[0], error)
            except Damaged as error:
                self._looked.append(look.args[0])
                self._report(look.args[0], error)
        if time.monotonic() > self._former_at:
            self._former_at = time.monotonic() + FORMER_EVERY_S
            self._protocol.drop_former_lists(self.queue)
        self.swept_at = time.time()
        return tick.wait_ms

    def _tick(self) -> Tick:
        ask = partial(
            self._protocol.tick,
            self.queue,
            every_ms=self._every_ms,
            looked=self._looked,
            lent=self._lent,
        )
        try:
            tick = ask()
        except Damaged as error:
            renamed = self._protocol.set_aside(self.queue)
            if not renamed:
                raise
            log.warning("queue %s: %s; renamed %s", self.queue, error, ", ".join(renamed))
            tick = ask()
        for stray, score in tick.strays:
            log.warning("queue %s: %.100r is no request id, and taken out", self.queue, stray)
            self._protocol.close(self.queue, stray, score, 0)
            self._protocol.close(self.queue, stray, -1, 0)
        return tick

    def _report(self, request_id: str, error: Damaged) -> None:
        if request_id not in self._reported:
            log.warning("request %s is damaged, and passed over: %s", request_id, error)
            if len(self._reported) >= MOST_REPORTED:
                self._reported.clear()
            self._reported.add(request_id)

    def look(self, request_id: str, score: float, tick: Tick) -> None:
        """Reap what has expired, push the tokens that are missing, close what has ended."""
        try:
            audit = self._protocol.audit(request_id)
            while audit.expired:
                reaped = self._protocol.reap(request_id)
                self._protocol.push(audit.queue, request_id, reaped.tokens)
                self.reaped += reaped.parts
                log.info("reaped %d parts of %s", reaped.parts, request_id)
                audit = self._protocol.audit(request_id)
        except RequestUnknown:
            if tick.now_ms - score > FORGET_UNOPENED_MS:
                self._protocol.close(self.queue, request_id, score, 0)
            return
        if audit.queue != self.queue:
            # Somebody submitted to this queue under an id that another one has, and died.
            self._protocol.close(self.queue, request_id, score, 0)
        elif audit.purge_at:
            self._close(request_id, score, audit)
        elif audit.tokens:
            self._protocol.ensure(request_id, audit)
        if audit.strays:
            log.warning("%s: %d entries of its stream were not ours", request_id, audit.strays)

    def _close(self, request_id: str, score: float, audit: Audit) -> None:
        is_closed = self._protocol.close(self.queue, request_id, score, audit.purge_at)
        self.closed[audit.state] += is_closed
        if is_closed and audit.believed:
            # Nobody may be there who has the handler, to take them.
            self._protocol.mint(self.queue, request_id, audit.tokens, mode="drop")

    def _purge(self, request_id: str) -> None:
        try:
            purge_at = self._protocol.purge(request_id)
        except RequestOpen:
            # The index is wrong: it was lost in part, with a failover.
            self._protocol.mint(self.queue, request_id, Tokens(), register="again")
            return
        self._protocol.close(self.queue, request_id, -1, purge_at)
        if not purge_at:
            log.info("purged %s", request_id)


def totals(janitors: Sequence[Janitor]) -> Samples:
    """What janitors of one process took back and closed, and when each has swept at the latest."""
    return {
        "streamq_requests_total": [
            ({"queue": each.queue, "state": state.value}, each.closed[state])
            for each in janitors
            for state in State
            if not state.is_live
        ],
        "streamq_janitor_reaped_parts_total": [({}, sum(each.reaped for each in janitors))],
        "streamq_janitor_last_success_timestamp_seconds": [
            ({}, min(each.swept_at for each in janitors))
        ],
    }
