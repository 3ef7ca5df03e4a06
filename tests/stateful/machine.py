"""Random interleavings of loaders, workers, janitors and users on one queue, with faults.

After every call the server is compared with the book of the request; after every step with what
the actors have in their hands. At the end the faults stop, and everything must come to its end.
"""

import functools
import secrets
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, ParamSpec

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from streamq import Janitor, Protocol, Request
from streamq.errors import ProtocolError
from streamq.keys import QueueKeys
from streamq.model import State
from tests.stateful.actors import (
    LEASE_MS,
    REPLY_LOST,
    UNDER_WAY,
    WELL,
    Loader,
    Net,
    Pick,
    Slot,
)
from tests.stateful.book import KEEP_MS, Book, Plan
from tests.stateful.seen import Eye, QueueSeen
from tests.stateful.watched import Crash, Watched

SLOTS = 4
LEVELS = (7, 50)
#: Tokens of one request are never more than this out at once.
MOST_OUT = 8

STEERING = [
    "pause",
    "resume",
    "resume",
    "cancel",
    "limit 1",
    "limit 2",
    "limit 4",
    "level 7",
    "level 50",
    "rate off",
    "rate 50/s",
]

P = ParamSpec("P")

fates = st.sampled_from([WELL, WELL, WELL, UNDER_WAY, REPLY_LOST])
picks = st.builds(
    Pick,
    fares=fates,
    most=st.sampled_from([2, 0, 1, 4]),
    outcome=st.sampled_from(["done", "done", "done", "retry", "snooze", "hold", "abandon", "dies"]),
    delay_ms=st.sampled_from([0, 0, 1_000, 40_000]),
    early=st.booleans(),
    release=st.integers(0, 5).map(lambda n: n == 5),
    stranger=st.integers(0, 9).map(lambda n: n == 9),
)
plans = st.builds(
    Plan,
    sizes=st.lists(st.integers(1, 3), min_size=4, max_size=12).map(tuple) | st.just(()),
    level=st.sampled_from(LEVELS),
    limit=st.integers(1, 3),
    retries=st.integers(0, 2),
    poison=st.integers(1, 3),
    max_failures=st.sampled_from([-1, -1, -1, 0, 1]),
    max_percent=st.sampled_from([-1.0, -1.0, 40.0]),
    rate_ms=st.sampled_from([0.0, 0.0, 20.0, 400.0]),
    delay_ms=st.sampled_from([0, 0, 0, 3_000]),
)
slots = st.integers(0, SLOTS - 1)
requests = st.integers(0, 5)
waits = st.sampled_from([0, 6_000, LEASE_MS + 1_000])
# What comes between two calls of a janitor or client: nothing, a slot, a janitor, or its death.
between = st.lists(
    st.none() | st.tuples(slots, picks) | st.sampled_from(["sweep", "crash"]), max_size=6
)


