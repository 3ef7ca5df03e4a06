"""The request's slot in the model: its keys, and what each script does to them.

A script is one atomic step, as on the server. Modelled as they are: the pending list without
an owner check in XACK and XCLAIM, leases with the number of the last call, ``retry`` as a set
beside the pending list, ``left``, ``out`` (tokens believed out), and a loop bound in ``reap``.
Abstracted away: a deadline is only passed or not, a retry only due or not; payloads, results,
records, attempts, levels and rates are not there at all.

Each rule of the protocol is a switch, so that a test can leave it out.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

LOST_PART = "a part is nowhere"
STRANDED = "a part is pending under a holder without a lease"
MISPLACED = "retry and the pending list do not agree"
MISCOUNT = "left is not the number of unfinished parts"
WRONG_END = "the request is over while left is not 0, or goes on while it is"
OVER_LIMIT = "more leases than the limit"
TRESPASS = "a call changed what was no longer its holder's"
HALF_ACK = "a batch XACK answered neither all nor none"

# Where a part is. A number from 0 on is the holder it is pending under.
NEW, WAITING, RETRY, DONE, FAILED, NOWHERE = -1, -2, -3, -4, -5, -6

Parts = tuple[int, ...]


class Rule(IntEnum):
    """What makes the protocol right; a rule with two halves is two switches."""

    ONE_LOCK = 10  # 1: start or strike under one lock
    NUMBERED = 20  # 2: calls of one lease are numbered
    HEARD = 21  # a call that has heard more than is stored met a rollback: the lease is lost
    FRESH_NAMES = 30  # 3: a holder's name is fresh for every lease
    HAND_BACK_ALL = 40  # 4: ending a lease hands back everything pending
    HAND_BACK_DRY = 41  # also where a finish asked for more and there is none
    LEASE_OR_NOTHING = 50  # 5: without a lease nothing but the mercy
    RENEW_ONLY_MOVES = 60  # 6: renew cannot create a lease
    REAP_CHECKS = 70  # 7: reap checks the deadline itself
    REAP_EMPTIES = 71  # 7: and ends the lease only when nothing is pending under it
    REAP_FENCES = 72  # a lease that reap has begun with is over for its holder
    NO_IDLE_LEASE = 80  # 8: who is handed nothing has no lease
    RETRY_AGREES = 90  # 9: finish removes from retry, claim drops what XCLAIM does not return
    KEEP_ENTRY = 100  # 10: giving up is XACK without XDEL
    FORGET_TOKENS = 101  # 10: redrive of an ended request believes no token out
    COUNT_REFUSED = 110  # 11: a refused claim counts its token too
    AUDIT_LOWERS = 111  # an audit may believe fewer tokens out than before, never more


class Standing(IntEnum):
    """A lease's deadline is ahead, is passed, or its parts are being taken back."""

    LIVE = 0
    EXPIRED = 1
    REAPED = 2


class State(IntEnum):
    """Where the request is."""

    LOADING = 0
    OPEN = 1
    ENDED = 2


class Script(IntEnum):
    """The scripts a holder calls."""

    NONE = 0
    CLAIM = 1
    FINISH = 2
    FAIL = 3
    HANDBACK = 4
    RELEASE = 5


class Lease(NamedTuple):
    """One entry of ``leases``, with the number of the holder's last call."""

    holder: int
    number: int
    standing: Standing = Standing.LIVE


class Call(NamedTuple):
    """A script call: ``also`` is "and more" for finish, "for good" for fail."""

    script: Script = Script.NONE
    holder: int = -1
    number: int = 0
    parts: Parts = ()
    also: bool = False
    rest: Parts = ()  # what the caller knows it has besides; rule 4 makes it needless
    heard: int = 0  # the highest number the caller has had an answer to


class Answer(NamedTuple):
    """What a script says: whether the lease goes on, the parts handed out, tokens to push."""

    goes_on: bool
    parts: Parts = ()
    push: int = 0


class Request(NamedTuple):
    """Everything in the request's slot."""

    places: Parts
    retry: Parts = ()
    later: Parts = ()
    leases: tuple[Lease, ...] = ()
    left: int = 1
    state: State = State.LOADING
    out: int = 0
    broken: str = ""


class Terms(NamedTuple):
    """What does not change while the request runs."""

    limit: int = 1
    batch: int = 2
    cap: int = 8
    reap_bound: int = 1
    without: frozenset[Rule] = frozenset()


