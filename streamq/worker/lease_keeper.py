"""What a pool does with the server on behalf of its processes, in a thread of its own.

Heartbeats, renewals, the janitor's rounds, and whatever is to be said for processes
that are dead or stuck. The server may go away for as long as it likes: the thread waits,
and the pool goes on looking after its processes.
"""

import logging
import os
import platform
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version

import msgspec

from streamq import backoff
from streamq.errors import Damaged, ProtocolError, RequestUnknown, ServerError, reading
from streamq.model import Failure, Running, Tokens, WorkerDetails
from streamq.protocol.protocol import Protocol
from streamq.queue.janitor import Janitor, totals
from streamq.telemetry.metrics import Samples, Stopwatch
from streamq.worker.channel import Config
from streamq.worker.slot_table import Held

log = logging.getLogger(__name__)

#: How often leases are renewed, and cancelled requests seen.
RENEW_EVERY_S = 1.0
#: How often the janitor asks what is due, if nobody says sooner.
SWEEP_EVERY_S = 1.0
#: How often a pool that is to end when nothing is left looks whether that is so.
LOOK_EVERY_S = 0.5

#: A process id, and what one of its slots holds.
Holding = tuple[int, Held]


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
        self._lease_ms = config.lease_ms
        self._beat_s = beat_ms / 1e3
        self.janitor = Janitor(protocol, config.queue, audit_ms)
        self._host = socket.gethostname()[:64] or platform.node()
        self.name = f"{self._host}.{os.getpid()}"
        self.handlers: list[str] = []
        self._slots = processes * config.slots
        self._levels = levels
        self._taken = frozenset(config.levels)
        self._started_ms = round(time.time() * 1e3)
        self._errands: deque[Callable[[], None]] = deque()
        self._unwanted: set[str] = set()
        #: What the processes hold; the pool replaces it with each of its rounds.
        self.holdings: list[Holding] = []
        self._is_over = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        #: What the processes could not count themselves: handler, state, number.
        self.counts: Counter[tuple[str, str]] = Counter()
        #: Calls that the server did not answer, by kind of error.
        self.errors: Counter[str] = Counter()
        #: How long the server takes to answer.
        self.trips = Stopwatch()
        self.is_server_up = False
        self._is_empty = False
        self._wants_emptiness = False
        renew_s = min(RENEW_EVERY_S, config.lease_ms / 4e3)
        self._chores: list[tuple[Callable[[], float | None], float]] = [
            (self._renew, renew_s),
            (self._do_errands, renew_s),
            (self._beat, beat_ms / 1e3),
            (self._sweep, audit_ms / 1e3),
            (self._look, LOOK_EVERY_S),
        ]
        self._due = {chore: 0.0 for chore, _ in self._chores}

    def start(self) -> None:
        """Begin to renew what the processes hold."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Say good-bye, after everything that is still to be said, if the server answers."""
        self._is_over.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def announce(self, handlers: list[str]) -> None:
        """The processes can run these: say so at once, for those who look for them."""
        if handlers != self.handlers:
            self.handlers = handlers
            self._due[self._beat] = 0.0
            self._wake.set()

    def expect(self, at_ms: int) -> None:
        """Something falls due then, by the server's clock: do not sleep over it."""
        at = (at_ms - self.janitor.ahead_ms) / 1e3
        if at < self._due[self._sweep]:
            self._due[self._sweep] = at
            self._wake.set()

    def is_unwanted(self, holder: str) -> bool:
        """Whether the lease is lost, or its request cancelled."""
        return holder in self._unwanted

    def is_nothing_left(self) -> bool:
        """Whether no request of the queue waits for this pool's handlers. Known a moment later."""
        self._wants_emptiness = True
        return self._is_empty

    def samples(self) -> Samples:
        """How the server answers, and what the janitor took back, as metrics."""
        return {
            "streamq_worker_slots": [({}, self._slots)],
            "streamq_server_up": [({}, int(self.is_server_up))],
            "streamq_server_errors_total": [
                ({"kind": kind}, number) for kind, number in sorted(self.errors.copy().items())
            ],
            "streamq_server_roundtrip_seconds": [({}, self.trips.spread())],
            **totals([self.janitor]),
        }

    # Errands for processes

    def release(self, held: Held, call: int, crashed: int | None) -> None:
        """End a dead holder's lease, and charge the part that was running."""

        def errand() -> None:
            answer = self._protocol.release(held.request_id, held.holder, call, crashed)
            self.counts[held.handler, "crashed"] += crashed is not None
            self._push(held.request_id, answer.tokens)

        self._send(errand)

    def hand_back(self, held: Held, call: int, numbers: Sequence[int]) -> None:
        """Give back parts that wait behind a slow one."""

        def errand() -> None:
            answer = self._protocol.handback(held.request_id, held.holder, call, numbers)
            self._push(held.request_id, answer.tokens)

        self._send(errand)

    def time_out(self, held: Held, call: int) -> None:
        """Fail the part that a process was stopped for."""
        number = held.running
        assert number is not None
        message = f"it took longer than {held.timeout_ms / 1e3:g} s"
        failure = Failure(error="Timeout", message=message, part=number, attempts=held.attempt)

        def errand() -> None:
            answer = self._protocol.fail(
                held.request_id,
                held.holder,
                call,
                number,
                [failure],
                delay_ms=held.retry_ms,
                records=(0, -1),
            )
            self.counts[held.handler, "retried" if answer.word == "retry" else "failed"] += 1
            self._push(held.request_id, answer.tokens)

        self._send(errand)

    def _send(self, errand: Callable[[], None]) -> None:
        self._errands.append(errand)
        self._wake.set()

    # The thread

    def _run(self) -> None:
        outages = 0
        while not (self._is_over.is_set() and not self._errands):
            try:
                wait_s = self._round()
                if outages:
                    log.info("the server answers again")
                outages = 0
                self.is_server_up = True
            except ServerError as error:
                outages += 1
                self.is_server_up = False
                if outages == 1:
                    log.warning("waiting for the server: %s", error)
                if self._is_over.is_set() and outages > 3:
                    break
                wait_s = backoff.delay_ms(outages, 100, 2_000) / 1e3
            except Exception:
                log.exception("the keeper goes on after")
                wait_s = 1.0
            self._sleep(wait_s, is_away=outages > 0)
        self._leave()

    def _sleep(self, wait_s: float, *, is_away: bool) -> None:
        if self._wake.wait(max(0.0, min(wait_s, RENEW_EVERY_S))):
            self._wake.clear()
        if self._errands and not is_away:
            self._due[self._do_errands] = 0.0

    def _round(self) -> float:
        """Do what is due. Returns the seconds until something is again."""
        first_error: ServerError | None = None
        for chore, every_s in self._chores:
            if time.monotonic() < self._due[chore]:
                continue
            try:
                said_s = chore()
                self._due[chore] = time.monotonic() + (every_s if said_s is None else said_s)
            except ServerError as error:
                self.errors[type(error).__name__] += 1
                first_error = first_error or error
            except Damaged as error:
                # The others are not to wait for it.
                log.warning("passed over: %s", error)
                self._due[chore] = time.monotonic() + every_s
        if first_error:
            raise first_error
        return min(self._due.values()) - time.monotonic()

    def _look(self) -> None:
        if self._wants_emptiness:
            self._is_empty = self._look_for_work()

    def _sweep(self) -> float:
        return max(0.01, min(self.janitor.sweep() / 1e3, SWEEP_EVERY_S))

    def _do_errands(self) -> float:
        """Say what is to be said, each in its turn; what finds nobody is kept, in its order."""
        kept: list[Callable[[], None]] = []
        first_error: ServerError | None = None
        for _ in range(len(self._errands)):
            errand = self._errands.popleft()
            try:
                errand()
            except ServerError as error:
                kept.append(errand)  # it bears repetition: its call is numbered
                first_error = first_error or error
            except ProtocolError as error:
                log.debug("dropped: %s", error)
        self._errands.extendleft(reversed(kept))
        if first_error:
            raise first_error
        return 0.0 if self._errands else RENEW_EVERY_S

    def _renew(self) -> None:
        by_request: dict[str, dict[str, int | None]] = defaultdict(dict)
        for _, held in self.holdings:
            by_request[held.request_id][held.holder] = held.running
        unwanted: set[str] = set()
        first_error: ServerError | None = None
        for request_id, running in by_request.items():
            try:
                unwanted |= self._renew_one(request_id, running)
            except ServerError as error:
                # A node that is away must not cost the leases on the others.
                first_error = first_error or error
        self._unwanted = unwanted
        if first_error:
            raise first_error

    def _renew_one(self, request_id: str, running: dict[str, int | None]) -> set[str]:
        """Renew the leases of one request. Returns the holders nobody wants any more."""
        begun = time.monotonic()
        try:
            state, _, stands = self._protocol.renew(request_id, self._lease_ms, running)
        except (RequestUnknown, Damaged):
            return set(running)
        self.trips.saw(time.monotonic() - begun)
        if not state.is_live:
            return set(running)
        return {holder for holder, is_standing in stands.items() if not is_standing}

    def _beat(self) -> None:
        holdings = self.holdings
        requests = sorted({held.request_id for _, held in holdings})
        details = msgspec.json.encode(self._details(holdings))
        begun = time.monotonic()
        self._protocol.beat(
            self._queue, self.name, round(self._beat_s * 3_000), details, self._lease_ms, requests
        )
        self.trips.saw(time.monotonic() - begun)

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
        )

    def _look_for_work(self) -> bool:
        for request_id in self._protocol.ids(self._queue):
            with suppress(RequestUnknown, Damaged), reading(request_id):
                found = self._protocol.inspect(request_id)
                is_live = found["state"] in ("loading", "open")
                is_ours = found["handler"] in self.handlers and int(found["level"]) in self._taken
                if is_live and is_ours and found.get("paused") != "1":
                    return False
        return True

    def _leave(self) -> None:
        try:
            self._protocol.beat(self._queue, self.name, 0)
        except ServerError:
            log.debug("left without a word: the server does not answer")

    def _push(self, request_id: str, tokens: Tokens) -> None:
        self._protocol.push(self._queue, request_id, tokens)
        if tokens.look_ms:
            self.expect(tokens.look_ms)
