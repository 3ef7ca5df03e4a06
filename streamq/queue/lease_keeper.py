"""Speaks to the server for a host of leases, in threads of its own: heartbeats, errands, sweeps.

One thread speaks for holders that are dead or stuck, and says that the host lives. One does the
janitor's rounds. Those of ``renewals`` renew leases. None of them waits for another. The server may
go away for as long as it likes: the threads wait, and the host goes on looking after its holders.
The host of a worker is the parent of a pool, and its holders are the slots of its processes.
"""

import logging
import os
import platform
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version

import msgspec

from streamq.errors import Damaged, ProtocolError, RequestUnknown, ServerError
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Outcome, Tokens
from streamq.queue.fleet import FleetPace, Running, WorkerDetails
from streamq.queue.janitor import Janitor, janitor_samples
from streamq.queue.outages import OutageLog, Outages
from streamq.queue.outcomes import GIVEN_UP, outcome_at_time_limit
from streamq.queue.renewals import Holding, Renewals
from streamq.queue.rounds import Rounds
from streamq.queue.told import SpansTold, ToldSpan, ToldTally
from streamq.telemetry.metrics import Samples

log = logging.getLogger(__name__)

#: The latest protocol version that is known here, as ``lua/lib/version.lua`` has it.
PROTOCOL = 3
#: The janitor asks what is due at least this often.
SWEEP_EVERY_S = 1.0
#: A pool that is to end when nothing is left looks this often whether that is so.
LOOK_EVERY_S = 0.5
#: Errands that the server did not answer are tried again this often.
ERRANDS_EVERY_S = 1.0
#: A pool tells at once how many of its slots are busy when that changes, and what the first records
#: of a handler took, once in this time at most.
CHANGE_EVERY_S = 1.0
#: While somebody looks at the timeline, a host tells so often what its slots did.
SHOW_EVERY_S = 1.0
#: A call waits for its answer for a quarter of the lease, but at least 0.25 s and at most 3 s; then
#: it is made again a little later.
MOST_REPLY_S = 3.0
LEAST_REPLY_S = 0.25
#: A worker is known for at least 5 s after a heartbeat: for longer than the grace of the leases
#: that make it beat so often. Otherwise a janitor that reaps could not know that it lives.
KNOWN_MS = 5_000
#: A worker's name is a part of a key, and has at most 64 characters.
MOST_NAME = 64


class Errand(msgspec.Struct):
    """A call to be made about a request, on whatever node the request is."""

    request_id: str
    say: Callable[[], None]


