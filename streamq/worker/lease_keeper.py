"""What a pool does with the server on behalf of its processes, in threads of its own.

One speaks for processes that are dead or stuck, and says that the pool lives. One does the
janitor's rounds. Those of ``renewals`` renew leases. None of them waits for another, and the
server may go away for as long as it likes: they wait, and the pool goes on looking after its
processes.
"""

import logging
import os
import platform
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version

import msgspec

from streamq.errors import Damaged, ProtocolError, RequestUnknown, ServerError
from streamq.model import Failure
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Outcome, Tokens
from streamq.queue.fleet import Running, WorkerDetails
from streamq.queue.janitor import Janitor, totals
from streamq.queue.outages import Outage, Outages
from streamq.telemetry.metrics import Samples
from streamq.worker.channel import Config
from streamq.worker.renewals import Holding, Renewals, Word
from streamq.worker.slot_table import Held

log = logging.getLogger(__name__)

#: How often the janitor asks what is due, if nobody says sooner.
SWEEP_EVERY_S = 1.0
#: How often a pool that is to end when nothing is left looks whether that is so.
LOOK_EVERY_S = 0.5
#: How often errands that found nobody are tried again.
ERRANDS_EVERY_S = 1.0
#: A call for a process is answered within a quarter of the lease, but not above or below these,
#: or it is made again a little later.
MOST_REPLY_S = 3.0
LEAST_REPLY_S = 0.25
#: A worker is known for so long (ms) after a heartbeat, at least: for longer than the grace of the
#: leases that make it beat so often, or who reaps could not know that it lives.
KNOWN_MS = 5_000
#: A worker's name is a part of a key, and has so many characters at most.
MOST_NAME = 64

#: Something to be done, and how often (s). It may return when it is to be done next.
Chore = tuple[Callable[[], float | None], float]


class Rounds:
    """A thread that does chores, each when it is due, whether the server is there or not."""

    def __init__(self, name: str, chores: list[Chore], word: Word) -> None:
        self._chores = chores
        self._word = word
        self._due = {chore: 0.0 for chore, _ in chores}
        self._wake = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._has_more: Callable[[], bool] = lambda: False
        self._leave: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def at_the_end(self, has_more: Callable[[], bool], leave: Callable[[], None]) -> None:
        """Go on at the end while there is more to do, for a few tries, and then leave."""
        self._has_more, self._leave = has_more, leave

    def end(self) -> None:
        """End after the chore at hand."""
        self._is_over.set()
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        self._thread.join(timeout_s)

    def hurry(self, chore: Callable[[], float | None], at: float = 0.0) -> None:
        """Do a chore then (by the clock that never jumps), if it was to be done later."""
        if at < self._due[chore]:
            self._due[chore] = at
            self._wake.set()

    def want(self, chore: Callable[[], float | None]) -> None:
        """Do a chore in the next round, whenever that is."""
        self._due[chore] = 0.0

    def _run(self) -> None:
        outage = Outage(rest_ms=100)  # the word tells of it, for all threads
        while not self._is_over.is_set() or (self._has_more() and outage.tries <= 3):
            try:
                wait_s = self._round()
                outage.over()
            except ServerError as error:
                self._word.failed(self._thread.name, error)
                wait_s = outage.failed(error)
            except Exception:
                if self._is_over.is_set():
                    break  # whoever ended it closes what it uses
                log.exception("the keeper goes on after")
                wait_s = 1.0
            if self._wake.wait(max(0.0, min(wait_s, SWEEP_EVERY_S))):
                self._wake.clear()
        self._leave()

    def _round(self) -> float:
        """Do what is due. Returns the seconds until something is again."""
        first_error: ServerError | None = None
        for chore, every_s in self._chores:
            if time.monotonic() < self._due[chore]:
                continue
            # Before it is done: who asks for it meanwhile is to have it again.
            self._due[chore] = time.monotonic() + every_s
            try:
                said_s = chore()
                if said_s is not None:
                    self._due[chore] = min(self._due[chore], time.monotonic() + said_s)
            except ServerError as error:
                self._due[chore] = 0.0
                first_error = first_error or error
            except Damaged as error:
                # The others are not to wait for it.
                log.warning("passed over: %s", error)
        if first_error:
            raise first_error
        return min(self._due.values()) - time.monotonic()


class Errand(msgspec.Struct):
    """Something to be said of a request, on whatever node it is."""

    request_id: str
    say: Callable[[], None]