class Slot:
    """A working copy of a request, for the length of one script."""

    __slots__ = ("broken", "later", "leases", "left", "out", "places", "retry", "state", "terms")

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

    def saved(self) -> Request:
        """The copy as the request it has become."""
        return Request(
            tuple(self.places),
            tuple(sorted(self.retry)),
            tuple(sorted(self.later)),
            tuple(sorted(self.leases.values())),
            self.left,
            self.state,
            self.out,
            self.broken,
        )

    def has(self, rule: Rule) -> bool:
        """Whether a rule is kept."""
        return rule not in self.terms.without

    # What scripts are made of.

    def want(self) -> int:
        """How many tokens should be out: room under the limit, and work to fill it."""
        if self.state is State.ENDED:
            return 0
        work = self.places.count(WAITING) + len(self.retry) - len(self.later)
        return min(self.terms.limit - len(self.leases), work, self.terms.cap)

    def mint(self) -> int:
        """Tokens the caller is to push: those missing from what is believed out."""
        missing = max(0, self.want() - self.out)
        self.out += missing
        return missing

    def pending(self, holder: int) -> Parts:
        """XPENDING of one consumer."""
        return tuple(part for part, place in enumerate(self.places) if place == holder)

    def is_pending(self, part: int) -> bool:
        """Whether the part is in the pending list, whoever has it."""
        return self.places[part] >= 0 or self.places[part] == RETRY

    def park(self, part: int) -> None:
        """XCLAIM into ``retry`` at 0, the front."""
        self.places[part] = RETRY
        if part not in self.retry:
            self.retry.append(part)

    def take(self, part: int, place: int) -> None:
        """The part leaves ``retry``, if it was there."""
        self.places[part] = place
        if part in self.retry:
            self.retry.remove(part)
        if part in self.later:
            self.later.remove(part)

    def count(self, part: int, place: int) -> None:
        """XACK answered 1: the part is finished, and the request with its last part."""
        if self.has(Rule.RETRY_AGREES):
            self.take(part, place)
        self.places[part] = place
        self.left -= 1
        self.end_at_zero()

    def end_at_zero(self) -> None:
        """The request ends when nothing is left, and its leases with it."""
        if self.left == 0:
            self.state = State.ENDED
            self.leases.clear()

    def hand_out(self, holder: int) -> Parts:
        """XCLAIM of due retries, then XREADGROUP of new parts, up to a batch."""
        due = [part for part in self.retry if part not in self.later]
        for part in due:
            if self.places[part] != RETRY and self.has(Rule.RETRY_AGREES):
                self.retry.remove(part)
        due = [part for part in due if self.places[part] == RETRY]
        new = [part for part, place in enumerate(self.places) if place == WAITING]
        parts = [*sorted(due), *new][: self.terms.batch]
        for part in parts:
            self.take(part, holder)
        return tuple(sorted(parts))

    def end_lease(self, call: Call) -> None:
        """Hand back what is pending under the holder, and end its lease."""
        rule = Rule.HAND_BACK_DRY if call.also else Rule.HAND_BACK_ALL
        for part in self.pending(call.holder) if self.has(rule) else call.rest:
            self.park(part)
        self.leases.pop(call.holder, None)

    # The loader's and the user's scripts.

    def append(self, parts: Parts) -> int:
        """Add parts; returns the tokens to push, as all of these do."""
        for part in parts:
            self.places[part] = WAITING
        self.left += len(parts)
        return self.mint()

    def seal(self) -> int:
        """The load is complete."""
        self.state = State.OPEN
        self.left -= 1
        self.end_at_zero()
        return self.mint()

    def redrive(self, part: int) -> int:
        """A part given up runs again: XCLAIM FORCE, which needs the entry."""
        if self.has(Rule.KEEP_ENTRY):
            self.park(part)
        else:
            self.places[part] = NOWHERE
        self.left += 1
        if self.state is State.ENDED:
            self.state = State.OPEN
            if self.has(Rule.FORGET_TOKENS):
                self.out = 0
        return self.mint()

    # The janitor's scripts.

    def reap(self, holder: int) -> int:
        """Take back the parts of an expired lease, as many as one call may."""
        pending = self.pending(holder)
        for part in pending[: self.terms.reap_bound]:
            self.park(part)
        is_last = len(pending) <= self.terms.reap_bound
        if is_last or not self.has(Rule.REAP_EMPTIES):
            self.leases.pop(holder)
        elif self.has(Rule.REAP_FENCES):
            self.leases[holder] = self.leases[holder]._replace(standing=Standing.REAPED)
        return self.mint()

    def audit(self) -> int:
        """How many tokens should be in the list. What the mint then adds is not believed out:
        another's push may come before it, and then it adds nothing.
        """
        want = self.want()
        self.out = min(self.out, want) if self.has(Rule.AUDIT_LOWERS) else want
        return want

    # The holder's scripts.

    def lease(self, holder: int) -> Lease | None:
        """The holder's lease, unless it is being taken back."""
        lease = self.leases.get(holder)
        return None if lease is None or lease.standing is Standing.REAPED else lease

    def claim(self, call: Call) -> Answer:
        """A lease with its first parts, if there is room and work."""
        if call.holder in self.leases:
            return self._claim_again(call)
        granted = len(self.leases) < self.terms.limit
        parts = self.hand_out(call.holder) if granted else ()
        if granted and (parts or not self.has(Rule.NO_IDLE_LEASE)):
            self.leases[call.holder] = Lease(call.holder, call.number)
        if parts or self.has(Rule.COUNT_REFUSED):
            self.out = max(0, self.out - 1)
        return Answer(bool(parts), parts, self.mint())

    def _claim_again(self, call: Call) -> Answer:
        lease = self.lease(call.holder)
        if lease is None:
            return Answer(False)
        parts = self.pending(call.holder)
        if not self.has(Rule.NUMBERED):
            parts = parts or self.hand_out(call.holder)
        elif call.number < lease.number:
            parts = ()
        return Answer(True, parts)

    def finish(self, call: Call) -> Answer:
        """Record a batch, then hand out the next or end the lease."""
        acked = [part for part in call.parts if self.is_pending(part)]
        if len(acked) not in (0, len(call.parts)):
            self.broken = HALF_ACK
        for part in acked:
            self.count(part, DONE)
        if self.state is State.ENDED:
            return Answer(False)
        parts = self._next_batch(call)
        if parts or (call.also and not self.has(Rule.NO_IDLE_LEASE)):
            self._keep_lease(call)
        else:
            self.end_lease(call)
        return Answer(bool(parts), parts, self.mint())

    def _next_batch(self, call: Call) -> Parts:
        if not call.also:
            return ()
        # Without numbers a repeat looks like any other call: it must be given what it has.
        again = () if self.has(Rule.NUMBERED) else self.pending(call.holder)
        return again or self.hand_out(call.holder)

    def _keep_lease(self, call: Call) -> None:
        if call.holder in self.leases:
            self.leases[call.holder] = Lease(call.holder, call.number)

    def finish_lost(self, call: Call) -> Answer:
        """The one mercy: a result still counts for a part that lies in ``retry``."""
        for part in call.parts:
            if part in self.retry and self.is_pending(part):
                self.count(part, DONE)
        return Answer(False, (), self.mint())

    def fail(self, call: Call) -> Answer:
        """Retry a part later, or give it up."""
        (part,) = call.parts
        if not self.is_pending(part):
            return Answer(True)
        if call.also:
            self.count(part, FAILED)
        else:
            self.park(part)
            self.later.append(part)
        return Answer(self.state is not State.ENDED, (), self.mint())

    def handback(self, call: Call) -> Answer:
        """Parts not started go to the front; the lease goes on."""
        for part in call.parts:
            if self.is_pending(part):
                self.park(part)
        return Answer(True, (), self.mint())

    def release(self, call: Call) -> Answer:
        """Everything unfinished goes to the front, and the lease ends."""
        self.end_lease(call)
        return Answer(False, (), self.mint())