def step(
    body: Callable[Concatenate["Machine", P], None],
) -> Callable[Concatenate["Machine", P], None]:
    """A step: counted, and followed by the checks that need everybody's hands."""

    @functools.wraps(body)
    def counted(self: "Machine", /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.tally["steps"] += 1
        self.is_sound = False
        body(self, *args, **kwargs)
        self.check()
        self.is_sound = True

    return counted


class Machine(RuleBasedStateMachine):
    """One queue, its requests and everybody who acts on them."""

    def __init__(self, protocol: Protocol, tally: Counter[str]) -> None:
        super().__init__()
        self.tally = tally
        self.is_sound = False
        self.queue = f"q{secrets.token_hex(6)}"
        self.eye = Eye(protocol.connection.redis, self.queue, LEVELS)
        self.protocol = Watched(protocol.connection, self.eye, tally)

    @initialize(unit=st.sampled_from(["parts", "records"]))
    def begin(self, unit: str) -> None:
        self.tally["examples"] += 1
        self.net = Net(self.protocol, self.queue, unit)
        self.books: list[Book] = []
        self.loaders: list[Loader] = []
        self.slots = [Slot(self.net, f"s{n}") for n in range(SLOTS)]
        self.janitors = [Janitor(self.protocol, self.queue) for _ in range(2)]
        self.is_sound = True

    # Requests

    @precondition(lambda self: len(self.books) < 6 and sum(b.is_live for b in self.books) < 3)
    @rule(plan=plans, chunk=st.sampled_from([5, 0]))
    @step
    def submit(self, plan: Plan, chunk: int) -> None:
        """A user submits a request, which is loaded at once or as its loaders get on."""
        request_id = f"{self.queue}-{len(self.books)}"
        book = Book(request_id, plan, self.tally, self.eye.request_of(request_id))
        self.protocol.books[request_id] = book
        self.books.append(book)
        loaders = [Loader(self.net, book), Loader(self.net, book)]
        self.loaders += loaders
        while chunk and not loaders[0].is_over:
            loaders[0].step(chunk)

    def has_books(self) -> bool:
        return bool(self.books)

    def book(self, index: int) -> Book:
        return self.books[index % len(self.books)]

    # Loaders

    @precondition(lambda self: self.busy_loaders())
    @rule(index=st.integers(0, 7), chunk=st.integers(1, 4), steps=st.integers(0, 5), fares=fates)
    @step
    def load(self, index: int, chunk: int, steps: int, fares: str) -> None:
        """A loader goes on for a while, and then meets what chance has for it."""
        busy = self.busy_loaders()
        loader = busy[index % len(busy)]
        for _ in range(steps):
            loader.step(chunk)
        loader.step(chunk, fares)

    def busy_loaders(self) -> list[Loader]:
        return [loader for loader in self.loaders if not loader.is_over]

    @precondition(has_books)
    @rule(index=st.integers(0, 15), leave_copy=st.booleans())
    @step
    def crash_loader(self, index: int, leave_copy: bool) -> None:
        """A loader dies and is run again, or one that was through is run once more."""
        self.loaders[index % len(self.loaders)].crash(leave_copy=leave_copy)

    # Workers

    @rule(slot=slots, pick=picks)
    @step
    def work(self, slot: int, pick: Pick) -> None:
        """One thing a slot does."""
        self.slots[slot].step(pick)

    @rule(slot=slots, pick=picks, steps=st.integers(1, 8))
    @step
    def work_on(self, slot: int, pick: Pick, steps: int) -> None:
        """A slot works for a while, and then meets what chance has for it."""
        for _ in range(steps):
            self.slots[slot].step()
        self.slots[slot].step(pick)

    @rule(chosen=st.lists(st.tuples(slots, picks), min_size=3, max_size=8))
    @step
    def work_together(self, chosen: list[tuple[int, Pick]]) -> None:
        """Several slots do one thing each."""
        for slot, pick in chosen:
            self.slots[slot].step(pick)

    def holders(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.holding]

    @precondition(holders)
    @rule(index=slots, keep=st.integers(0, 1), renews=st.booleans(), fares=fates)
    @step
    def beat(self, index: int, keep: int, renews: bool, fares: str) -> None:
        """A heartbeat renews a lease, or gives back what is not started."""
        holders = self.holders()
        slot = holders[index % len(holders)]
        if renews:
            slot.renew()
        else:
            slot.hand_back(keep, fares)

    def workers(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.is_idle]

    @precondition(workers)
    @rule(index=slots, leave_copy=st.booleans())
    @step
    def crash(self, index: int, leave_copy: bool) -> None:
        """A worker dies, wherever it was."""
        workers = self.workers()
        workers[index % len(workers)].crash(leave_copy=leave_copy)

    def callers(self) -> list[Any]:
        return [actor for actor in self.actors() if actor.call]

    @precondition(callers)
    @rule(index=slots)
    @step
    def double_call(self, index: int) -> None:
        """A call under way will arrive once more than its caller knows."""
        callers = self.callers()
        callers[index % len(callers)].leave_copy()

    @precondition(lambda self: self.net.late)
    @rule(at=st.integers(0, 7))
    @step
    def arrive(self, at: int) -> None:
        """A late call arrives."""
        self.net.arrive(at)

    # Time, and tokens

    @precondition(holders)
    @rule(index=slots, reap=st.booleans())
    @step
    def stall(self, index: int, reap: bool) -> None:
        """A slot was frozen past its deadline; it wakes later, and may have been reaped."""
        holders = self.holders()
        holding = holders[index % len(holders)].holding
        if holding is not None and holding.holder in holding.book.leases:
            self.eye.expire(holding.book.keys, holding.holder)
            self.look_again(holding.book)
            if reap:
                # Its tokens are dropped here, as a janitor's that dies after this.
                holding.book.trusted = False
                self.protocol.reap(holding.book.id)

    @rule(ms=st.sampled_from([30, 1_000, 6_000, LEASE_MS + 1_000, 60_000]))
    @step
    def pass_time(self, ms: int) -> None:
        """Time goes by, and nobody does anything."""
        self.advance(ms)

    def advance(self, ms: int) -> None:
        if not ms:
            return
        self.net.clock += ms
        self.eye.move_queue(ms)
        for book in self.books:
            self.eye.move(book.keys, ms)
            self.look_again(book)

    def look_again(self, book: Book) -> None:
        """The server was changed by hand."""
        book.compare(self.eye.request(book.keys))

    @precondition(has_books)
    @rule(index=requests, level=st.sampled_from(LEVELS), count=st.integers(-2, 2))
    @step
    def spoil_tokens(self, index: int, level: int, count: int) -> None:
        """Tokens are lost, or there are some nobody asked for."""
        book = self.book(index)
        for _ in range(-count):
            if self.eye.lose(book.id):
                book.trusted = False
                self.tally["tokens lost"] += 1
        for _ in range(count):
            self.eye.double(book.id, level)

    # Janitors

    @rule(index=st.integers(0, 1), wait_ms=waits)
    @step
    def sweep(self, index: int, wait_ms: int) -> None:
        """A janitor sweeps, undisturbed."""
        self.sweep_alone(index, wait_ms)

    def sweep_alone(self, index: int, wait_ms: int) -> None:
        self.advance(wait_ms)
        self.protocol.looked_at.clear()
        self.janitors[index].sweep()
        for request_id in self.protocol.looked_at:
            book = self.protocol.books[request_id]
            book.trusted, book.shunned = True, False

    @rule(acts=between, wait_ms=waits)
    @step
    def sweep_disturbed(self, acts: list[Any], wait_ms: int) -> None:
        """A janitor sweeps while others act, or dies in the middle."""
        self.advance(wait_ms)
        self.protocol.looked_at.clear()
        # What an audit found may be out of date when the janitor acts on it.
        for book in self.books:
            book.trusted = False
        self.disturbed(acts, self.janitors[0].sweep)

    def disturbed(self, acts: list[Any], run: Callable[[], object]) -> bool:
        """Run something while others act between its calls. Returns whether it lived."""
        with self.acts_between(acts):
            try:
                run()
            except Crash:
                self.tally["crashes between calls"] += 1
                return False
        return True

    @contextmanager
    def acts_between(self, acts: list[Any]) -> Generator[None]:
        rest = iter(acts)

        def act() -> None:
            chosen = next(rest, None)
            if chosen == "crash":
                raise Crash
            if chosen == "sweep":
                self.janitors[1].sweep()
            elif chosen is not None:
                slot, pick = chosen
                self.slots[slot].step(pick)

        self.protocol.between = act
        try:
            yield
        finally:
            self.protocol.between = None

    # Users

    @precondition(has_books)
    @rule(index=requests, act=st.sampled_from(STEERING))
    @step
    def steer(self, index: int, act: str) -> None:
        """A user pauses, resumes, cancels, or changes level, limit or rate."""
        name, _, value = act.partition(" ")
        request = Request(self.protocol, self.book(index).id)
        changes: dict[str, Any] = {"rate": value} if name == "rate" else {}
        if name in ("level", "limit"):
            changes = {name: int(value)}
        # Whether it had to be refused is checked with the call.
        with suppress(ProtocolError):
            if changes:
                request.set(**changes)
            else:
                getattr(request, name)()

    def has_failures(self) -> bool:
        return any(book.failed or book.state is State.FAILED for book in self.books)

    @precondition(has_failures)
    @rule(index=requests, acts=between)
    @step
    def redrive(self, index: int, acts: list[Any]) -> None:
        """A user runs failed parts again, while others act between the calls that takes."""
        books = [book for book in self.books if book.failed or book.state is State.FAILED]
        self.redrive_book(books[index % len(books)], acts)

    def redrive_book(self, book: Book, acts: list[Any]) -> None:
        request = Request(self.protocol, book.id)
        try:
            lived = self.disturbed(acts, request.retry)
        except ProtocolError:
            return
        book.is_adrift = not lived
        if not lived:
            book.trusted = False

    @precondition(has_books)
    @rule(index=requests, next_number=st.integers(1, 4), keep=st.booleans(), rival=st.booleans())
    @step
    def collect(self, index: int, next_number: int, keep: bool, rival: bool) -> None:
        """A collector reads results, and forgets them once they are written."""
        book = self.book(index)
        names = self.read_results(book, next_number, (book.committed, book.committed), [])
        if keep or names is None:
            return
        expected = "rival" if rival else book.committed
        self.read_results(book, next_number, (expected, f"{self.net.clock} {self.net.runs}"), names)

    def read_results(
        self, book: Book, next_number: int, commit: tuple[str, str], forget: list[str]
    ) -> list[str] | None:
        try:
            found = self.protocol.collect(
                book.id, next_number=next_number, commit=commit, forget=forget
            )
        except ProtocolError:
            return None
        return [str(number) for number, _ in found.results]

    # Checks

    def check(self) -> None:
        """What can be seen only with everybody's hands open."""
        queue = self.eye.queue()
        for slot in self.slots:
            slot.check_hands()
        for book in self.books:
            if book.is_live and not book.is_adrift:
                assert book.id in queue.open, "a request that runs is not registered"
            if book.is_live and book.trusted and not book.paused:
                self.check_tokens(book, queue)

    def check_tokens(self, book: Book, queue: QueueSeen) -> None:
        """Without faults there is never room and work without a token (rule 11)."""
        seen = book.seen
        tokens = queue.tokens[book.level].count(book.id) + self.in_hands(book)
        assert tokens >= seen.number("out"), "more tokens are believed out than there are"
        ready = book.total - book.delivered + len(seen.due(seen.now))
        room = book.limit - len(book.leases)
        if not ready or room <= 0 or tokens or seen.blocked_until() > seen.now:
            return
        look = min([queue.due.get(book.id, float("inf")), *self.looks_in_hands(book)])
        assert look <= seen.now + (1_000 if book.shunned else 0), "room and work, and no token"

    def actors(self) -> list[Any]:
        return [*self.slots, *(slot.heart for slot in self.slots), *self.loaders]

    def in_hands(self, book: Book) -> int:
        """Tokens of the request's level that somebody has popped or is to push."""
        level = book.level
        popped = [slot.token for slot in self.slots if slot.token]
        held = sum(held is book and at == level for held, at in popped)
        calls = [slot.call for slot in self.slots if slot.call and slot.call.has_token]
        held += sum(call.book is book for call in calls)
        return held + sum(
            push.tokens.count
            for actor in self.actors()
            for push in actor.pushes
            if push.book is book and push.tokens.level == level
        )

    def looks_in_hands(self, book: Book) -> list[int]:
        pushes = [push for actor in self.actors() for push in actor.pushes if push.book is book]
        return [
            push.tokens.look_ms - (self.net.clock - push.clock)
            for push in pushes
            if push.tokens.look_ms
        ]

    # The end

    def teardown(self) -> None:
        if not self.is_sound:
            return
        self.settle()
        self.purge()
        worker_keys = [QueueKeys(self.queue, worker=slot.name).worker for slot in self.slots]
        self.eye.forget([QueueKeys(self.queue).workers, *worker_keys])

    def settle(self) -> None:
        """With the faults off, every request comes to its end, and nobody spins."""
        while self.net.late:
            self.net.arrive(0)
        for book in self.books:
            if book.is_adrift:
                self.redrive_book(book, [])
            if book.paused and book.is_live:
                Request(self.protocol, book.id).resume()
        queue = self.eye.queue()
        start = sum(len(ids) for ids in queue.tokens.values()) + SLOTS
        start += sum(self.in_hands(book) for book in self.books)
        pops, granted = self.net.pops, self.tally["claim ok"]
        rounds = 0
        while any(book.is_live or book.state is None and not book.is_purged for book in self.books):
            rounds += 1
            assert rounds < 20 + 2 * sum(book.left for book in self.books), "it does not end"
            self.round()
        self.tally["rounds"] += rounds
        found_work = self.tally["claim ok"] - granted
        useless = self.net.pops - pops - found_work
        assert useless <= start + MOST_OUT * len(self.books) * (rounds + 1), "workers spin"
        for book in self.books:
            if book.state is State.DONE:
                assert book.done + book.failed == len(book.plan.sizes)

    def round(self) -> None:
        for loader in self.loaders:
            if loader.book.state is State.LOADING and loader.is_over:
                loader.again()
            for _ in range(2 * len(loader.book.plan.sizes) + 8):
                loader.step()
        for slot in self.slots:
            slot.settle(200)
        self.sweep_alone(0, LEASE_MS + 1_000)
        for slot in self.slots:
            slot.settle(200)
        self.check()

    def purge(self) -> None:
        """After the end and the retention, nothing of a request remains."""
        for slot in self.slots:
            slot.settle(200)
        self.eye.move_queue(3_600_001, registered=True)
        for wait_ms in (6_000, KEEP_MS + 1_000, 6_000):
            self.eye.move_queue(6_000)
            self.sweep_alone(1, wait_ms)
        queue = self.eye.queue()
        for book in self.books:
            assert book.is_purged
            assert self.eye.request(book.keys).keys == 0
        assert (queue.due, queue.open, queue.closed) == ({}, {}, {})
