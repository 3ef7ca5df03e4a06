"""Who acts on requests: slots of workers and loaders, simulated one call at a time.

A slot keeps the client's rules: a fresh name for every lease, calls numbered under it, and what
a call hands back is struck before it is sent and never started. A call goes well, or stays under
way (sent, not executed), or is executed and its reply lost; then it is sent again as it was, but
for a claim: its name is released instead. A copy of a call that was under way may arrive at any
later moment.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from streamq.errors import LoadGap, ProtocolError, RequestEnded, RequestUnknown
from streamq.model import Failure
from streamq.protocol.replies import FailKind, Grant, Opened, Outcome, Terms, Tokens
from tests.protocol.interleavings.book import Book
from tests.protocol.interleavings.watched import Watched

LEASE_MS = 20_000

#: How a call fares.
WELL, UNDER_WAY, REPLY_LOST = "well", "under way", "reply lost"


@dataclass(frozen=True)
class Pick:
    """What chance decides about one step of a slot."""

    fares: str = WELL
    most: int = 2
    #: What becomes of the running part: done, or a kind of failure, or its process dies; or it goes
    #: on, and what its records came to is kept.
    outcome: str = "done"
    delay_ms: int = 0
    #: Report before everything in hand has run.
    early: bool = False
    #: Give the lease back politely.
    release: bool = False
    #: Not to have the handler.
    stranger: bool = False
    #: A call that is sent again will arrive twice, the first time after the second.
    copy: bool = False
    #: To have worked on an earlier request of the same id.
    former: bool = False


PLAIN = Pick()


@dataclass
class Net:
    """The queue, and what is between the actors and the server."""

    protocol: Watched
    queue: str
    unit: str
    #: How much time was made to pass.
    clock: int = 0
    #: Calls that may still arrive.
    late: list[tuple[Book, Callable[[], Any]]] = field(default_factory=list)
    #: Counts what ran, so that every run has a result of its own.
    runs: int = 0
    pops: int = 0

    def book(self, request_id: str) -> Book:
        return self.protocol.books[request_id]

    def arrive(self, at: int) -> None:
        """Let a late call arrive; nobody hears its answer."""
        book, send = self.late.pop(at % len(self.late))
        with suppress(ProtocolError):
            lose(book, send())
        self.protocol.tally["late calls"] += 1


def tokens_of(reply: Any) -> Tokens:
    """The tokens an answer asks to be pushed."""
    if isinstance(reply, Grant | Outcome):
        return reply.tokens
    if isinstance(reply, tuple) and isinstance(reply[-1], Tokens):
        return reply[-1]
    return Tokens()


def lose(book: Book, reply: Any) -> None:
    """Nobody hears this answer, nor pushes its tokens."""
    if tokens_of(reply):
        book.trusted = False


@dataclass
class Push:
    """Tokens somebody is about to push, and when that was asked for."""

    book: Book
    tokens: Tokens
    clock: int


@dataclass
class Sent:
    """A call under way: how to send it, and who is told the answer."""

    book: Book
    send: Callable[[], Any]
    hear: Callable[[Any], None]


class Actor:
    """Makes one call at a time, and pushes tokens before it goes on."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.call: Sent | None = None
        self.pushes: list[Push] = []

    def attempt(self, sent: Sent, fares: str) -> None:
        """Send a call, for the first time or again."""
        self.call = sent
        if fares == UNDER_WAY:
            return
        try:
            reply = sent.send()
        except ProtocolError as refused:
            reply = refused
        if fares == REPLY_LOST:
            self.net.protocol.tally["lost replies"] += 1
            lose(sent.book, reply)
            return
        self.call = None
        self.ask_to_push(sent.book, tokens_of(reply))
        sent.hear(reply)

    @property
    def is_busy(self) -> bool:
        return bool(self.call or self.pushes)

    def goes_on(self, fares: str, *, copy: bool = False) -> bool:
        """Push what is to be pushed, or send the call under way again, if there is any."""
        if self.pushes:
            self.push()
        elif self.call:
            if copy:
                self.leave_copy()
            self.attempt(self.call, fares)
        else:
            return False
        return True

    def ask_to_push(self, book: Book, tokens: Tokens) -> None:
        if tokens:
            self.pushes.append(Push(book, tokens, self.net.clock))

    def push(self) -> None:
        """Do what an earlier answer asked for."""
        push = self.pushes.pop(0)
        look = push.tokens.look_ms
        if look:
            look -= self.net.clock - push.clock
        tokens = Tokens(push.tokens.count, push.tokens.to, look)
        self.net.protocol.push(self.net.queue, push.book.id, tokens)

    def leave_copy(self) -> None:
        """The call under way is sent again; this one may arrive later."""
        if self.call:
            self.net.late.append((self.call.book, self.call.send))

    def crash(self, *, leave_copy: bool) -> None:
        """Lose everything that is not on the server."""
        for push in self.pushes:
            push.book.trusted = False
        if leave_copy:
            self.leave_copy()
        self.call = None
        self.pushes = []
        self.net.protocol.tally["crashes"] += 1


