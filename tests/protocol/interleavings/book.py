"""The reference: what must be true of one request after each call, and of each answer.

It has no clock and no tokens. Where an answer depends on the time, the server was read before
the call and after it, and one of the two moments must explain the answer.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamq.errors import (
    CollectorLost,
    LoadGap,
    ProtocolError,
    RequestEnded,
    RequestOpen,
    RequestUnknown,
)
from streamq.model import Part, Policy, Spec, State
from streamq.protocol.keys import RequestKeys, token_list_of
from streamq.protocol.replies import Audit, Collected, Grant, Opened, Outcome, Reaped, Tokens
from tests.protocol.interleavings.seen import EPOCH, LOOK_EVERY_MS, Seen
from tests.support.by_hand import HANDLER

# Where a part is, if it is not under a holder. Parts in retry are pending under `-`.
WAITING, PARKED, DONE, FAILED = "(waiting)", "-", "(done)", "(failed)"

KEEP_MS = 600_000


@dataclass(frozen=True)
class Plan:
    """A request as it is to be submitted; ``sizes`` are the records of each part."""

    sizes: tuple[int, ...] = (1, 1)
    level: int = 50
    limit: int = 2
    retries: int = 1
    poison: int = 2
    max_failures: int = -1
    max_percent: float = -1.0
    rate_ms: float = 0.0
    delay_ms: int = 0

    def policy(self, queue: str) -> Policy:
        """The same in the protocol's words."""
        return Policy(
            handler=HANDLER,
            queue=queue,
            level=self.level,
            limit=self.limit,
            poison=self.poison,
            max_failures=self.max_failures,
            max_percent=self.max_percent,
            keep_ms=KEEP_MS,
            rate_ms=self.rate_ms,
            delay_ms=self.delay_ms,
            spec=Spec(retries=self.retries),
        )

    def cursor(self, parts: int) -> str:
        """Where the load stands after so many parts."""
        return f"c{parts}" if parts else ""


@dataclass
class Tries:
    """What went wrong with a part so far."""

    errors: int = 0
    crashes: int = 0
    alone: int = 0
    run: int = 0
    records: int = 0

    def numbers(self) -> tuple[int, ...]:
        """As the server keeps it."""
        return self.errors, self.crashes, self.alone, self.run, self.records


@dataclass
class Lease:
    """A lease: the number of its last call, and the part its holder said it runs."""

    call: int = 0
    said: str | None = None


