"""One process of a pool: takes tokens, claims parts, runs handlers, finishes parts.

It never works out for itself whether it still owns a part: it presents its lease and
accepts the answer. Its parent renews the leases and sees at once when it dies, so this
process may be busy, stuck or gone without anything being lost.
"""

import asyncio
import faulthandler
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from threading import Condition, Thread
from typing import Any, TypeVar

import msgspec

from streamq.app import App, Context
from streamq.driver.connection import Connection
from streamq.errors import (
    Damaged,
    ProtocolError,
    RequestNewer,
    RequestUnknown,
    ServerError,
    StreamqError,
)
from streamq.model import Failure, Part, Spec, State
from streamq.protocol.keys import list_of
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Grant, Terms, Token, Tokens
from streamq.queue.outages import Outage
from streamq.records.references import Reader
from streamq.telemetry import logs
from streamq.worker import counters as tally
from streamq.worker import program
from streamq.worker.channel import Config, Hello, Idle, Line, Look, Order, Unfit
from streamq.worker.load_app import load_app, own_files
from streamq.worker.runner import Done, Runner, Trouble
from streamq.worker.slot_table import MOST_PARTS, Table
from streamq.worker.tracebacks import users_traceback
from streamq.worker.turns import Turns
from streamq.worker.waiting_place import WaitingPlace

log = logging.getLogger(__name__)

T = TypeVar("T")

#: A take blocks so long, unless it is ended: for a stop, or since the server does not answer.
BLOCK_S = 10.0
#: How often a server at which a take blocks is asked whether it is there.
CHECK_EVERY_S = 2.0
#: How often a take that is to end is ended again: it may have been just about to block.
WAKE_EVERY_S = 0.005
#: A token that came so soon was there already.
AT_ONCE_S = 0.002
#: Threads for the calls of coroutines, so that connections stay few.
ASYNC_CALLERS = 8
#: How often coroutines are looked at that take too long or are not wanted any more.
WATCH_S = 0.1
IDLE_EVERY_S = 1.0
#: Pauses before claims of a request that is not there yet.
_NOT_YET_S = (0.0001, 0.0003, 0.0006, 0.0012, 0.0024)
#: A token that comes so soon after the end of its request is left over. Should it be one of a
#: redrive already, a look just after that (``mint.lua``) replaces it.
LEFT_OVER_S = 0.2
#: Tokens of a request that a later version of streamq made are dropped unclaimed for so long.
NEWER_PAUSE_S = 10.0
#: What ``fail`` answers when the lease goes on.
_GOES_ON = ("retry", "failed")
#: A request whose first part is to run alone is left to other processes for so long at least, when
#: this one is busy for longer than a quantum.
SUSPECT_PAUSE_S = 1.0
#: The longer such a part has waited, the longer all other slots may be kept free for it.
SUSPECT_SHARE = 0.05
#: A part that was not seen for so long since then has run elsewhere: what it waited counts no more.
SUSPECT_FORGOTTEN_S = 300.0
_ENDS = frozenset({State.DONE.value, State.FAILED.value, State.CANCELLED.value})
_KNOWN_REQUESTS = 1_000
#: Results of a batch beyond this are sent before more parts are run, and these go back unread:
#: so it is several times what the parts of a batch have.
_MOST_UNSENT = 2**22


# Whether this is a copy of the process that a handler made.
_is_copy = False
# Where coroutines run, if there are any.
_loop: asyncio.AbstractEventLoop | None = None


def _know_copy() -> None:
    global _is_copy
    _is_copy = True
    if _loop:
        # A coroutine that forked may wait for something: the copy is not to go on with the others.
        _loop.call_soon(os._exit, 0)


os.register_at_fork(after_in_child=_know_copy)


class Gone(Exception):
    """The lease is over or the process is to stop now: whatever was at hand is dropped."""


