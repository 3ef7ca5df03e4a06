"""The request's slot in the model: its keys, and what each script does to them.

A script is one atomic step, as on the server. Modelled as they are: a pending list without
an owner check in XACK and XCLAIM, leases with the number of the last call, ``retry`` as a set
beside the pending list, ``left``, and ``out`` (tokens believed out). Abstracted away: a
deadline is ahead, passed, or passed for the grace, a retry due or not; payloads, results, records,
attempts, levels and rates are not there at all. A script may check more than it does here.

Each rule of the protocol is a switch, so that a test can leave it out.
"""

from collections.abc import Callable
from enum import IntEnum, StrEnum
from typing import NamedTuple

LOST_PART = "a part is nowhere"
STRANDED = "a part is pending under a holder without a lease"
MISPLACED = "retry and the pending list do not agree"
MISCOUNT = "left is not the number of unfinished parts"
WRONG_END = "the request is over while parts are left, or goes on while none is"
OVER_LIMIT = "more leases than the limit"
TRESPASS = "a call changed what was no longer its holder's"
HALF_ACK = "a batch XACK answered neither all nor none"
IN_VAIN = "a lease was granted to a holder that was released before"
FORMER = "a result of an earlier request of the same id was counted"

Parts = tuple[int, ...]


class Rule(StrEnum):
    """What makes the protocol right: the design's number, and which half of that rule.

    Those marked "added" are not in the design's list. Without them the model breaks as well.
    """

    ONE_LOCK = "1"  # a part is started or struck, under one lock
    NUMBERED = "2"  # calls of one lease are numbered
    REPEAT_RENEWS = "2-repeat"  # added: a repeat moves the deadline, for it lets its holder go on
    FRESH_NAMES = "3"  # no holder's name is used for a second lease
    CLAIM_ONCE = "3-once"  # added: a claim is not sent twice; unanswered, its name is released
    RELEASE_LASTS = "3-over"  # added: a claim that comes after its own release is refused
    HAND_BACK_ALL = "4"  # who ends a lease hands back everything pending under it
    HAND_BACK_DRY = "4-dry"  # added: also finish that asked for more and got nothing
    LEASE_OR_NOTHING = "5"  # without a lease, only the mercy
    SAME_REQUEST = "5-same"  # added: no mercy for results of an earlier request of the same id
    RECOUNT = "5-recount"  # added: a batch XACK answered in part (a rollback) counts that part
    RENEW_ONLY_MOVES = "6"  # renew creates no lease
    REAP_CHECKS = "7-deadline"  # reap checks the deadline itself
    REAP_EMPTIES = "7-pending"  # reap ends a lease only when nothing is pending under it
    REAP_WHOLE = "7-whole"  # added: reap takes all parts of a lease in one call
    GRACE = "7-grace"  # added: reap waits for a grace after leases were seen expired
    GAP = "7-gap"  # added: an outage starts the grace anew
    OWN_GRACE = "7-own"  # added: each lease has a grace of its own
    NO_IDLE_LEASE = "8"  # who is handed nothing has no lease
    RETRY_AGREES = "9"  # what is finished leaves retry
    KEEP_ENTRY = "10-entry"  # giving up is XACK without XDEL
    FORGET_TOKENS = "10-tokens"  # redrive of an ended request believes no token out
    COUNT_REFUSED = "11"  # a refused claim uses up its token too
    AUDIT_LOWERS = "11-audit"  # added: an audit believes fewer tokens out, or as many, never more


class Place(IntEnum):
    """Where a part is. A number from 0 on is the holder it is pending under."""

    NEW = -1  # not appended yet
    WAITING = -2
    RETRY = -3
    DONE = -4
    FAILED = -5
    NOWHERE = -6


class Standing(IntEnum):
    """A lease's deadline is ahead, or passed, or passed for longer than the grace."""

    LIVE = 0
    EXPIRED = 1
    OLD = 2


class Suspicion(IntEnum):
    """What is known of leases past their deadline."""

    NONE = 0
    BEGUN = 1  # they were seen
    RIPE = 2  # they were seen for the whole grace


class State(IntEnum):
    """Where the request is."""

    LOADING = 0
    OPEN = 1
    ENDED = 2


class Script(IntEnum):
    """What a holder calls; GIVE_UP is ``fail`` after the last attempt."""

    NONE = 0
    CLAIM = 1
    FINISH = 2
    FAIL = 3
    GIVE_UP = 4
    HANDBACK = 5
    RELEASE = 6