class Keeper:
    """Speaks to the server for a pool."""

    def __init__(
        self,
        protocol: Protocol,
        config: Config,
        processes: int,
        *,
        beat_ms: int,
        audit_ms: int,
        levels: str = "",
    ) -> None:
        """``levels`` are those of the configuration, as people write them."""
        self._protocol = protocol
        self._queue = config.queue
        self._pool = config.pool
        self._lease_ms = config.lease_ms
        self._beat_s = beat_ms / 1e3
        self._outages = Outages()
        self.janitor = Janitor(protocol, config.queue, audit_ms, self._outages)
        self._host = socket.gethostname()[:MOST_NAME] or platform.node()
        self.name = _name_of(self._host, os.getpid())
        self.handlers: list[str] = []
        self._slots = processes * config.slots
        self._levels = levels
        self._taken = frozenset(config.levels)
        self._started_ms = round(time.time() * 1e3)
        self._errands: deque[Errand] = deque()
        #: What the processes could not count themselves: handler, state, number.
        self.counts: Counter[tuple[str, str]] = Counter()
        self._is_empty = False
        self._wants_emptiness = False
        self._word = Word()
        self._hasty_lock = threading.Lock()
        self._hasty_protocol: Protocol | None = None
        self._renewals = Renewals(protocol, self._hasty, config.lease_ms, self._outages, self._word)
        self._speaking = Rounds(
            "keeper",
            [(self._do_errands, ERRANDS_EVERY_S), (self._beat, beat_ms / 1e3)],
            self._word,
        )
        self._speaking.at_the_end(lambda: bool(self._errands), self._leave)
        self._sweeping = Rounds(
            "sweeper", [(self._sweep, audit_ms / 1e3), (self._look, LOOK_EVERY_S)], self._word
        )

    def start(self) -> None:
        """Begin to renew what the processes hold."""
        self._speaking.start()
        self._sweeping.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Say good-bye, after everything that is still to be said, if the server answers."""
        end = time.monotonic() + timeout_s
        self._renewals.stop()
        self._sweeping.end()
        self._speaking.end()
        for rounds in (self._speaking, self._sweeping):
            rounds.join(max(0.0, end - time.monotonic()))
        if self._hasty_protocol:
            self._hasty_protocol.connection.close()

    def hold(self, holdings: list[Holding]) -> None:
        """Renew what the processes hold; the pool says it with each of its rounds."""
        self._renewals.hold(holdings)

    @property
    def holdings(self) -> list[Holding]:
        """What the processes hold."""
        return self._renewals.holdings

    @property
    def is_server_up(self) -> bool:
        """Whether the server answered what it was last asked."""
        return self._word.is_server_up

    def announce(self, handlers: list[str]) -> None:
        """The processes can run these: say so at once, for those who look for them."""
        if handlers != self.handlers:
            self.handlers = handlers
            self._speaking.hurry(self._beat)

    def expect(self, at_ms: int) -> None:
        """Something falls due then, by the server's clock: do not sleep over it."""
        self._sweeping.hurry(self._sweep, (at_ms - self.janitor.ahead_ms) / 1e3)

    def is_unwanted(self, holder: str) -> bool:
        """Whether the lease is lost, or its request cancelled."""
        return self._renewals.is_unwanted(holder)

    def is_nothing_left(self) -> bool:
        """Whether no request of the queue waits for this pool's handlers. Known a moment later."""
        self._wants_emptiness = True
        return self._is_empty

    def samples(self) -> Samples:
        """How the server answers, and what the janitor took back, as metrics."""
        errors = self._word.errors.copy()
        return {
            "streamq_worker_slots": [({}, self._slots)],
            "streamq_server_up": [({}, int(self.is_server_up))],
            "streamq_server_errors_total": [
                ({"kind": kind}, number) for kind, number in sorted(errors.items())
            ],
            "streamq_server_roundtrip_seconds": [({}, self._renewals.trips.spread())],
            **totals([self.janitor]),
        }

    # Errands for processes

    def release(self, held: Held, call: int, crashed: int | None) -> None:
        """End a dead holder's lease, and charge the part that was running."""

        def count(_: str) -> None:
            self.counts[held.handler, "crashed"] += crashed is not None

        self._send(
            held,
            lambda: self._hasty().release(held.request_id, held.holder, call, crashed),
            count,
        )

    def hand_back(self, held: Held, call: int, numbers: Sequence[int]) -> None:
        """Give back parts that wait behind a slow one."""

        self._send(
            held, lambda: self._hasty().handback(held.request_id, held.holder, call, numbers)
        )

    def time_out(self, held: Held, call: int) -> None:
        """Fail the part that a process was stopped for."""
        number = held.running
        assert number is not None
        message = f"it took longer than {held.timeout_ms / 1e3:g} s"
        failure = Failure(error="Timeout", message=message, part=number, attempts=held.attempt)

        def fail() -> Outcome:
            return self._hasty().fail(
                held.request_id,
                held.holder,
                call,
                number,
                [failure],
                delay_ms=held.retry_ms,
                records=(0, -1),
            )

        def count(word: str) -> None:
            if word == "retry":
                self.counts[held.handler, "retried"] += 1
            elif word in ("failed", "ended", "done"):  # not if the lease was lost
                self.counts[held.handler, "failed"] += 1

        self._send(held, fail, count)

    def _send(
        self,
        held: Held,
        call: Callable[[], Outcome],
        count: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Make a call until it is answered, count it once, and push the tokens it asks for."""
        answers: list[Outcome] = []

        def say() -> None:
            # The push may find nobody and be tried again. The call is not: it is counted.
            if not answers:
                answers.append(call())
                count(answers[0].word)
            self._push(held.request_id, answers[0].tokens)

        self._errands.append(Errand(held.request_id, say))
        self._speaking.hurry(self._do_errands)

    # The threads

    def _hasty(self) -> Protocol:
        """For calls that may be made again, and are not to be waited for."""
        with self._hasty_lock:
            if self._hasty_protocol is None:
                reply_s = max(LEAST_REPLY_S, min(MOST_REPLY_S, self._lease_ms / 4e3))
                self._hasty_protocol = self._protocol.hasty(reply_s)
            return self._hasty_protocol

    def _look(self) -> None:
        if self._wants_emptiness:
            self._is_empty = self._look_for_work()

    def _sweep(self) -> float:
        """Do the janitor's round, unless the queue's node was away just now."""
        node = self._protocol.node_of_queue(self._queue)
        if left_s := self._outages.left_s(node):
            return left_s
        try:
            wait_ms = self.janitor.sweep()
        except ServerError:
            self._outages.saw(node)
            raise
        self._word.worked("sweeper")
        return max(0.01, min(wait_ms / 1e3, SWEEP_EVERY_S))

    def _do_errands(self) -> float | None:
        """Say what is to be said, each in its turn; what finds nobody is kept, in its order."""
        kept: list[Errand] = []
        away: set[str] = set()
        first_error: ServerError | None = None
        for _ in range(len(self._errands)):
            errand = self._errands.popleft()
            node = self._protocol.node_of(errand.request_id)
            if node in away or errand.request_id in away:
                kept.append(errand)
                continue
            try:
                errand.say()
            except ServerError as error:
                kept.append(errand)  # it bears repetition: its call is numbered
                away.add(node)  # the others for it would each wait as long
                # Its errands have an order, whichever node it is on by the next.
                away.add(errand.request_id)
                self._outages.saw(node)
                first_error = first_error or error
            except ProtocolError as error:
                log.debug("dropped: %s", error)
        self._errands.extendleft(reversed(kept))
        if first_error:
            # The beat tells whether the others answer. Nobody is woken for it: a thread that is
            # woken does not rest before it tries again.
            self._speaking.want(self._beat)
            raise first_error
        return 0.0 if self._errands else None

    def _beat(self) -> None:
        holdings = self.holdings
        requests = sorted({held.request_id for _, held in holdings})
        details = msgspec.json.encode(self._details(holdings))
        known_ms = max(KNOWN_MS, round(self._beat_s * 3_000))
        begun = time.monotonic()
        self._hasty().beat(self._queue, self.name, known_ms, details, self._lease_ms, requests)
        self._renewals.trips.saw(time.monotonic() - begun)
        if not self._errands:
            self._word.worked("keeper")

    def _details(self, holdings: list[Holding]) -> WorkerDetails:
        now_ms = round(time.time() * 1e3)
        monotonic_ms = time.monotonic() * 1e3
        running = [
            Running(
                request=held.request_id,
                part=held.running,
                since_ms=round(now_ms - (monotonic_ms - held.since_ms)),
                handler=held.handler,
                pid=pid,
            )
            for pid, held in holdings
            if held.running is not None
        ]
        return WorkerDetails(
            name=self.name,
            host=self._host,
            pid=os.getpid(),
            version=version("streamq"),
            queue=self._queue,
            handlers=self.handlers,
            slots=self._slots,
            busy=len(holdings),
            started_ms=self._started_ms,
            beat_ms=now_ms,
            levels=self._levels,
            running=running,
            pool=self._pool,
        )

    def _look_for_work(self) -> bool:
        for request_id in self._protocol.ids(self._queue):
            with suppress(RequestUnknown, Damaged):
                found = self._protocol.inspect(request_id)
                is_ours = (
                    found.text("handler") in self.handlers
                    and found.known_count("level") in self._taken
                )
                if found.state.is_live and is_ours and not found.is_paused:
                    return False
        return True

    def _leave(self) -> None:
        try:
            self._hasty().beat(self._queue, self.name, 0)
        except ServerError:
            log.debug("left without a word: the server does not answer")

    def _push(self, request_id: str, tokens: Tokens) -> None:
        self._hasty().push(self._queue, request_id, tokens)
        if tokens.look_ms:
            self.expect(tokens.look_ms)


def most_between_beats_ms(lease_ms: int) -> int:
    """How often a pool is to be heard at least: it lives for whoever reaps if it was heard after
    the deadline of a lease, and the grace from then on (``lua/lib/suspicion.lua``) is all the time.
    """
    grace_ms = 3_000 + max(1_000, min(10_000, lease_ms // 4))
    return min(lease_ms // 4, grace_ms // 2)


def _name_of(host: str, pid: int) -> str:
    """A worker's name: as much of its host as there is room for, and its process id."""
    return f"{host[: MOST_NAME - len(f'.{pid}')]}.{pid}"
