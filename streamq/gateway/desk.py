"""Serves workers that are somewhere else: they take parts, report their outcomes, beat and leave.

The rules of a lease are those of native workers (``queue/taker.py``, ``queue/held_lease.py``). A
desk keeps nothing of a lease: everything is in the ticket that the worker holds.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import TypeVar

import msgspec
from msgspec import UNSET

from streamq import units
from streamq.errors import Damaged, InvalidValue, ServerError, StreamqError
from streamq.gateway import payloads
from streamq.gateway.courier import FIRST_LEASE_MS, Courier, Renewal, WasLost, renew_for_courier
from streamq.gateway.dispatch import (
    MOST_LINES_OF_KEY,
    Dispatch,
    DispatchedTake,
    DispatchLine,
    Wanted,
)
from streamq.gateway.messages import (
    Ask,
    Beat,
    Granted,
    Leave,
    Left,
    Offer,
    Report,
    Verdict,
)
from streamq.gateway.outcomes import Outcomes
from streamq.gateway.paces import Paces
from streamq.gateway.problems import Problem, problem_of_too_many_takes
from streamq.gateway.roles import LOCAL, Caller
from streamq.gateway.ticket import (
    FINISH,
    HANDBACK,
    BadTicket,
    PackedNumbers,
    Ticket,
    TicketBook,
    TicketSigner,
)
from streamq.model import Spec
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Grant, Terms, Tokens
from streamq.queue.held_lease import HeldLease, LeaseGone
from streamq.queue.lease_keeper import LeaseKeeper
from streamq.queue.pace import Pace
from streamq.queue.renewals import Holding, unwanted_holders
from streamq.queue.taker import KNOWN_REQUESTS, Claimed
from streamq.worker.options import levels_of_options

T = TypeVar("T")


def _do_nothing_for_lease() -> None:
    """Do nothing: there is no lease to speak for."""


def _do_nothing_when_delivered(_: WasLost) -> None:
    """Do nothing: the lease was confirmed before."""


#: Calls of the server that are made at the same time.
CALLERS = 16
#: Workers beat at least this often: within the grace of a lease (``lua/README.md``, rule 7), so
#: that they are heard after an outage.
MOST_BEAT_MS = 3_000
#: How far the clocks of gateways may be apart before turns are cut short.
CLOCKS_APART_MS = 1_000


class Handed(msgspec.Struct, frozen=True):
    """An answer to ``take`` or ``report``, and what to do when it is out, or cannot be sent."""

    granted: Granted | None
    #: The ticket of a new lease, or the next of the same.
    ticket: Ticket | None = None
    delivered: Callable[[WasLost], None] = _do_nothing_when_delivered
    undo: Callable[[], None] = _do_nothing_for_lease


class Desk:
    """Serves workers. Its methods belong to the event loop; calls of the server run in threads."""

    def __init__(
        self, protocol: Protocol, keepers: dict[str, LeaseKeeper], signer: TicketSigner, word: str
    ) -> None:
        self._protocol = protocol
        self._keepers = keepers
        self._signer = signer
        self._dispatch = Dispatch(protocol, keepers, word)
        self._callers = ThreadPoolExecutor(CALLERS, "desk")
        self.courier = Courier(protocol, keepers, self.in_thread)
        self._paces = Paces()
        self._waiting: set[DispatchedTake] = set()
        #: How many parts were handed out, and how many came back with each outcome.
        self.parts: Counter[str] = Counter(handed=0, done=0, failed=0, back=0, crashed=0)
        #: How many calls of each caller wait.
        self._waits: Counter[str] = Counter()
        #: In which lines they do.
        self._lines_of: defaultdict[str, Counter[DispatchLine]] = defaultdict(Counter)
        #: Raises a problem if the key of a caller is over, which was good when the call came.
        self.check_again: Callable[[Caller], None] = lambda _: None
        self.is_key_over: Callable[[Caller], bool] = lambda _: False
        #: Whether the gateway stops. Then no call waits any more.
        self.is_stopping = False
        #: When requests were created, and their specs.
        self._specs: dict[str, tuple[int, Spec]] = {}

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Make calls of the server beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._callers, call)

    @property
    def waiting(self) -> int:
        """How many calls wait for parts."""
        return len(self._waiting)

    def stop_waiting(self) -> None:
        """Answer calls that wait, now and from now on: the gateway stops."""
        self.is_stopping = True
        for waiter in self._waiting:
            waiter.expire()

    def close(self) -> None:
        """End the threads."""
        self._dispatch.stop()
        self._callers.shutdown(wait=False, cancel_futures=True)

    # What workers say

    async def take(self, caller: Caller, ask: Ask) -> Handed:
        """Wait for a lease. Nothing is granted if none came in time."""
        if not ask.handlers:
            raise InvalidValue("which handlers? Name at least one")
        line = self._dispatch.line(self._wanted(caller, ask))
        claimed = await self._wait_for(caller, line, ask)
        if claimed is None:
            return Handed(None)
        lease, grant, known = claimed
        now_ms = _now_of_desk_ms()
        ticket = Ticket(
            request_id=lease.request_id,
            holder=lease.holder,
            queue=ask.queue,
            handler=grant.handler,
            number=1,
            created_ms=grant.created_ms,
            lease_ms=_lease_ms_for_desk(ask),
            parts=PackedNumbers(),
            records=PackedNumbers(),
            attempts={},
            backoff_ms=known.work.backoff_ms,
            backoff_max_ms=known.work.backoff_max_ms,
            quantum_ms=ask.quantum_ms,
            part_s=self._paces.of(caller.name, ask.name, lease.request_id),
            handed_ms=now_ms,
            late_ms=now_ms + ask.quantum_ms,
            key=caller.name,
            facts=lease.facts,
        )
        ticket = ticket.with_parts(grant.parts)
        try:
            self.check_again(caller)
        except Problem:
            self._release(ticket)
            raise
        self._remember(ticket, known.work)
        granted = self._granted("ok", ticket, grant, ask, known.work)
        return Handed(
            granted,
            ticket,
            delivered=lambda was_lost: self.courier.delivered(ticket, was_lost),
            undo=lambda: self._release(ticket),
        )

    async def report(self, caller: Caller, report: Report) -> Handed:
        """Record what became of parts, and hand out the next if the report asks for some."""
        ticket = self.open(caller, report.ticket)
        outcomes = Outcomes(ticket, report)
        pace = Pace(ticket.quantum_ms / 1e3, ticket.part_s)
        now_ms = _now_of_desk_ms()
        pace.observe(outcomes.ran, max(0.0, (now_ms - ticket.handed_ms) / 1e3))
        ask = report.next
        if ask:
            self._paces.note(caller.name, ask.name, ticket.request_id, pace.part_s)
        most = 0
        left_ms = _left_of_desk_turn_ms(ticket, now_ms)
        if ask and not self.is_stopping and left_ms and outcomes.goes_on:
            most = min(ask.most, pace.most(left_ms / 1e3))
        max_bytes = ask.max_bytes if ask else 1
        terms = Terms(most, max_bytes, ticket.lease_ms)
        grant = await self.in_thread(lambda: self._send(ticket, outcomes, terms))
        self.parts.update(outcomes.counts())
        if grant.parts:
            following = msgspec.structs.replace(
                ticket, number=ticket.number + 1, part_s=pace.part_s, handed_ms=_now_of_desk_ms()
            )
            following = following.with_parts(grant.parts)
            spec = await self._spec(ticket)
            granted = self._granted("ok", following, grant, ask or Ask(), spec)
            granted.counted = grant.counted
            return Handed(granted, following)
        if ask and ask.handlers and not self.is_stopping and grant.word != "late":
            handed = await self.take(caller, ask)
            if handed.granted:
                handed.granted.counted = grant.counted
                return handed
        return Handed(Granted(word=grant.word, counted=grant.counted, parts=[]))

    async def beat(self, caller: Caller, beat: Beat) -> Verdict:
        """Renew the leases of a live worker. The answer names those that nobody needs any more."""
        tickets = self._valid(caller, [held.ticket for held in beat.tickets])
        texts = {ticket.holder: text for text, ticket in tickets.items()}
        verdict = Verdict([each.ticket for each in beat.tickets if each.ticket not in tickets], [])
        leases = [
            Renewal(tickets[each.ticket].lease_ms, tickets[each.ticket], each.part)
            for each in beat.tickets
            if each.ticket in tickets
        ]
        answers = await renew_for_courier(self._protocol, self.in_thread, leases)
        away = [answer for _, _, answer in answers if isinstance(answer, ServerError)]
        if away and len(away) == len(answers):
            raise away[0]
        for request_id, running, answer in answers:
            unwanted = unwanted_holders(request_id, running, answer)
            verdict.unwanted += [texts[holder] for holder in running if holder in unwanted]
            if not isinstance(answer, StreamqError) and answer[1]:
                verdict.paused += [texts[each] for each in running if each not in unwanted]
        return verdict

    async def leave(self, caller: Caller, leave: Leave) -> Left:
        """End the leases of a worker that goes. Its unfinished parts run elsewhere at once."""
        tickets = self._valid(caller, leave.tickets)

        def release() -> None:
            for ticket in tickets.values():
                self._lease(ticket, Terms(0), FINISH).release()

        await self.in_thread(release)
        return Left(len(tickets))

    # Leases

    async def _wait_for(self, caller: Caller, line: DispatchLine, ask: Ask) -> Claimed[Spec] | None:
        if self.is_stopping:
            return None
        loop = asyncio.get_running_loop()

        waiter = DispatchedTake(loop, partial(self._first_terms, caller.name, ask))
        self.check_waits(caller)
        lines = self._lines_of[caller.name]
        if len(lines) >= MOST_LINES_OF_KEY and line not in lines and caller is not LOCAL:
            raise problem_of_too_many_takes(
                f"calls of the key {caller.name} wait for {len(lines)} different sets of handlers "
                "and levels already"
            )
        lines[line] += 1
        self._waits[caller.name] += 1
        self._waiting.add(waiter)
        expiring = loop.call_later(ask.wait_s, waiter.expire)
        try:
            line.join(waiter)
            return await waiter.granted
        except asyncio.CancelledError:  # the caller has left
            waiter.leave()
            raise
        finally:
            expiring.cancel()
            waiter.is_over = True
            self._waiting.discard(waiter)
            self._waits[caller.name] -= 1
            lines[line] -= 1
            if not lines[line]:
                del lines[line]

    def _first_terms(self, caller: str, ask: Ask, request_id: str, most: int) -> Terms:
        """Return what a take asks of a request, of which so many parts take about a quantum."""
        # Short until the answer is out: then the courier renews the lease to its whole length.
        lease_ms = min(FIRST_LEASE_MS, _lease_ms_for_desk(ask))
        part_s = self._paces.of(caller, ask.name, request_id)
        most = max(most, Pace(ask.quantum_ms / 1e3, part_s).most())
        return Terms(min(most, ask.most), ask.max_bytes, lease_ms)

    def check_waits(self, caller: Caller) -> None:
        """Raise a problem if so many calls of this caller wait that no other may."""
        if self._waits[caller.name] >= caller.waits:
            raise problem_of_too_many_takes(
                f"{caller.waits} calls of the key {caller.name} wait already"
            )

    @contextmanager
    def counted(self, caller: Caller) -> Iterator[None]:
        """Count a call that waits, as long as the block lasts."""
        self._waits[caller.name] += 1
        try:
            yield
        finally:
            self._waits[caller.name] -= 1

    def _wanted(self, caller: Caller, ask: Ask) -> Wanted:
        self.check_queue(caller, ask.queue)
        offers = {}
        for each in ask.handlers:
            offer = each if isinstance(each, Offer) else Offer(each)
            name = units.name(offer.name, "handler")
            offers[name] = f"parts {name} {offer.retries if offer.retries is not UNSET else ''}"
        return Wanted(
            ask.queue,
            _levels_for_desk(ask.levels),
            tuple((name, offer.rstrip()) for name, offer in sorted(offers.items())),
        )

    def check_queue(self, caller: Caller, queue: str) -> None:
        """Raise an error unless the gateway serves the queue, and the caller may use it."""
        caller.check_queue(queue)
        if queue not in self._keepers:
            raise InvalidValue(f"this gateway does not serve the queue {queue!r:.80}")

    def open(self, caller: Caller, text: str) -> Ticket:
        """Read a ticket from its text. It must have been given to this caller."""
        ticket = self._signer.open(text, caller.name)
        caller.check_queue(ticket.queue)
        return ticket

    def _valid(self, caller: Caller, texts: Sequence[str]) -> dict[str, Ticket]:
        """Return the tickets that are valid, by their texts: one that is not harms no other.

        Raises:
            BadTicket: none of them is.
        """
        valid: dict[str, Ticket] = {}
        bad: BadTicket | None = None
        for text in texts:
            try:
                valid[text] = self.open(caller, text)
            except BadTicket as error:
                bad = error
        if bad and not valid:
            raise bad
        return valid

    def _granted(self, word: str, ticket: Ticket, grant: Grant, ask: Ask, spec: Spec) -> Granted:
        self.parts["handed"] += len(grant.parts)
        return Granted(
            word=word,
            ticket=self._signer.seal(ticket),
            request=ticket.request_id,
            handler=ticket.handler,
            lease_ms=ticket.lease_ms,
            beat_ms=min(ticket.lease_ms // 4, MOST_BEAT_MS),
            timeout_ms=spec.timeout_ms,
            parts=payloads.parts_with_payloads_told(grant.parts, spec, ask.as_),
        )

    def _remember(self, ticket: Ticket, spec: Spec) -> None:
        if len(self._specs) >= KNOWN_REQUESTS:
            self._specs.clear()
        self._specs[ticket.request_id] = (ticket.created_ms, spec)

    async def _spec(self, ticket: Ticket) -> Spec:
        """Return the spec of a request; read it, if another gateway has granted the lease."""
        created_ms, spec = self._specs.get(ticket.request_id, (-1, Spec()))
        if created_ms != ticket.created_ms:
            found = await self.in_thread(lambda: self._protocol.inspect(ticket.request_id))
            spec = found.spec
            self._remember(ticket, spec)
        return spec

    def _send(self, ticket: Ticket, outcomes: Outcomes, terms: Terms) -> Grant:
        """Make the calls of a report, each with the number that belongs to the ticket."""
        lease = self._lease(ticket, terms, 1)
        book = lease.book
        assert isinstance(book, TicketBook)
        try:
            for place, (part, outcome) in enumerate(outcomes.not_done, 1):
                book.at(place)
                lease.fail(part, outcome)
            book.at(HANDBACK)
            if outcomes.crashed is not None:
                # Results that come later count without the lease, because its parts were just given
                # back.
                lease.release(outcomes.crashed)
            elif outcomes.back:
                lease.hand_back(outcomes.back)
            for part, done in outcomes.done:
                lease.record(part, done)
            book.at(FINISH)
            return lease.finish(terms.most, is_alone=True)
        except LeaseGone:
            return Grant("lost", Tokens(), [])

    def _release(self, ticket: Ticket) -> None:
        """Give back parts that the answer did not take to the worker."""
        book = TicketBook(ticket.number)
        self._keepers[ticket.queue].release(
            Holding(request_id=ticket.request_id, holder=ticket.holder), book.next_call(), None
        )

    def _lease(self, ticket: Ticket, terms: Terms, place: int) -> HeldLease:
        host = _DeskLeaseHost(self._protocol, self._keepers[ticket.queue], ticket.queue, terms)
        book = TicketBook(ticket.number, place)
        lease = HeldLease(host, book, ticket.holder, ticket.request_id, is_insisting=False)
        lease.handler, lease.created_ms = ticket.handler, ticket.created_ms
        lease.facts = ticket.facts
        return lease


class _DeskLeaseHost:
    """What a ``HeldLease`` needs of its host, for the calls of one ticket."""

    def __init__(self, protocol: Protocol, keeper: LeaseKeeper, queue: str, terms: Terms) -> None:
        self.protocol = protocol
        self._keeper = keeper
        self._queue = queue
        self._terms = terms

    def terms(self, most: int) -> Terms:
        """Return what to ask the server for."""
        return msgspec.structs.replace(self._terms, most=most)

    def push(self, request_id: str, tokens: Tokens) -> None:
        """Push the tokens that a reply asks for, and register the janitor's next look."""
        if not tokens:
            return
        # If the server does not answer now, the next audit pushes these tokens.
        with suppress(ServerError, Damaged):
            self.protocol.push(self._queue, request_id, tokens)
        if look_ms := tokens.next_look_ms(self._queue):
            self._keeper.expect(look_ms)

    def note_end(self, request_id: str, grant: Grant) -> None:
        """Note nothing."""


@lru_cache(1_000)
def _levels_for_desk(text: str) -> tuple[int, ...]:
    return levels_of_options(text, "levels")


def _lease_ms_for_desk(ask: Ask) -> int:
    return round(ask.lease_s * 1e3)


def _left_of_desk_turn_ms(ticket: Ticket, now_ms: int) -> int:
    """Return for how long a lease may go on before others have their turn.

    Another gateway may have granted it, or the clock may have gone back since. A turn does not last
    longer for that.
    """
    left_ms = ticket.late_ms - now_ms
    if not 0 < left_ms <= ticket.quantum_ms + CLOCKS_APART_MS:
        return 0
    return min(left_ms, ticket.quantum_ms)


def _now_of_desk_ms() -> int:
    return round(time.time() * 1e3)