class Pace(msgspec.Struct):
    """How many parts to ask for: as many as take about a quantum."""

    quantum_s: float
    _part_s: float = 0.0

    def most(self, seconds: float | None = None) -> int:
        """Parts that take about so long, or a quantum; one while nothing is known."""
        if self._part_s <= 0:
            return 1
        seconds = self.quantum_s if seconds is None else seconds
        return max(1, min(MOST_PARTS, int(seconds / self._part_s)))

    def saw(self, parts: int, seconds: float) -> None:
        """So many parts took so long. Slowing down is believed at once, speed by degrees."""
        if parts:
            seen = max(seconds / parts, 1e-7)
            self._part_s = max(seen, self._part_s / 4) if self._part_s else seen


class Known(msgspec.Struct, frozen=True):
    """What a process knows of a request it has worked on."""

    created_ms: int
    #: The place of its handler among all, for the tally.
    handler: int
    runner: Runner
    pace: Pace


class Lease:
    """A lease and what runs under it."""

    def __init__(
        self, slot: int, request_id: str, holder: str, known: Known, waiting_since: float
    ) -> None:
        self.slot = slot
        self.request_id = request_id
        self.holder = holder
        self.created_ms = known.created_ms
        self.handler = known.handler
        self.runner = known.runner
        self.takes_context = known.runner.handler.context_name is not None
        self.pace = known.pace
        self.part_began = time.monotonic()
        #: After this no parts are asked for, and a little later none is begun: others are to
        #: have a turn. What was asked for in time is rather run than handed back.
        self.late_at = self.part_began + known.pace.quantum_s
        self.stop_at = self.late_at + known.pace.quantum_s / 4
        #: When the batch at hand was asked for, and how long it took to come.
        self.asked_at = self.part_began
        self.call_s = 0.0
        #: Since when the request's parts could be run, by the clock of this process.
        self.waiting_since = waiting_since
        #: Of the batch at hand: how long its parts waited, how many of them are retries, and
        #: whether there is but one.
        self.waited_s = 0.0
        self.retried = 0
        self.is_single = False
        self.results: list[bytes | int] = []
        self.records = 0
        self.size = 0
        self.part: Part | None = None
        #: The coroutine that runs the current part, and why it is stopped, if it is.
        self.task: asyncio.Task[Any] | None = None
        self.stop_reason = ""

    def handed(self, grant: Grant, now: float) -> None:
        """A batch has come."""
        self.call_s = now - self.asked_at
        self.waited_s = now - self.waiting_since
        self.retried = grant.retried
        self.is_single = len(grant.parts) == 1

    def record(self, part: Part, outcome: Done) -> None:
        """Keep a result until the batch is finished."""
        self.results += (part.number, outcome.result)
        self.records += outcome.records
        self.size += len(outcome.result)