class Lease(NamedTuple):
    """One entry of ``leases``, with the number of the holder's last call."""

    holder: int
    number: int
    standing: Standing = Standing.LIVE


class Call(NamedTuple):
    """A script call of a holder."""

    script: Script = Script.NONE
    holder: int = -1
    number: int = 0
    parts: Parts = ()
    more: bool = False  # finish: hand out the next batch
    rest: Parts = ()  # what else the caller knows it has; rule 4 makes it needless
    made: int = 0  # which of the requests of this id its parts are of


class Answer(NamedTuple):
    """What a script says: whether the lease goes on, the parts handed out, tokens to push."""

    goes_on: bool
    parts: Parts = ()
    push: int = 0


class Request(NamedTuple):
    """Everything in the request's slot."""

    places: Parts
    retry: Parts = ()
    later: Parts = ()  # those in retry that are not due
    leases: tuple[Lease, ...] = ()
    left: int = 1
    state: State = State.LOADING
    out: int = 0
    broken: str = ""
    suspicion: Suspicion = Suspicion.NONE
    gone: Parts = ()  # holders that were released without a lease
    made: int = 0  # how many requests of this id there were before


class Terms(NamedTuple):
    """What does not change while the request runs."""

    limit: int = 1
    batch: int = 2
    cap: int = 8
    without: frozenset[Rule] = frozenset()


