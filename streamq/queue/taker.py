"""Takes tokens for a host of leases, and claims parts with them.

A host is a process of a pool, or another program that runs parts or passes them on. A claim that is
granted gives it a ``HeldLease`` (``queue/held_lease.py``). A ``Taker`` keeps these rules
(``lua/README.md``, section 4):

* The name of a holder is used for one claim. A claim is never sent twice: when the server did not
  answer it, the lease that it may have granted is released.
* The host's ``LeaseBook`` has the name of a holder before its claim is sent. So the parent of a
  pool can speak for a process that dies.
* A token that can be of no use is dropped without a claim.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from streamq import units
from streamq.errors import (
    Damaged,
    ProtocolError,
    RequestNewer,
    RequestUnknown,
    ServerError,
    ServerRefused,
)
from streamq.flows.shape import Shape
from streamq.model import Failure, Spec, State
from streamq.protocol.keys import token_list_of
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Grant, Terms, Token, Tokens
from streamq.queue.held_lease import HeldLease, LeaseGone, report_outage_under_lease
from streamq.queue.lease_book import LeaseBook
from streamq.queue.outcomes import PartNotDone
from streamq.queue.pace import Pace
from streamq.queue.turns import Turns
from streamq.queue.waiting_place import WaitingPlace

log = logging.getLogger(__name__)

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
#: Tokens of a request that this host cannot claim from are dropped unclaimed for 10 s.
NEWER_PAUSE_S = 10.0
#: Those of a request that cannot be read are kept for 1 s: its parts go back with tokens, and would
#: be claimed again as fast as these go.
DAMAGED_PAUSE_S = 1.0
_ENDS = frozenset({State.DONE.value, State.FAILED.value, State.CANCELLED.value})
#: A host remembers this many requests.
KNOWN_REQUESTS = 1_000


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A host of leases: its name, the queue it takes tokens from, and the handlers it can run."""

    #: The names of its holders begin with this, and those of no other host do.
    name: str
    queue: str
    levels: tuple[int, ...]
    #: By the names of handlers: what ``claim`` is told of them.
    offers: dict[str, str]
    lease_ms: int
    #: A batch is as large as takes about this time.
    quantum_s: float
    #: Whether calls are repeated until the server answers (``HeldLease``).
    is_insisting: bool = True


class KnownRequest(msgspec.Struct, Generic[Work], frozen=True):
    """What a host knows of a request that it has worked on."""

    #: A later request with the same id was created at another time.
    created_ms: int
    pace: Pace
    work: Work
    #: What the spec says of a stage of a flow; "" for a plain request.
    facts: str = ""


class Invitation(NamedTuple):
    """A token to claim with."""

    token: Token
    #: Whether it was there before it was waited for.
    was_waiting: bool


class Claimed(NamedTuple, Generic[Work]):
    """A lease that was granted, its first batch, and what is known of its request."""

    lease: HeldLease
    grant: Grant
    known: KnownRequest[Work]


