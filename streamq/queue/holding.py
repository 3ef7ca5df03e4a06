"""The rules of a lease on the client's side, for every host that holds leases.

A host is a process of a pool, or whatever else runs parts or passes them on. A ``Taker`` takes
tokens for its host and claims parts with them. A ``HeldLease`` is what a claim was granted: it
finishes parts, fails them, hands them back, and ends. Both keep these rules (``lua/README.md``,
section 4):

* The name of a holder is used for one claim. A claim is never sent twice: when the server did not
  answer it, the lease that it may have granted is released.
* The host's ``LeaseBook`` has the name of a holder before its claim is sent, and the numbers of its
  parts before one of them is run. So somebody else can speak for a host that dies.
* Calls under a lease are numbered. A call is repeated, number and all, until the server answers it.
* The tokens that a reply asks for are pushed before the parts that came with it are run.
* A token that can be of no use is dropped without a claim.
"""

import logging
import time
import typing
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from streamq.errors import (
    Damaged,
    ProtocolError,
    RequestNewer,
    RequestUnknown,
    ServerError,
    StreamqError,
)
from streamq.model import Failure, Part, State
from streamq.protocol.keys import list_of
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Grant, Outcome, Terms, Token, Tokens
from streamq.queue.outages import Outage
from streamq.queue.outcomes import PartDone, PartNotDone
from streamq.queue.pace import MOST_PARTS, Pace
from streamq.queue.turns import Turns
from streamq.queue.waiting_place import WaitingPlace

log = logging.getLogger(__name__)

T = TypeVar("T")
#: What a host makes of a request in order to work on it, such as a runner of its handler.
Work = TypeVar("Work")

#: If a take returns within 2 ms, the token was there already: there is a backlog and nobody is
#: idle.
AT_ONCE_S = 0.002
#: A worker may be woken before its request is there (``Protocol.submit``). It claims again after
#: each of these pauses, 4.6 ms in all, while the request is registered.
_NOT_YET_S = (0.0001, 0.0003, 0.0006, 0.0012, 0.0024)
#: For 200 ms after a host saw a request end it drops the tokens of the request without a claim. If
#: the request was redriven meanwhile, that drops a good token: ``mint.lua`` therefore has the
#: request visited 250 ms after a redrive.
LEFT_OVER_S = 0.2
#: Tokens of a request that a later version of streamq made are dropped unclaimed for 10 s.
NEWER_PAUSE_S = 10.0
#: What ``fail`` answers when the lease goes on.
_GOES_ON = ("retry", "failed")
_ENDS = frozenset({State.DONE.value, State.FAILED.value, State.CANCELLED.value})
#: A host remembers this many requests.
KNOWN_REQUESTS = 1_000


class LeaseGone(Exception):
    """The lease is over, or its request is gone: what the holder has at hand is dropped."""


class LeaseBook(typing.Protocol):
    """Where a host writes down what one of its places holds. A place has one lease at a time.

    A process of a pool keeps it where its parent can read it, who then speaks for a dead process.
    What is written must be there when the method returns: ``Taker`` and ``HeldLease`` rely on the
    order.
    """

    @property
    def name(self) -> str:
        """What tells the place from others of the host; it is part of the names of holders."""

    def hold(self, holder: str, request_id: str) -> None:
        """Note that a claim is about to be sent, under this name. Numbers of calls begin anew."""

    def deal(self, numbers: Sequence[int]) -> None:
        """Note the parts of a batch that is about to be run. No part of it is started."""

    def next_call(self) -> int:
        """Return the number of the next call under the lease.

        It is the same one until that call is answered. There is room below it for calls of those
        who speak for the host.
        """

    def answered(self) -> None:
        """Note that the call with the number of ``next_call`` was answered."""

    def drop(self) -> None:
        """Note that the lease is over."""

    def count_finished(self, handler: str, parts: int, records: int) -> None:
        """Count parts whose results the server has counted."""

    def count_failed(self, handler: str, part: Part, outcome: PartNotDone, word: str) -> None:
        """Count a part that ``fail`` was told of, by the word that it answered."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes tokens, from which queue, and what it can run."""

    #: What the names of its holders begin with. No other host has it.
    name: str
    queue: str
    levels: tuple[int, ...]
    #: By the names of handlers: what ``claim`` is told of them.
    offers: dict[str, str]
    lease_ms: int
    #: A batch takes about so long.
    quantum_s: float


class KnownRequest(msgspec.Struct, Generic[Work], frozen=True):
    """What a host knows of a request that it has worked on."""

    #: It tells the request from a later one with the same id.
    created_ms: int
    pace: Pace
    work: Work


class Invitation(NamedTuple):
    """A token to claim with."""

    token: Token
    #: Whether it was there before it was waited for.
    was_waiting: bool