@dataclass
class Holding:
    """A lease as its holder sees it."""

    book: Book
    holder: str
    #: When its request was created, as the claim was told.
    created_ms: int = 0
    #: Of the last call.
    number: int = 0
    queue: list[int] = field(default_factory=list)
    running: int | None = None
    finished: dict[int, bytes] = field(default_factory=dict)
    #: Parts never to be started, by the call that hands them back.
    struck: dict[int, int] = field(default_factory=dict)

    def next_call(self) -> int:
        self.number += 1
        return self.number

    def strike(self, keep: int, call: int) -> list[int]:
        """Take what was not started from the queue, but for the first few."""
        struck, self.queue = self.queue[keep:], self.queue[:keep]
        self.struck |= dict.fromkeys(struck, call)
        return struck

    def accept(self, grant: Grant, call: int) -> None:
        """Take over what an answer handed out, also when part of it is known already."""
        known = {*self.queue, *self.finished, self.running}
        for part in grant.parts:
            if part.number not in known and self.struck.get(part.number, -1) <= call:
                self.queue.append(part.number)


class Slot(Actor):
    """One slot of a worker and its heartbeat."""

    def __init__(self, net: Net, name: str) -> None:
        super().__init__(net)
        self.name = name
        self.leases = 0
        self.token: tuple[Book, int] | None = None
        self.holding: Holding | None = None
        #: The heartbeat makes calls of its own beside the slot's.
        self.heart = Actor(net)

    @property
    def is_idle(self) -> bool:
        return not (self.is_busy or self.heart.is_busy or self.token or self.holding)

    def step(self, pick: Pick = PLAIN) -> bool:
        """Do the next thing. Returns whether there was anything to do."""
        if self.goes_on(pick.fares, copy=pick.copy):
            return True
        if self.holding:
            self._work(self.holding, pick)
        elif self.token:
            self._claim(*self.token, pick)
        else:
            return self._take()
        return True

    def can_hand_back(self, keep: int) -> bool:
        """Whether the heartbeat has something to do, or the slot's call to overtake."""
        if self.heart.is_busy or self.holding is None:
            return self.heart.is_busy
        return self.call is not None or len(self.holding.queue) > keep

    def settle(self, steps: int) -> None:
        """Go on without faults until there is nothing to do."""
        for _ in range(steps):
            if not self.heart.goes_on(WELL) and not self.step(PLAIN):
                return
        raise AssertionError(f"{self.name} is still busy after {steps} steps")

    def _take(self) -> bool:
        popped = self.net.protocol.eye.pop()
        if popped is None:
            return False
        self.net.pops += 1
        self.token = self.net.book(popped[0]), popped[1]
        return True

    def _claim(self, book: Book, level: int, pick: Pick) -> None:
        self.token = None
        self.leases += 1
        holder = f"{self.name}.{self.leases}"
        terms = Terms(1 + pick.most, lease_ms=LEASE_MS)
        handlers = ["parts other"] if pick.stranger else [f"{self.net.unit} h"]
        holding = Holding(book, holder)
        sent = Sent(
            book,
            lambda: self.net.protocol.claim(book.id, holder, terms, handlers, level=level),
            lambda reply: self._hear_claim(holding, reply),
        )
        if pick.fares != UNDER_WAY:
            self.attempt(sent, pick.fares)
        else:
            # The token goes with it, wherever it is.
            book.trusted = False
            if pick.copy:
                self.net.late.append((book, sent.send))
        if pick.fares != WELL:
            self._release(holding, None, UNDER_WAY)

    def _hear_claim(self, holding: Holding, reply: Grant | ProtocolError) -> None:
        if isinstance(reply, Grant) and reply.word == "ok":
            holding.accept(reply, 0)
            holding.created_ms = reply.created_ms
            self.holding = holding

    def _work(self, holding: Holding, pick: Pick) -> None:
        if holding.running is not None:
            self._end_run(holding, holding.running, pick)
        elif pick.release:
            self._release(holding, None, pick.fares)
        elif holding.queue and not (pick.early and holding.finished):
            holding.running = holding.queue.pop(0)
        else:
            self._finish(holding, pick)

    def _end_run(self, holding: Holding, number: int, pick: Pick) -> None:
        self.net.runs += 1
        if pick.outcome == "keeps":
            self._keep(holding, number, pick)
            return
        holding.running = None
        if pick.outcome == "done":
            holding.finished[number] = f"{holding.holder} ran {number} as {self.net.runs}".encode()
        elif pick.outcome == "dies":
            self._release(holding, number, pick.fares)
        else:
            self._fail(holding, number, pick)

    def _finish(self, holding: Holding, pick: Pick) -> None:
        call, book = holding.next_call(), holding.book
        results, holding.finished = holding.finished, {}
        if pick.most == 0:
            holding.strike(0, call)
        flat = [value for pair in results.items() for value in pair]
        records = sum(book.outstanding(number) for number in results)
        terms = Terms(pick.most, lease_ms=LEASE_MS)
        # One whose lease was lost may work on what was another request of the same name.
        created_ms = holding.created_ms - (pick.former and holding.holder not in book.leases)
        self.attempt(
            Sent(
                book,
                lambda: self.net.protocol.finish(
                    book.id, holding.holder, call, flat, records, terms, created_ms
                ),
                lambda reply: self._hear_finish(holding, call, reply),
            ),
            pick.fares,
        )

    def _hear_finish(self, holding: Holding, call: int, reply: Grant | ProtocolError) -> None:
        if isinstance(reply, Grant) and reply.word == "ok":
            holding.accept(reply, call)
        elif isinstance(reply, ProtocolError) or reply.word != "late":
            self.holding = None

    def _fail(self, holding: Holding, number: int, pick: Pick) -> None:
        call, book = holding.next_call(), holding.book
        outstanding = book.outstanding(number)
        failed = 1 if pick.early else outstanding
        good = f"{holding.holder} ran part of {number} as {self.net.runs}".encode()
        self.attempt(
            Sent(
                book,
                lambda: self.net.protocol.fail(
                    book.id,
                    holding.holder,
                    call,
                    number,
                    [Failure(error="ValueError")],
                    kind=cast(FailKind, pick.outcome),
                    delay_ms=pick.delay_ms,
                    records=(outstanding - failed, failed),
                    result=good if outstanding > failed else b"",
                    partial=good if outstanding > failed else b"",
                ),
                lambda reply: self._hear_outcome(
                    holding, reply, ("retry", "failed", "ended", "late")
                ),
            ),
            pick.fares,
        )

    def _keep(self, holding: Holding, number: int, pick: Pick) -> None:
        """Keep what records of the running part came to; it goes on."""
        call, book = holding.next_call(), holding.book
        partial = f"{holding.holder} kept {number} as {self.net.runs}".encode()
        created_ms = holding.created_ms - (pick.former and holding.holder not in book.leases)

        def hear(reply: str | ProtocolError) -> None:
            if reply not in ("ok", "late"):
                self._drop(holding)

        self.attempt(
            Sent(
                book,
                lambda: self.net.protocol.keep(
                    book.id, holding.holder, call, number, partial, b"", created_ms
                ),
                hear,
            ),
            pick.fares,
        )

    def _release(self, holding: Holding, crashed: int | None, fares: str) -> None:
        call, book = holding.next_call(), holding.book
        holding.strike(0, call)
        holding.finished = {}
        self.attempt(
            Sent(
                book,
                lambda: self.net.protocol.release(book.id, holding.holder, call, crashed),
                lambda reply: self._hear_outcome(holding, reply, ("late",)),
            ),
            fares,
        )

    def _hear_outcome(
        self, holding: Holding, reply: Outcome | ProtocolError, goes_on: tuple[str, ...]
    ) -> None:
        if isinstance(reply, ProtocolError) or reply.word not in goes_on:
            self._drop(holding)

    def _drop(self, holding: Holding) -> None:
        """The lease is over: nothing more is started; a call under way is still repeated."""
        holding.queue, holding.running, holding.finished = [], None, {}
        if self.call is None and self.holding is holding:
            self.holding = None

    # The heartbeat.

    def renew(self) -> None:
        """Move the deadline, and say what runs."""
        holding = self.holding
        if holding is None:
            return
        protocol, book = self.net.protocol, holding.book
        protocol.beat(self.net.queue, self.name, 60_000, requests=[book.id])
        try:
            state, _, stands = protocol.renew(book.id, LEASE_MS, {holding.holder: holding.running})
        except RequestUnknown:
            self._drop(holding)
            return
        if not stands[holding.holder] or not state.is_live:
            self._drop(holding)

    def hand_back(self, keep: int, fares: str) -> None:
        """Give back what is not started, but for the first few, or go on with such a call.

        While the slot has a call under way this may be nothing, which still counts as a call.
        """
        holding = self.holding
        if not self.heart.goes_on(fares) and holding is not None:
            call, book = holding.next_call(), holding.book
            struck = holding.strike(keep, call)
            sent = Sent(
                book,
                lambda: self.net.protocol.handback(book.id, holding.holder, call, struck),
                lambda reply: self._hear_outcome(holding, reply, ("ok", "late")),
            )
            self.heart.attempt(sent, fares)

    def die(self, *, leave_copy: bool) -> None:
        """The slot's process dies, and its parent ends the lease for it."""
        holding = self.holding
        self._lose_token()
        Actor.crash(self, leave_copy=leave_copy)
        if holding is not None:
            self._release(holding, holding.running, WELL)

    def crash(self, *, leave_copy: bool) -> None:
        """The slot dies with its parent: nobody ends the lease."""
        self._lose_token()
        self.holding = None
        self.heart.crash(leave_copy=leave_copy)
        super().crash(leave_copy=leave_copy)

    def _lose_token(self) -> None:
        if self.token:
            self.token[0].trusted = False
        self.token = None

    def check_hands(self) -> None:
        """What this slot may start or runs is its own on the server, while it has the lease."""
        holding = self.holding
        if holding is None or holding.holder not in holding.book.leases:
            return
        for number in [*holding.queue, *([] if holding.running is None else [holding.running])]:
            assert holding.book.place[number] == holding.holder, f"{number} runs elsewhere"


