"""The rules of a lease on the client's side, with a host that has no process and no slot table."""

from collections.abc import Sequence
from typing import Any

import pytest

from streamq.errors import Damaged, ServerUnreachable
from streamq.model import Failure, Part
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Grant, Tokens
from streamq.queue.held_lease import HeldLease, LeaseGone
from streamq.queue.outcomes import PartDone, PartNotDone
from streamq.queue.taker import Claimed, Host, Invitation, Taker
from tests.conftest import ANY_KIND
from tests.support.by_hand import CAN_RUN, HANDLER, RequestByHand

#: Calls whose place among the writes of the book is noted.
CALLS = ("claim", "finish", "fail", "keep", "handback", "release", "push")


class Diary:
    """A book in the memory of the test, which notes the order of everything."""

    name = "place"

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.counts: list[tuple[Any, ...]] = []
        self._calls = 0

    @property
    def order(self) -> list[str]:
        """What happened, in words."""
        return [note[0] for note in self.notes]

    def hold(self, holder: str, request_id: str) -> None:
        self._calls = 0
        self.notes.append(("hold", holder, request_id))

    def deal(self, numbers: Sequence[int]) -> None:
        self.notes.append(("deal", list(numbers)))

    def next_call(self) -> int:
        return (self._calls + 1) * 10

    def answered(self) -> None:
        self._calls += 1
        self.notes.append(("answered",))

    def drop(self) -> None:
        self.notes.append(("drop",))

    def count_finished(self, handler: str, parts: int, records: int) -> None:
        self.counts.append(("finished", handler, parts, records))

    def count_failed(self, handler: str, part: Part, outcome: PartNotDone, word: str) -> None:
        self.counts.append(("failed", handler, part.number, word))