class LeaseKeeper:
    """Speaks to the server for a host of leases."""

    def __init__(
        self,
        protocol: Protocol,
        queue: str,
        pool: str,
        *,
        slots: int,
        lease_ms: int,
        beat_ms: int,
        audit_ms: int,
        levels: Iterable[int],
        levels_text: str = "",
    ) -> None:
        """Prepare to speak for the holders whose names begin with ``pool``.

        ``levels`` are those from which tokens are taken; ``levels_text`` the same as people wrote
        them, for those who look at the worker.
        """
        self._protocol = protocol
        self._queue = queue
        self._pool = pool
        self._lease_ms = lease_ms
        self._beat_s = beat_ms / 1e3
        self._outages = Outages()
        self.janitor = Janitor(protocol, queue, audit_ms, self._outages)
        self._host = socket.gethostname()[:MOST_NAME] or platform.node()
        self.name = _name_of_worker(self._host, os.getpid())
        self.handlers: list[str] = []
        #: Returns what is known of the handlers, for loaders that size parts.
        self.paces: Callable[[], dict[str, FleetPace]] = dict
        #: Return the work done for each handler; and the latest spans of slots up to a number, with
        #: how many are left out. Both are for those who look at the dashboard.
        self.tallies: Callable[[], dict[str, ToldTally]] = dict
        self.spans: Callable[[int], tuple[list[ToldSpan], int]] = lambda _: ([], 0)
        #: How many spans a second are to be told; 0: nobody looks.
        self._spans = 0
        self._slots = slots
        self._levels = levels_text
        self._taken = frozenset(levels)
        self._started_ms = round(time.time() * 1e3)
        self._errands: deque[Errand] = deque()
        #: What the holders could not count themselves, by handler and state.
        self.counts: Counter[tuple[str, str]] = Counter()
        self._is_empty = False
        self._wants_emptiness = False
        #: How many slots the last heartbeat said are busy, and when it was sent.
        self._told_busy = 0
        self._told_at = 0.0
        self._availability = OutageLog()
        self._hasty_lock = threading.Lock()
        self._hasty_protocol: Protocol | None = None
        self._renewals = Renewals(
            protocol, self._hasty, lease_ms, self._outages, self._availability
        )
        self._speaking = Rounds(
            "keeper",
            [
                (self._do_errands, ERRANDS_EVERY_S),
                (self._beat, beat_ms / 1e3),
                (self._show, SHOW_EVERY_S),
            ],
            self._availability,
        )
        self._speaking.at_the_end(lambda: bool(self._errands), self._leave)
        self._sweeping = Rounds(
            "sweeper",
            [(self._sweep, audit_ms / 1e3), (self._look, LOOK_EVERY_S)],
            self._availability,
        )

    def start(self) -> None:
        """Start the threads."""
        self._speaking.start()
        self._sweeping.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Make the calls that are still to be made, if the server answers, and end the threads."""
        end = time.monotonic() + timeout_s
        self._renewals.stop()
        self._sweeping.end()
        self._speaking.end()
        for rounds in (self._speaking, self._sweeping):
            rounds.join(max(0.0, end - time.monotonic()))
        if self._hasty_protocol:
            self._hasty_protocol.connection.close()

    def hold(self, holdings: list[Holding]) -> None:
        """Renew these leases, and no others, until told otherwise.

        If another number of slots is busy than the last heartbeat said, the next one comes soon.
        """
        self._renewals.hold(holdings)
        if len(holdings) != self._told_busy:
            self.tell_soon()

    def tell_soon(self) -> None:
        """Send the next heartbeat a second after the last one: there is something new to tell."""
        self._speaking.hurry(self._beat, self._told_at + CHANGE_EVERY_S)

    @property
    def holdings(self) -> list[Holding]:
        """Return what the holders have."""
        return self._renewals.holdings

    @property
    def is_server_up(self) -> bool:
        """Tell whether the server answered what it was last asked."""
        return self._availability.is_server_up

    def announce(self, handlers: list[str]) -> None:
        """Say with a heartbeat, at once, that the holders can run these handlers."""
        if handlers != self.handlers:
            self.handlers = handlers
            self._speaking.hurry(self._beat)

    def expect(self, at_ms: int) -> None:
        """Sweep at this time (ms of the server's clock): something falls due then."""
        self._sweeping.hurry(self._sweep, (at_ms - self.janitor.ahead_ms) / 1e3)

    def is_unwanted(self, holder: str) -> bool:
        """Tell whether the lease is lost, or its request cancelled."""
        return self._renewals.is_unwanted(holder)

    def is_nothing_left(self) -> bool:
        """Tell whether no request of the queue waits for this pool's handlers.

        The answer is that of the last look, and looks begin with the first call.
        """
        self._wants_emptiness = True
        return self._is_empty

    def samples(self) -> Samples:
        """Return metrics of how the server answers, and of what the janitor took back."""
        errors = self._availability.errors.copy()
        return {
            "streamq_worker_slots": [({}, self._slots)],
            "streamq_server_up": [({}, int(self.is_server_up))],
            "streamq_server_errors_total": [
                ({"kind": kind}, number) for kind, number in sorted(errors.items())
            ],
            "streamq_server_roundtrip_seconds": [({}, self._renewals.trips.spread())],
            **janitor_samples([self.janitor]),
        }

    # Errands for processes

    def release(self, held: Holding, call: int, crashed: int | None) -> None:
        """End a dead holder's lease, and charge the part that was running."""

        def count(_: str) -> None:
            self.counts[held.handler, "crashed"] += crashed is not None

        self._send(
            held,
            lambda: self._hasty().release(held.request_id, held.holder, call, crashed),
            count,
        )

    def hand_back(
        self,
        held: Holding,
        call: int,
        numbers: Sequence[int],
        came_late: Callable[[], None] = lambda: None,
    ) -> None:
        """Give back parts that wait behind a slow one.

        ``came_late`` is called, in another thread, if a later call of the holder came first.
        """

        def tell(word: str) -> None:
            if word == "late":
                came_late()

        self._send(
            held, lambda: self._hasty().handback(held.request_id, held.holder, call, numbers), tell
        )

    def time_out(self, held: Holding, call: int) -> None:
        """Fail the part whose holder was stopped because the part took too long."""
        number = held.running
        assert number is not None
        failure = outcome_at_time_limit(number, held.attempt, held.timeout_ms, held.record)

        def fail() -> Outcome:
            return self._hasty().fail(
                held.request_id,
                held.holder,
                call,
                number,
                [failure],
                kind="late" if held.record else "retry",
                delay_ms=held.retry_ms,
                records=(0, -1),
            )

        def count(word: str) -> None:
            if word == "retry":
                self.counts[held.handler, "retried"] += 1
            elif word in GIVEN_UP:  # not if the lease was lost
                self.counts[held.handler, "failed"] += 1

        self._send(held, fail, count)

    def _send(
        self,
        held: Holding,
        call: Callable[[], Outcome],
        count: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Make a call until it is answered, count it once, and push the tokens it asks for."""
        answers: list[Outcome] = []

        def say() -> None:
            # A push that is not answered is tried again. The call is not: it was counted.
            if not answers:
                answers.append(call())
                count(answers[0].word)
            self._push(held.request_id, answers[0].tokens)

        self._errands.append(Errand(held.request_id, say))
        self._speaking.hurry(self._do_errands)

    # The threads

    def _hasty(self) -> Protocol:
        """Return a protocol for calls that are made again rather than waited for."""
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
        self._availability.worked("sweeper")
        return max(0.01, min(wait_ms / 1e3, SWEEP_EVERY_S))

    def _do_errands(self) -> float | None:
        """Run errands in their order, and keep those that the server does not answer."""
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
                kept.append(errand)  # it may be repeated: its call is numbered
                away.add(node)  # other calls to this node would each wait as long
                # Errands of one request keep their order, even if it is on another node by now.
                away.add(errand.request_id)
                self._outages.saw(node)
                first_error = first_error or error
            except ProtocolError as error:
                log.debug("dropped: %s", error)
        self._errands.extendleft(reversed(kept))
        if first_error:
            # A heartbeat tells whether other nodes answer. It is not hurried: a thread that is
            # woken does not rest before it tries again.
            self._speaking.want(self._beat)
            raise first_error
        return 0.0 if self._errands else None

    def _beat(self) -> None:
        holdings = self.holdings
        self._told_busy, self._told_at = len(holdings), time.monotonic()
        requests = sorted({held.request_id for held in holdings})
        details = msgspec.json.encode(self._details(holdings))
        known_ms = max(KNOWN_MS, round(self._beat_s * 3_000))
        begun = time.monotonic()
        told = self._hasty().beat(
            self._queue, self.name, known_ms, details, self._lease_ms, requests
        )
        self._spans = told.spans
        self._renewals.trips.saw(time.monotonic() - begun)
        if not self._errands:
            self._availability.worked("keeper")

    def _show(self) -> None:
        """Tell what the slots did lately, while somebody looks at the timeline."""
        if not self._spans:
            return
        spans, left_out = self.spans(round(self._spans * SHOW_EVERY_S))
        if spans:
            told = msgspec.json.encode(SpansTold(self.name, spans, left_out))
            self._hasty().show(self._queue, told)

    def _details(self, holdings: list[Holding]) -> WorkerDetails:
        now_ms = round(time.time() * 1e3)
        monotonic_ms = time.monotonic() * 1e3
        running = [
            Running(
                request=held.request_id,
                part=held.running,
                since_ms=round(now_ms - (monotonic_ms - held.since_ms)),
                handler=held.handler,
                pid=held.pid,
                progress=held.progress,
            )
            for held in holdings
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
            paces=self.paces(),
            tallies=self.tallies(),
            protocol=PROTOCOL,
        )

    def _look_for_work(self) -> bool:
        for request_id in self._protocol.places(self._queue):
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
        except Damaged as error:
            log.warning("left without a word: %s", error)

    def _push(self, request_id: str, tokens: Tokens) -> None:
        self._hasty().push(self._queue, request_id, tokens)
        if tokens.look_ms:
            self.expect(tokens.look_ms)


def most_between_beats_ms(lease_ms: int) -> int:
    """Return the longest time between two heartbeats of a pool with such leases (ms).

    A janitor takes a pool for alive if the pool was heard after the deadline of a lease and before
    the grace is over (``lua/lib/suspicion.lua``). So a pool beats at least twice in a grace.
    """
    grace_ms = 3_000 + max(1_000, min(10_000, lease_ms // 4))
    return min(lease_ms // 4, grace_ms // 2)


def _name_of_worker(host: str, pid: int) -> str:
    """Return a worker's name: as much of its host's as there is room for, and its process id."""
    return f"{host[: MOST_NAME - len(f'.{pid}')]}.{pid}"