_BODIES: dict[Script, Callable[[Slot, Call], Answer]] = {
    Script.FINISH: Slot.finish,
    Script.FAIL: Slot.fail,
    Script.HANDBACK: Slot.handback,
    Script.RELEASE: Slot.release,
}


def execute(terms: Terms, request: Request, call: Call) -> tuple[Request, Answer]:
    """One call of a holder's script: the request afterwards, and what the caller is told."""
    if request.state is State.ENDED:
        return request, Answer(False)
    slot = Slot(terms, request)
    may_act = call.script is Script.CLAIM or slot.lease(call.holder) is not None
    answer = slot.claim(call) if call.script is Script.CLAIM else _numbered(slot, call)
    saved = slot.saved()
    if _trespassed(request, saved, call.holder, may_act):
        saved = saved._replace(broken=TRESPASS)
    return saved, answer


def _numbered(slot: Slot, call: Call) -> Answer:
    """Run a call of a standing lease once; without a lease, only the mercy."""
    lease = slot.lease(call.holder)
    if lease is not None and call.heard > lease.number and slot.has(Rule.HEARD):
        lease = None
    if lease is not None and slot.has(Rule.NUMBERED):
        if call.number < lease.number:
            return Answer(True)
        if call.number == lease.number:
            return Answer(True, slot.pending(call.holder))
        slot.leases[call.holder] = lease._replace(number=call.number)
    if lease is None and slot.has(Rule.LEASE_OR_NOTHING):
        return slot.finish_lost(call) if call.script is Script.FINISH else Answer(False)
    return _BODIES[call.script](slot, call)


def _trespassed(before: Request, after: Request, holder: int, may_act: bool) -> bool:
    """Whether a call touched another holder's part, or without a lease more than the mercy."""
    for was, now in zip(before.places, after.places, strict=True):
        if was in (now, holder):
            continue
        if was >= 0 or not (may_act or (was, now) == (RETRY, DONE)):
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
        if place == NOWHERE:
            return LOST_PART
        if place >= 0 and place not in holders:
            return STRANDED
        if (place == RETRY) != (part in request.retry):
            return MISPLACED
    return None


def _broken_count(request: Request) -> str | None:
    unfinished = sum(place not in (NEW, DONE, FAILED) for place in request.places)
    if request.left != unfinished + (request.state is State.LOADING):
        return MISCOUNT
    if (request.left == 0) != (request.state is State.ENDED):
        return WRONG_END
    return None
