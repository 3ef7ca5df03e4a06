"""Random interleavings of loaders, workers, janitors and users on one queue, with faults.

After every call the server is compared with the book of the request; after every step with what
the actors have in their hands. At the end the faults stop, and everything must come to its end.

What is drawn never depends on what the server answered, so that a failure can be repeated.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from streamq import Janitor, Protocol, Request
from streamq.errors import ProtocolError
from streamq.model import State
from streamq.protocol.keys import QueueKeys, token_list_of
from tests.protocol.interleavings.actors import (
    LEASE_MS,
    PLAIN,
    REPLY_LOST,
    UNDER_WAY,
    WELL,
    Actor,
    Loader,
    Net,
    Pick,
    Slot,
)
from tests.protocol.interleavings.book import KEEP_MS, Book, Plan
from tests.protocol.interleavings.seen import EPOCH, LOOK_EVERY_MS, MOST_OUT, Eye, QueueSeen
from tests.protocol.interleavings.watched import Crash, Watched
from tests.support.by_hand import HANDLER

SLOTS = 4
LEVELS = (7, 50)
#: Requests of one example, and how many run at once.
MOST_REQUESTS = 8
MOST_LIVE = 3
#: Between two looks of a janitor.
EVERY_MS = 6_000

T = TypeVar("T")

FATES = (WELL, WELL, WELL, UNDER_WAY, REPLY_LOST)
OUTCOMES = ("done", "done", "done", "done", "retry", "snooze", "hold", "abandon", "dies", "keeps")
STEERING = (
    *("limit 1", "limit 1", "limit 1", "limit 4", "level 7", "level 50", "rate off", "rate 1/s"),
    *("pause", "pause", "pause", "resume", "resume", "resume", "cancel", "cancel"),
)


def _some_picks() -> list[Pick]:
    """Enough of all there could be, the simplest first: one draw instead of eight."""
    chance = Random(1)
    found = [
        Pick(
            fares=chance.choice(FATES),
            most=chance.choice((0, 1, 2, 4)),
            outcome=chance.choice(OUTCOMES),
            delay_ms=chance.choice((0, 0, 3_000, 40_000)),
            early=chance.random() < 0.5,
            release=chance.random() < 0.1,
            stranger=chance.random() < 0.05,
            copy=chance.random() < 0.7,
            former=chance.random() < 0.3,
        )
        for _ in range(500)
    ]
    return [PLAIN, *found]


class Act(NamedTuple):
    """One step: a method of the machine and what it is given."""

    name: str
    args: tuple[Any, ...]


indexes = st.integers(0, 11)
fates = st.sampled_from(FATES)
picks = st.sampled_from(_some_picks())
waits = st.sampled_from([0, EVERY_MS, LEASE_MS + 1_000])
plans = st.builds(
    Plan,
    sizes=st.sampled_from([((1, 2, 3) * 5)[:n] for n in (4, 6, 8, 12, 14, 15, 3, 2, 1, 0)]),
    level=st.sampled_from(LEVELS),
    # Above the most tokens that are out at once, every claim has to ask for more.
    limit=st.sampled_from([1, 2, 3, 12]),
    retries=st.integers(0, 2),
    poison=st.integers(1, 3),
    max_failures=st.sampled_from([-1, -1, 0, 0, 1]),
    max_percent=st.sampled_from([-1.0, -1.0, 40.0]),
    rate_ms=st.sampled_from([*[0.0] * 6, 24.0, 3_000.0]),
    delay_ms=st.sampled_from([*[0] * 6, 3_000]),
)
# What comes between two calls of a janitor or client: nothing, a slot, another of them, its death.
between = st.lists(
    st.sampled_from([None, "redrive", "sweep", "crash"])
    | st.tuples(indexes, picks, st.integers(0, 3)),
    max_size=6,
)

#: Each act, how often it comes compared with others, and what it is given.
ACTS: dict[str, tuple[int, st.SearchStrategy[tuple[Any, ...]]]] = {
    "work": (12, st.tuples(indexes, picks)),
    "work_on": (6, st.tuples(indexes, picks, st.integers(1, 8))),
    "load": (4, st.tuples(indexes, st.integers(1, 4), st.integers(0, 5), fates)),
    "submit": (2, st.tuples(plans, st.sampled_from([5, 0]))),
    "renew": (2, st.tuples(indexes)),
    "hand_back": (4, st.tuples(indexes, st.integers(0, 1), fates)),
    "die": (2, st.tuples(indexes, st.booleans())),
    "repeat": (2, st.tuples(indexes, picks)),
    "overtake": (3, st.tuples(indexes, picks)),
    "crash": (2, st.tuples(indexes, st.booleans())),
    "crash_loader": (1, st.tuples(indexes, st.booleans())),
    "double_call": (2, st.tuples(indexes)),
    "arrive": (3, st.tuples(indexes)),
    "stall": (3, st.tuples(indexes, st.booleans())),
    "pass_time": (2, st.tuples(st.sampled_from([30, 1_000, 4_000, LEASE_MS + 1_000, 60_000]))),
    "spoil_tokens": (2, st.tuples(indexes, st.sampled_from(LEVELS), st.integers(-2, 2))),
    "sweep": (3, st.tuples(st.integers(0, 1), waits)),
    "watch": (
        2,
        st.tuples(st.integers(0, 1), waits, st.sampled_from([LOOK_EVERY_MS] * 3 + [EVERY_MS])),
    ),
    "sweep_disturbed": (3, st.tuples(between, waits)),
    "sweep_late": (2, st.tuples(waits)),
    "steer": (4, st.tuples(indexes, st.sampled_from(STEERING))),
    "redrive_late": (2, st.tuples(indexes)),
    "redrive": (3, st.tuples(indexes, between)),
    "collect": (1, st.tuples(indexes, st.integers(1, 2), st.booleans(), st.booleans())),
}
#: Not in a calm example, where no token is ever lost.
FAULTS = {
    *("crash", "crash_loader", "die", "double_call", "overtake", "repeat", "spoil_tokens"),
    "stall",
}
_NAMES = [name for name, (weight, _) in ACTS.items() for _ in range(weight)]


@st.composite
def acts(draw: st.DrawFn) -> Act:
    name = draw(st.sampled_from(_NAMES))
    return Act(name, draw(ACTS[name][1]))


def _one(found: Sequence[T], index: int) -> list[T]:
    """One of those found, or none if there is none."""
    return [found[index % len(found)]] if found else []


def wanted(book: Book, *, timeless: bool = False) -> int:
    """How many tokens should be out for the request as it was last read.

    ``timeless``: leaving out what could not start at all times, and so waits for a look.
    """
    seen = book.seen
    now = EPOCH if timeless else seen.now
    if not book.is_live or book.paused or seen.blocked_until() > now:
        return 0
    ready = book.total - book.delivered + len(seen.due(now))
    return max(0, min(seen.limit(now) - len(book.leases), ready, MOST_OUT))


class Machine(RuleBasedStateMachine):
    """One queue, its requests and everybody who acts on them."""

    def __init__(self, protocol: Protocol, tally: Counter[str]) -> None:
        super().__init__()
        self.tally = tally
        self.steps = 0
        self.is_calm = False
        self.is_sound = False
        self.queue = f"q{secrets.token_hex(6)}"
        self.eye = Eye(protocol.connection.redis, self.queue, LEVELS)
        self.protocol = Watched(protocol.connection, self.eye, tally)
        self.books: list[Book] = []
        self.loaders: list[Loader] = []
        self.slots: list[Slot] = []
        self.janitors = [Janitor(self.protocol, self.queue) for _ in range(2)]

    @initialize(
        unit=st.sampled_from(["parts", "records"]),
        chosen=st.lists(plans, min_size=2, max_size=MOST_LIVE),
        chunk=st.sampled_from([5, 0]),
        is_calm=st.sampled_from([False, False, True]),
    )
    def begin(self, unit: str, chosen: list[Plan], chunk: int, is_calm: bool) -> None:
        """Somebody submitted requests, which are loaded or not."""
        self.tally["examples"] += 1
        self.tally["calm examples"] += is_calm
        self.is_calm = is_calm
        self.net = Net(self.protocol, self.queue, unit)
        self.slots = [Slot(self.net, f"s{n}") for n in range(SLOTS)]
        for plan in chosen:
            self.submit(plan, chunk)
        self.is_sound = True

    @rule(act=acts())
    def step(self, act: Act) -> None:
        """Somebody does something, and everything is checked."""
        self.steps += 1
        self.tally["steps"] += 1
        self.tally[f"act {act.name}"] += 1
        self.is_sound = False
        calls = self.tally["calls"]
        if not (self.is_calm and act.name in FAULTS):
            getattr(self, act.name)(*act.args)
        if self.tally["calls"] == calls:
            # There was nothing to do it with, or it was no call: let somebody get on.
            self.slots[self.steps % SLOTS].step()
        self.check()
        self.is_sound = True

    # Loaders

    def submit(self, plan: Plan, chunk: int) -> None:
        """A request comes, and is loaded at once or as its loaders get on."""
        live = sum(book.is_live for book in self.books)
        if len(self.books) == MOST_REQUESTS or live == MOST_LIVE:
            return
        request_id = f"{self.queue}-{len(self.books)}"
        book = Book(request_id, plan, self.tally, self.eye.request_of(request_id))
        self.protocol.books[request_id] = book
        self.books.append(book)
        loaders = [Loader(self.net, book), Loader(self.net, book)]
        self.loaders += loaders
        while chunk and not loaders[0].is_over:
            loaders[0].step(chunk)

    def load(self, index: int, chunk: int, steps: int, fares: str) -> None:
        """A loader goes on for a while, and then meets what chance has for it."""
        for loader in _one([loader for loader in self.loaders if not loader.is_over], index):
            for _ in range(steps):
                loader.step(chunk)
            loader.step(chunk, WELL if self.is_calm else fares)

    def crash_loader(self, index: int, leave_copy: bool) -> None:
        """A loader dies and is run again, or one that was through is run once more."""
        for loader in _one(self.loaders, index):
            loader.crash(leave_copy=leave_copy)

    # Workers

    def work(self, index: int, pick: Pick) -> None:
        """One thing a slot does."""
        self.slots[index % SLOTS].step(replace(pick, fares=WELL) if self.is_calm else pick)

    def work_on(self, index: int, pick: Pick, steps: int) -> None:
        """A slot works for a while, and then meets what chance has for it."""
        for _ in range(steps):
            self.slots[index % SLOTS].step(replace(pick, fares=WELL))
        self.work(index, pick)

    def repeat(self, index: int, pick: Pick) -> None:
        """A batch is recorded, and its reply lost: it is reported again."""
        lost = replace(pick, fares=REPLY_LOST, outcome="done", release=False)
        for slot in _one(self.holders(), index):
            for _ in range(12):
                if slot.call is None:
                    slot.step(lost)
            slot.step(replace(pick, fares=WELL))

    def overtake(self, index: int, pick: Pick) -> None:
        """A call of a slot is executed after one its heartbeat made later."""
        for slot in _one(self.holders(), index):
            if not slot.is_busy:
                slot.step(replace(pick, fares=UNDER_WAY))
            slot.hand_back(0, WELL)
            slot.step()

    def holders(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.holding]

    def renew(self, index: int) -> None:
        """A heartbeat renews a lease."""
        for slot in _one(self.holders(), index):
            slot.renew()

    def hand_back(self, index: int, keep: int, fares: str) -> None:
        """A heartbeat gives back what is not started."""
        can = [slot for slot in self.slots if slot.can_hand_back(keep)]
        for slot in _one(can, index):
            slot.hand_back(keep, WELL if self.is_calm else fares)

    def busy(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.is_idle]

    def crash(self, index: int, leave_copy: bool) -> None:
        """A worker dies, wherever it was."""
        for slot in _one(self.busy(), index):
            slot.crash(leave_copy=leave_copy)

    def die(self, index: int, leave_copy: bool) -> None:
        """A process of a worker dies, wherever it was."""
        for slot in _one(self.busy(), index):
            slot.die(leave_copy=leave_copy)

    def actors(self) -> list[Actor]:
        return [*self.slots, *(slot.heart for slot in self.slots), *self.loaders]

    def double_call(self, index: int) -> None:
        """A call under way will arrive once more than its caller knows."""
        for actor in _one([actor for actor in self.actors() if actor.call], index):
            actor.leave_copy()

    def arrive(self, index: int) -> None:
        """A late call arrives."""
        if self.net.late:
            self.net.arrive(index)

    # Time, and tokens

    def stall(self, index: int, reap: bool) -> None:
        """A slot was frozen past its deadline; it wakes later, and may have been reaped."""
        for slot in _one(self.holders(), index):
            holding = slot.holding
            if holding is not None and holding.holder in holding.book.leases:
                self.eye.expire(holding.book.keys, holding.holder)
                holding.book.compare(self.eye.request(holding.book.keys))
                self.tally["stalls"] += 1
                if reap:
                    # Its tokens are dropped here, as a janitor's that dies after this.
                    holding.book.trusted = False
                    self.eye.suspect(holding.book.keys, holding.book.seen.now)
                    holding.book.compare(self.eye.request(holding.book.keys))
                    self.protocol.reap(holding.book.id)

    def pass_time(self, ms: int) -> None:
        """Time goes by, and nobody does anything."""
        self.net.clock += ms
        self.eye.move_queue(ms)
        for book in self.books:
            if book.state is not None:
                book.compare(self.eye.move(book.keys, ms))

    def spoil_tokens(self, index: int, level: int, count: int) -> None:
        """Tokens are lost, or there are some nobody asked for."""
        for book in _one(self.books, index):
            for _ in range(-count):
                if self.eye.lose(book.id):
                    book.trusted = False
                    self.tally["tokens lost"] += 1
            for _ in range(count):
                self.eye.double(book.id, level)

    # Janitors

    def sweep(self, index: int, wait_ms: int) -> None:
        """A janitor sweeps, undisturbed."""
        if wait_ms:
            self.pass_time(wait_ms)
        self.protocol.looked_at.clear()
        self.protocol.asked_by_reap.clear()
        before = self.eye.queue()
        self.janitors[index].sweep()
        after = self.eye.queue()
        for request_id in self.protocol.looked_at:
            book = self.protocol.books[request_id]
            book.trusted = True
            there, now = (queue.tokens[book.level].count(book.id) for queue in (before, after))
            # What a reap asks for is worked out from what is believed, as by every other script.
            most = max(there, wanted(book)) + self.protocol.asked_by_reap[request_id]
            assert now <= most, "an audit pushes only what is missing"

    def watch(self, index: int, wait_ms: int, every_ms: int) -> None:
        """A janitor sweeps, and again and again while there are suspects, or with gaps."""
        self.sweep(index, wait_ms)
        for _ in range(LEASE_MS // LOOK_EVERY_MS):
            if not any(book.seen.overdue(book.seen.now) for book in self.books):
                return
            self.tally["watched"] += 1
            self.sweep(index, every_ms)

    def sweep_disturbed(self, acts: list[Any], wait_ms: int) -> None:
        """A janitor sweeps while others act, or dies in the middle."""
        if wait_ms:
            self.pass_time(wait_ms)
        if not self.disturbed(acts, self.janitors[0].sweep):
            for book in self.books:
                book.trusted = False

    def sweep_late(self, wait_ms: int) -> None:
        """A janitor's last call comes late: everybody works before it pushes, and failed parts
        run again before it closes what it saw ended.
        """

        def act(name: str) -> None:
            if name == "mint":
                for slot in self.slots * 3:
                    slot.step()
            elif name == "close":
                for book in self.failing():
                    self.redrive_book(book, [])

        if wait_ms:
            self.pass_time(wait_ms)
        with self.protocol.held_up(act):
            self.janitors[0].sweep()

    def disturbed(self, acts: list[Any], run: Callable[[], object]) -> bool:
        """Run something while others act between its calls. Returns whether it lived."""
        rest = iter(acts)

        def act(_: str) -> None:
            chosen = next(rest, None)
            if chosen == "crash" and not self.is_calm:
                raise Crash
            if chosen == "sweep":
                self.janitors[1].sweep()
            elif chosen == "redrive":
                for book in self.failing():
                    self.redrive_book(book, [])
            elif isinstance(chosen, tuple):
                self.work_on(*chosen)

        with self.protocol.held_up(act):
            try:
                run()
            except Crash:
                self.tally["crashes between calls"] += 1
                return False
        return True

    # Users

    def steer(self, index: int, act: str) -> None:
        """A user pauses, resumes, cancels, or changes level, limit or rate."""
        name, _, value = act.partition(" ")
        for book in _one(self.running() or self.books, index):
            request = Request(self.protocol, book.id)
            # Whether it had to be refused is checked with the call.
            with suppress(ProtocolError):
                if value:
                    request.set(**{name: value if name == "rate" else int(value)})  # type: ignore[arg-type]
                else:
                    getattr(request, name)()

    def running(self) -> list[Book]:
        """Requests with something in somebody's hands, or at least some that are not over."""
        live = [book for book in self.books if book.is_live]
        return [book for book in live if book.leases] or live

    def redrive(self, index: int, acts: list[Any]) -> None:
        """A user runs failed parts again, while others act between the calls that takes."""
        for book in _one(self.failing(), index):
            self.redrive_book(book, acts)

    def redrive_late(self, index: int) -> None:
        """A janitor sweeps after a user said that failed parts run again, and before they do."""

        def act(name: str) -> None:
            if name == "redrive":
                self.janitors[1].sweep()

        for book in _one(self.failing(), index):
            with self.protocol.held_up(act), suppress(ProtocolError):
                Request(self.protocol, book.id).retry()
                book.is_adrift = False

    def failing(self) -> list[Book]:
        return [book for book in self.books if book.failed or book.state is State.FAILED]

    def redrive_book(self, book: Book, acts: list[Any]) -> None:
        with suppress(ProtocolError):
            book.is_adrift = not self.disturbed(acts, Request(self.protocol, book.id).retry)
            if book.is_adrift:
                book.trusted = False

    def collect(self, index: int, first: int, forget: bool, rival: bool) -> None:
        """A collector reads results, and forgets them once they are written."""
        for book in _one(self.books, index):
            with suppress(ProtocolError):
                stands = book.committed
                found = self.protocol.collect(book.id, next_number=first, commit=(stands, stands))
                if forget:
                    self.protocol.collect(
                        book.id,
                        next_number=found.next,
                        commit=("rival" if rival else stands, f"at {self.steps}"),
                        forget=[number for number, _ in found.results],
                    )

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
        assert tokens >= wanted(book, timeless=True), "room and work, and too few tokens"
        if tokens >= wanted(book):
            return
        look = min([queue.due.get(book.id, float("inf")), *self.looks_in_hands(book)])
        assert look <= seen.now, "room and work, and no token"
        self.tally["look instead of a token"] += 1

    def in_hands(self, book: Book) -> int:
        """Tokens of the request's level that somebody has popped or is to push."""
        level = book.level
        popped = [slot.token for slot in self.slots if slot.token]
        held = sum(held is book and at == level for held, at in popped)
        return held + sum(
            push.tokens.count
            for actor in self.actors()
            for push in actor.pushes
            if push.book is book and push.tokens.to == token_list_of(HANDLER, level)
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
        # After a failure this would hide it.
        if not self.is_sound:
            return
        self.settle()
        self.purge()
        worker_keys = [QueueKeys(self.queue, worker=slot.name).worker for slot in self.slots]
        self.eye.forget([QueueKeys(self.queue).workers, *worker_keys])

    def settle(self) -> None:
        """With the faults off, every request comes to its end, and nobody spins."""
        self.calm_down()
        useless = self.tokens_anywhere()
        pops, granted = self.net.pops, self.tally["claim ok"]
        rounds = 0
        while any(book.state is None or book.is_live for book in self.books if not book.is_purged):
            rounds += 1
            assert rounds < 20 + 2 * sum(book.left for book in self.books), "it does not end"
            if rounds == 5:
                self.lift_rates()
            self.round()
        self.tally["rounds"] += rounds
        found_work = self.tally["claim ok"] - granted
        useless += MOST_OUT * len(self.books) * (rounds + 1)
        assert self.net.pops - pops <= found_work + useless, "workers spin"
        for book in self.books:
            if book.state is State.DONE:
                assert book.done + book.failed == len(book.plan.sizes)

    def calm_down(self) -> None:
        """What is late arrives, who died is run again, and what is paused goes on."""
        while self.net.late:
            self.net.arrive(0)
        for book in self.books:
            if book.is_adrift:
                self.redrive_book(book, [])
            if book.paused and book.is_live:
                Request(self.protocol, book.id).resume()

    def lift_rates(self) -> None:
        """It was seen that slow requests get on; they need not go on slowly."""
        for book in self.books:
            if book.is_live and book.has_rate:
                Request(self.protocol, book.id).set(rate="off")

    def tokens_anywhere(self) -> int:
        lists = self.eye.queue().tokens.values()
        return sum(map(len, lists)) + sum(self.in_hands(book) for book in self.books)

    def round(self) -> None:
        """Everybody does what there is to do, once."""
        for loader in self.loaders:
            if loader.book.state is State.LOADING and loader.is_over:
                loader.again()
            while not loader.is_over:
                loader.step()
        self.work_off()
        self.watch(0, LEASE_MS + 1_000, LOOK_EVERY_MS)
        self.work_off()
        self.check()

    def work_off(self) -> None:
        for slot in self.slots:
            slot.settle(500)

    def purge(self) -> None:
        """After the end and the retention, nothing of a request remains."""
        self.work_off()
        # The holder of a failed request is to be known dead first. And who is closed is looked at
        # once more before it is kept for its time.
        self.watch(1, LEASE_MS + 1_000, LOOK_EVERY_MS)
        for _ in range(2):
            # Who was registered and is not there is forgotten after an hour.
            self.eye.move_queue(3_700_000, registered=True)
            self.sweep(1, KEEP_MS + EVERY_MS)
        queue = self.eye.queue()
        for book in self.books:
            assert book.is_purged
            assert self.eye.request(book.keys).keys == 0
        assert (queue.due, queue.open, queue.closed) == ({}, {}, {})