class Slot:
    """A working copy of a request, for the length of one script."""

    __slots__ = (
        *("broken", "gone", "later", "leases", "left", "made", "out", "places", "retry", "state"),
        *("suspicion", "terms"),
    )

    def __init__(self, terms: Terms, request: Request) -> None:
        self.terms = terms
        self.places = list(request.places)
        self.retry = list(request.retry)
        self.later = list(request.later)
        self.leases = {lease.holder: lease for lease in request.leases}
        self.left = request.left
        self.state = request.state
        self.out = request.out
        self.broken = request.broken
        self.suspicion = request.suspicion
        self.gone = list(request.gone)
        self.made = request.made

    def saved(self) -> Request:
        """The request as the script leaves it."""
        return Request(
            tuple(self.places),
            tuple(sorted(self.retry)),
            tuple(sorted(self.later)),
            tuple(sorted(self.leases.values())),
            self.left,
            self.state,
            self.out,
            self.broken,
            self.suspicion,
            tuple(sorted(self.gone)),
            self.made,
        )

    def has(self, rule: Rule) -> bool:
        """Whether a rule is kept."""
        return rule not in self.terms.without

    # What scripts are made of.

    def mint(self) -> int:
        """Tokens the caller is to push: those missing from what is believed out."""
        missing = max(0, want(self.terms, self) - self.out)
        self.out += missing
        return missing

    def pending(self, holder: int) -> Parts:
        """XPENDING of one consumer."""
        return tuple(part for part, place in enumerate(self.places) if place == holder)

    def is_pending(self, part: int) -> bool:
        """Whether the part is in the pending list, whoever has it."""
        return self.places[part] >= 0 or self.places[part] == Place.RETRY

    def park(self, part: int) -> None:
        """XCLAIM into ``retry`` at 0, the front."""
        self.places[part] = Place.RETRY
        if part not in self.retry:
            self.retry.append(part)

    def unpark(self, part: int) -> None:
        """ZREM from ``retry``."""
        for parts in (self.retry, self.later):
            if part in parts:
                parts.remove(part)

    def count(self, part: int, place: Place) -> None:
        """XACK answered 1: the part is finished, and the request with its last part."""
        if self.has(Rule.RETRY_AGREES):
            self.unpark(part)
        self.places[part] = place
        self.left -= 1
        self.end_at_zero()

    def end_at_zero(self) -> None:
        """The request ends when nothing is left, and every lease with it."""
        if self.left == 0:
            self.state = State.ENDED
            self.leases.clear()

    def hand_out(self, holder: int) -> Parts:
        """XCLAIM of due retries, then XREADGROUP of new parts, up to a batch."""
        due = [part for part in self.retry if part not in self.later]
        for part in due:
            if self.places[part] != Place.RETRY and self.has(Rule.RETRY_AGREES):
                self.unpark(part)
        first = sorted(part for part in due if self.places[part] == Place.RETRY)
        new = [part for part, place in enumerate(self.places) if place == Place.WAITING]
        parts = [*first, *new][: self.terms.batch]
        for part in parts:
            self.unpark(part)
            self.places[part] = holder
        return tuple(parts)

    def end_lease(self, call: Call) -> None:
        """Hand back what is pending under the holder, and end its lease."""
        rule = Rule.HAND_BACK_DRY if call.more else Rule.HAND_BACK_ALL
        for part in self.pending(call.holder) if self.has(rule) else call.rest:
            self.park(part)
        self.leases.pop(call.holder, None)

    # The loader's and the user's scripts. Each returns the tokens to push.

    def append(self, parts: Parts) -> int:
        """Add a chunk of parts."""
        for part in parts:
            self.places[part] = Place.WAITING
        self.left += len(parts)
        return self.mint()

    def seal(self) -> int:
        """The load is complete."""
        self.state = State.OPEN
        self.left -= 1
        self.end_at_zero()
        return self.mint()

    def redrive(self, part: int) -> int:
        """A part given up runs again: XCLAIM FORCE, which needs the entry to be there."""
        if self.has(Rule.KEEP_ENTRY):
            self.park(part)
        else:
            self.places[part] = Place.NOWHERE
        self.left += 1
        if self.state is State.ENDED:
            self.state = State.OPEN
            self.out = 0 if self.has(Rule.FORGET_TOKENS) else self.out
        return self.mint()

    # The janitor's scripts.

    def reap(self, holder: int) -> int:
        """Take back the parts of an expired lease, and end it; tokens to push."""
        pending = self.pending(holder)
        bounded = not (self.has(Rule.REAP_WHOLE) and self.has(Rule.REAP_EMPTIES))
        for part in pending[:1] if bounded else pending:
            self.park(part)
        if not self.pending(holder) or not self.has(Rule.REAP_EMPTIES):
            self.leases.pop(holder)
        return self.mint()

    def audit(self) -> int:
        """How many tokens should be in the list.

        What the mint will add is not believed out: when somebody's push comes first, it adds
        nothing, and both would be believed.
        """
        wanted = want(self.terms, self)
        self.out = min(self.out, wanted) if self.has(Rule.AUDIT_LOWERS) else wanted
        return wanted

    # The holder's scripts.

    def claim(self, call: Call) -> Answer:
        """A lease with its first parts, if there is room and work."""
        lease = self.leases.get(call.holder)
        if lease is not None:
            return self._claim_again(call, lease)
        is_gone = call.holder in self.gone
        has_room = len(self.leases) < self.terms.limit
        has_room = has_room and not (is_gone and self.has(Rule.RELEASE_LASTS))
        parts = self.hand_out(call.holder) if has_room else ()
        if parts or (has_room and not self.has(Rule.NO_IDLE_LEASE)):
            self.leases[call.holder] = Lease(call.holder, call.number)
            self.broken = IN_VAIN if is_gone else self.broken
        if parts or self.has(Rule.COUNT_REFUSED):
            self.out = max(0, self.out - 1)
        return Answer(bool(parts), parts, self.mint())

    def _claim_again(self, call: Call, lease: Lease) -> Answer:
        if self.has(Rule.NUMBERED):
            return self.repeated(call, lease)
        return Answer(True, self.pending(call.holder) or self.hand_out(call.holder))

    def repeated(self, call: Call, lease: Lease) -> Answer:
        """Acknowledge a call that was executed before; the last one is told what it got."""
        if call.number < lease.number:
            return Answer(goes_on=True)
        if self.has(Rule.REPEAT_RENEWS):
            self.leases[call.holder] = lease._replace(standing=Standing.LIVE)
        return Answer(True, self.pending(call.holder))

    def finish(self, call: Call) -> Answer:
        """Record a batch, then hand out the next or end the lease."""
        acked = [part for part in call.parts if self.is_pending(part)]
        if len(acked) not in (0, len(call.parts)) and not self.has(Rule.RECOUNT):
            self.broken = HALF_ACK
        for part in acked:
            self.count(part, Place.DONE)
        if self.state is State.ENDED:
            return Answer(goes_on=False)
        parts = self._next_batch(call)
        if parts or (call.more and not self.has(Rule.NO_IDLE_LEASE)):
            self._keep_lease(call)
        else:
            self.end_lease(call)
        return Answer(bool(parts), parts, self.mint())

    def _next_batch(self, call: Call) -> Parts:
        if not call.more:
            return ()
        # Without numbers a repeat looks like any other call: it must be given what it has.
        again = () if self.has(Rule.NUMBERED) else self.pending(call.holder)
        return again or self.hand_out(call.holder)

    def _keep_lease(self, call: Call) -> None:
        if call.holder in self.leases:
            self.leases[call.holder] = Lease(call.holder, call.number)

    def finish_lost(self, call: Call) -> Answer:
        """The one mercy: a result still counts for a part that lies in ``retry``."""
        if call.made != self.made and self.has(Rule.SAME_REQUEST):
            return Answer(False, (), self.mint())
        for part in call.parts:
            if part in self.retry and self.is_pending(part):
                self.count(part, Place.DONE)
                self.broken = FORMER if call.made != self.made else self.broken
        return Answer(False, (), self.mint())

    def fail(self, call: Call) -> Answer:
        """The part is to run again later."""
        for part in filter(self.is_pending, call.parts):
            self.park(part)
            self.later.append(part)
        return Answer(True, (), self.mint())

    def give_up(self, call: Call) -> Answer:
        """The part has failed for good, and counts as finished."""
        for part in filter(self.is_pending, call.parts):
            self.count(part, Place.FAILED)
        return Answer(self.state is not State.ENDED, (), self.mint())

    def handback(self, call: Call) -> Answer:
        """Parts not started go to the front; the lease goes on."""
        for part in filter(self.is_pending, call.parts):
            self.park(part)
        return Answer(True, (), self.mint())

    def release(self, call: Call) -> Answer:
        """Everything unfinished goes to the front, and the lease ends."""
        self.end_lease(call)
        return Answer(False, (), self.mint())