class Claimed(NamedTuple, Generic[Work]):
    """A lease that was granted, its first batch, and what is known of its request."""

    lease: "HeldLease"
    grant: Grant
    known: KnownRequest[Work]


class Taker(Generic[Work]):
    """Takes tokens for a host, and claims parts with them.

    One thread takes and claims. Any thread may use the other methods.
    """

    def __init__(
        self,
        protocol: Protocol,
        host: Host,
        prepare: Callable[[str, Grant], Work],
        visit_at: Callable[[int], object],
    ) -> None:
        """``prepare`` makes what the host needs for a request of which it knows nothing yet. It may
        raise anything: then the parts that were granted fail.

        ``visit_at`` is told when a janitor has to visit the queue (ms of the server's clock).
        """
        self.protocol = protocol
        self._host = host
        self._prepare = prepare
        self._visit_at = visit_at
        self._offers = list(host.offers.values())
        self._turns = Turns(tuple(host.offers))
        self._place = WaitingPlace(protocol, host.queue, host.levels)
        self._known: OrderedDict[str, KnownRequest[Work]] = OrderedDict()
        #: By handler: the pace of the request of which parts were run last.
        self._paces: dict[str, Pace] = {}
        #: Requests whose tokens are of no use now, and until when: those that have ended, whose
        #: last tokens are left over, and those that are to be left to other hosts for a while.
        self._ended: dict[str, float] = {}
        #: Tokens of the latter. The host gives them back every second, for other hosts: the server
        #: believes them out, so nobody pushes others before the next audit.
        self._kept: dict[str, list[Token]] = {}
        self._keeping = Lock()
        self._leases = 0

    # Taking

    def next_token(
        self, block_s: float, has_room: Callable[[], bool] = lambda: False
    ) -> Invitation | None:
        """Wait for a token, up to so long. Returns None if none came that is of use here.

        ``has_room`` tells whether nothing runs at the host now: then it may also take a part that
        is to run alone, whose request it would leave to others.

        Raises:
            ServerError: the server does not answer.
            Damaged: what the queue holds cannot be read.
        """
        asked = time.monotonic()
        token = self._place.take(self._turns.order(), block_s)
        if token is None:
            self._turns.took_nothing()
            return None
        self._turns.took(token.handler, token.request_id)
        was_waiting = time.monotonic() - asked < AT_ONCE_S
        return None if self._is_left_alone(token, has_room) else Invitation(token, was_waiting)

    def claim(self, invitation: Invitation, book: LeaseBook) -> Claimed[Work] | None:
        """Claim parts with a token. Returns None if there are none.

        The parts are not run before ``HeldLease.begin``.
        """
        token, request_id = invitation.token, invitation.token.request_id
        self._leases += 1
        lease = HeldLease(self, book, f"{self._host.name}-{book.name}-{self._leases}", request_id)
        first = self._first_most() if invitation.was_waiting else 1
        grant = self._claim(lease, token.level, first)
        lease.handed_at = time.monotonic()
        if grant is None or not grant.parts:
            lease.drop()
            if grant:
                self.note_end(request_id, grant)
                self.push(request_id, grant.tokens)
            return None
        lease.handler, lease.created_ms = grant.handler, grant.created_ms
        try:
            known = self._know(request_id, grant)
        except Exception as error:  # noqa: BLE001  whatever the user's types lead to
            self._refuse(lease, grant, error)
            return None
        return Claimed(lease, grant, known)

    def _claim(self, lease: "HeldLease", level: int, first: int) -> Grant | None:
        known = self._known.get(lease.request_id)
        terms = self.terms(known.pace.most() if known else first)
        # Before the claim is sent: somebody else can end the lease if this host dies now.
        lease.book.hold(lease.holder, lease.request_id)
        try:
            return self._claim_soon(lease, terms, level, known.created_ms if known else 0)
        except RequestNewer as error:
            # Nothing was granted. The tokens of the request are dropped unclaimed for a while.
            log.warning("request %s is left alone: %s", lease.request_id, error)
            self._leave_alone(lease.request_id, NEWER_PAUSE_S)
            return None
        except Damaged as error:
            # The lease may have been granted all the same.
            log.warning("request %s is passed over: %s", lease.request_id, error)
            lease.release()
            return None
        except ProtocolError:
            return None  # the request was purged, or lost with the server's memory
        except ServerError as error:
            # The claim may have been granted, or may be so later. Its holder's name is not used
            # again.
            report_outage(error)
            lease.release()
            return None

    def _claim_soon(self, lease: "HeldLease", terms: Terms, level: int, known: int) -> Grant:
        """Claim; and again a moment later of a request that is registered and not there yet."""
        for pause_s in (*_NOT_YET_S, 0.0):
            try:
                return self.protocol.claim(
                    lease.request_id, lease.holder, terms, self._offers, level=level, known=known
                )
            except RequestUnknown:
                if not pause_s or not self._is_registered(lease.request_id):
                    raise
                time.sleep(pause_s)
        raise AssertionError("the last pause is none")

    def _is_registered(self, request_id: str) -> bool:
        return self.protocol.registered(self._host.queue, request_id) is not None

    def _first_most(self) -> int:
        """Return how many parts to ask for of a request that is new: its handler is not known."""
        if len(self._paces) < len(self._offers):
            return 1
        return min(pace.most() for pace in list(self._paces.values()))

    def _know(self, request_id: str, grant: Grant) -> KnownRequest[Work]:
        known = self._known.get(request_id)
        if known and known.created_ms == grant.created_ms:
            return known
        work = self._prepare(request_id, grant)
        known = KnownRequest(grant.created_ms, Pace(self._host.quantum_s), work)
        self._known[request_id] = known
        while len(self._known) > KNOWN_REQUESTS:
            self._known.popitem(last=False)
        return known

    def _refuse(self, lease: "HeldLease", grant: Grant, error: Exception) -> None:
        """Fail parts that cannot even be begun, rather than claim them again and again."""
        log.error("%s cannot be run on %s: %s", grant.handler, lease.request_id, error)
        for part in grant.parts:
            failure = Failure(error=type(error).__name__, message=str(error), part=part.number)
            try:
                if not lease.fail(part, PartNotDone("abandon", 0, [failure], (0, -1))):
                    break
            except LeaseGone:  # the request was purged meanwhile
                break
        lease.release()
        lease.drop()
        self.push(lease.request_id, grant.tokens)

    # What leases use

    def terms(self, most: int) -> Terms:
        """Return what to ask the server for: at most so many parts, for the time of a lease."""
        return Terms(most, lease_ms=self._host.lease_ms)

    def note_pace(self, handler: str, pace: Pace) -> None:
        """Note how long parts of a handler take at present."""
        self._paces[handler] = pace

    def push(self, request_id: str, tokens: Tokens) -> None:
        """Push the tokens that a reply asks for, and have a janitor come when the reply says so."""
        if not tokens:
            return
        # The next audit pushes what is not pushed now.
        with suppress(ServerError, Damaged):
            self.protocol.push(self._host.queue, request_id, tokens)
        if tokens.look_ms:
            self._visit_at(tokens.look_ms)

    def insist(self, call: Callable[[], T]) -> T:
        """Make a call until the server answers. Every repeat is the same call, number and all.

        Raises:
            LeaseGone: the answer is that there is nothing to be done under this lease.
        """
        outage = Outage(report_outage)
        while True:
            try:
                return call()
            except ServerError as error:
                time.sleep(outage.failed(error))
            except ProtocolError as error:
                level = logging.WARNING if isinstance(error, Damaged) else logging.INFO
                log.log(level, "dropped: %s", error)
                raise LeaseGone from None

    # Tokens that are of no use

    def note_end(self, request_id: str, grant: Grant) -> None:
        """Drop the last tokens of a request that has ended: there is nothing to claim with them."""
        if grant.word in _ENDS:
            self._leave_alone(request_id, LEFT_OVER_S)

    def leave_to_others(self, request_id: str, seconds: float) -> None:
        """Claim nothing of the request for so long, and keep the tokens that come meanwhile."""
        with self._keeping:
            self._leave_alone(request_id, seconds)
            self._kept.setdefault(request_id, [])

    def give_back_tokens(self) -> None:
        """Push the tokens that were kept: other hosts may have room for the part."""
        with self._keeping:
            now = time.monotonic()
            tokens = [token for kept in self._kept.values() for token in kept]
            alone = (each for each in self._kept if self._ended.get(each, 0.0) > now)
            self._kept = {each: [] for each in alone}
        for token in tokens:
            self.push(token.request_id, Tokens(1, list_of(token.handler, token.level)))

    def _leave_alone(self, request_id: str, seconds: float) -> None:
        if len(self._ended) >= KNOWN_REQUESTS:
            self._ended.clear()
        self._ended[request_id] = time.monotonic() + seconds

    def _is_left_alone(self, token: Token, has_room: Callable[[], bool]) -> bool:
        """Tell whether the token is of no use now. One that will be of use later is kept."""
        if token.request_id not in self._ended:
            return False
        # In one step: ``give_back_tokens`` must not forget the request in between.
        with self._keeping:
            if self._ended.get(token.request_id, 0.0) <= time.monotonic():
                return False
            if token.request_id in self._kept:
                if has_room():
                    return False
                self._kept[token.request_id].append(token)
        return True


