"""release.lua: running -> retry; running -> failed for a part that crashed once too often."""

import msgspec
import pytest

from streamq.errors import RequestUnknown
from streamq.model import Failure
from streamq.protocol.replies import Tokens
from tests.support.by_hand import RequestByHand


@pytest.fixture
def holder(driver: RequestByHand) -> str:
    """Holds parts 1 to 3 of five."""
    driver.load(5)
    holder, _ = driver.claim(3)
    return holder


class TestPolitely:
    def test_everything_pending_goes_to_the_front(self, driver: RequestByHand, holder: str) -> None:
        outcome = driver.release(holder)

        assert outcome.word == "over"
        assert driver.retry() == {1: 1, 2: 2, 3: 3}
        assert (driver.left(), driver.failed()) == (5, {})

    def test_lease_ends_and_its_consumer_goes(self, driver: RequestByHand, holder: str) -> None:
        driver.protocol.renew(driver.id, 20_000, {holder: 1})

        driver.release(holder)

        assert (driver.leases(), driver.holders(), driver.consumers()) == ({}, {}, set())

    def test_parts_may_run_beside_others_and_no_attempt_is_spent(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.release(holder)

        _, grant = driver.claim(9)
        assert [(p.number, p.attempt) for p in grant.parts] == [(n, 1) for n in (1, 2, 3, 4, 5)]
        assert driver.tries() == {}

    def test_other_leases_are_not_touched(self, driver: RequestByHand, holder: str) -> None:
        other, _ = driver.claim()

        driver.release(holder)

        assert (set(driver.leases()), driver.held(other)) == ({other}, [4])

    def test_holder_of_nothing_may_go(self, driver: RequestByHand, holder: str) -> None:
        driver.handback(holder, [1, 2, 3])

        assert driver.release(holder).word == "over"
        assert (driver.leases(), driver.consumers()) == ({}, set())

    def test_holder_of_very_many_parts_loses_none(self, driver: RequestByHand) -> None:
        driver.load(1_100)
        holder, _ = driver.claim(1_000)
        driver.finish(holder, [], 100)
        assert len(driver.held(holder)) == 1_100

        driver.release(holder)

        assert list(driver.retry()) == list(range(1, 1_101))


class TestCrash:
    def test_only_the_part_that_ran_is_charged(self, driver: RequestByHand, holder: str) -> None:
        outcome = driver.release(holder, crashed=2)

        assert outcome.word == "over"
        assert driver.tries() == {2: "0 1 1 0 0"}
        assert driver.retry() == {1: 1, 2: 2, 3: 3}

    def test_part_of_another_holder_is_not_charged(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.claim()

        driver.release(holder, crashed=4)

        assert driver.tries() == {}

    def test_spends_no_attempt(self, driver: RequestByHand, holder: str) -> None:
        driver.fail(holder, 1)
        driver.finish(holder, [], 1)

        driver.release(holder, crashed=1)

        assert driver.tries() == {1: "1 1 1 0 0"}
        assert driver.claim()[1].parts[0].attempt == 2

    def test_part_that_killed_three_workers_is_given_up_as_poison(
        self, driver: RequestByHand
    ) -> None:
        driver.open()
        driver.append(2, records=7)
        for left in (3, 3, 2):
            holder, grant = driver.claim()
            assert grant.parts[0].number == 1
            assert driver.release(holder, crashed=1).word == "over"
            assert driver.left() == left

        assert msgspec.json.decode(driver.failed()[1], type=list[Failure])[0].error == "Poison"
        assert (driver.retry(), driver.entries()) == ({}, [1, 2])
        assert (driver.meta("failed"), driver.meta("records_failed")) == ("1", "7")
        assert driver.tries() == {1: "0 3 0 0 7"}

    def test_last_part_given_up_as_poison_ends_the_request(self, driver: RequestByHand) -> None:
        driver.load(1, poison=1)
        holder, _ = driver.claim()

        with driver.published() as published:
            outcome = driver.release(holder, crashed=1)

        assert (outcome.word, bool(outcome.tokens), published) == ("done", False, ["done"])

    def test_poison_counts_as_a_failure(self, driver: RequestByHand) -> None:
        driver.load(3, poison=1, max_failures=0)
        holder, _ = driver.claim(2)

        outcome = driver.release(holder, crashed=2)

        assert (outcome.word, driver.meta("state")) == ("failed", "failed")
        assert driver.retry() == {1: 1}


def without_gone(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: text for name, text in found.items() if name != "gone"}


class TestRefusal:
    def test_without_a_lease_notes_the_name_and_changes_nothing_else(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.expire(holder)
        driver.reap()
        before = driver.snapshot()

        outcome = driver.release(holder, crashed=1)

        assert (outcome.word, bool(outcome.tokens)) == ("lost", False)
        assert without_gone(driver.snapshot()) == before
        assert driver.redis.zrange(driver.keys.gone, 0, -1) == [holder.encode()]

    def test_repeated_after_a_lost_reply_charges_once(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.release(holder, crashed=1, call=1)
        before = driver.snapshot()

        assert driver.release(holder, crashed=1, call=1).word == "lost"
        assert without_gone(driver.snapshot()) == before

    def test_names_are_forgotten_when_no_claim_can_come_any_more(
        self, driver: RequestByHand
    ) -> None:
        driver.load(6)
        driver.release("first")
        driver.redis.zadd(driver.keys.gone, {"first": driver.now_ms() - 600_001})

        driver.release("second")

        assert driver.redis.zrange(driver.keys.gone, 0, -1) == [b"second"]
        assert 0 < driver.redis.pttl(driver.keys.gone) <= 600_000

    @pytest.mark.parametrize("call", [3, 4])
    def test_lower_or_equal_call_changes_nothing(
        self, driver: RequestByHand, holder: str, call: int
    ) -> None:
        driver.handback(holder, [], call=4)
        before = driver.snapshot()

        outcome = driver.release(holder, call=call)

        assert (outcome.word, bool(outcome.tokens)) == ("late", False)
        assert driver.snapshot() == before

    @pytest.mark.parametrize("state", ["done", "cancelled"])
    def test_ended_request_answers_its_state(
        self, driver: RequestByHand, holder: str, state: str
    ) -> None:
        if state == "cancelled":
            driver.protocol.cancel(driver.id)
        else:
            driver.finish(holder, [1, 2, 3], 2)
            driver.finish(holder, [4, 5])
        before = driver.snapshot()

        outcome = driver.release(holder, crashed=1)

        assert (outcome.word, bool(outcome.tokens)) == (state, False)
        assert driver.snapshot() == before

    def test_lease_of_a_failed_request_ends_all_the_same(self, driver: RequestByHand) -> None:
        driver.load(5, max_failures=0)
        holder, _ = driver.claim(2)
        driver.give_up(3)

        outcome = driver.release(holder)

        assert (outcome.word, bool(outcome.tokens)) == ("failed", False)
        assert (driver.leases(), driver.retry()) == ({}, {1: 1, 2: 2})

    def test_of_a_request_nobody_opened_leaves_no_key(self, driver: RequestByHand) -> None:
        with pytest.raises(RequestUnknown):
            driver.release("nobody")

        assert driver.existing_keys() == set()


def test_invites_others_to_what_was_given_back(driver: RequestByHand, holder: str) -> None:
    driver.set_meta(out=0)

    assert driver.release(holder).tokens == Tokens(5, "h:50")


def test_full_server_still_takes_it(driver: RequestByHand, holder: str) -> None:
    with driver.full_server():
        assert driver.release(holder, crashed=1).word == "over"