@dataclass
class Book:
    """One request."""

    id: str
    plan: Plan
    tally: Counter[str]
    seen: Seen
    state: State | None = None
    is_purged: bool = False
    paused: bool = False
    level: int = 0
    limit: int = 0
    has_rate: bool = False
    unit: str = ""
    sealed: bool = False
    place: dict[int, str] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    tries: dict[int, Tries] = field(default_factory=dict)
    partial: dict[int, bytes] = field(default_factory=dict)
    results: dict[str, bytes] = field(default_factory=dict)
    #: Parts in retry that were put off; the others are at the front.
    put_off: set[int] = field(default_factory=set)
    delivered: int = 0
    records_done: int = 0
    records_failed: int = 0
    redrives: int = 0
    committed: str = ""
    #: Holders whose request ended under them: their consumers stay.
    litter: set[str] = field(default_factory=set)
    #: Holders that were released without a lease: their claim may still come.
    gone: set[str] = field(default_factory=set)
    #: No token and no look was lost since the last audit.
    trusted: bool = True
    #: Who redrove it died on the way, and is to be run again.
    is_adrift: bool = False

    def __post_init__(self) -> None:
        self.keys = RequestKeys(self.id)
        self.level = self.plan.level
        self.limit = self.plan.limit
        self.has_rate = self.plan.rate_ms > 0

    # What follows from the rest.

    @property
    def total(self) -> int:
        """Parts appended."""
        return len(self.place)

    @property
    def done(self) -> int:
        return self._at(DONE)

    @property
    def failed(self) -> int:
        return self._at(FAILED)

    @property
    def left(self) -> int:
        """Parts not finished, plus 1 while loading."""
        return self.total - self.done - self.failed + (not self.sealed)

    @property
    def is_live(self) -> bool:
        return self.state is not None and self.state.is_live

    @property
    def is_over(self) -> bool:
        """Whether the scripts of holders answer with the state alone."""
        return self.state in (State.DONE, State.CANCELLED)

    def _at(self, place: str) -> int:
        return sum(where == place for where in self.place.values())

    def held(self, holder: str) -> list[int]:
        """Parts pending under a holder, in order."""
        return [number for number, place in self.place.items() if place == holder]

    def trouble(self, number: int) -> Tries:
        """What went wrong with a part; kept from now on."""
        return self.tries.setdefault(number, Tries())

    def outstanding(self, number: int) -> int:
        """Records of a part that have no outcome yet."""
        known = self.tries.get(number, Tries()).records
        return known or self.plan.sizes[number - 1]

    def _is_free(self, number: int) -> bool:
        """Whether a result of the part counts without a lease: nobody has it, and no earlier run
        has delivered some of its records.
        """
        tries = self.tries.get(number, Tries())
        has_delivered = tries.run > 0 and tries.records < self.plan.sizes[number - 1]
        return self.place[number] == PARKED and not has_delivered

    def _field(self, number: int) -> str:
        run = self.tries.get(number, Tries()).run
        return f"{number}.{run}" if run else str(number)

    def _note(self, event: str) -> None:
        self.tally[event] += 1

    # What scripts are made of.

    def _intolerable(self, *, at_end: bool) -> bool:
        failed, done = self.failed, self.done
        if self.unit == "records":
            failed, done = self.records_failed, self.records_done
        if 0 <= self.plan.max_failures < failed:
            return True
        share = failed * 100 > self.plan.max_percent * (failed + done)
        return self.plan.max_percent >= 0 and at_end and share

    def _count_down(self) -> bool:
        """After something was finished: whether this was the end."""
        if self.left > 0 or not self.is_live:
            return False
        self.litter |= self.leases.keys()
        self.leases.clear()
        if not self.failed:
            self.tries.clear()
            self.partial.clear()
        self.state = State.FAILED if self._intolerable(at_end=True) else State.DONE
        self._note(f"ended {self.state}")
        return True

    def _park(self, number: int, *, later: bool = False) -> None:
        self.place[number] = PARKED
        self.put_off.discard(number)
        if later:
            self.put_off.add(number)

    def _end_lease(self, holder: str) -> None:
        for number in self.held(holder):
            self._park(number)
        del self.leases[holder]

    def _give_up(self, number: int) -> None:
        self.place[number] = FAILED
        self.put_off.discard(number)
        self.trouble(number).alone = 0
        self.records_failed += self.trouble(number).records
        self._note("given up")
        self._count_down()
        if self.is_live and self._intolerable(at_end=False):
            self.state = State.FAILED
            self._note("failed early")

    def _most_crashes(self, number: int) -> int:
        """At how many crashes the part is given up: of several records, workers find the one."""
        records = self.plan.sizes[number - 1]
        if self.unit != "records" or records <= 1:
            return self.plan.poison
        return self.plan.poison * 3 + 2  # up to 16 records

    def _charge_crash(self, number: int) -> None:
        trouble = self.trouble(number)
        trouble.crashes += 1
        trouble.alone = 1
        self._note("charged")
        if trouble.crashes >= self._most_crashes(number):
            trouble.records = self.outstanding(number)
            self._note("poison")
            self._give_up(number)

    def _record(self, numbers: Sequence[int], results: dict[int, bytes]) -> None:
        for number in numbers:
            name = self._field(number)
            assert name not in self.results, f"part {number} has two results"
            self.results[name] = results[number]
            self.place[number] = DONE
            self.put_off.discard(number)
            self.tries.pop(number, None)
            self.partial.pop(number, None)

    # Handing out.

    def _hand(self, holder: str, parts: Sequence[Part], most: int, after: Seen) -> None:
        """Check that these parts could be handed out, and that these were the ones to hand out."""
        numbers = [part.number for part in parts]
        assert 0 < len(numbers) <= most
        retried = [number for number in numbers if self.place[number] == PARKED]
        new = numbers[len(retried) :]
        assert numbers[: len(retried)] == retried, "retries come before new parts"
        assert new == [*range(self.delivered + 1, self.delivered + 1 + len(new))]
        due = self.seen.due(after.now)
        assert set(retried) <= set(due), "handed out before its time"
        if not self.has_rate and due == self.seen.due(self.seen.now):
            assert numbers == self._choose(due, most)
        if any(self.tries.get(number, Tries()).alone for number in numbers):
            assert len(numbers) == 1, "a part once reaped is handed out alone"
            self._note("alone")
        for part in parts:
            self._check_part(part)
            self.place[part.number] = holder
            self.put_off.discard(part.number)
        self.delivered += len(new)

    def _choose(self, due: Sequence[int], most: int) -> list[int]:
        """What is to be handed out when no rate is set."""
        chosen: list[int] = []
        for number in due[:most]:
            if self.tries.get(number, Tries()).alone:
                return chosen or [number]
            chosen.append(number)
        new = range(self.delivered + 1, self.total + 1)
        return [*chosen, *new[: most - len(chosen)]]

    def _check_part(self, part: Part) -> None:
        number = part.number
        assert part.payload == f"{self.id} {number}".encode()
        assert part.about == str(self.plan.sizes[number - 1]).encode()
        assert part.attempt == self.tries.get(number, Tries()).errors + 1
        assert part.partial == self.partial.get(number, b"")

    def _hand_again(self, holder: str, parts: Sequence[Part]) -> None:
        assert [part.number for part in parts] == self.held(holder)
        for part in parts:
            self._check_part(part)
        self._note("repeated")

    def _nothing_to_hand(self) -> bool:
        """Whether there was nothing to hand out when the call was sent."""
        before = self.seen
        return before.blocked_until() > before.now or (
            self.delivered == self.total and not before.due(before.now)
        )

    # The loader's calls. Each method takes the answer and the request as read after it.

    def opened(self, reply: Opened) -> None:
        """The same submission, whenever it comes."""
        if self.state is None:
            assert reply == Opened(True, State.LOADING, 0, "")
            self.state = State.LOADING
            return
        assert reply == Opened(False, self.state, self.total, self.plan.cursor(self.total))

    def appended(self, reply: tuple[int, str, Tokens] | ProtocolError, first: int, n: int) -> None:
        last = first + n - 1
        if last <= self.total:
            assert reply == (
                self.total,
                self.plan.cursor(self.total),
                Tokens(0, token_list_of(HANDLER, self.level)),
            )
        elif self.state is not State.LOADING:
            assert isinstance(reply, RequestEnded)
        elif first != self.total + 1:
            assert isinstance(reply, LoadGap)
            self._note("gap")
        else:
            assert not isinstance(reply, ProtocolError)
            assert reply[:2] == (last, self.plan.cursor(last))
            self.place |= dict.fromkeys(range(first, last + 1), WAITING)

    def was_sealed(self, reply: tuple[State, Tokens] | ProtocolError, total: int) -> None:
        if self.state is not State.CANCELLED and self.total != total:
            assert isinstance(reply, LoadGap)
            return
        if self.state is not State.CANCELLED and not self.sealed:
            self.sealed = True
            if self.state is State.LOADING:
                self.state = State.OPEN
            self._count_down()
        assert not isinstance(reply, ProtocolError)
        assert reply[0] == self.state

    # The holders' calls.

    def claimed(
        self, grant: Grant, after: Seen, holder: str, level: int, most: int, unit: str | None
    ) -> None:
        """A lease was asked for. ``unit``: how the caller runs the handler, if it has it."""
        self._note(f"claim {grant.word}")
        if holder in self.leases:
            assert grant.word == "ok"
            self._hand_again(holder, grant.parts)
            return
        refusal = self._refusal(holder, level, unit)
        if refusal:
            assert grant.word == refusal
        elif grant.word == "held":
            assert self.seen.blocked_until() > self.seen.now
        else:
            assert self.seen.blocked_until() <= after.now
            self.unit = self.unit or unit or ""
        if grant.word == "ok":
            self._hand(holder, grant.parts, most, after)
            self.leases[holder] = Lease()
            return
        assert not grant.parts
        assert grant.tokens.count == 0, "a refused token is dropped, not replaced"
        if grant.word == "empty":
            assert self._nothing_to_hand()
        # Only strays come to somebody without the handler; the next audit makes up for this one.
        self.trusted &= grant.word != "handler"

    def _refusal(self, holder: str, level: int, unit: str | None) -> str:
        """Why a fresh claim must be refused whatever the time is, or nothing."""
        if not self.is_live:
            return str(self.state)
        if holder in self.gone:
            return "lost"
        if level not in (-1, self.level):
            return "level"
        if self.paused:
            return "paused"
        if unit is None:
            return "handler"
        return "limit" if len(self.leases) >= self.seen.limit(self.seen.now) else ""

    def finished(
        self,
        grant: Grant,
        after: Seen,
        holder: str,
        call: int,
        results: dict[int, bytes],
        most: int,
        created_ms: int,
    ) -> None:
        self._note(f"finish {grant.word}")
        if self.is_over:
            assert (grant.word, grant.parts, grant.counted) == (str(self.state), [], 0)
            return
        lease = self.leases.get(holder)
        numbers = self._countable(holder, results, created_ms)
        assert grant.counted == len(numbers)
        self.records_done += sum(self.outstanding(number) for number in numbers)
        self._record(numbers, results)
        if numbers and self._count_down():
            assert (grant.word, grant.parts) == (str(self.state), [])
            return
        word = "lost" if lease is None else self._go_on(lease, grant, after, holder, call, most)
        if word in ("lost", "late", "over"):
            assert not grant.parts
        assert grant.word == (word if self.is_live else str(self.state))

    def _countable(self, holder: str, results: dict[int, bytes], created_ms: int) -> list[int]:
        """Which of the results are to be counted."""
        if holder not in self.leases and created_ms != self.seen.number("created_ms"):
            self.tally["former"] += len(results)
            return []
        if holder not in self.leases:
            merciful = [number for number in results if self._is_free(number)]
            self.tally["mercy"] += len(merciful)
            return merciful
        pending = [n for n in results if self.place[n] not in (WAITING, DONE, FAILED)]
        assert all(self.place[number] == holder for number in pending), "not its part to finish"
        assert len(pending) in (0, len(results)), "a batch is counted as one"
        return pending

    def _go_on(
        self, lease: Lease, grant: Grant, after: Seen, holder: str, call: int, most: int
    ) -> str:
        if call < lease.call:
            return "late"
        if call == lease.call:
            self._hand_again(holder, grant.parts)
            return "ok"
        lease.call, lease.said = call, None
        room = len(self.leases) <= self.seen.limit(self.seen.now)
        if most > 0 and room and self.is_live and not self.paused:
            if grant.parts:
                assert self.seen.blocked_until() <= after.now
                self._hand(holder, grant.parts, most, after)
                return "ok"
            assert self._nothing_to_hand()
        self._end_lease(holder)
        return "over"

    def kept(
        self, word: str, holder: str, call: int, number: int, partial: bytes, created_ms: int
    ) -> None:
        self._note(f"keep {word}")
        lease = self.leases.get(holder)
        if self.is_over:
            assert word == str(self.state)
        elif lease is None:
            assert word == "lost"
            if created_ms != self.seen.number("created_ms"):
                self.tally["former"] += 1
            elif self._is_free(number):
                self.partial[number] = partial
        elif call < lease.call or self.place[number] != holder:
            assert word == "late"
        else:
            assert word == "ok"
            if call > lease.call:
                lease.call, self.partial[number] = call, partial

    def put_off_or_given_up(
        self,
        reply: Outcome,
        holder: str,
        call: int,
        number: int,
        kind: str,
        delay_ms: int,
        records: tuple[int, int],
        result: bytes,
        partial: bytes,
    ) -> None:
        """The answer to ``fail``."""
        self._note(f"fail {reply.word}")
        refusal = self._refusal_of(holder, call)
        if not refusal and self.place[number] != holder:
            refusal = "late"
        if refusal:
            assert reply.word == refusal
            return
        self.leases[holder] = Lease(call)
        if partial:
            self.partial[number] = partial
        spends = kind in ("retry", "abandon")
        errors = self.tries.get(number, Tries()).errors + spends
        word = "retry"
        if kind == "abandon" or errors > self.plan.retries:
            word = "failed"
            if result:
                self.results[self._field(number)] = result
            self.records_done += records[0]
            self.trouble(number).errors = errors
            self.trouble(number).records = records[1]
            self._give_up(number)
        else:
            self.trouble(number).errors = errors
            self._park(number, later=delay_ms > 0)
        state = "ended" if self.state == "failed" else str(self.state)
        assert reply.word == (word if self.is_live else state)

    def _refusal_of(self, holder: str, call: int) -> str:
        """Why a numbered call that hands out nothing must change nothing, or nothing."""
        if self.is_over:
            return str(self.state)
        if holder not in self.leases:
            return "lost"
        return "late" if call <= self.leases[holder].call else ""

    def handed_back(self, reply: Outcome, holder: str, call: int, numbers: Sequence[int]) -> None:
        self._note(f"handback {reply.word}")
        refusal = self._refusal_of(holder, call)
        if refusal:
            assert reply.word == refusal
            return
        self.leases[holder].call = call
        for number in numbers:
            if self.place[number] == holder:
                self._park(number)
        assert reply.word == ("ok" if self.is_live else str(self.state))

    def released(self, reply: Outcome, holder: str, call: int, crashed: int | None) -> None:
        self._note(f"release {reply.word}")
        refusal = self._refusal_of(holder, call)
        if refusal:
            assert reply.word == refusal
            if refusal == "lost":
                self.gone.add(holder)
            return
        is_held = crashed is not None and self.place[crashed] == holder
        self._end_lease(holder)
        if is_held and crashed is not None:
            self._charge_crash(crashed)
        assert reply.word == ("over" if self.is_live else str(self.state))

    def renewed(
        self, reply: tuple[State, bool, dict[str, bool]], running: dict[str, int | None]
    ) -> None:
        stands = {holder: holder in self.leases for holder in running}
        assert reply == (self.state, self.paused, stands)
        for holder, number in running.items():
            if holder in self.leases:
                self.leases[holder].said = "" if number is None else str(number)

    # The janitor's calls.

    def reaped(self, reply: Reaped, after: Seen) -> None:
        before = self.seen
        reaped = before.leases.keys() - after.leases.keys()
        sure, maybe = before.reapable(before.now), before.reapable(after.now)
        if reply.state is State.DONE:  # with the last part every lease ends
            reaped &= sure | maybe
        assert sure & maybe <= reaped <= sure | maybe, "reaped is who was silent for the grace"
        expired = [(before.leases[holder], holder) for holder in reaped]
        taken = 0
        for _, holder in sorted(expired):
            numbers = self.held(holder)
            said = self.leases[holder].said if holder in self.leases else None
            running = numbers if len(numbers) == 1 else [n for n in numbers if str(n) == said]
            if holder in self.leases:
                self._end_lease(holder)
            taken += len(numbers)
            for number in numbers:
                if number in running:
                    self._charge_crash(number)
                else:
                    self.trouble(number).alone = 1
        self.tally["reaped"] += len(expired)
        assert (reply.leases, reply.parts, reply.state) == (len(expired), taken, self.state)

    def audited(self, reply: Audit, after: Seen) -> None:
        assert reply.state == self.state
        assert bool(reply.purge_at) == (not self.is_live and not self.leases)
        before = self.seen
        times = (before.now, after.now)
        least, most = (len(before.overdue(now)) for now in times)
        assert least <= reply.overdue <= most
        assert reply.expired in {len(before.reapable(now)) for now in times}
        if not reply.overdue:
            assert not after.number("suspected_ms") + after.number("looked_ms")
        else:
            assert before.now <= after.number("looked_ms") <= after.now
            since = after.number("suspected_ms")
            kept = {before.suspected_since(now) for now in times}
            assert since in kept - {0} or (0 in kept and since == after.number("looked_ms"))
            look = reply.tokens.look_ms
            assert 0 < look <= after.now + LOOK_EVERY_MS, "suspects are looked at again"
        assert 0 <= reply.tokens.count <= max(0, self.limit - len(self.leases))

    def purged(self, reply: int | ProtocolError, after: Seen, *, force: bool) -> None:
        if self.is_live:
            assert isinstance(reply, RequestOpen)
            return
        purge_at = self.seen.number("finished_ms") + KEEP_MS
        if self.state is None or force or reply == 0:
            assert reply == 0
            assert force or self.state is None or purge_at <= after.now
            assert after.keys == 0, "something of a purged request remains"
            self.state, self.is_purged = None, True
            self.leases.clear()
            self.gone.clear()
            self._note("purged")
            return
        assert not isinstance(reply, ProtocolError)
        assert reply > self.seen.now

    # The user's calls.

    def was_set(
        self,
        reply: tuple[State, Tokens] | ProtocolError,
        level: int | None,
        limit: int | None,
        rate_ms: float | None,
    ) -> None:
        if not self._may_steer(reply):
            return
        self.level = self.level if level is None else level
        self.limit = self.limit if limit is None else limit
        self.has_rate = self.has_rate if rate_ms is None else rate_ms > 0

    def was_paused(self, reply: State | ProtocolError) -> None:
        if self._may_steer(reply):
            self.paused = True

    def resumed(self, reply: tuple[State, Tokens] | ProtocolError) -> None:
        if self._may_steer(reply):
            self.paused = False

    def _may_steer(self, reply: object) -> bool:
        if not self.is_live:
            assert isinstance(reply, RequestEnded)
            return False
        assert not isinstance(reply, ProtocolError)
        return True

    def cancelled(self, reply: int | ProtocolError) -> None:
        if not self.is_live and self.state is not State.CANCELLED:
            assert isinstance(reply, RequestEnded)
            return
        assert reply == self.total - self.done - self.failed
        self.state = State.CANCELLED
        self.leases.clear()
        self.tries.clear()
        self.partial.clear()
        self._note("cancelled")

    def redriven(
        self, reply: tuple[int, State, Tokens] | ProtocolError, numbers: Sequence[int]
    ) -> None:
        if self.state is State.CANCELLED:
            assert isinstance(reply, RequestEnded)
            return
        again = [number for number in numbers if self.place.get(number) == FAILED]
        for number in again:
            self._park(number)
            trouble = self.trouble(number)
            trouble.alone = int(trouble.crashes > 0)
            trouble.errors = trouble.crashes = 0
            trouble.run += 1
            self.records_failed -= trouble.records
            self._note("redriven")
        if not self.is_live and self.left > 0:
            self.state = State.OPEN if self.sealed else State.LOADING
            self.redrives += 1
            self._note("reopened")
        assert not isinstance(reply, ProtocolError)
        assert reply[:2] == (len(again), self.state)

    def collected(
        self, reply: Collected | ProtocolError, next_number: int, commit: tuple[str, str]
    ) -> None:
        """Results were asked for; those of the same call to forget are dropped here too."""
        expected, new = commit
        if expected != new and self.committed not in (expected, new):
            assert isinstance(reply, CollectorLost)
            self._note("fenced")
            return
        assert not isinstance(reply, ProtocolError)
        self.committed = new if expected != new else self.committed
        assert reply.state == self.state
        assert reply.left == len(self.results)
        for number, result in reply.results:
            assert next_number <= number < reply.next
            assert result == self.results[str(number)]
        self.tally["collected"] += len(reply.results)

    def forgotten(self, reply: object) -> bool:
        """Whether the answer is that there is no such request; then that must be so."""
        if isinstance(reply, RequestUnknown):
            assert self.state is None
        return isinstance(reply, RequestUnknown)

    # The server against the book.

    def compare(self, seen: Seen) -> None:
        """Check the invariants of the request as it was read just now."""
        self._compare_leases(seen)
        if self.state is None:
            assert seen.keys == 0, "nothing of a request that is not there"
        else:
            self._compare_counts(seen)
            self._compare_results(seen)
            if self.state is State.CANCELLED:
                assert seen.left is None
                assert not seen.entries
                assert not seen.retry
            else:
                self._compare_parts(seen)
        self.seen = seen

    def _compare_counts(self, seen: Seen) -> None:
        expected = {
            "state": str(self.state),
            "sealed": str(int(self.sealed)),
            "cursor": self.plan.cursor(self.total),
            "committed": self.committed,
        }
        assert {
            name: seen.meta.get(name, "0" if name == "sealed" else "") for name in expected
        } == (expected)
        numbers = {
            "total": self.total,
            "delivered": self.delivered,
            "done": self.done,
            "failed": self.failed,
            "records": sum(self.plan.sizes[: self.total]),
            "records_done": self.records_done,
            "records_failed": self.records_failed,
            "redrives": self.redrives,
            "paused": self.paused,
            "level": self.level,
            "limit": self.limit,
        }
        assert {name: int(seen.number(name)) for name in numbers} == numbers
        assert (seen.number("finished_ms") == 0) == self.is_live
        if self.state is not State.CANCELLED:
            assert seen.left == self.left
        if self.state in (State.LOADING, State.OPEN, State.DONE):
            assert self.is_live == (self.left > 0), "it ends when nothing is left, and only then"

    def _compare_leases(self, seen: Seen) -> None:
        grown = seen.leases.keys() - self.seen.leases.keys()
        if grown:
            assert len(self.seen.leases) < self.seen.number("limit"), "leases grew at the limit"
            assert len(grown) == 1
        assert seen.leases.keys() == self.leases.keys()
        assert seen.gone == self.gone
        holders = {holder: str(lease.call) for holder, lease in self.leases.items()}
        said = {f"{h}#": lease.said for h, lease in self.leases.items() if lease.said is not None}
        assert seen.holders == holders | said

    def _compare_results(self, seen: Seen) -> None:
        assert seen.results == self.results
        assert seen.failed.keys() == {n for n, place in self.place.items() if place == FAILED}
        assert seen.partial == self.partial
        assert seen.tries == {n: tries.numbers() for n, tries in self.tries.items()}

    def _compare_parts(self, seen: Seen) -> None:
        """Invariant 1, from what the server has alone, and then against the book."""
        for number, place in self.place.items():
            found = _places(seen, number, self.delivered)
            assert len(found) == 1, f"part {number} is in {found}"
            assert found == {place}, f"part {number} is in {found}, not in {place}"
        assert set(seen.pending.values()) <= seen.leases.keys() | {PARKED}
        gone = self.state is State.DONE and not self.failed
        assert gone or seen.last == self.delivered
        for number, score in seen.retry.items():
            assert score > EPOCH if number in self.put_off else score == number
        assert seen.consumers <= self.leases.keys() | self.litter | {PARKED}


def _places(seen: Seen, number: int, delivered: int) -> set[str]:
    """Every place in which the server has a part."""
    found = set()
    has_entry = number in seen.entries
    if number > delivered and has_entry:
        found.add(WAITING)
    if number in seen.pending:
        found.add(seen.pending[number])
    if number in seen.retry:
        found.add(PARKED)
    if number in seen.failed and has_entry:
        found.add(FAILED)
    if not has_entry:
        found.add(DONE)
    return found