class Taker(Generic[Work]):
    """Takes tokens for a host, and claims parts with them.

    One thread takes tokens. Any thread may use the other methods.
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
        #: By handler: the flow that it was last a stage of.
        self._shapes: dict[str, Shape] = {}
        #: By handler: the pace of the request of which parts were run last.
        self._paces: dict[str, Pace] = {}
        #: Requests whose tokens are of no use now, and until when: those that have ended, whose
        #: last tokens are left over, and those that are to be left to other hosts for a while.
        self._ended: dict[str, float] = {}
        #: Tokens of the latter. The host gives them back every second, for other hosts: the server
        #: believes them out, so nobody pushes others before the next audit.
        self._kept: dict[str, list[Token]] = {}
        #: Those of the latter that could not be read: a host that has room leaves them alone, too.
        self._unreadable: set[str] = set()
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

    def claim(
        self, invitation: Invitation, book: LeaseBook, terms: Callable[[int], Terms] | None = None
    ) -> Claimed[Work] | None:
        """Claim parts with a token. Returns None if there are none.

        The parts are not run before ``HeldLease.begin``. ``terms`` says what to ask the server for
        when so many parts take about a quantum; without it the host's own terms hold.

        Raises:
            ServerError: the host does not insist, and the server did not answer. The book has the
                name of the lease, which may have been granted and has to be released.
        """
        token, request_id = invitation.token, invitation.token.request_id
        with self._keeping:
            self._leases += 1
            number = self._leases
        lease = HeldLease(
            self,
            book,
            f"{self._host.name}-{book.name}-{number}",
            request_id,
            is_insisting=self._host.is_insisting,
        )
        lease.handler = token.handler
        first = self._first_most() if invitation.was_waiting else 1
        grant = self._claim(lease, token.level, first, terms)
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
        lease.facts = known.facts
        return Claimed(lease, grant, known)

    def _claim(
        self,
        lease: HeldLease,
        level: int,
        first: int,
        terms_for: Callable[[int], Terms] | None = None,
    ) -> Grant | None:
        known = self._known.get(lease.request_id)
        guess = self._shapes.get(lease.handler)
        terms = (terms_for or self.terms)(known.pace.most() if known else first)
        # Before the claim is sent: a parent can then end the lease if this host dies now.
        lease.book.hold(lease.holder, lease.request_id)
        try:
            created_ms = known.created_ms if known else 0
            return self._claim_soon(lease, terms, level, created_ms, guess)
        except (RequestNewer, ServerRefused) as error:
            # Nothing was granted: a later version made the request, or its keys are another team's.
            # Its tokens are dropped unclaimed for a while.
            log.warning("request %s is left alone: %s", lease.request_id, error)
            self._leave_alone(lease.request_id, NEWER_PAUSE_S)
            return None
        except Damaged as error:
            # The lease may have been granted all the same.
            log.warning("request %s is passed over: %s", lease.request_id, error)
            self.leave_to_others(lease.request_id, DAMAGED_PAUSE_S, also_with_room=True)
            lease.release()
            return None
        except ProtocolError:
            return None  # the request was purged, or lost with the server's memory
        except ServerError as error:
            # The claim may have been granted, or may be so later. Its holder's name is not used
            # again.
            report_outage_under_lease(error)
            lease.release()
            return None

    def _claim_soon(
        self, lease: HeldLease, terms: Terms, level: int, known: int, guess: Shape | None
    ) -> Grant:
        """Claim; and again a moment later of a request that is registered and not there yet."""
        for pause_s in (*_NOT_YET_S, 0.0):
            try:
                return self.protocol.claim(
                    lease.request_id,
                    lease.holder,
                    terms,
                    self._offers,
                    level=level,
                    known=known,
                    guess=guess,
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
        facts = self._facts_of(request_id, grant) if b'"facts"' in grant.spec else ""
        known = KnownRequest(grant.created_ms, Pace(self._host.quantum_s), work, facts)
        with self._keeping:
            self._known[request_id] = known
            while len(self._known) > KNOWN_REQUESTS:
                self._known.popitem(last=False)
        return known

    def _facts_of(self, request_id: str, grant: Grant) -> str:
        """Return what the spec says of a stage, and note which flow it is of."""
        spec = msgspec.json.decode(grant.spec, type=Spec)
        shape = Shape.read(spec.shape)
        self.protocol.learn(request_id.partition("/")[0], shape)
        self._shapes[grant.handler] = shape
        return spec.facts

    def _refuse(self, lease: HeldLease, grant: Grant, error: Exception) -> None:
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
        if look_ms := tokens.next_look_ms(self._host.queue):
            self._visit_at(look_ms)

    def keep_one(self, place: str, tokens: Tokens) -> tuple[Token | None, Tokens]:
        """Return a token for a later stage of a flow that this host can use, and the other tokens.

        Returns None and all of them if there is no such token.
        """
        own_stage = _stage_number(place)
        for at, each in enumerate(tokens.others):
            handler, _, level = each.tokens.to.rpartition(":")
            is_later = _stage_number(each.place) > own_stage
            is_ours = each.queue == self._host.queue and handler in self._host.offers
            if each.tokens.count < 1 or not is_later or not is_ours:
                continue
            if int(level) in self._host.levels:
                fewer = replace(each.tokens, count=each.tokens.count - 1)
                rest = (replace(each, tokens=fewer),) if fewer else ()
                others = (*tokens.others[:at], *rest, *tokens.others[at + 1 :])
                return Token(each.place, handler, int(level)), replace(tokens, others=others)
        return None, tokens

    # Tokens that are of no use

    def note_end(self, request_id: str, grant: Grant) -> None:
        """Drop the last tokens of a request that has ended: there is nothing to claim with them."""
        if grant.word in _ENDS:
            self._leave_alone(request_id, LEFT_OVER_S)

    def leave_to_others(
        self, request_id: str, seconds: float, *, also_with_room: bool = False
    ) -> None:
        """Claim nothing of the request for so long, and keep the tokens that come meanwhile.

        A host that has room may claim of it all the same, unless ``also_with_room`` is set.
        """
        with self._keeping:
            self._leave_alone(request_id, seconds)
            self._kept.setdefault(request_id, [])
            if also_with_room:
                self._unreadable.add(request_id)
            else:
                self._unreadable.discard(request_id)

    def give_back_tokens(self) -> None:
        """Push the tokens that were kept: other hosts may have room for the part."""
        with self._keeping:
            now = time.monotonic()
            tokens = [token for kept in self._kept.values() for token in kept]
            alone = (each for each in self._kept if self._ended.get(each, 0.0) > now)
            self._kept = {each: [] for each in alone}
        for token in tokens:
            self.push(token.request_id, Tokens(1, token_list_of(token.handler, token.level)))

    def _leave_alone(self, request_id: str, seconds: float) -> None:
        if len(self._ended) >= KNOWN_REQUESTS:
            self._ended.clear()
            self._unreadable.clear()
        self._ended[request_id] = time.monotonic() + seconds

    def _is_left_alone(self, token: Token, has_room: Callable[[], bool]) -> bool:
        """Tell whether the token is of no use now. One that will be of use later is kept."""
        if token.request_id not in self._ended:
            return False
        # In one step: ``give_back_tokens`` must not forget the request in between.
        with self._keeping:
            if self._ended.get(token.request_id, 0.0) <= time.monotonic():
                self._unreadable.discard(token.request_id)
                return False
            if token.request_id in self._kept:
                if token.request_id not in self._unreadable and has_room():
                    return False
                self._kept[token.request_id].append(token)
        return True


def _stage_number(place: str) -> int:
    return int(units.place(place)[1] or 1)
