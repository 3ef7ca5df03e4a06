"""Takes back parts of dead workers, and keeps the queue's indexes true.

Every step is idempotent: any number of janitors may sweep one queue at once.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from streamq.errors import (
    Damaged,
    RequestNewer,
    RequestOpen,
    RequestUnknown,
    ServerBusy,
    ServerError,
    ServerFull,
    ServerRefused,
    ServerUnreachable,
    SubmissionLate,
)
from streamq.model import State
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Audit, Tick, Tokens
from streamq.queue.fleet import pools_heard_in_fleet
from streamq.queue.outages import Outages
from streamq.queue.starting_callbacks import parent_owes, settle_callbacks
from streamq.telemetry.metrics import Samples

log = logging.getLogger(__name__)

#: A request that was registered but never opened is removed from the index after this time.
FORGET_UNOPENED_MS = 3_600_000
#: The janitor remembers up to 1,000 damaged requests, so that it reports each only once.
MOST_REPORTED = 1_000
#: How often the janitor removes lists of tokens that only an earlier version uses.
FORMER_EVERY_S = 3_600.0
#: A list of tokens that came into use longer ago than this and is empty is removed from ``used``.
FORGET_LISTS_MS = 3_600_000
#: A sweep goes on after up to 3 looks that the only server did not answer; the next one ends it.
MOST_AWAY = 3
#: A sweep ends after this time. Requests that it did not reach are due again soon.
MOST_SWEEP_S = 5.0
#: Requests with leases past their deadline are looked at this often, also in the middle of a sweep.
#: After a longer time between two looks there may have been an outage, so their grace starts anew.
WATCH_EVERY_S = 1.0
#: ``sweep_out`` waits at most this long for suspects; their grace is 13 s at most.
WATCH_S = 60.0
#: An ended request is looked at once more after this time. A failover may have undone the end of
#: the request but not that of its entry in the queue's index.
CONFIRM_MS = 180_000

#: A callback that could be purged, but that its parent still owes, is looked at again after this.
ASK_AGAIN_MS = 60_000

#: The most lists of tokens of ended requests that one sweep clears; each takes some milliseconds.
MOST_LISTS = 10

#: A sweep looks at up to so many requests with one call to each node, and closes those of them that
#: have ended with another. A look takes the server some 30 us; others wait meanwhile.
LOOK_TOGETHER = 25
#: How long the answer of an audit is good for. Then the janitor asks anew, because it would push
#: tokens a second time that workers have taken meanwhile.
BELIEVED_S = 0.1

#: The janitor reads the heartbeats again for a reap when they are older than this: there may be
#: hundreds of workers and of requests to reap. A pool that lives is heard twice in the grace of its
#: leases, so a heartbeat that is read a second late is still in time.
BEATS_EVERY_S = 1.0

#: A request, and the function that looks at it.
Look = tuple[str, Callable[[], None]]


class Janitor:
    """Sweep one queue: take back what the dead left, push missing tokens, purge what has expired.

    Every worker pool has one; any number may sweep a queue at once.

    Example:
        Janitor(Protocol(Connection("redis://localhost")), "default").sweep()
    """

    def __init__(
        self,
        protocol: Protocol,
        queue: str = "default",
        every_ms: int = 5_000,
        outages: Outages | None = None,
    ) -> None:
        """``outages`` may be shared with other threads of this process."""
        self._protocol = protocol
        self._outages = outages or Outages()
        self.queue = queue
        self._every_ms = every_ms
        #: How far the server's clock is ahead of ``time.monotonic`` (ms).
        self.ahead_ms = 0.0
        #: How many parts this janitor took back, and when its last sweep ended (s since 1970).
        self.reaped = 0
        self.swept_at = 0.0
        #: Requests that this janitor closed, by their last state.
        self.closed: Counter[State] = Counter()
        self._reported: set[str] = set()
        #: Requests with leases past their deadline: score in the index, and when they were looked
        #: at.
        self._suspects: dict[str, tuple[float, float]] = {}
        #: The earliest moment (ms) at which one of the requests looked at needs another look; 0:
        #: none.
        self._next_look_ms = 0
        #: Looks of this sweep that the only server did not answer.
        self._unanswered = 0
        #: Requests of the last tick that were looked at, and until when the tick lent them to us.
        self._looked: list[str] = []
        self._lent = 0
        #: Lists that may have tokens of ended requests, each with one of these requests.
        self._littered: dict[str, str] = {}
        #: When each live pool was last heard (ms), and when that was read.
        self._beats: dict[str, float] = {}
        self._beats_at = float("-inf")
        self._former_at = time.monotonic() + FORMER_EVERY_S

    def sweep(self) -> int:
        """Look at every request that is due. Return the ms until the next one is."""
        tick = self._tick()
        self.ahead_ms = tick.now_ms - time.monotonic() * 1e3
        self._next_look_ms = self._unanswered = 0
        self._looked, self._lent = [], tick.now_ms + self._every_ms
        lent = {request_id for request_id, _ in tick.due}
        begun = time.monotonic()
        for request_id, look in self._looks(tick):
            if self._has_looked(request_id, look) and request_id in lent:
                lent.remove(request_id)  # a suspect may be looked at several times
                self._looked.append(request_id)
            if time.monotonic() - begun > MOST_SWEEP_S:
                break
        self._drop_tokens()
        if time.monotonic() > self._former_at:
            self._former_at = time.monotonic() + FORMER_EVERY_S
            self._protocol.drop_former_lists(self.queue)
            self._protocol.forget_lists(self.queue, tick.now_ms - FORGET_LISTS_MS)
        self.swept_at = time.time()
        if not self._next_look_ms:
            return tick.wait_ms
        now_ms = self.ahead_ms + time.monotonic() * 1e3
        return max(0, min(tick.wait_ms, round(self._next_look_ms - now_ms)))

    def _has_looked(self, request_id: str, look: Callable[[], None]) -> bool:
        """Look at a request and return True, or return False if its node does not answer."""
        node = self._protocol.node_of(request_id)
        if node and self._outages.left_s(node):
            return False
        try:
            look()
        except (ServerBusy, ServerUnreachable) as error:
            log.warning("cannot look at %s: %s", request_id, error)
            if not node:
                self._unanswered += 1
                if self._unanswered > MOST_AWAY:
                    raise
            elif isinstance(error, ServerUnreachable):
                self._is_away(node)  # others are on nodes that answer
            return False
        except (ServerFull, ServerRefused, SubmissionLate) as error:
            # This is about the one request: its callbacks are submissions, or it is of a team whose
            # requests this user may not touch. Others are looked at; the next tick has it again.
            log.warning("%s is not looked at yet: %s", request_id, error)
            return False
        except Damaged as error:
            self._report(request_id, error)
        return True

    def sweep_out(self) -> None:
        """Sweep until nothing is due; for up to 60 s, wait until suspects are renewed or reaped."""
        until = time.monotonic() + WATCH_S
        while (wait_ms := self.sweep()) == 0 or (self._suspects and time.monotonic() < until):
            time.sleep(wait_ms / 1e3)

    def _looks(self, tick: Tick) -> Iterator[Look]:
        """Yield what a sweep does, request after request; suspects come whenever it is time."""
        for first in range(0, len(tick.due), LOOK_TOGETHER):
            some = tick.due[first : first + LOOK_TOGETHER]
            asked_at = time.monotonic()
            audits = self._audit_together(some)
            closed = self._close_together(some, audits, tick)
            for request_id, score in some:
                yield from self._watch(tick)
                if request_id in closed:
                    yield request_id, _janitor_finds_it_closed
                    continue
                audit = audits.get(request_id)
                is_stale = time.monotonic() - asked_at > BELIEVED_S
                if audit and is_stale and not audit.strays:  # strays are told of only once
                    audit = None
                yield request_id, partial(self.look, request_id, score, tick, audit)
        for request_id in tick.purgeable:
            yield from self._watch(tick)
            yield request_id, partial(self._purge, request_id)
        yield from self._watch(tick)

    def _audit_together(self, due: Sequence[tuple[str, float]]) -> dict[str, Audit]:
        """Return what requests need. Those of which nothing is told are looked at one by one."""
        if len(due) < 2:
            return {}
        away = self._outages.left_s
        return self._protocol.audit_all(
            [each for each, _ in due if not away(self._protocol.node_of(each))],
            self._is_away,
        )

    def _is_away(self, node: str) -> None:
        """Note that a node of a cluster did not answer: each further call would wait as long."""
        if node:
            self._outages.saw(node)

    def _close_together(
        self, due: Sequence[tuple[str, float]], audits: Mapping[str, Audit], tick: Tick
    ) -> Collection[str]:
        """Close those of the requests that have ended and need nothing else. Returns their ids."""
        closing = [
            (request_id, score, self._purge_at(audits[request_id], tick))
            for request_id, score in due
            if request_id in audits and self._is_over(audits[request_id])
        ]
        if not closing:
            return ()
        try:
            closed = set(self._protocol.close_all(self.queue, closing))
        except ServerError:
            return ()
        for request_id in closed:
            audit = audits[request_id]
            self._suspects.pop(request_id, None)
            self.closed[audit.state] += 1
            self._note_tokens(request_id, audit)
        return closed

    def _is_over(self, audit: Audit) -> bool:
        """Return whether a request has ended, and is only to be closed."""
        return audit.purge_at > 0 and audit.queue == self.queue and not audit.strays

    def _watch(self, tick: Tick) -> Iterator[Look]:
        """Yield suspects that want another look, the oldest first.

        Those that cannot be looked at in time are left to other janitors, or to when they are due.
        """
        begun = time.monotonic()
        for request_id, (score, looked_at) in list(self._suspects.items()):
            if begun - looked_at < WATCH_EVERY_S:
                continue
            if time.monotonic() - begun > WATCH_EVERY_S:
                del self._suspects[request_id]
            else:
                yield request_id, partial(self.look, request_id, score, tick)

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
            what = "newer" if isinstance(error, RequestNewer) else "damaged"
            log.warning("request %s is %s, and passed over: %s", request_id, what, error)
            if len(self._reported) >= MOST_REPORTED:
                self._reported.clear()
            self._reported.add(request_id)

    def look(self, request_id: str, score: float, tick: Tick, audit: Audit | None = None) -> None:
        """Reap leases of dead workers, push missing tokens, close the request if it has ended.

        ``audit``: what the request was just told to need.
        """
        self._suspects.pop(request_id, None)
        self.ahead_ms = self.ahead_ms or tick.now_ms - time.monotonic() * 1e3
        try:
            audit = self._meet_terms(request_id, self._reap(request_id, audit))
        except RequestUnknown:
            if tick.now_ms - score > FORGET_UNOPENED_MS:
                self._protocol.close(self.queue, request_id, score, 0)
            return
        if audit.queue != self.queue:
            # Somebody submitted to this queue under an id of another queue's request, and died.
            self._protocol.close(self.queue, request_id, score, 0)
        elif audit.purge_at:
            self._close(request_id, score, audit, tick)
        elif audit.tokens:
            self._protocol.ensure(request_id, audit)
            self._expect(audit.tokens.look_ms)
        if audit.overdue and audit.queue == self.queue:
            self._suspects[request_id] = score, time.monotonic()
        if audit.strays:
            log.warning("%s: %d entries of its stream were not ours", request_id, audit.strays)

    def _meet_terms(self, request_id: str, audit: Audit) -> Audit:
        """End a request that is past its deadline, and start the callbacks that it owes."""
        if audit.queue != self.queue:
            return audit
        if audit.overdue_by:
            self._protocol.expire(request_id)
            log.info("%s is %d ms past its deadline, and has failed", request_id, audit.overdue_by)
            audit = self._protocol.audit(request_id)
        if audit.owed:
            settle_callbacks(self._protocol, request_id)
            audit = self._protocol.audit(request_id)
        return audit

    def _reap(self, request_id: str, audit: Audit | None) -> Audit:
        """Take back the parts of dead holders, a bounded number at a time."""
        audit = audit or self._protocol.audit(request_id)
        while audit.expired:
            reaped = self._protocol.reap(request_id, heard=self._heard())
            if not reaped.leases:
                break
            self._protocol.push(audit.queue, request_id, reaped.tokens)
            self.reaped += reaped.parts
            log.info("reaped %d parts of %s", reaped.parts, request_id)
            audit = self._protocol.audit(request_id)
        return audit

    def _heard(self) -> dict[str, int]:
        """Return how many ms ago each live pool of the queue was heard."""
        begun = time.monotonic()
        if begun - self._beats_at > BEATS_EVERY_S:
            try:
                self._beats = pools_heard_in_fleet(self._protocol, self.queue)
            except Damaged as error:
                # Nobody counts as heard, so the dead are charged; their parts come back.
                renamed = self._protocol.set_aside(self.queue)
                log.warning("queue %s: %s; renamed %s", self.queue, error, ", ".join(renamed))
                self._beats = {}
            self._beats_at = begun
        now_ms = self.ahead_ms + time.monotonic() * 1e3
        return {pool: max(0, round(now_ms - at_ms)) for pool, at_ms in self._beats.items()}

    def _close(self, request_id: str, score: float, audit: Audit, tick: Tick) -> None:
        purge_at = self._purge_at(audit, tick)
        if self._protocol.close(self.queue, request_id, score, purge_at):
            self.closed[audit.state] += 1
        self._note_tokens(request_id, audit)

    @staticmethod
    def _purge_at(audit: Audit, tick: Tick) -> int:
        return min(audit.purge_at, tick.now_ms + CONFIRM_MS)

    def _note_tokens(self, request_id: str, audit: Audit) -> None:
        if audit.believed:
            self._littered[audit.tokens.to] = request_id

    def _drop_tokens(self) -> None:
        """Remove tokens of ended requests from the lists: there may be no worker to take them.

        One call reads a bounded part of a list, so a list is cleared in each sweep until nothing is
        found. Tokens that lie behind those of other requests are cleared when one of these is
        closed.
        """
        for to, request_id in list(self._littered.items())[:MOST_LISTS]:
            try:
                taken = self._protocol.mint(self.queue, request_id, Tokens(to=to), mode="drop")
            except Damaged as error:
                # A worker or janitor that uses the list next renames it (``aside``).
                log.warning("queue %s: list %s is passed over: %s", self.queue, to, error)
                taken = 0
            if not taken:
                del self._littered[to]

    def _now_ms(self) -> int:
        """Return the server's time, as the last tick told it."""
        return round(self.ahead_ms + time.monotonic() * 1e3)

    def _expect(self, look_ms: int) -> None:
        """Note that a request wants another look at that moment (0: at none in particular)."""
        if look_ms and not 0 < self._next_look_ms < look_ms:
            self._next_look_ms = look_ms

    def _purge(self, request_id: str) -> None:
        try:
            purge_at = self._protocol.purge(request_id)
            if purge_at < 0 and parent_owes(self._protocol, request_id):
                purge_at = self._now_ms() + ASK_AGAIN_MS
            elif purge_at < 0:
                purge_at = self._protocol.purge(request_id, is_asked=True)
        except RequestOpen:
            # The request lives, so its entry in ``closed`` is wrong: a failover lost a part of the
            # index.
            self._protocol.mint(self.queue, request_id, Tokens(), register="again")
            return
        self._protocol.close(self.queue, request_id, -1, purge_at)
        if not purge_at:
            log.info("purged %s", request_id)


def _janitor_finds_it_closed() -> None:
    """Look at a request that is closed already."""


def janitor_samples(janitors: Sequence[Janitor]) -> Samples:
    """Return what the janitors of a process took back and closed, and when each last swept."""
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
