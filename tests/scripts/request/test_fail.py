"""fail.lua: running -> retry or failed; open -> done, failed."""

import msgspec
import pytest

from streamq.errors import RequestUnknown
from streamq.model import Failure
from streamq.protocol.replies import Tokens
from tests.support.by_hand import RequestByHand


@pytest.fixture
def holder(driver: RequestByHand) -> str:
    """Holds parts 1 and 2 of five, each of which may run three times."""
    driver.load(5, retries=2)
    holder, _ = driver.claim(2)
    return holder


class TestRetry:
    def test_part_waits_for_its_time(self, driver: RequestByHand, holder: str) -> None:
        outcome = driver.fail(holder, 1, delay_ms=60_000)

        assert outcome.word == "retry"
        assert 0 < driver.retry()[1] - driver.now_ms() <= 60_000
        assert outcome.tokens.look_ms == driver.retry()[1]

    def test_without_a_delay_part_goes_to_the_front(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.fail(holder, 1)

        assert driver.retry() == {1: 1}

    def test_lease_goes_on_with_the_other_parts(self, driver: RequestByHand, holder: str) -> None:
        driver.fail(holder, 1)

        assert set(driver.leases()) == {holder}
        assert driver.held(holder) == [2]
        assert driver.finish(holder, [2], 1).word == "ok"

    def test_error_is_counted_and_nothing_else(self, driver: RequestByHand, holder: str) -> None:
        driver.fail(holder, 1, records=(3, 2), result=b"good")

        assert driver.tries() == {1: "1 0 0 0 0"}
        assert (driver.results(), driver.failed(), driver.left()) == ({}, {}, 5)
        assert [driver.meta(f) for f in ("failed", "records_done", "records_failed")] == [""] * 3

    def test_outcomes_so_far_are_kept_for_the_next_attempt(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.fail(holder, 1, partial=b"some")
        part = driver.finish(holder, [2], 1).parts[0]
        assert (part.number, part.attempt, part.partial) == (1, 2, b"some")

        driver.fail(holder, 1)

        part = driver.finish(holder, [], 1).parts[0]
        assert (part.number, part.attempt, part.partial) == (1, 3, b"some")

    def test_number_of_the_call_is_stored_and_what_ran_is_forgotten(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.protocol.renew(driver.id, 20_000, {holder: 1})

        driver.fail(holder, 1, call=6)

        assert driver.holders() == {holder: "6"}


class TestGiveUp:
    def test_error_after_the_last_attempt_gives_the_part_up(
        self, driver: RequestByHand, holder: str
    ) -> None:
        words = []
        for _ in range(3):
            words.append(driver.fail(holder, 1).word)
            driver.finish(holder, [], 1)

        assert words == ["retry", "retry", "failed"]
        failure = msgspec.json.decode(driver.failed()[1], type=list[Failure])[0]
        assert (failure.error, failure.message) == ("ValueError", "no")

    def test_without_retries_the_first_error_gives_the_part_up(self, driver: RequestByHand) -> None:
        driver.load(2, retries=0)
        holder, _ = driver.claim()

        assert driver.fail(holder, 1).word == "failed"

    def test_abandoned_part_has_no_more_attempts(self, driver: RequestByHand, holder: str) -> None:
        outcome = driver.fail(holder, 1, kind="abandon", delay_ms=60_000)

        assert outcome.word == "failed"
        assert (set(driver.failed()), driver.retry()) == ({1}, {})

    def test_part_is_acknowledged_and_its_entry_stays(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.fail(holder, 1, kind="abandon")

        assert driver.held(holder) == [2]
        assert driver.entries() == [1, 2, 3, 4, 5]
        assert (driver.left(), driver.meta("failed")) == (4, "1")

    def test_yield_of_its_good_records_is_recorded_with_it(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.fail(holder, 1, kind="abandon", records=(3, 2), result=b"good")

        assert driver.results() == {"1": b"good"}
        assert (driver.meta("records_done"), driver.meta("records_failed")) == ("3", "2")
        assert driver.tries() == {1: "1 0 0 0 2"}

    def test_part_that_yielded_nothing_has_no_result(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.fail(holder, 1, kind="abandon")

        assert driver.results() == {}

    def test_last_part_ends_the_request(self, driver: RequestByHand) -> None:
        driver.load(1)
        holder, _ = driver.claim()

        with driver.published() as published:
            outcome = driver.fail(holder, 1, kind="abandon")

        assert (outcome.word, bool(outcome.tokens)) == ("done", False)
        assert (published, driver.meta("state"), driver.left()) == (["done"], "done", 0)
        assert driver.existing_keys() == {"meta", "left", "parts", "failed", "tries"}

    def test_last_part_before_the_seal_does_not(self, driver: RequestByHand) -> None:
        driver.open()
        driver.append(1)
        holder, _ = driver.claim()

        assert driver.fail(holder, 1, kind="abandon").word == "failed"
        assert (driver.meta("state"), driver.left()) == ("loading", 1)


class TestSnooze:
    def test_spends_no_attempt(self, driver: RequestByHand, holder: str) -> None:
        for _ in range(9):
            assert driver.fail(holder, 1, kind="snooze").word == "retry"
            part = driver.finish(holder, [], 1).parts[0]
            assert (part.number, part.attempt) == (1, 1)

        assert driver.tries() == {1: "0 0 0 0 0"}

    def test_spends_no_attempt_where_there_is_only_one(self, driver: RequestByHand) -> None:
        driver.load(2, retries=0)
        holder, _ = driver.claim(2)

        words = [driver.fail(holder, n, kind=k).word for n, k in ((1, "snooze"), (2, "hold"))]

        assert words == ["retry", "retry"]

    def test_part_is_told_from_one_that_was_never_run(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.fail(holder, 1, kind="snooze")
        driver.fail(holder, 2, kind="hold")
        driver.release(holder)

        _, grant = driver.claim(5)

        assert (len(grant.parts), grant.retried) == (5, 2)
        assert {part.attempt for part in grant.parts} == {1}

    def test_puts_off_this_part_only(self, driver: RequestByHand, holder: str) -> None:
        driver.fail(holder, 1, kind="snooze", delay_ms=60_000)

        assert 0 < driver.retry()[1] - driver.now_ms() <= 60_000
        assert [part.number for part in driver.claim(9)[1].parts] == [3, 4, 5]

    def test_keeps_the_errors_before_it(self, driver: RequestByHand, holder: str) -> None:
        driver.fail(holder, 1)
        driver.finish(holder, [], 1)

        driver.fail(holder, 1, kind="snooze", partial=b"some")

        assert (driver.tries(), driver.partial()) == ({1: "1 0 0 0 0"}, {1: b"some"})


class TestHold:
    def test_puts_off_the_whole_request_and_spends_no_attempt(
        self, driver: RequestByHand, holder: str
    ) -> None:
        outcome = driver.fail(holder, 1, kind="hold", delay_ms=60_000)

        held = int(driver.meta("hold_ms"))
        assert 0 < held - driver.now_ms() <= 60_000
        assert (outcome.word, outcome.tokens) == ("retry", Tokens(0, "h:50", held))
        driver.release(holder)
        assert driver.claim()[1].word == "held"
        assert driver.tries() == {1: "0 0 0 0 0"}

    def test_shorter_one_does_not_cut_a_longer_one(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.fail(holder, 1, kind="hold", delay_ms=60_000)
        held = driver.meta("hold_ms")

        driver.fail(holder, 2, kind="hold", delay_ms=1_000)

        assert driver.meta("hold_ms") == held


class TestTolerance:
    def test_one_more_than_tolerated_fails_the_request_at_once(self, driver: RequestByHand) -> None:
        driver.load(5, max_failures=1)
        holder, _ = driver.claim(3)

        with driver.published() as published:
            outcomes = [driver.fail(holder, n, kind="abandon") for n in (1, 2)]

        assert [outcome.word for outcome in outcomes] == ["failed", "ended"]
        assert published == ["failed"]
        assert (driver.meta("state"), bool(outcomes[1].tokens)) == ("failed", False)
        assert 0 <= driver.now_ms() - int(driver.meta("finished_ms")) < 60_000

    def test_as_many_as_tolerated_do_not(self, driver: RequestByHand) -> None:
        driver.load(5, max_failures=2)

        driver.give_up(1, 2)

        assert driver.meta("state") == "open"

    def test_fails_also_while_loading(self, driver: RequestByHand) -> None:
        driver.open(max_failures=0)
        driver.append(2)

        driver.give_up(1)

        assert driver.meta("state") == "failed"

    def test_other_leases_of_a_failed_request_stand_until_they_come_back(
        self, driver: RequestByHand
    ) -> None:
        driver.load(5, max_failures=0)
        other, _ = driver.claim(2)
        driver.give_up(3)

        assert driver.held(other) == [1, 2]
        outcome = driver.fail(other, 1, kind="abandon")
        assert (outcome.word, driver.left(), set(driver.failed())) == ("ended", 3, {1, 3})

    def test_percentage_is_judged_from_a_thousand_on(self, driver: RequestByHand) -> None:
        driver.load(1_200, max_percent=1.0)
        driver.set_meta(done=979)

        for number in range(1, 21):
            driver.give_up(number)
        assert driver.meta("state") == "open"
        driver.give_up(21)

        assert driver.meta("state") == "failed"

    def test_percentage_that_is_not_exceeded_is_tolerated(self, driver: RequestByHand) -> None:
        driver.load(9, max_percent=1.0)
        driver.set_meta(done=2_000)

        driver.give_up(1, 2)

        assert driver.meta("state") == "open"

    def test_last_failure_is_judged_by_percentage_whatever_the_number(
        self, driver: RequestByHand
    ) -> None:
        driver.load(2, max_percent=60.0)

        driver.give_up(1, 2)

        assert driver.meta("state") == "failed"

    @pytest.mark.parametrize(("unit", "state"), [("records", "failed"), ("parts", "open")])
    def test_counts_what_the_handler_takes(
        self, driver: RequestByHand, unit: str, state: str
    ) -> None:
        driver.load(5, max_failures=2)
        holder, _ = driver.claim(handlers=(f"{unit} h",))

        driver.fail(holder, 1, kind="abandon", records=(5, 3))

        assert driver.meta("state") == state

    @pytest.mark.parametrize(("unit", "state"), [("records", "open"), ("parts", "failed")])
    def test_takes_the_percentage_of_what_the_handler_takes(
        self, driver: RequestByHand, unit: str, state: str
    ) -> None:
        driver.load(5, max_percent=10.0)
        driver.set_meta(done=899, records_done=9_990, failed=100, records_failed=100)
        holder, _ = driver.claim(handlers=(f"{unit} h",))

        driver.fail(holder, 1, kind="abandon")

        assert driver.meta("state") == state


class TestRefusal:
    def test_without_a_lease_changes_nothing(self, driver: RequestByHand, holder: str) -> None:
        driver.expire(holder)
        driver.reap()
        before = driver.snapshot()

        outcome = driver.fail(holder, 1, kind="abandon")

        assert (outcome.word, bool(outcome.tokens)) == ("lost", False)
        assert driver.snapshot() == before

    @pytest.mark.parametrize("call", [3, 4])
    def test_lower_or_equal_call_changes_nothing(
        self, driver: RequestByHand, holder: str, call: int
    ) -> None:
        driver.handback(holder, [], call=4)
        before = driver.snapshot()

        outcome = driver.fail(holder, 1, call=call)

        assert (outcome.word, bool(outcome.tokens)) == ("late", False)
        assert driver.snapshot() == before

    def test_repeated_after_a_lost_reply_spends_one_attempt(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.fail(holder, 1, call=1)

        assert driver.fail(holder, 1, call=1).word == "late"
        assert driver.tries() == {1: "1 0 0 0 0"}

    def test_part_of_another_holder_is_not_touched(
        self, driver: RequestByHand, holder: str
    ) -> None:
        other, _ = driver.claim()
        before = driver.snapshot()

        outcome = driver.fail(holder, 3, kind="abandon")

        assert outcome.word == "late"
        assert driver.snapshot() == before
        assert driver.held(other) == [3]

    @pytest.mark.parametrize("state", ["done", "cancelled"])
    def test_ended_request_answers_its_state(
        self, driver: RequestByHand, holder: str, state: str
    ) -> None:
        if state == "cancelled":
            driver.protocol.cancel(driver.id)
        else:
            driver.finish(holder, [1, 2], 3)
            driver.finish(holder, [3, 4, 5])
        before = driver.snapshot()

        outcome = driver.fail(holder, 1)

        assert (outcome.word, bool(outcome.tokens)) == (state, False)
        assert driver.snapshot() == before

    def test_of_a_request_nobody_opened_leaves_no_key(self, driver: RequestByHand) -> None:
        with pytest.raises(RequestUnknown):
            driver.fail("nobody", 1)

        assert driver.existing_keys() == set()


class TestTokens:
    @pytest.fixture
    def alone(self, driver: RequestByHand) -> str:
        """Holds the only part of a request, with room for more leases and no token out."""
        driver.load(1)
        holder, _ = driver.claim(level=50)
        assert driver.meta("out") == "0"
        return holder

    def test_part_that_may_run_at_once_invites(self, driver: RequestByHand, alone: str) -> None:
        assert driver.fail(alone, 1).tokens == Tokens(1, "h:50")

    def test_part_that_waits_asks_for_a_look(self, driver: RequestByHand, alone: str) -> None:
        tokens = driver.fail(alone, 1, delay_ms=60_000).tokens

        assert tokens == Tokens(0, "h:50", int(driver.retry()[1]))
        assert driver.meta("due_ms") == str(tokens.look_ms)

    @pytest.mark.parametrize(
        ("delay_ms", "is_sooner"), [(900_000, False), (5_000, True)], ids=["later", "sooner"]
    )
    def test_look_is_asked_for_only_when_none_comes_sooner(
        self, driver: RequestByHand, holder: str, delay_ms: int, is_sooner: bool
    ) -> None:
        driver.fail(holder, 1, delay_ms=60_000)

        tokens = driver.fail(holder, 2, delay_ms=delay_ms).tokens

        assert bool(tokens.look_ms) == is_sooner


def test_full_server_still_takes_it(driver: RequestByHand, holder: str) -> None:
    with driver.full_server():
        words = [driver.fail(holder, 1).word, driver.fail(holder, 2, kind="abandon").word]

    assert words == ["retry", "failed"]


class TestHoldsOfSeveral:
    def test_is_not_longer_because_others_ran_when_it_began(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.fail(holder, 1, kind="hold", delay_ms=60_000)
        until = int(driver.meta("hold_ms"))
        driver.set_meta(hold_from_ms=until - 60_500, hold_ms=until - 500)

        driver.fail(holder, 2, kind="hold", delay_ms=60_000)

        assert int(driver.meta("hold_ms")) == until - 500

    def test_is_as_long_as_the_longest_that_is_asked_for(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.fail(holder, 1, kind="hold", delay_ms=60_000)
        until = int(driver.meta("hold_ms"))

        driver.fail(holder, 2, kind="hold", delay_ms=90_000)

        assert int(driver.meta("hold_ms")) == until + 30_000

    def test_begins_anew_when_the_last_one_is_over(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.set_meta(hold_from_ms=1_000, hold_ms=2_000)

        driver.fail(holder, 1, kind="hold", delay_ms=60_000)

        assert int(driver.meta("hold_ms")) == int(driver.meta("hold_from_ms")) + 60_000


class TestEasedLimit:
    """A handler that holds the request has found that too many parts run at once (rule 17)."""

    def eased(self, driver: RequestByHand, seconds_ago: float) -> None:
        """Ten leases of twelve allowed stand when one holds; the hold ended some time ago."""
        driver.load(40, limit=12)
        holders = [driver.claim()[0] for _ in range(10)]
        driver.fail(holders[0], 1, kind="hold", delay_ms=60_000)
        assert (driver.meta("eased"), driver.meta("eased_ms")) == ("8", driver.meta("hold_ms"))
        ended = round(driver.now_ms() - seconds_ago * 1e3)
        driver.set_meta(hold_ms=ended, hold_from_ms=ended - 1, eased_ms=ended)
        for holder in holders:
            driver.release(holder)
        driver.set_meta(due_ms=0)

    def leases(self, driver: RequestByHand) -> int:
        words = [driver.claim()[1].word for _ in range(13)]
        assert set(words) == {"ok", "limit"}
        return words.count("ok")

    @pytest.mark.parametrize(("seconds", "most"), [(1, 8), (12, 9), (32, 11), (600, 12)])
    def test_no_more_leases_than_85_percent_and_one_more_every_10_s(
        self, driver: RequestByHand, seconds: int, most: int
    ) -> None:
        self.eased(driver, seconds)

        assert self.leases(driver) == most

    def test_limit_that_is_set_anew_counts_at_once(self, driver: RequestByHand) -> None:
        self.eased(driver, 1)

        driver.protocol.set(driver.id, limit=11)

        assert self.leases(driver) == 11

    def test_last_claim_asks_for_a_look_when_the_limit_grows(self, driver: RequestByHand) -> None:
        self.eased(driver, 1)
        ended = int(driver.meta("eased_ms"))

        looks = [driver.claim()[1].tokens.look_ms for _ in range(8)]

        assert [look for look in looks if look] == [ended + 10_000], "asked for once"

    def test_look_at_that_moment_pushes_a_token(self, driver: RequestByHand) -> None:
        self.eased(driver, 1)
        self.leases(driver)
        ended = int(driver.meta("eased_ms"))
        assert driver.protocol.audit(driver.id).tokens.count == 0

        driver.set_meta(eased_ms=ended - 10_000)

        assert driver.protocol.audit(driver.id).tokens.count == 1


class TestOneRecordTookTooLong:
    """Of a part of several records."""

    @pytest.fixture
    def late(self, driver: RequestByHand) -> str:
        """Holds a part of three records, which may run twice."""
        driver.open(retries=1)
        driver.protocol.append(driver.id, 1, "", "c1", 3, [b"abc", b"3"])
        driver.protocol.seal(driver.id, 1, "c1")
        holder, _ = driver.claim(handlers=["records h"])
        return holder

    def fail(self, driver: RequestByHand, holder: str) -> str:
        failure = [Failure(error="Timeout", record=2)]
        call = driver.call(holder)
        failing = driver.protocol.fail(driver.id, holder, call, 1, failure, kind="late")
        return failing.word

    def test_it_is_noted_and_spends_an_attempt(self, driver: RequestByHand, late: str) -> None:
        assert self.fail(driver, late) == "retry"

        (part,) = driver.claim()[1].parts
        assert (part.attempt, part.mark) == (2, b"late 0 1 2")

    def test_part_runs_again_after_its_last_attempt_but_not_for_ever(
        self, driver: RequestByHand, late: str
    ) -> None:
        attempts = []
        word = "retry"
        while word == "retry":
            word = self.fail(driver, late)
            driver.release(late)
            late, grant = driver.claim()
            attempts += [part.attempt for part in grant.parts]

        assert attempts == [2, 3, 4, 5], "one more for each record"
        assert list(driver.failed()) == [1]


class TestEasing:
    """A handler that holds the request found that too many run at once."""

    def holders(self, driver: RequestByHand, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            holder, grant = driver.claim()
            if grant.word != "ok":
                assert grant.word == "limit"
                break
            found.append(holder)
        return found

    @pytest.fixture
    def held(self, driver: RequestByHand) -> RequestByHand:
        """Of 40 at once the first was refused by an API; then all others gave up their leases."""
        driver.load(100, limit=40)
        first, *others = self.holders(driver, 40)
        driver.fail(first, 1, kind="hold", delay_ms=1_000)
        # Others that are told the same on their way do not ease it again.
        driver.fail(others[0], 2, kind="hold", delay_ms=1_000)
        for holder in (first, *others):
            driver.release(holder)
        driver.redis.hset(driver.keys.meta, "hold_ms", 0)
        return driver

    def test_fewer_run_at_once_after_a_hold(self, held: RequestByHand) -> None:
        assert len(self.holders(held, 40)) == 34
        assert held.meta("limit") == "40"

    def test_the_next_hold_eases_it_more_and_never_to_nothing(self, held: RequestByHand) -> None:
        counts = []
        for _ in range(20):
            found = self.holders(held, 40)
            counts.append(len(found))
            held.fail(found[0], held.held(found[0])[0], kind="hold", delay_ms=1_000)
            for holder in found:
                held.release(holder)
            held.redis.hset(held.keys.meta, "hold_ms", 0)

        assert (counts[:3], counts[-1]) == ([34, 28, 23], 1)

    def test_limit_comes_back_in_time(self, held: RequestByHand) -> None:
        held.redis.hincrby(held.keys.meta, "eased_ms", -31_000)
        assert len(self.holders(held, 40)) == 37

        held.redis.hincrby(held.keys.meta, "eased_ms", -300_000)
        assert len(self.holders(held, 40)) == 3, "40 in all"

    def test_limit_that_is_set_counts_at_once(self, held: RequestByHand) -> None:
        held.protocol.set(held.id, None, 38, None)

        assert len(self.holders(held, 40)) == 38

    def test_part_that_is_snoozed_alone_eases_nothing(self, driver: RequestByHand) -> None:
        driver.load(10, limit=4)
        (first, *_) = self.holders(driver, 4)
        driver.fail(first, 1, kind="snooze", delay_ms=1_000)

        assert driver.meta("eased") == ""