class Process:
    """The process: its slots, and the loop that fills them."""

    def __init__(self, config: Config, app: App, table: Table, line: Line) -> None:
        self._config = config
        self._app = app
        self._table = table
        self._line = line
        self._reader = Reader(config.allow_read)
        self._protocol = Protocol(Connection(config.url), config.prefix)
        self._offers = [handler.offer for handler in app.handlers.values()]
        self._turns = Turns(tuple(app.handlers))
        self._place = WaitingPlace(self._protocol, config.queue, config.levels)
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._runner_for = lru_cache(64)(self._make_runner)  # most requests have the same
        #: Of each handler, by its number: the pace of the request that it ran last.
        self._paces: dict[int, Pace] = {}
        #: Requests whose tokens are of no use here, and until when: those that have ended, whose
        #: tokens are left over from before, and those whose next part is to run alone.
        self._ended: dict[str, float] = {}
        #: Tokens of the latter, which go back every second, for other processes: they are believed
        #: out, so nobody pushes others before the next audit.
        self._kept: dict[str, list[Token]] = {}
        self._name = f"{config.pool}.{secrets.token_hex(8)}"
        self._leases = 0
        self._changed = Condition()
        self._free = list(range(config.slots))
        self._is_stopping = self._is_quiet = False
        #: Parts that are to run alone and found no room yet: since when, and until when their
        #: request is left alone.
        self._suspects: dict[tuple[str, int], tuple[float, float]] = {}
        #: Since when a token is waited for, or 0.
        self._taking_since = 0.0
        #: The slot whose part is to run with nothing beside it, or -1.
        self._exclusive = -1
        self._pid = os.getpid()
        self._handler_numbers = {name: number for number, name in enumerate(app.handlers)}
        self._said_idle = self._idle_since = time.monotonic()
        self._threads = ThreadPoolExecutor(config.slots, "slot")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callers = ThreadPoolExecutor(ASYNC_CALLERS, "caller")
        self._async_leases: dict[int, Lease] = {}

    # Taking

    def run(self) -> None:
        """Take and run until told to stop, then wait for what runs."""
        Thread(target=self._obey, name="control", daemon=True).start()
        Thread(target=self._tick, name="clock", daemon=True).start()
        outage = Outage(self._report_outage)
        while not self._is_stopping:
            slot = self._await_slot()
            if slot is None:
                continue
            try:
                lease, grant = self._take(slot)
                outage.over()
            except (ServerError, Damaged) as error:
                self._give_slot(slot)
                if self._is_stopping:
                    continue
                self._rest(outage.failed(error))
                continue
            if lease is None or grant is None:
                self._give_slot(slot)
            else:
                self._begin(lease, grant)
        self._give_back_tokens()
        self._await_all_free()
        self._say_idle(force=True)

    def _take(self, slot: int) -> tuple[Lease | None, Grant | None]:
        asked = time.monotonic()
        token = self._await_token()
        # Then nobody was waiting for it either, so nobody is idle.
        is_busy = time.monotonic() - asked < AT_ONCE_S
        if token is None:
            return None, None
        request_id = token.request_id
        if self._is_left_alone(token):
            return None, None
        self._leases += 1
        holder = f"{self._name}-{slot}-{self._leases}"
        first = self._first_most() if is_busy else 1
        asked = time.monotonic()
        grant = self._claim(slot, request_id, holder, token.level, first)
        claimed = time.monotonic()
        if grant is None or not grant.parts:
            self._table.drop(slot)
            if grant:
                self._note_end(request_id, grant)
                self._push(request_id, grant.tokens)
            return None, None
        try:
            known = self._learn(request_id, grant)
        except Exception as error:  # noqa: BLE001  whatever the user's types lead to
            self._refuse(slot, request_id, holder, grant, error)
            return None, None
        timeout_ms, is_async = known.runner.timeout_ms, known.runner.handler.is_async
        self._table.describe(slot, grant.handler, timeout_ms=timeout_ms, is_async=is_async)
        self._deal(slot, grant)
        # Before a handler runs: others are to be woken first.
        self._push(request_id, grant.tokens)
        lease = Lease(slot, request_id, holder, known, claimed - grant.waited_ms / 1e3)
        lease.asked_at = asked
        lease.handed(grant, claimed)
        return lease, grant

    def _await_token(self) -> Token | None:
        handlers = self._turns.order()
        self._taking_since = time.monotonic()
        try:
            # After the line above, for whoever stops us then sees to it that this ends.
            if self._is_stopping or self._is_quiet:
                return None
            token = self._place.take(handlers, BLOCK_S)
        finally:
            self._taking_since = 0.0
        if token is None:
            self._turns.took_nothing()
        else:
            self._turns.took(token.handler, token.request_id)
        return token

    def _claim(
        self, slot: int, request_id: str, holder: str, level: int, first: int
    ) -> Grant | None:
        known = self._known.get(request_id)
        terms = self._terms(known.pace.most() if known else first)
        made = known.created_ms if known else 0
        # Before the claim, so that the parent can end the lease should this process die now.
        self._table.hold(slot, holder, request_id)
        try:
            return self._claim_soon(request_id, holder, terms, level, made)
        except RequestNewer as error:
            # Nothing was granted. Its tokens are dropped unclaimed for a while.
            log.warning("request %s is left alone: %s", request_id, error)
            self._leave_alone(request_id, NEWER_PAUSE_S)
            return None
        except Damaged as error:
            # It may have been granted all the same.
            log.warning("request %s is passed over: %s", request_id, error)
            self._release_holder(slot, request_id, holder)
            return None
        except ProtocolError:
            return None  # purged, or lost with the server's memory
        except ServerError as error:
            # It may have been granted. The name is not used again, whenever the claim arrives.
            self._report_outage(error)
            self._release_holder(slot, request_id, holder)
            return None

    def _claim_soon(
        self, request_id: str, holder: str, terms: Terms, level: int, made: int
    ) -> Grant:
        """Claim; and again a moment later of a request that is registered and not there yet.

        A worker may be woken for a small request before it is there (``Protocol.submit``).
        """
        for pause_s in (*_NOT_YET_S, 0.0):
            try:
                return self._protocol.claim(
                    request_id, holder, terms, self._offers, level=level, known=made
                )
            except RequestUnknown:
                if not pause_s or self._protocol.registered(self._config.queue, request_id) is None:
                    raise
                time.sleep(pause_s)
        raise AssertionError("the last pause is none")

    def _first_most(self) -> int:
        """Parts to ask for of a request that is new here: its handler is not known before."""
        if len(self._paces) < len(self._offers):
            return 1
        return min(pace.most() for pace in list(self._paces.values()))

    def _make_runner(self, handler: str, text: bytes) -> Runner:
        spec = msgspec.json.decode(text, type=Spec)
        return Runner(self._app.handlers[handler], spec, self._config.max_result, "", self._reader)

    def _learn(self, request_id: str, grant: Grant) -> Known:
        known = self._known.get(request_id)
        if known and known.created_ms == grant.created_ms:
            return known
        runner = self._runner_for(grant.handler, grant.spec).of(request_id)
        number = self._handler_numbers[grant.handler]
        known = Known(grant.created_ms, number, runner, Pace(self._config.quantum_ms / 1e3))
        self._known[request_id] = known
        while len(self._known) > _KNOWN_REQUESTS:
            self._known.popitem(last=False)
        return known

    def _refuse(
        self, slot: int, request_id: str, holder: str, grant: Grant, error: Exception
    ) -> None:
        """Fail parts that cannot even be begun, rather than to take them again and again."""
        log.error("%s cannot be run on %s: %s", grant.handler, request_id, error)
        whose = (request_id, holder, self._handler_numbers[grant.handler])
        for part in grant.parts:
            failure = Failure(error=type(error).__name__, message=str(error), part=part.number)
            trouble = Trouble("abandon", 0, [failure], (0, -1))
            try:
                if self._tell_failure(slot, whose, part, trouble) not in _GOES_ON:
                    break
            except Gone:  # the request was purged meanwhile
                break
        self._release_holder(slot, request_id, holder)
        self._table.drop(slot)
        self._push(request_id, grant.tokens)

    def _terms(self, most: int) -> Terms:
        return Terms(most, lease_ms=self._config.lease_ms)

    def _deal(self, slot: int, grant: Grant) -> None:
        self._table.deal(slot, [part.number for part in grant.parts])

    def _push(self, request_id: str, tokens: Tokens) -> None:
        if not tokens:
            return
        # What is not pushed now is pushed by the next audit.
        with suppress(ServerError, Damaged):
            self._protocol.push(self._config.queue, request_id, tokens)
        if tokens.look_ms:
            self._line.send(Look(tokens.look_ms))

    # Slots

    def _await_slot(self) -> int | None:
        with self._changed:
            while not self._is_stopping:
                if self._free and not self._is_quiet and self._exclusive < 0:
                    return self._free.pop()
                self._changed.wait()
        return None

    def _give_slot(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            if slot == self._exclusive:
                self._exclusive = -1
            self._changed.notify_all()

    def _await_all_free(self, but: int = 0, timeout_s: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._free) >= self._config.slots - but, timeout_s
            )

    def _make_room(self, lease: Lease, number: int) -> bool:
        """Wait for a quantum until nothing runs beside a part that is to run alone.

        Where other slots are never free at once, it is waited for longer and longer: a twentieth
        of the time that the part has waited. Then the request is left alone for the other nineteen.
        So the part is run at some time, and costs the other slots a twentieth of theirs.
        """
        now = time.monotonic()
        part = (lease.request_id, number)
        since, known_until = self._suspects.pop(part, (now, now))
        if now - known_until > SUSPECT_FORGOTTEN_S:
            since = now
        wait_s = max(lease.pace.quantum_s, (now - since) * SUSPECT_SHARE)
        self._exclusive = lease.slot
        if self._await_all_free(but=1, timeout_s=wait_s):
            return True
        alone_s = max(SUSPECT_PAUSE_S, wait_s * (1 / SUSPECT_SHARE - 1))
        self._suspects[part] = since, time.monotonic() + alone_s
        while len(self._suspects) > _KNOWN_REQUESTS:
            del self._suspects[next(iter(self._suspects))]
        with self._changed:
            self._leave_alone(lease.request_id, alone_s)
            self._kept.setdefault(lease.request_id, [])
        return False

    def _begin(self, lease: Lease, grant: Grant) -> None:
        # It may kill this process: nothing is to run beside it, then it is clear who did.
        is_suspect = grant.retried and any(part.is_suspect for part in grant.parts)
        if is_suspect and not self._make_room(lease, grant.parts[0].number):
            self._release(lease)
            self._end(lease)
            return
        if lease.runner.handler.is_async:
            asyncio.run_coroutine_threadsafe(self._serve_async(lease, grant), self._event_loop())
        elif self._config.slots == 1:
            self._serve(lease, grant)
        else:
            self._threads.submit(self._serve, lease, grant)

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping, seconds)

    # Running

    def _serve(self, lease: Lease, grant: Grant) -> None:
        try:
            while grant.parts:
                grant = self._finish(lease, self._run_batch(lease, grant.parts))
        except Gone:
            self._let_go(lease)
        except BaseException:  # noqa: BLE001  it is logged there
            self._stumble(lease)
        finally:
            self._end(lease)

    def _let_go(self, lease: Lease) -> None:
        """End the lease if it stands: nobody works under it any more."""
        with suppress(Exception):
            self._release(lease)

    def _stumble(self, lease: Lease) -> None:
        """Something is wrong with us: say so, and do not run into it again and again."""
        log.exception("slot %d stumbled over a part of %s", lease.slot, lease.request_id)
        with suppress(Exception):
            if lease.part:
                failure = Failure(error="InternalError", message="see the worker's log")
                self._fail(lease, lease.part, Trouble("retry", 1_000, [failure], (0, -1)))
        self._let_go(lease)

    def _end(self, lease: Lease) -> None:
        self._table.drop(lease.slot)
        self._idle_since = time.monotonic()
        self._give_slot(lease.slot)
        self._say_idle()

    def _run_batch(self, lease: Lease, parts: list[Part]) -> int:
        """Run parts one after another. Returns how many to ask for next, 0 to end the lease."""
        slot, table, run = lease.slot, self._table, lease.runner.run
        clock = time.monotonic
        begun = now = clock()
        took: list[float] = []
        for index, part in enumerate(parts):
            if not self._may_start(lease, index, part, now):
                break
            lease.part = part
            outcome = run(part, self._context(lease, part) if lease.takes_context else None)
            if _is_copy:
                # A handler that forked and returned must not go on as a second worker.
                os._exit(0)
            table.end(slot, index)
            started, now = now, clock()
            took.append(now - started)
            if isinstance(outcome, Done):
                lease.record(part, outcome)
            elif self._fail(lease, part, outcome):
                now = clock()
            else:
                break
        table.tally.saw(slot, lease.handler, tally.RAN, took)
        return self._next_most(lease, begun, len(took), len(parts))

    def _may_start(self, lease: Lease, index: int, part: Part, now: float) -> bool:
        if (index and (now > lease.stop_at or lease.size > _MOST_UNSENT)) or self._is_stopping:
            return False
        if lease.runner.timeout_ms:
            self._table.expect(lease.slot, part.attempt, lease.runner.retry_ms(part))
        lease.part_began = now
        if not self._table.start(lease.slot, index, int(now * 1e3)):
            return False
        if lease.is_single:
            # It may run for long. Of several only some may be begun: they are counted together.
            self._count_waits(lease, 1)
        return True

    def _next_most(self, lease: Lease, begun: float, ran: int, given: int) -> int:
        now = time.monotonic()
        if not lease.is_single:
            self._count_waits(lease, ran)
        lease.pace.saw(ran, now - begun)
        self._paces[lease.handler] = lease.pace
        lease.asked_at = now
        # What comes too late to be run would only go back.
        left_s = lease.late_at - now - lease.call_s
        if ran < given or self._is_stopping or left_s <= 0:
            return 0
        return lease.pace.most(left_s)

    def _count_waits(self, lease: Lease, begun: int) -> None:
        first = begun - lease.retried
        if first > 0:
            waited = (lease.waited_s,)
            self._table.tally.saw(lease.slot, lease.handler, tally.WAITED, waited, first)

    def _context(self, lease: Lease, part: Part) -> Context:
        slot, table = lease.slot, self._table
        return Context(
            lease.request_id,
            part.number,
            part.attempt,
            source=lease.runner.source_of(part),
            should_stop=lambda: table.is_told(slot),
            progress=lambda percent: table.set_progress(slot, percent),
        )

    def _fail(self, lease: Lease, part: Part, trouble: Trouble) -> bool:
        """Tell of a part that failed. Returns whether the next of the batch may be begun."""
        whose = (lease.request_id, lease.holder, lease.handler)
        if self._tell_failure(lease.slot, whose, part, trouble) in _GOES_ON:
            return True
        lease.late_at = 0.0  # nothing more is asked for either
        return False

    def _tell_failure(
        self, slot: int, whose: tuple[str, str, int], part: Part, trouble: Trouble
    ) -> str:
        request_id, holder, handler = whose
        call = self._table.next_call(slot)
        answer = self._insist(
            lambda: self._protocol.fail(
                request_id,
                holder,
                call,
                part.number,
                trouble.failures,
                kind=trouble.kind,
                delay_ms=trouble.delay_ms,
                records=trouble.records,
                result=trouble.result,
                partial=trouble.partial,
            )
        )
        self._table.answered(slot)
        self._tally_trouble(slot, handler, part, trouble, answer.word)
        self._push(request_id, answer.tokens)
        return answer.word

    def _tally_trouble(
        self, slot: int, handler: int, part: Part, trouble: Trouble, word: str
    ) -> None:
        count = self._table.tally.count
        if word == "retry":
            count(slot, handler, tally.RETRIED)
        elif word in ("failed", "ended", "done"):  # the request may have ended with this part
            done, failed = trouble.records
            count(slot, handler, tally.FAILED)
            count(slot, handler, tally.RECORDS_DONE, done)
            count(slot, handler, tally.RECORDS_FAILED, failed if failed >= 0 else part.records or 1)

    def _finish(self, lease: Lease, most: int) -> Grant:
        call = self._table.next_call(lease.slot)
        results, records, terms = lease.results, lease.records, self._terms(most)
        grant = self._insist(
            lambda: self._protocol.finish(
                lease.request_id,
                lease.holder,
                call,
                results,
                records,
                terms,
                lease.created_ms,
            )
        )
        self._table.answered(lease.slot)
        self._table.tally.count(lease.slot, lease.handler, tally.DONE, grant.counted)
        self._table.tally.count(lease.slot, lease.handler, tally.RECORDS_DONE, records)
        lease.results, lease.records, lease.size, lease.part = [], 0, 0, None
        is_suspect = any(part.is_suspect for part in grant.parts)
        if grant.word == "late" or (is_suspect and self._is_shared(lease)):
            # To run alone: back to the front with it; whoever takes it clears the way.
            self._release(lease)
            grant = msgspec.structs.replace(grant, parts=[])
        elif grant.parts:
            if len(grant.parts) > MOST_PARTS:
                # After a lost reply all is told that the lease has, which may be more than a slot
                # can hold when the server had forgotten its last moments. The rest goes back when
                # the lease ends, and it ends with these.
                lease.late_at = 0.0
                del grant.parts[MOST_PARTS:]
            lease.handed(grant, time.monotonic())
            self._deal(lease.slot, grant)
        self._note_end(lease.request_id, grant)
        self._push(lease.request_id, grant.tokens)
        return grant

    def _note_end(self, request_id: str, grant: Grant) -> None:
        """Its last tokens are just behind, and there is nothing to claim with them."""
        if grant.word in _ENDS:
            self._leave_alone(request_id, LEFT_OVER_S)

    def _leave_alone(self, request_id: str, seconds: float) -> None:
        """Drop tokens of the request for so long."""
        if len(self._ended) >= _KNOWN_REQUESTS:
            self._ended.clear()
        self._ended[request_id] = time.monotonic() + seconds

    def _is_left_alone(self, token: Token) -> bool:
        """Whether the token is of no use here now. One that will be again is kept for then."""
        if token.request_id not in self._ended:
            return False
        # In one step: whoever gives tokens back is not to forget the request in between.
        with self._changed:
            if self._ended.get(token.request_id, 0.0) <= time.monotonic():
                return False
            if token.request_id in self._kept:
                if len(self._free) >= self._config.slots - 1:
                    return False  # nothing runs here now: there is room for a part alone
                self._kept[token.request_id].append(token)
        return True

    def _give_back_tokens(self) -> None:
        """Push tokens that were kept: other processes may have room."""
        with self._changed:
            now = time.monotonic()
            tokens = [token for kept in self._kept.values() for token in kept]
            alone = (each for each in self._kept if self._ended.get(each, 0.0) > now)
            self._kept = {each: [] for each in alone}
        for token in tokens:
            self._push(token.request_id, Tokens(1, list_of(token.handler, token.level)))

    def _is_shared(self, lease: Lease) -> bool:
        return self._config.slots > 1 and self._exclusive != lease.slot

    def _release(self, lease: Lease) -> None:
        self._release_holder(lease.slot, lease.request_id, lease.holder)

    def _release_holder(self, slot: int, request_id: str, holder: str) -> None:
        call = self._table.next_call(slot)
        with suppress(Gone):
            answer = self._insist(lambda: self._protocol.release(request_id, holder, call))
            self._table.answered(slot)
            self._push(request_id, answer.tokens)

    def _insist(self, call: Callable[[], T]) -> T:
        """Make a call until the server answers. Every repeat is the same call, number and all."""
        outage = Outage(self._report_outage)
        while True:
            try:
                return call()
            except ServerError as error:
                time.sleep(outage.failed(error))
            except ProtocolError as error:
                level = logging.WARNING if isinstance(error, Damaged) else logging.INFO
                log.log(level, "dropped: %s", error)
                raise Gone from None

    # Coroutines

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        global _loop
        if self._loop is None:
            _loop = self._loop = asyncio.new_event_loop()
            Thread(target=self._run_loop, args=(self._loop,), name="loop", daemon=True).start()
            asyncio.run_coroutine_threadsafe(self._watch(), self._loop)
        return self._loop

    @staticmethod
    def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            # Without it the coroutines' slots would hang; the parent takes back what they hold.
            os._exit(1)

    async def _serve_async(self, lease: Lease, grant: Grant) -> None:
        loop = asyncio.get_running_loop()
        self._async_leases[lease.slot] = lease
        try:
            while grant.parts:
                most = await self._run_batch_async(lease, grant.parts)
                grant = await loop.run_in_executor(self._callers, self._finish, lease, most)
        except Gone:
            await loop.run_in_executor(self._callers, self._let_go, lease)
        except Exception:  # noqa: BLE001  it is logged there
            await loop.run_in_executor(self._callers, self._stumble, lease)
        finally:
            self._async_leases.pop(lease.slot, None)
            self._end(lease)

    async def _run_batch_async(self, lease: Lease, parts: list[Part]) -> int:
        loop = asyncio.get_running_loop()
        begun = time.monotonic()
        took: list[float] = []
        for index, part in enumerate(parts):
            if not self._may_start(lease, index, part, time.monotonic()):
                break
            lease.part = part
            outcome = await self._run_async(lease, part)
            if _is_copy:
                os._exit(0)
            self._table.end(lease.slot, index)
            took.append(time.monotonic() - lease.part_began)
            if isinstance(outcome, Done):
                lease.record(part, outcome)
            elif not await loop.run_in_executor(self._callers, self._fail, lease, part, outcome):
                break
        self._table.tally.saw(lease.slot, lease.handler, tally.RAN, took)
        return self._next_most(lease, begun, len(took), len(parts))

    async def _run_async(self, lease: Lease, part: Part) -> Done | Trouble:
        context = self._context(lease, part) if lease.takes_context else None
        run = lease.runner.run_async(part, context)
        lease.stop_reason = ""
        lease.task = asyncio.ensure_future(run)
        try:
            outcome: Done | Trouble = await lease.task
            return outcome
        except asyncio.CancelledError:
            if lease.stop_reason == "told":
                raise Gone from None
            if lease.stop_reason == "timeout":
                return lease.runner.time_out(part)
            return lease.runner.fail(part, RuntimeError("the handler cancelled itself"))
        finally:
            lease.task = None

    async def _watch(self) -> None:
        """Stop coroutines that take too long, or whose result is not wanted any more."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            for lease in list(self._async_leases.values()):
                limit_s = lease.runner.timeout_ms / 1e3
                is_over = limit_s and now - lease.part_began > limit_s
                if not lease.task or lease.stop_reason:
                    continue
                if is_over or self._table.is_told(lease.slot):
                    lease.stop_reason = "timeout" if is_over else "told"
                    lease.task.cancel()

    # Telling and being told

    def _obey(self) -> None:
        for word in self._line.words():
            if isinstance(word, Order):
                with self._changed:
                    self._is_quiet = word.word == "quiet"
                    self._is_stopping = self._is_stopping or word.word == "stop"
                    self._changed.notify_all()
                # It may be just about to wait, so once may not be enough.
                while self._taking_since:
                    self._protocol.connection.wake()
                    time.sleep(WAKE_EVERY_S)
        # The parent is gone, and nobody renews the leases: what runs here may run elsewhere soon.
        # The programs that handlers started are in the group that this process leads.
        if os.getpgrp() == self._pid:
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def _tick(self) -> None:
        """Tell the parent how long there was nothing to do, and leave servers that hang."""
        checked = 0.0
        while True:
            time.sleep(IDLE_EVERY_S)
            self._say_idle()
            now, since = time.monotonic(), self._taking_since
            if since and now - max(since, checked) > CHECK_EVERY_S:
                self._protocol.connection.check_waits()
                checked = time.monotonic()
            self._give_back_tokens()

    def _say_idle(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._said_idle < IDLE_EVERY_S:
            return
        self._said_idle = now
        is_idle = len(self._free) + (self._taking_since > 0) >= self._config.slots
        self._line.send(Idle(now - self._idle_since if is_idle else 0.0))

    @staticmethod
    def _report_outage(error: StreamqError) -> None:
        what = "passed over" if isinstance(error, Damaged) else "waiting for the server"
        log.warning("%s: %s", what, error)


def main() -> None:
    """Run by a ``Nursery``, with CONTROL_FD and TABLE_FD as arguments."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # Not SIG_IGN: programs that a handler starts would inherit that.
        signal.signal(number, lambda *_: None)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    line = Line(socket.socket(fileno=int(sys.argv[1])))
    config = line.read_config()
    if config is None:
        _leave(0)
        return
    if not config.keeps_stdout:
        with suppress(OSError):  # nobody may have given us a stderr
            os.dup2(2, 1)
    table = Table(int(sys.argv[2]), config.slots)
    logs.configure(config.log_level, config.log_format)
    try:
        if config.argv:
            app = program.app_of(config.handler, config.argv, config.max_result)
        else:
            app = load_app(config.target, config.handler)
    except StreamqError as error:
        line.send(Unfit(str(error), ""))
        _leave(4)
    except BaseException as error:  # noqa: BLE001  whatever the user's module raises
        line.send(Unfit(f"{config.target} cannot be imported: {error!r}", users_traceback(error)))
        _leave(4)
    line.send(Hello([handler.offer for handler in app.handlers.values()], own_files()))
    gc.freeze()
    gc.enable()
    try:
        Process(config, app, table, line).run()
    except BaseException:
        log.exception("the process ends")
        _leave(1)
    _leave(0)


def _leave(code: int) -> None:
    """End, whatever threads of the user's are still there."""
    with suppress(Exception):  # a handler may have closed them
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
