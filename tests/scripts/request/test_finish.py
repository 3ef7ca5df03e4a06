"""finish.lua: running -> done; waiting, retry -> running; open -> done, failed."""

import pytest

from streamq.errors import RequestUnknown
from streamq.protocol.replies import Grant, Tokens
from tests.support.by_hand import RequestByHand


def numbers(grant: Grant) -> list[int]:
    return [part.number for part in grant.parts]


@pytest.fixture
def holder(driver: RequestByHand) -> str:
    """Holds parts 1 to 3 of nine."""
    driver.load(9)
    holder, _ = driver.claim(3)
    return holder


@pytest.fixture
def lost(driver: RequestByHand, holder: str) -> str:
    """Held parts 1 to 3 of nine until its lease was over and its parts were taken back."""
    driver.expire(holder)
    assert driver.reap().parts == 3
    return holder


class TestRecord:
    def test_result_count_and_entry_change_in_one_step(
        self, driver: RequestByHand, holder: str
    ) -> None:
        grant = driver.finish(holder, [1, 3], 2)

        assert (grant.word, grant.counted) == ("ok", 2)
        assert driver.results() == {"1": b"r1", "3": b"r3"}
        assert driver.left() == 7
        assert (driver.meta("done"), driver.meta("records_done")) == ("2", "2")
        assert driver.entries() == [2, 4, 5, 6, 7, 8, 9]

    def test_records_are_counted_as_the_caller_says(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.finish(holder, [1, 2], 1, records=25)

        assert (driver.meta("done"), driver.meta("records_done")) == ("2", "25")

    def test_trouble_of_a_part_is_forgotten_with_it(self, driver: RequestByHand) -> None:
        driver.load(2)
        holder, _ = driver.claim()
        driver.fail(holder, 1, partial=b"some")
        again = driver.finish(holder, [], 1)
        assert numbers(again) == [1]

        driver.finish(holder, [1])

        assert (driver.tries(), driver.partial(), driver.retry()) == ({}, {}, {})

    def test_nothing_is_finished_by_a_call_without_results(
        self, driver: RequestByHand, holder: str
    ) -> None:
        grant = driver.finish(holder, [], 1)

        assert (grant.word, grant.counted, numbers(grant)) == ("ok", 0, [4])
        assert (driver.left(), driver.held(holder)) == (9, [1, 2, 3, 4])


class TestNext:
    def test_next_batch_comes_under_the_same_lease(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.expire(holder)

        grant = driver.finish(holder, [1, 2, 3], 4)

        assert (grant.word, numbers(grant)) == ("ok", [4, 5, 6, 7])
        assert driver.held(holder) == [4, 5, 6, 7]
        assert 0 < driver.leases()[holder] - driver.now_ms() <= 20_000

    def test_due_retries_come_first(self, driver: RequestByHand, holder: str) -> None:
        other, _ = driver.claim(2)
        driver.release(other)

        grant = driver.finish(holder, [1, 2, 3], 3)

        assert numbers(grant) == [4, 5, 6]

    def test_reaped_part_comes_alone(self, driver: RequestByHand, holder: str) -> None:
        dead, _ = driver.claim()
        driver.expire(dead)
        driver.reap()

        grant = driver.finish(holder, [1, 2, 3], 3)

        assert numbers(grant) == [4]

    def test_asking_for_nothing_hands_everything_back_and_ends_the_lease(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.protocol.renew(driver.id, 20_000, {holder: 1})

        grant = driver.finish(holder, [1])

        assert (grant.word, grant.parts) == ("over", [])
        assert driver.retry() == {2: 2, 3: 3}
        assert (driver.leases(), driver.holders(), driver.consumers()) == ({}, {}, set())

    def test_parts_handed_back_may_run_beside_others(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.finish(holder, [1])

        assert driver.tries() == {}
        assert numbers(driver.claim(3)[1]) == [2, 3, 4]

    def test_nothing_to_hand_out_leaves_no_lease(self, driver: RequestByHand) -> None:
        driver.load(3)
        driver.claim()
        holder, _ = driver.claim(2)

        grant = driver.finish(holder, [2, 3], 5)

        assert (grant.word, grant.parts, bool(grant.tokens)) == ("over", [], False)
        assert holder not in driver.leases()
        assert holder not in driver.consumers()

    def test_pause_ends_the_lease_and_what_ran_counts(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.protocol.pause(driver.id)

        grant = driver.finish(holder, [1, 2], 5)

        assert (grant.word, grant.counted, bool(grant.tokens)) == ("over", 2, False)
        assert (driver.leases(), driver.retry()) == ({}, {3: 3})

    def test_hold_ends_the_lease(self, driver: RequestByHand, holder: str) -> None:
        driver.set_meta(hold_ms=driver.now_ms() + 60_000)

        grant = driver.finish(holder, [1, 2, 3], 5)

        assert grant.word == "over"
        assert grant.tokens == Tokens(0, "h:50", int(driver.meta("hold_ms")))

    def test_rate_ends_the_lease(self, driver: RequestByHand) -> None:
        driver.load(9, rate_ms=60_000.0)
        holder, _ = driver.claim()

        grant = driver.finish(holder, [1], 5)

        assert (grant.word, grant.tokens.count, driver.leases()) == ("over", 0, {})

    def test_rate_bounds_the_next_batch(self, driver: RequestByHand, holder: str) -> None:
        driver.protocol.set(driver.id, rate_ms=60_000)

        grant = driver.finish(holder, [1, 2, 3], 5)

        assert (grant.word, numbers(grant)) == ("ok", [4])

    def test_leases_beyond_a_lowered_limit_end_one_by_one(
        self, driver: RequestByHand, holder: str
    ) -> None:
        other, _ = driver.claim()
        driver.protocol.set(driver.id, limit=1)

        words = [
            driver.finish(holder, [1, 2, 3], 1).word,
            driver.finish(other, [4], 1).word,
        ]

        assert words == ["over", "ok"]
        assert set(driver.leases()) == {other}

    def test_waits_for_the_load_when_it_is_behind(self, driver: RequestByHand) -> None:
        driver.open()
        driver.append(1)
        holder, _ = driver.claim()

        grant = driver.finish(holder, [1], 5)

        assert (grant.word, driver.meta("state"), driver.left()) == ("over", "loading", 1)


class TestEnd:
    def test_last_part_ends_the_request(self, driver: RequestByHand) -> None:
        driver.load(2)
        holder, _ = driver.claim(2)
        driver.finish(holder, [1], 1)

        with driver.published() as published:
            grant = driver.finish(holder, [2], 5)

        assert (grant.word, grant.counted, bool(grant.tokens)) == ("done", 1, False)
        assert published == ["done"]
        assert (driver.meta("state"), driver.left()) == ("done", 0)
        assert 0 <= driver.now_ms() - int(driver.meta("finished_ms")) < 60_000

    def test_end_keeps_only_what_is_still_asked_for(self, driver: RequestByHand) -> None:
        driver.load(2)
        idle, _ = driver.claim()
        driver.fail(idle, 1, partial=b"some")
        holder, _ = driver.claim(2)

        driver.finish(holder, [1, 2])

        assert driver.existing_keys() == {"meta", "left", "results"}

    def test_end_keeps_the_parts_that_were_given_up(self, driver: RequestByHand) -> None:
        driver.load(2)
        driver.give_up(1)
        holder, _ = driver.claim()

        assert driver.finish(holder, [2]).word == "done"

        assert driver.existing_keys() == {"meta", "left", "results", "failed", "parts", "tries"}
        assert driver.entries() == [1]

    @pytest.mark.parametrize(("percent", "state"), [(50.0, "done"), (49.9, "failed")])
    def test_percentage_of_failures_is_judged_at_the_end(
        self, driver: RequestByHand, percent: float, state: str
    ) -> None:
        driver.load(2, max_percent=percent)
        driver.give_up(1)
        assert driver.meta("state") == "open"
        holder, _ = driver.claim()

        with driver.published() as published:
            grant = driver.finish(holder, [2])

        assert (grant.word, grant.counted) == (state, 1)
        assert (driver.meta("state"), published) == (state, [state])

    def test_repeated_after_the_end_counts_nothing(self, driver: RequestByHand) -> None:
        driver.load(1)
        holder, _ = driver.claim()
        driver.finish(holder, [1], call=1)
        before = driver.snapshot()

        grant = driver.finish(holder, [1], call=1)

        assert (grant.word, grant.counted, grant.parts) == ("done", 0, [])
        assert driver.snapshot() == before

    def test_after_a_cancel_changes_nothing(self, driver: RequestByHand, holder: str) -> None:
        driver.protocol.cancel(driver.id)
        before = driver.snapshot()

        grant = driver.finish(holder, [1], 5)

        assert (grant.word, grant.counted, grant.parts) == ("cancelled", 0, [])
        assert driver.snapshot() == before

    def test_after_the_purge_is_refused_and_leaves_no_key(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.protocol.cancel(driver.id)
        driver.protocol.purge(driver.id, force=True)

        with pytest.raises(RequestUnknown):
            driver.finish(holder, [1], 5)

        assert driver.existing_keys() == set()

    def test_what_ran_when_the_request_failed_still_counts(self, driver: RequestByHand) -> None:
        driver.load(4, max_failures=0)
        holder, _ = driver.claim(2)
        driver.give_up(3)
        assert driver.meta("state") == "failed"

        grant = driver.finish(holder, [1], 5)

        assert (grant.word, grant.counted, grant.parts) == ("failed", 1, [])
        assert (driver.results(), driver.left()) == ({"1": b"r1"}, 2)
        assert (driver.leases(), driver.retry()) == ({}, {2: 2})

    def test_last_part_of_a_failed_request_does_not_end_it_again(
        self, driver: RequestByHand
    ) -> None:
        driver.load(2, max_failures=0)
        holder, _ = driver.claim()
        driver.give_up(2)
        driver.set_meta(finished_ms=17)

        with driver.published() as published:
            grant = driver.finish(holder, [1])

        assert (grant.word, grant.counted, driver.left()) == ("failed", 1, 0)
        assert (published, driver.meta("finished_ms")) == ([], "17")


class TestCallNumber:
    def test_equal_after_the_deadline_moves_it(self, driver: RequestByHand) -> None:
        driver.load(5)
        holder, _ = driver.claim(2)
        driver.finish(holder, [1, 2], 2, call=1)
        driver.expire(holder)

        driver.finish(holder, [1, 2], 2, call=1)

        assert driver.protocol.reap(driver.id).leases == 0, "it was told to go on"

    def test_equal_is_a_repeat_and_returns_what_is_pending(
        self, driver: RequestByHand, holder: str
    ) -> None:
        first = driver.finish(holder, [1, 2, 3], 2, call=1)

        again = driver.finish(holder, [1, 2, 3], 2, call=1)

        assert numbers(first) == numbers(again) == [4, 5]
        assert (again.word, again.counted) == ("ok", 0)
        assert (driver.left(), driver.meta("done"), driver.held(holder)) == (6, "3", [4, 5])

    def test_equal_does_not_end_the_lease(self, driver: RequestByHand, holder: str) -> None:
        driver.finish(holder, [1, 2, 3], 2, call=1)

        again = driver.finish(holder, [1, 2, 3], 0, call=1)

        assert (again.word, numbers(again)) == ("ok", [4, 5])
        assert set(driver.leases()) == {holder}

    def test_equal_tells_the_trouble_again(self, driver: RequestByHand, holder: str) -> None:
        other, _ = driver.claim()
        driver.fail(other, 4, partial=b"some")
        driver.finish(holder, [1, 2, 3], 1, call=1)

        again = driver.finish(holder, [1, 2, 3], 1, call=1)

        assert [(p.number, p.attempt, p.partial) for p in again.parts] == [(4, 2, b"some")]

    def test_lower_is_acknowledged_only(self, driver: RequestByHand, holder: str) -> None:
        driver.handback(holder, [3], call=2)

        grant = driver.finish(holder, [1], 5, call=1)

        assert (grant.word, grant.counted, grant.parts) == ("late", 1, [])
        assert driver.results() == {"1": b"r1"}
        assert (driver.held(holder), driver.holders()[holder]) == ([2], "2")

    def test_lower_does_not_end_the_lease(self, driver: RequestByHand, holder: str) -> None:
        driver.handback(holder, [3], call=2)

        driver.finish(holder, [1], 0, call=1)

        assert set(driver.leases()) == {holder}

    def test_lower_can_bring_the_last_part(self, driver: RequestByHand) -> None:
        driver.load(1)
        holder, _ = driver.claim()
        driver.handback(holder, [], call=2)

        assert driver.finish(holder, [1], 5, call=1).word == "done"

    def test_higher_is_stored_and_what_ran_is_forgotten(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.protocol.renew(driver.id, 20_000, {holder: 1})

        driver.finish(holder, [1], 1, call=7)

        assert driver.holders() == {holder: "7"}

    def test_repeat_of_the_call_that_ended_the_lease_is_lost_and_counts_nothing(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.finish(holder, [1, 2], 0, call=1)
        before = driver.snapshot()

        again = driver.finish(holder, [1, 2], 0, call=1)

        assert (again.word, again.counted) == ("lost", 0)
        assert driver.snapshot() == before


class TestLost:
    def test_result_of_a_part_nobody_took_since_is_kept(
        self, driver: RequestByHand, lost: str
    ) -> None:
        grant = driver.finish(lost, [1, 2], 5)

        assert (grant.word, grant.counted, grant.parts) == ("lost", 2, [])
        assert driver.results() == {"1": b"r1", "2": b"r2"}
        assert (driver.left(), set(driver.retry()), driver.tries()) == (7, {3}, {3: "0 0 1 0 0"})
        assert driver.entries() == [3, 4, 5, 6, 7, 8, 9]

    def test_result_of_a_part_another_has_is_dropped(
        self, driver: RequestByHand, lost: str
    ) -> None:
        other, grant = driver.claim()
        assert numbers(grant) == [1]

        late = driver.finish(lost, [1, 2])

        assert (late.word, late.counted, driver.results()) == ("lost", 1, {"2": b"r2"})
        assert driver.finish(other, [1], 1).counted == 1
        assert (driver.left(), driver.meta("done")) == (7, "2")

    def test_result_of_a_part_another_finished_is_dropped(
        self, driver: RequestByHand, lost: str
    ) -> None:
        other, _ = driver.claim()
        driver.finish(other, [1])
        before = driver.snapshot()

        late = driver.finish(lost, [1])

        assert (late.word, late.counted) == ("lost", 0)
        assert driver.snapshot() == before

    def test_result_of_a_part_that_was_given_up_is_dropped(self, driver: RequestByHand) -> None:
        driver.load(2, poison=1)
        holder, _ = driver.claim()
        driver.expire(holder)
        driver.reap()
        assert set(driver.failed()) == {1}

        late = driver.finish(holder, [1])

        assert (late.word, late.counted, driver.results()) == ("lost", 0, {})

    def test_claims_nothing_and_leaves_no_lease(self, driver: RequestByHand, lost: str) -> None:
        driver.finish(lost, [1, 2, 3], 5)

        assert (driver.leases(), driver.holders(), driver.consumers()) == ({}, {}, set())

    def test_records_of_kept_parts_are_their_own(self, driver: RequestByHand) -> None:
        driver.open()
        driver.append(3, records=10)
        holder, _ = driver.claim(3)
        driver.expire(holder)
        driver.reap()
        driver.claim()

        driver.finish(holder, [1, 2, 3], records=30)

        assert (driver.meta("done"), driver.meta("records_done")) == ("2", "20")

    def test_last_part_ends_the_request_also_then(self, driver: RequestByHand) -> None:
        driver.load(1)
        holder, _ = driver.claim()
        driver.expire(holder)
        driver.reap()

        grant = driver.finish(holder, [1], 5)

        assert (grant.word, grant.counted, driver.meta("state")) == ("done", 1, "done")

    def test_holder_that_never_had_a_lease_counts_nothing(
        self, driver: RequestByHand, holder: str
    ) -> None:
        before = driver.snapshot()

        grant = driver.finish("nobody", [1, 4])

        assert (grant.word, grant.counted) == ("lost", 0)
        assert driver.snapshot() == before

    def test_result_of_an_earlier_request_of_the_same_id_is_dropped(
        self, driver: RequestByHand
    ) -> None:
        driver.load(3)
        old, grant = driver.claim(3)
        driver.set_meta(created_ms=grant.created_ms - 1)  # it was not made in the same moment
        driver.protocol.cancel(driver.id)
        driver.protocol.purge(driver.id, force=True)
        driver.load(3)
        new, _ = driver.claim(3)
        driver.handback(new, [2, 3])

        late = driver.finish(old, [1, 2, 3], created_ms=grant.created_ms - 1)

        assert (late.word, late.counted) == ("lost", 0)
        assert (driver.results(), driver.retry()) == ({}, {2: 2, 3: 3})

    def test_who_does_not_say_of_which_request_counts_nothing(
        self, driver: RequestByHand, lost: str
    ) -> None:
        assert driver.finish(lost, [1, 2], created_ms=0).counted == 0

    def test_repeated_counts_nothing_twice(self, driver: RequestByHand, lost: str) -> None:
        driver.finish(lost, [1, 2], call=1)
        before = driver.snapshot()

        again = driver.finish(lost, [1, 2], call=1)

        assert (again.word, again.counted) == ("lost", 0)
        assert driver.snapshot() == before


class TestRollback:
    """The server lost its last moments, and knows some parts of a batch and not others."""

    def test_part_that_is_not_delivered_any_more_is_not_counted(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.redis.xack(driver.keys.parts, "w", 2, 3)
        driver.redis.xgroup_setid(driver.keys.parts, "w", "1-0")
        driver.set_meta(delivered=1)

        grant = driver.finish(holder, [1, 2, 3], 2)

        assert (grant.counted, numbers(grant)) == (1, [2, 3])
        assert (driver.results(), driver.left()) == ({"1": b"r1"}, 8)
        assert driver.finish(holder, [2, 3], 1).counted == 2

    def test_part_that_is_done_is_not_counted_again(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.finish(holder, [2], 1)
        driver.redis.hset(driver.keys.results, "2", b"older")

        grant = driver.finish(holder, [1, 2, 3], 1)

        assert (grant.counted, driver.meta("done"), driver.left()) == (2, "3", 6)
        assert driver.results() == {"1": b"r1", "2": b"older", "3": b"r3"}

    def test_part_that_was_given_up_stays_given_up(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.fail(holder, 2, kind="abandon")

        grant = driver.finish(holder, [1, 2, 3], 1)

        assert (grant.counted, driver.left()) == (2, 6)
        assert (set(driver.failed()), set(driver.results())) == ({2}, {"1", "3"})

    def test_records_are_those_of_the_parts_counted(self, driver: RequestByHand) -> None:
        driver.open()
        driver.append(3, records=10)
        holder, _ = driver.claim(3)
        driver.finish(holder, [2], 1, records=10)

        driver.finish(holder, [1, 2, 3], records=30)

        assert driver.meta("records_done") == "30"

    def test_batch_that_is_not_delivered_at_all_is_not_counted(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.redis.xack(driver.keys.parts, "w", 1, 2, 3)
        driver.redis.xgroup_setid(driver.keys.parts, "w", "0-0")
        driver.set_meta(delivered=0)

        grant = driver.finish(holder, [1, 2, 3], 2)

        assert (grant.word, grant.counted, numbers(grant)) == ("ok", 0, [1, 2])
        assert driver.left() == 9


class TestTokens:
    def test_end_of_a_lease_invites_another(self, driver: RequestByHand) -> None:
        driver.load(5, limit=1)
        holder, _ = driver.claim(level=50)

        grant = driver.finish(holder, [1])

        assert (grant.tokens, driver.meta("out")) == (Tokens(1, "h:50"), "1")

    def test_lease_that_goes_on_invites_nobody_in_its_place(self, driver: RequestByHand) -> None:
        driver.load(5, limit=1)
        holder, _ = driver.claim(level=50)

        grant = driver.finish(holder, [1], 1)

        assert (bool(grant.tokens), driver.meta("out")) == (False, "0")

    def test_uses_no_token_up(self, driver: RequestByHand, holder: str) -> None:
        driver.set_meta(out=7)

        driver.finish(holder, [1, 2, 3])

        assert driver.meta("out") == "7"

    def test_lost_lease_invites_to_what_it_left(self, driver: RequestByHand, lost: str) -> None:
        driver.set_meta(out=0)

        assert driver.finish(lost, [1]).tokens == Tokens(8, "h:50")


def test_full_server_still_drains(driver: RequestByHand) -> None:
    driver.load(2)
    holder, _ = driver.claim()

    with driver.full_server():
        words = [driver.finish(holder, [1], 1).word, driver.finish(holder, [2]).word]

    assert words == ["ok", "done"]


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.finish("nobody", [1])

    assert driver.existing_keys() == set()