class HeldLease:
    """A lease that a host holds: its name, its calls, and the results that are not sent yet.

    One thread at a time uses it.
    """

    def __init__(self, taker: Taker[Any], book: LeaseBook, holder: str, request_id: str) -> None:
        self._taker = taker
        self.book = book
        self.holder = holder
        self.request_id = request_id
        #: Both are known when the claim is granted.
        self.handler = ""
        self.created_ms = 0
        #: When the claim was sent, and when the batch at hand came.
        self.asked_at = self.handed_at = time.monotonic()
        #: Whether parts may be asked for after those at hand.
        self.wants_more = True
        #: Results that are not sent yet, each behind the number of its part; of how many records
        #: they are, and how many bytes they have.
        self.results: list[bytes | int] = []
        self.records = 0
        self.size = 0
        #: The part that runs, or ran last since the last ``finish``.
        self.part: Part | None = None

    def begin(self, grant: Grant) -> None:
        """Write the first batch down, and wake others before it is run."""
        self._deal(grant)
        self._taker.push(self.request_id, grant.tokens)

    def record(self, part: Part, outcome: PartDone) -> None:
        """Keep a result until ``finish`` sends it."""
        self.results += (part.number, outcome.result)
        self.records += outcome.records
        self.size += len(outcome.result)

    def finish(self, most: int, *, is_alone: bool) -> Grant:
        """Send the results, and ask for more parts; 0 ends the lease.

        A part that may kill its host is to run alone. Unless the host says that nothing runs beside
        this lease, such a part goes back to the front: whoever claims it next makes room for it.

        Raises:
            LeaseGone: the request is gone.
        """
        taker, book = self._taker, self.book
        call = book.next_call()
        results, records, terms = self.results, self.records, taker.terms(most)
        grant = taker.insist(
            lambda: taker.protocol.finish(
                self.request_id, self.holder, call, results, records, terms, self.created_ms
            )
        )
        book.answered()
        book.count_finished(self.handler, grant.counted, records)
        self.results, self.records, self.size, self.part = [], 0, 0, None
        is_suspect = any(part.is_suspect for part in grant.parts)
        if grant.word == "late" or (is_suspect and not is_alone):
            self.release()
            grant = msgspec.structs.replace(grant, parts=[])
        elif grant.parts:
            if len(grant.parts) > MOST_PARTS:
                # After a lost reply ``finish`` tells of all parts that the lease has. They may be
                # more than a book can hold, if the server forgot its last moments. The others go
                # back when the lease ends, and it ends with these.
                self.wants_more = False
                del grant.parts[MOST_PARTS:]
            self.handed_at = time.monotonic()
            self._deal(grant)
        taker.note_end(self.request_id, grant)
        taker.push(self.request_id, grant.tokens)
        return grant

    def fail(self, part: Part, outcome: PartNotDone) -> bool:
        """Tell of a part that did not succeed. Returns whether the next of the batch may be begun.

        Raises:
            LeaseGone: the request is gone.
        """
        call = self.book.next_call()
        answer = self._taker.insist(
            lambda: self._taker.protocol.fail(
                self.request_id,
                self.holder,
                call,
                part.number,
                outcome.failures,
                kind=outcome.kind,
                delay_ms=outcome.delay_ms,
                records=outcome.records,
                result=outcome.result,
                partial=outcome.partial,
            )
        )
        self.book.answered()
        self.book.count_failed(self.handler, part, outcome, answer.word)
        self._taker.push(self.request_id, answer.tokens)
        if answer.word in _GOES_ON:
            return True
        self.wants_more = False
        return False

    def hand_back(self, numbers: Sequence[int]) -> None:
        """Give back parts that were not begun, and go on with the others.

        Raises:
            LeaseGone: the request is gone.
        """
        self._answered(
            lambda call: self._taker.protocol.handback(self.request_id, self.holder, call, numbers)
        )

    def release(self) -> None:
        """End the lease, if it stands. What was not finished goes back to the front."""
        with suppress(LeaseGone):
            self._answered(
                lambda call: self._taker.protocol.release(self.request_id, self.holder, call)
            )

    def drop(self) -> None:
        """Note that nobody works under the lease any more."""
        self.book.drop()

    def _answered(self, make: Callable[[int], Outcome]) -> None:
        call = self.book.next_call()
        answer = self._taker.insist(lambda: make(call))
        self.book.answered()
        self._taker.push(self.request_id, answer.tokens)

    def _deal(self, grant: Grant) -> None:
        self.book.deal([part.number for part in grant.parts])


def report_outage(error: StreamqError) -> None:
    """Log why a call had no answer."""
    what = "passed over" if isinstance(error, Damaged) else "waiting for the server"
    log.warning("%s: %s", what, error)