class Loader(Actor):
    """Submits one request in chunks, from where the server stands."""

    def __init__(self, net: Net, book: Book) -> None:
        super().__init__(net)
        self.book = book
        self.stage = "register"
        self.parts = 0

    @property
    def is_over(self) -> bool:
        return self.stage == "end" and not self.is_busy

    def step(self, chunk: int = 2, fares: str = WELL) -> None:
        if self.goes_on(fares):
            return
        if self.book.is_purged:
            self.stage = "end"
        elif self.stage == "register":
            self.net.protocol.mint(self.net.queue, self.book.id, Tokens(), register="yes")
            self.stage = "open"
        elif self.stage == "open":
            self._open(fares)
        elif self.stage == "load":
            self._append(chunk, fares)

    def again(self) -> None:
        """Run the same submission once more."""
        self.stage = "register"

    def _open(self, fares: str) -> None:
        book = self.book
        policy = book.plan.policy(self.net.queue)

        def send() -> Opened:
            # After a purge this would be another request of the same name.
            if book.is_purged:
                raise RequestUnknown
            return self.net.protocol.open(book.id, "d", policy)

        def hear(reply: Any) -> None:
            if isinstance(reply, Opened):
                self.parts, self.stage = reply.total, "load"

        self.attempt(Sent(book, send, hear), fares)

    def _append(self, chunk: int, fares: str) -> None:
        book, first = self.book, self.parts + 1
        last = min(self.parts + chunk, len(book.plan.sizes))
        if first > last:
            self._seal(fares)
            return
        sizes = book.plan.sizes[first - 1 : last]
        entries: list[bytes | int] = []
        for number, size in enumerate(sizes, first):
            entries += [f"{book.id} {number}".encode(), size]
        after, cursor = book.plan.cursor(self.parts), book.plan.cursor(last)
        self.attempt(
            Sent(
                book,
                lambda: self.net.protocol.append(
                    book.id, first, after, cursor, sum(sizes), entries
                ),
                lambda reply: self._hear_append(last, reply),
            ),
            fares,
        )

    def _hear_append(self, last: int, reply: Any) -> None:
        if isinstance(reply, LoadGap):
            self.parts = self.book.total
        elif isinstance(reply, RequestEnded | RequestUnknown):
            self.stage = "end"
        else:
            self.parts = last

    def _seal(self, fares: str) -> None:
        book, parts = self.book, self.parts
        cursor = book.plan.cursor(parts)

        def hear(_: Any) -> None:
            self.stage = "end"

        self.attempt(
            Sent(book, lambda: self.net.protocol.seal(book.id, parts, cursor), hear), fares
        )

    def crash(self, *, leave_copy: bool) -> None:
        super().crash(leave_copy=leave_copy)
        self.stage = "register"