class Gate:
    """A host of one place."""

    def __init__(self, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = driver
        self.book = Diary()
        self.visits: list[int] = []
        self.prepared: list[str] = []
        self.protocol = Protocol(driver.protocol.connection)
        for name in CALLS:
            monkeypatch.setattr(self.protocol, name, self._noted(name))
        host = Host(
            name="gate",
            queue=driver.queue,
            levels=tuple(range(100)),
            offers={HANDLER: CAN_RUN[0]},
            lease_ms=20_000,
            quantum_s=0.05,
        )
        self.taker: Taker[str] = Taker(self.protocol, host, self._prepare, self.visits.append)
        #: Calls that are made and whose answers are lost, by name.
        self.lost: list[str] = []

    def _noted(self, name: str) -> Any:
        make = getattr(self.protocol, name)

        def call(*words: Any, **options: Any) -> Any:
            self.book.notes.append((name, *words))
            answer = make(*words, **options)
            if name in self.lost:
                self.lost.remove(name)
                raise ServerUnreachable("the answer is lost")
            return answer

        return call

    def _prepare(self, request_id: str, grant: Grant) -> str:
        self.prepared.append(request_id)
        return grant.handler

    def push(self) -> None:
        """Let a token of the request be there."""
        self.driver.protocol.push(self.driver.queue, self.driver.id, Tokens(1, f"{HANDLER}:50"))

    def invited(self) -> Invitation:
        """Take a token."""
        self.push()
        invitation = self.taker.next_token(5)
        assert invitation is not None
        return invitation

    def claim(self) -> Claimed[str]:
        """Take a token, claim with it, and begin."""
        claimed = self.taker.claim(self.invited(), self.book)
        assert claimed is not None
        claimed.lease.begin(claimed.grant)
        return claimed


@pytest.fixture
def gate(driver: RequestByHand, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(driver, monkeypatch)


def given_up(number: int) -> PartNotDone:
    return PartNotDone("abandon", 0, [Failure(error="No", message="no", part=number)], (0, -1))


@ANY_KIND
class TestOrder:
    def test_holder_is_written_before_the_claim_and_parts_before_tokens_are_pushed(
        self, gate: Gate, driver: RequestByHand
    ) -> None:
        driver.load(5, limit=3)
        driver.set_meta(out=0)

        lease, grant, known = gate.claim()

        assert gate.book.order == ["hold", "claim", "deal", "push"]
        assert gate.book.notes[0] == ("hold", lease.holder, driver.id)
        assert lease.holder == "gate-place-1"
        assert gate.book.notes[2] == ("deal", [part.number for part in grant.parts])
        assert (known.work, gate.prepared) == (HANDLER, [driver.id])

    def test_next_batch_is_written_before_its_tokens_are_pushed(
        self, gate: Gate, driver: RequestByHand
    ) -> None:
        driver.load(4, limit=3)
        lease, grant, _ = gate.claim()
        lease.record(grant.parts[0], PartDone(b"r", 1))
        gate.book.notes.clear()
        driver.set_meta(out=0)

        grant = lease.finish(2, is_alone=False)

        assert [part.number for part in grant.parts] == [2, 3]
        assert gate.book.order == ["finish", "answered", "deal", "push"]
        assert (lease.results, lease.records, lease.size, lease.part) == ([], 0, 0, None)
        assert gate.book.counts == [("finished", HANDLER, 1, 1)]

    def test_request_that_is_known_is_prepared_once(
        self, gate: Gate, driver: RequestByHand
    ) -> None:
        driver.load(2)
        for _ in range(2):
            lease, grant, known = gate.claim()
            lease.record(grant.parts[0], PartDone(b"r", 1))
            lease.finish(0, is_alone=False)

        assert (gate.prepared, known.work) == ([driver.id], HANDLER)


@ANY_KIND
class TestAnswersThatAreLost:
    def test_claim_is_not_sent_again_and_its_lease_is_released(
        self, gate: Gate, driver: RequestByHand
    ) -> None:
        driver.load(3)
        gate.lost = ["claim"]

        assert gate.taker.claim(gate.invited(), gate.book) is None

        assert gate.book.order == ["hold", "claim", "release", "answered", "push", "drop"]
        assert driver.leases() == {}
        assert set(driver.retry()) == {1}
        assert gate.claim().lease.holder == "gate-place-2", "no name is used twice"

    def test_finish_is_repeated_with_its_number_and_counted_once(
        self, gate: Gate, driver: RequestByHand
    ) -> None:
        driver.load(3)
        lease, grant, _ = gate.claim()
        lease.record(grant.parts[0], PartDone(b"r", 1))
        gate.lost = ["finish"]
        gate.book.notes.clear()

        grant = lease.finish(1, is_alone=False)

        calls = [note[3] for note in gate.book.notes if note[0] == "finish"]
        assert calls == [10, 10]
        assert [part.number for part in grant.parts] == [2]
        assert driver.meta("done") == "1"
        lease.record(grant.parts[0], PartDone(b"r", 1))
        lease.finish(0, is_alone=False)
        calls = [note[3] for note in gate.book.notes if note[0] == "finish"]
        assert calls == [10, 10, 20]

    def test_lease_of_a_request_that_is_purged_is_gone(
        self, gate: Gate, driver: RequestByHand
    ) -> None:
        driver.load(3)
        lease, grant, _ = gate.claim()
        driver.redis.delete(driver.keys.meta)

        with pytest.raises(LeaseGone):
            lease.fail(grant.parts[0], given_up(1))

        lease.release()
        assert "answered" not in gate.book.order


@ANY_KIND
class TestLease:
    def test_parts_that_are_handed_back_run_elsewhere_and_the_lease_goes_on(
        self, gate: Gate, driver: RequestByHand
    ) -> None:
        driver.load(3)
        lease, grant, _ = gate.claim()
        lease.record(grant.parts[0], PartDone(b"r", 1))
        grant = lease.finish(2, is_alone=False)

        lease.hand_back([3])

        assert set(driver.retry()) == {3}
        assert set(driver.leases()) == {lease.holder}
        lease.record(grant.parts[0], PartDone(b"r", 1))
        lease.finish(0, is_alone=False)
        assert (driver.meta("done"), driver.leases()) == ("2", {})

    def test_nothing_more_is_wanted_after_one_failure_too_many(
        self, gate: Gate, driver: RequestByHand
    ) -> None:
        driver.load(3, max_failures=0)
        lease, grant, _ = gate.claim()

        assert not lease.fail(grant.parts[0], given_up(1))

        assert not lease.wants_more
        assert gate.book.counts == [("failed", HANDLER, 1, "ended")]

    @pytest.mark.parametrize("is_alone", [False, True])
    def test_part_that_is_to_run_alone_goes_back_where_it_is_not(
        self, gate: Gate, driver: RequestByHand, is_alone: bool
    ) -> None:
        driver.load(2)
        other, _ = driver.claim()
        lease, grant, _ = gate.claim()
        driver.release(other)
        driver.redis.hset(driver.keys.tries, "1", "0 1 1 0 0")
        lease.record(grant.parts[0], PartDone(b"r", 1))

        grant = lease.finish(1, is_alone=is_alone)

        assert [part.number for part in grant.parts] == ([1] if is_alone else [])
        assert set(driver.leases()) == ({lease.holder} if is_alone else set())

    def test_parts_that_cannot_be_prepared_fail(
        self, gate: Gate, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver.load(1)

        def refuse(*_: Any) -> str:
            raise TypeError("no such type")

        monkeypatch.setattr(gate.taker, "_prepare", refuse)

        assert gate.taker.claim(gate.invited(), gate.book) is None

        assert (driver.meta("failed"), driver.leases()) == ("1", {})
        assert gate.book.order == [
            "hold",
            "claim",
            "fail",
            "answered",
            "release",
            "answered",
            "drop",
        ]


@ANY_KIND
class TestTokensThatAreOfNoUse:
    def test_token_of_a_request_that_has_just_ended_is_dropped(
        self, gate: Gate, driver: RequestByHand
    ) -> None:
        driver.load(1)
        lease, grant, _ = gate.claim()
        lease.record(grant.parts[0], PartDone(b"r", 1))
        lease.finish(1, is_alone=False)
        gate.push()

        assert gate.taker.next_token(5) is None
        gate.taker._ended[driver.id] = 0.0
        assert gate.invited().token.request_id == driver.id

    def test_request_that_cannot_be_read_is_not_claimed_again_at_once(
        self, gate: Gate, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its part goes back with a token, and would be claimed as fast as that goes."""
        claim = gate.protocol.claim

        def unreadable(*words: Any, **options: Any) -> Grant:
            claim(*words, **options)
            raise Damaged("what claim was told cannot be read")

        driver.load(1)
        monkeypatch.setattr(gate.protocol, "claim", unreadable)
        assert gate.taker.claim(gate.invited(), gate.book) is None
        assert driver.leases() == {}
        gate.push()
        waiting = driver.tokens()

        assert gate.taker.next_token(5, lambda: True) is None, "it is left alone for a second"
        assert len(driver.tokens()) == len(waiting) - 1
        gate.taker.give_back_tokens()
        assert driver.tokens() == waiting, "other parts of it may be read: no token is lost"

    def test_request_that_cannot_be_read_is_left_alone_though_its_lease_is_not_given_back(
        self, gate: Gate, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At a gateway the release is not repeated, and raises what became of it."""

        def unreadable(*_: Any, **__: Any) -> Grant:
            raise Damaged("what claim was told cannot be read")

        def away(_: HeldLease) -> None:
            raise ServerUnreachable("the server is away")

        driver.load(1)
        monkeypatch.setattr(gate.protocol, "claim", unreadable)
        monkeypatch.setattr(HeldLease, "release", away)
        with pytest.raises(ServerUnreachable):
            gate.taker.claim(gate.invited(), gate.book)
        gate.push()

        assert gate.taker.next_token(5) is None

    def test_token_of_a_request_that_is_left_to_others_comes_back(
        self, gate: Gate, driver: RequestByHand
    ) -> None:
        driver.load(1)
        gate.taker.leave_to_others(driver.id, 3_600)
        gate.push()
        assert gate.taker.next_token(5) is None
        assert driver.tokens() == [], "it is kept"

        gate.taker.give_back_tokens()

        assert driver.tokens() == [driver.id], "another host may have room"
        assert gate.taker.next_token(5, lambda: True), "and so may this one by now"


@ANY_KIND
class TestKeep:
    def test_each_is_a_call_of_its_own(self, gate: Gate, driver: RequestByHand) -> None:
        driver.load(1)
        lease, grant, _ = gate.claim()
        lease.part = grant.parts[0]

        assert [lease.keep(outcomes, b"") for outcomes in (b"one", b"two")] == [True, True]

        assert driver.partial() == {1: b"two"}
        lease.release()
        assert (driver.leases(), driver.retry()) == ({}, {1: 1})

    @pytest.mark.parametrize("outcomes", [b"", b"some"])
    def test_failure_that_finds_the_lease_lost_keeps_what_there_is(
        self, gate: Gate, driver: RequestByHand, outcomes: bytes
    ) -> None:
        driver.load(1)
        lease, grant, _ = gate.claim()
        lease.part = grant.parts[0]
        driver.expire(lease.holder)
        driver.reap()

        failures = given_up(1).failures
        failed = PartNotDone("retry", 0, failures, (0, -1), partial=outcomes)
        assert not lease.fail(lease.part, failed)

        assert gate.book.order.count("keep") == len(driver.partial()) == (outcomes != b"")


def test_handlers_of_a_level_take_turns_whatever_one_of_them_has(
    protocol: Protocol, queue: str
) -> None:
    both = Host(
        name="both",
        queue=queue,
        levels=(50,),
        offers={"a": "parts a", "b": "parts b"},
        lease_ms=20_000,
        quantum_s=0.05,
    )
    taker: Taker[str] = Taker(protocol, both, lambda *_: "", lambda _: None)
    for request_id, tokens in (("first", Tokens(3, "a:50")), ("second", Tokens(1, "b:50"))):
        protocol.push(queue, request_id, tokens)

    taken = [taker.next_token(5) for _ in range(4)]

    assert [each and each.token.handler for each in taken] == ["a", "b", "a", "a"]