_BODIES: dict[Script, Callable[[Slot, Call], Answer]] = {
    Script.FINISH: Slot.finish,
    Script.FAIL: Slot.fail,
    Script.GIVE_UP: Slot.give_up,
    Script.HANDBACK: Slot.handback,
    Script.RELEASE: Slot.release,
}


def want(terms: Terms, request: Request | Slot) -> int:
    """How many tokens should be out: room under the limit, and work to fill it."""
    if request.state is State.ENDED:
        return 0
    work = request.places.count(Place.WAITING) + len(request.retry) - len(request.later)
    return min(terms.limit - len(request.leases), work, terms.cap)


def execute(terms: Terms, request: Request, call: Call) -> tuple[Request, Answer]:
    """One call of a holder's script: the request afterwards, and what the caller is told."""
    if request.state is State.ENDED:
        return request, Answer(goes_on=False)
    slot = Slot(terms, request)
    may_act = call.script is Script.CLAIM or call.holder in slot.leases
    answer = slot.claim(call) if call.script is Script.CLAIM else _once(slot, call)
    saved = slot.saved()
    if _trespassed(request, saved, call.holder, may_act):
        saved = saved._replace(broken=TRESPASS)
    return saved, answer


def _once(slot: Slot, call: Call) -> Answer:
    """Run a call of a lease, unless it ran before; without a lease, only the mercy."""
    lease = slot.leases.get(call.holder)
    if lease is None and call.script is Script.RELEASE:
        slot.gone.append(call.holder)
    if lease is None and slot.has(Rule.LEASE_OR_NOTHING):
        return slot.finish_lost(call) if call.script is Script.FINISH else Answer(goes_on=False)
    if lease is not None and slot.has(Rule.NUMBERED):
        if call.number <= lease.number:
            return slot.repeated(call, lease)
        slot.leases[call.holder] = lease._replace(number=call.number)
    return _BODIES[call.script](slot, call)


def _trespassed(before: Request, after: Request, holder: int, may_act: bool) -> bool:
    """Whether a call touched another holder's part, or without a lease more than the mercy."""
    for was, now in zip(before.places, after.places, strict=True):
        if was in (now, holder):
            continue
        if was >= 0 or not (may_act or (was, now) == (Place.RETRY, Place.DONE)):
            return True
    return False


def broken(terms: Terms, request: Request) -> str | None:
    """The invariant of the request's slot that does not hold."""
    if request.broken:
        return request.broken
    if len(request.leases) > terms.limit:
        return OVER_LIMIT
    return _broken_places(request) or _broken_count(request)


def _broken_places(request: Request) -> str | None:
    holders = [lease.holder for lease in request.leases]
    for part, place in enumerate(request.places):
        if place == Place.NOWHERE:
            return LOST_PART
        if place >= 0 and place not in holders:
            return STRANDED
        if (place == Place.RETRY) != (part in request.retry):
            return MISPLACED
    return None


def _broken_count(request: Request) -> str | None:
    finished = (Place.NEW, Place.DONE, Place.FAILED)
    unfinished = sum(place not in finished for place in request.places)
    if request.left != unfinished + (request.state is State.LOADING):
        return MISCOUNT
    if (request.left == 0) != (request.state is State.ENDED):
        return WRONG_END
    return None
