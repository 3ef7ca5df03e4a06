"""claim.lua: waiting, retry -> running."""

from collections.abc import Callable

import msgspec
import pytest

from streamq.errors import Damaged, RequestUnknown
from streamq.model import Spec
from streamq.protocol.keys import QueueKeys, token_list_of
from streamq.protocol.replies import Grant, Token, Tokens
from tests.support.by_hand import HOUR_MS, RequestByHand, cancelled, done, failed


def numbers(grant: Grant) -> list[int]:
    return [part.number for part in grant.parts]


class TestLease:
    def test_hands_out_parts_in_input_order_under_a_lease(self, driver: RequestByHand) -> None:
        driver.load(5)

        holder, grant = driver.claim(3)

        assert grant.word == "ok"
        assert [(part.number, part.payload) for part in grant.parts] == [
            (1, b"1"),
            (2, b"2"),
            (3, b"3"),
        ]
        assert set(driver.leases()) == {holder}
        assert driver.held(holder) == [1, 2, 3]

    def test_stands_for_the_time_asked_for(self, driver: RequestByHand) -> None:
        driver.load(1)

        holder, _ = driver.claim(lease_ms=90_000)

        assert 30_000 < driver.leases()[holder] - driver.now_ms() <= 90_000

    def test_repeated_after_a_lost_reply_returns_the_same_parts_and_no_more(
        self, driver: RequestByHand
    ) -> None:
        driver.load(5)
        holder, first = driver.claim(2)

        _, again = driver.claim(4, holder=holder)

        assert (again.word, numbers(again)) == ("ok", numbers(first))
        assert driver.held(holder) == [1, 2]
        assert set(driver.leases()) == {holder}

    def test_repeated_after_the_deadline_moves_it(self, driver: RequestByHand) -> None:
        driver.load(5)
        holder, _ = driver.claim(2)
        driver.expire(holder)

        driver.claim(2, holder=holder)

        assert driver.protocol.reap(driver.id).leases == 0, "it was told to go on"

    def test_repeated_at_the_limit_is_not_refused(self, driver: RequestByHand) -> None:
        driver.load(5, limit=1)
        holder, _ = driver.claim()

        _, again = driver.claim(holder=holder)

        assert (again.word, numbers(again)) == ("ok", [1])

    def test_repeated_keeps_the_number_of_the_last_call(self, driver: RequestByHand) -> None:
        driver.load(5)
        holder, _ = driver.claim()
        driver.finish(holder, [1], 1, call=4)

        driver.claim(holder=holder)

        assert driver.holders() == {holder: "4"}

    def test_start_of_the_request_is_noted_once(self, driver: RequestByHand) -> None:
        driver.load(2)
        driver.claim()
        started_ms = driver.meta("started_ms")
        driver.set_meta(started_ms=17)

        driver.claim()

        assert 0 <= driver.now_ms() - int(started_ms) < 60_000
        assert driver.meta("started_ms") == "17"

    def test_handler_and_spec_come_with_it_unless_known(self, driver: RequestByHand) -> None:
        driver.load(3, retries=9)

        _, told = driver.claim()
        _, known = driver.claim(known=told.created_ms)
        _, other = driver.claim(known=told.created_ms - 1)

        assert (told.handler, known.handler) == ("h", "h")
        assert msgspec.json.decode(told.spec, type=Spec) == Spec(retries=9)
        assert known.spec == b""
        assert other.spec == told.spec, "the id was used before, for another request"

    def test_tells_how_long_the_request_has_waited(self, driver: RequestByHand) -> None:
        driver.load(3)
        driver.set_meta(created_ms=driver.now_ms() - 60_000)

        holder, grant = driver.claim()
        _, again = driver.claim(holder=holder)

        assert 60_000 <= grant.waited_ms <= again.waited_ms < 120_000

    def test_delay_is_no_wait(self, driver: RequestByHand) -> None:
        driver.load(1)
        now_ms = driver.now_ms()
        driver.set_meta(created_ms=now_ms - 3_600_000, hold_ms=now_ms - 60_000)

        assert 60_000 <= driver.claim()[1].waited_ms < 120_000

    def test_request_of_a_later_time_has_not_waited(self, driver: RequestByHand) -> None:
        driver.load(1)
        driver.set_meta(created_ms=driver.now_ms() + 60_000)

        assert driver.claim()[1].waited_ms == 0

    def test_tells_how_many_parts_had_trouble(self, driver: RequestByHand) -> None:
        driver.load(5)
        holder, first = driver.claim(3)
        driver.fail(holder, 1)
        driver.fail(holder, 2)
        driver.release(holder)

        _, grant = driver.claim(5)

        assert (first.retried, grant.retried) == (0, 2)
        assert len(grant.parts) == 5

    @pytest.mark.parametrize("unit", ["parts", "records"])
    def test_first_one_says_what_the_request_is_counted_in(
        self, driver: RequestByHand, unit: str
    ) -> None:
        driver.load(1)

        driver.claim(handlers=("parts g", f"{unit} h"))

        assert driver.meta("unit") == unit

    @pytest.mark.parametrize(("asked", "counts"), [(None, "5"), (0, "0"), (2, "2")])
    def test_handler_says_how_often_to_retry_unless_the_request_does(
        self, driver: RequestByHand, asked: int | None, counts: str
    ) -> None:
        driver.load(2, retries=asked)

        for retries in (5, 6):
            driver.claim(handlers=("parts g 9", f"parts h {retries}"))

        assert driver.meta("retries") == counts

    def test_parts_run_before_the_load_is_complete(self, driver: RequestByHand) -> None:
        driver.open()
        driver.append(2)

        assert numbers(driver.claim(5)[1]) == [1, 2]

    def test_hands_out_a_thousand_parts_at_most(self, driver: RequestByHand) -> None:
        driver.load(1_100)

        _, grant = driver.claim(1_100)

        assert numbers(grant) == list(range(1, 1_001))


class TestRefusal:
    def test_at_the_limit_drops_the_token(self, driver: RequestByHand) -> None:
        driver.load(5, limit=1)
        driver.claim()

        _, grant = driver.claim(level=50)

        assert (grant.word, grant.parts, bool(grant.tokens)) == ("limit", [], False)
        assert len(driver.leases()) == 1

    def test_counts_an_expired_lease_until_it_is_reaped(self, driver: RequestByHand) -> None:
        driver.load(5, limit=1)
        holder, _ = driver.claim()
        driver.expire(holder)

        assert driver.claim()[1].word == "limit"

    def test_limit_lowered_below_the_leases_refuses(self, driver: RequestByHand) -> None:
        driver.load(5, limit=3)
        driver.claim()
        driver.claim()
        driver.protocol.set(driver.id, limit=1)

        assert driver.claim()[1].word == "limit"

    def test_with_nothing_to_run_leaves_no_lease_and_no_consumer(
        self, driver: RequestByHand
    ) -> None:
        driver.open()

        _, grant = driver.claim(level=50)

        assert (grant.word, bool(grant.tokens)) == ("empty", False)
        assert (driver.leases(), driver.holders(), driver.consumers()) == ({}, {}, set())

    def test_with_only_a_later_retry_says_when_to_look(self, driver: RequestByHand) -> None:
        driver.load(1)
        holder, _ = driver.claim()
        driver.fail(holder, 1, delay_ms=60_000)
        driver.release(holder)
        driver.set_meta(due_ms=0)

        _, grant = driver.claim()

        assert (grant.word, grant.tokens.count) == ("empty", 0)
        assert grant.tokens.look_ms == driver.retry()[1]
        assert (driver.leases(), driver.consumers()) == ({}, set())

    def test_of_a_delayed_request_says_when_it_starts(self, driver: RequestByHand) -> None:
        driver.load(1, delay_ms=60_000)
        driver.set_meta(due_ms=0)

        _, grant = driver.claim(level=50)

        assert (grant.word, grant.parts) == ("held", [])
        assert grant.tokens == Tokens(0, "h:50", int(driver.meta("hold_ms")))

    def test_of_a_delayed_request_ends_when_the_time_has_come(self, driver: RequestByHand) -> None:
        driver.load(1, delay_ms=60_000)
        driver.set_meta(hold_ms=driver.now_ms())

        assert driver.claim()[1].word == "ok"

    def test_of_a_paused_request(self, driver: RequestByHand) -> None:
        driver.load(1)
        driver.protocol.pause(driver.id)

        _, grant = driver.claim(level=50)

        assert (grant.word, grant.parts, bool(grant.tokens)) == ("paused", [], False)

    def test_of_one_without_the_handler_drops_the_stray_token(self, driver: RequestByHand) -> None:
        driver.load(1)

        _, grant = driver.claim(level=50, handlers=("parts hh", "records g", "h"))

        assert (grant.word, grant.handler, grant.tokens.count) == ("handler", "h", 0)
        assert grant.tokens.look_ms == 0
        assert (driver.leases(), driver.meta("unit")) == ({}, "")

    def test_token_of_a_former_level_is_dropped(self, driver: RequestByHand) -> None:
        driver.load(5)
        driver.protocol.set(driver.id, level=3)

        _, grant = driver.claim(level=50)

        assert (grant.word, grant.parts, grant.tokens.count) == ("level", [], 0)

    def test_of_a_request_nobody_opened_leaves_no_key(self, driver: RequestByHand) -> None:
        with pytest.raises(RequestUnknown):
            driver.claim()

        assert driver.existing_keys() == set()


@pytest.mark.parametrize("become", [done, failed, cancelled])
def test_of_an_ended_request_answers_its_state(
    driver: RequestByHand, become: Callable[[RequestByHand], None]
) -> None:
    driver.load(1, max_failures=0)
    become(driver)
    before = driver.snapshot()

    _, grant = driver.claim()

    assert (grant.word, grant.parts, bool(grant.tokens)) == (become.__name__, [], False)
    assert driver.snapshot() == before


class TestOrder:
    def test_due_retries_come_first_and_in_input_order(self, driver: RequestByHand) -> None:
        driver.load(9)
        one, _ = driver.claim(3)
        other, _ = driver.claim(3)
        driver.release(other)
        driver.release(one)

        _, grant = driver.claim(8)

        assert numbers(grant) == [1, 2, 3, 4, 5, 6, 7, 8]

    def test_part_that_was_put_off_comes_after_those_handed_back(
        self, driver: RequestByHand
    ) -> None:
        driver.load(3)
        holder, _ = driver.claim(3)
        driver.fail(holder, 1, delay_ms=60_000)
        driver.release(holder)
        driver.redis.zadd(driver.keys.retry, {1: driver.now_ms()})

        _, grant = driver.claim(3)

        assert numbers(grant) == [2, 3, 1]

    def test_retry_that_is_not_due_waits(self, driver: RequestByHand) -> None:
        driver.load(3)
        holder, _ = driver.claim()
        driver.fail(holder, 1, delay_ms=60_000)

        _, grant = driver.claim(3)

        assert numbers(grant) == [2, 3]
        assert set(driver.retry()) == {1}

    def test_retry_tells_its_attempt_and_what_is_known_already(self, driver: RequestByHand) -> None:
        driver.load(2)
        holder, _ = driver.claim(2)
        driver.fail(holder, 1, partial=b"some")
        driver.release(holder)

        _, grant = driver.claim(2)

        assert [(part.attempt, part.partial) for part in grant.parts] == [(2, b"some"), (1, b"")]

    def test_part_that_is_to_run_alone_does_not_come_behind_another(
        self, driver: RequestByHand
    ) -> None:
        driver.load(3, limit=3)
        holder, _ = driver.claim(3)
        driver.release(holder)
        driver.redis.hset(driver.keys.tries, 2, "0 0 1 0 1")

        handed = [numbers(driver.claim(3)[1]) for _ in range(3)]

        assert handed == [[1], [2], [3]]

    def test_reaped_part_comes_alone(self, driver: RequestByHand) -> None:
        driver.load(5)
        holder, _ = driver.claim(2)
        driver.expire(holder)
        driver.reap()

        grants = [driver.claim(5)[1] for _ in range(3)]

        assert [numbers(grant) for grant in grants] == [[1], [2], [3, 4, 5]]
        assert [grant.parts[0].is_suspect for grant in grants] == [True, True, False]

    @pytest.mark.parametrize("rate_ms", [0.0, 1.0])
    def test_reaped_part_does_not_come_with_those_before_it(
        self, driver: RequestByHand, rate_ms: float
    ) -> None:
        driver.load(5, rate_ms=rate_ms)
        polite, _ = driver.claim(2)
        dead, _ = driver.claim()
        driver.release(polite)
        driver.expire(dead)
        driver.reap()

        batches = [numbers(driver.claim(5)[1]) for _ in range(3)]

        assert batches == [[1, 2], [3], [4, 5]]

    def test_retry_that_is_finished_meanwhile_is_dropped(self, driver: RequestByHand) -> None:
        driver.load(2)
        holder, _ = driver.claim()
        driver.finish(holder, [1])
        driver.redis.zadd(driver.keys.retry, {1: 1})

        _, grant = driver.claim(2)

        assert numbers(grant) == [2]
        assert driver.retry() == {}

    def test_retry_that_is_finished_meanwhile_is_no_work(self, driver: RequestByHand) -> None:
        driver.load(2)
        holder, _ = driver.claim(2)
        driver.finish(holder, [1], 0)
        other, _ = driver.claim()
        driver.redis.zadd(driver.keys.retry, {1: 1})

        _, grant = driver.claim()

        assert grant.word == "empty"
        assert (driver.retry(), set(driver.leases()), driver.consumers()) == ({}, {other}, {other})


class TestGarbage:
    @pytest.mark.parametrize("after", [2, 3])
    @pytest.mark.parametrize("most", [1, 9])
    def test_entries_of_somebody_else_are_passed_over_and_not_counted(
        self, driver: RequestByHand, after: int, most: int
    ) -> None:
        driver.open()
        driver.append(after)
        driver.redis.xadd(driver.keys.parts, {"not": "ours"}, id=f"{after}-7")
        if after == 2:
            driver.append(1, first=3)

        grants = [driver.claim(most)[1] for _ in range(4)]

        assert [number for grant in grants for number in numbers(grant)] == [1, 2, 3]
        assert driver.meta("delivered") == "3"
        assert driver.left() == 4, "three parts, and the load is open"
        assert driver.redis.xpending(driver.keys.parts, "w")["pending"] == 3, "nobody holds it"

    def test_entry_of_somebody_else_does_not_end_the_request(self, driver: RequestByHand) -> None:
        driver.load(2)
        driver.redis.xadd(driver.keys.parts, {"not": "ours"})
        holder, grant = driver.claim(9)

        driver.finish(holder, [number for number in numbers(grant) if number != 2])

        assert (driver.left(), driver.meta("state")) == (1, "open")

    @pytest.mark.parametrize("junk", ["", "x", "-1", "0", "01", "1-0", "1.5", "9" * 30])
    def test_member_of_retry_that_is_no_number_is_taken_out(
        self, driver: RequestByHand, junk: str
    ) -> None:
        driver.load(3)
        driver.claim()
        driver.redis.zadd(driver.keys.retry, {junk: 0})

        _, grant = driver.claim(9)

        assert numbers(grant) == [2, 3]
        assert driver.redis.zcard(driver.keys.retry) == 0

    @pytest.mark.parametrize("field", ["delivered", "unit"])
    def test_field_that_is_lost_lifts_no_limit_and_hides_no_part(
        self, driver: RequestByHand, field: str
    ) -> None:
        driver.load(1, limit=1)
        holder, _ = driver.claim()
        driver.redis.hdel(driver.keys.meta, field)

        _, refused = driver.claim()
        driver.protocol.release(driver.id, holder, 1)
        _, grant = driver.claim()

        assert refused.word == "limit"
        assert numbers(grant) == [1]

    def test_tries_that_say_nothing_count_as_none(self, driver: RequestByHand) -> None:
        driver.load(1)
        holder, _ = driver.claim()
        driver.handback(holder, [1])
        driver.redis.hset(driver.keys.tries, "1", "not ours")

        _, grant = driver.claim()

        assert [(part.number, part.attempt) for part in grant.parts] == [(1, 1)]

    def test_request_without_its_times_and_options_is_still_answered(
        self, driver: RequestByHand
    ) -> None:
        driver.load(1)
        driver.redis.hdel(driver.keys.meta, "created_ms", "spec")

        _, grant = driver.claim()

        told = (grant.word, grant.spec, grant.created_ms, grant.waited_ms)
        assert told == ("ok", b"", 0, 0)

    def test_key_of_another_type_is_said(self, driver: RequestByHand) -> None:
        driver.load(1)
        driver.redis.delete(driver.keys.parts)
        driver.redis.set(driver.keys.parts, "not ours")

        with pytest.raises(Damaged, match="another type"):
            driver.claim()


class TestBytes:
    def test_stops_after_the_part_that_reaches_the_bound(self, driver: RequestByHand) -> None:
        driver.open()
        driver.append(10, size=100)

        _, grant = driver.claim(10, max_bytes=250)

        assert numbers(grant) == [1, 2, 3]

    def test_part_larger_than_the_bound_comes_by_itself(self, driver: RequestByHand) -> None:
        driver.open()
        driver.append(3, size=100)

        _, grant = driver.claim(10, max_bytes=1)

        assert numbers(grant) == [1]

    def test_empty_payloads_are_bounded_by_count(self, driver: RequestByHand) -> None:
        driver.open()
        driver.protocol.append(driver.id, 1, "", "c", 40, [b"", b"1"] * 40)

        _, grant = driver.claim(38, max_bytes=10)

        assert len(grant.parts) == 38


class TestTokens:
    def test_level_of_the_list_is_the_level_of_the_token(self, driver: RequestByHand) -> None:
        tokens = driver.load(3, level=7)
        driver.protocol.push(driver.queue, driver.id, tokens)

        assert driver.redis.llen(QueueKeys(driver.queue, to=token_list_of("h", 7)).tokens) == 3
        assert driver.protocol.take(driver.queue, ("h",), 1) == Token(driver.id, "h", 7)

    def test_each_claim_may_push_until_eight_are_out(self, driver: RequestByHand) -> None:
        driver.load(100, limit=100)

        _, grant = driver.claim(level=50)

        assert (grant.tokens, driver.meta("out")) == (Tokens(1, "h:50"), "8")

    def test_those_missing_from_what_could_start_are_pushed(self, driver: RequestByHand) -> None:
        driver.load(6, limit=5)
        driver.set_meta(out=2)

        _, grant = driver.claim(3, level=50)

        # Three parts are left, four leases are free, one token is out.
        assert (grant.tokens, driver.meta("out")) == (Tokens(2, "h:50"), "3")

    def test_no_more_are_out_than_leases_are_free(self, driver: RequestByHand) -> None:
        driver.load(9, limit=2)
        driver.set_meta(out=0)

        first, second = (driver.claim()[1].tokens.count for _ in range(2))

        assert (first, second) == (1, 0)

    def test_refused_claim_uses_its_token_up(self, driver: RequestByHand) -> None:
        driver.load(9, limit=1)
        driver.claim()
        driver.set_meta(out=4)

        driver.claim(level=50)

        assert driver.meta("out") == "3"

    def test_claim_without_a_token_uses_none_up(self, driver: RequestByHand) -> None:
        driver.load(9, limit=1)
        driver.claim()
        driver.set_meta(out=4)

        driver.claim()

        assert driver.meta("out") == "4"

    def test_token_of_a_former_level_was_written_off_before(self, driver: RequestByHand) -> None:
        driver.load(9)
        driver.protocol.set(driver.id, level=3)
        assert driver.meta("out") == "8"

        driver.claim(level=50)

        assert driver.meta("out") == "8"

    def test_fewer_than_none_are_never_out(self, driver: RequestByHand) -> None:
        driver.load(1, limit=1)
        driver.claim()
        driver.set_meta(out=0)

        driver.claim(level=50)

        assert driver.meta("out") == "0"


class TestRate:
    def test_slow_rate_hands_out_one_part_and_holds_the_next(self, driver: RequestByHand) -> None:
        driver.load(9, rate_ms=60_000.0)

        _, first = driver.claim(5)
        driver.set_meta(due_ms=0)
        _, second = driver.claim(5)

        assert (numbers(first), first.tokens.count) == ([1], 0)
        assert (second.word, second.tokens.count) == ("held", 0)
        assert 0 < second.tokens.look_ms - driver.now_ms() <= 60_000

    def test_fast_rate_hands_out_a_few_ahead(self, driver: RequestByHand) -> None:
        driver.load(50, rate_ms=10.0)

        _, grant = driver.claim(50)

        # As many as lie within 50 ms, and the one that reaches beyond.
        assert len(grant.parts) == 5

    def test_rate_does_not_save_up(self, driver: RequestByHand) -> None:
        driver.load(50, rate_ms=10.0)
        driver.set_meta(rate_at_ms=1)

        _, grant = driver.claim(50)

        assert len(grant.parts) == 5

    def test_retries_are_under_the_rate_too(self, driver: RequestByHand) -> None:
        driver.load(9)
        holder, _ = driver.claim(9)
        driver.release(holder)
        driver.protocol.set(driver.id, rate_ms=60_000)

        _, grant = driver.claim(5)

        assert numbers(grant) == [1]
        assert driver.claim(5)[1].word == "held"

    def test_retries_under_a_rate_come_with_what_is_known_of_them(
        self, driver: RequestByHand
    ) -> None:
        driver.load(3, rate_ms=0.01)
        holder, _ = driver.claim(3)
        for number in (1, 2):
            driver.fail(holder, number, delay_ms=0, partial=b"some")
        driver.release(holder)

        _, grant = driver.claim(5)

        told = {part.number: (part.attempt, part.partial) for part in grant.parts}
        assert told == {1: (2, b"some"), 2: (2, b"some"), 3: (1, b"")}

    def test_counts_records_where_the_handler_takes_records(self, driver: RequestByHand) -> None:
        driver.open(rate_ms=10.0)
        driver.append(9, records=3)

        _, grant = driver.claim(9, handlers=("records h",))

        # Three records of each part take 30 ms of the 50.
        assert numbers(grant) == [1, 2]

    def test_counts_parts_where_the_handler_takes_parts(self, driver: RequestByHand) -> None:
        driver.open(rate_ms=10.0)
        driver.append(9, records=3)

        _, grant = driver.claim(9, handlers=("parts h",))

        assert numbers(grant) == [1, 2, 3, 4, 5]

    def test_rate_charged_by_a_clock_that_was_ahead_is_forgotten(
        self, driver: RequestByHand
    ) -> None:
        driver.load(9, rate_ms=60_000.0)
        driver.claim()
        driver.set_meta(rate_at_ms=driver.now_ms() + HOUR_MS)

        _, grant = driver.claim()

        assert numbers(grant) == [2]
        assert 59_000 < float(driver.meta("rate_at_ms")) - driver.now_ms() <= 60_000
        assert driver.claim()[1].word == "held"

    def test_part_of_many_records_holds_the_rate_for_as_long_as_they_take(
        self, driver: RequestByHand
    ) -> None:
        driver.open(rate_ms=10.0)
        driver.append(9, records=360_000)
        driver.claim(handlers=("records h",))
        driver.set_meta(due_ms=0)

        _, grant = driver.claim(handlers=("records h",))

        assert grant.word == "held"
        assert grant.tokens.look_ms - driver.now_ms() > HOUR_MS - 60_000

    def test_rate_charged_by_an_earlier_version_stands(self, driver: RequestByHand) -> None:
        driver.load(9, rate_ms=60_000.0)
        driver.set_meta(rate_at_ms=driver.now_ms() + HOUR_MS)

        assert driver.claim()[1].word == "held"


class TestGone:
    def test_claim_that_comes_after_its_own_release_grants_nothing(
        self, driver: RequestByHand
    ) -> None:
        driver.load(1)
        driver.release("w1")

        _, grant = driver.claim(holder="w1", level=50)

        assert (grant.word, grant.parts, grant.tokens.count) == ("lost", [], 0)
        assert (driver.leases(), driver.holders(), driver.consumers()) == ({}, {}, set())
        assert driver.meta("out") == "0", "its token is used up all the same"

    def test_part_that_nobody_was_handed_is_charged_with_no_crash(
        self, driver: RequestByHand
    ) -> None:
        driver.load(1)
        for name in ("w1", "w2", "w3"):
            driver.release(name)
            driver.claim(holder=name)
            if name in driver.leases():
                driver.expire(name)
            driver.reap()

        assert (driver.tries(), driver.failed()) == ({}, {})

    def test_part_that_kills_whole_hosts_at_once_is_given_up(self, driver: RequestByHand) -> None:
        driver.load(1)
        for _ in range(3):  # nothing is heard of a holder after its claim
            driver.expire(driver.claim()[0])
            driver.reap()

        assert set(driver.failed()) == {1}

    def test_others_can_claim(self, driver: RequestByHand) -> None:
        driver.load(1)
        driver.release("w1")

        assert driver.claim()[1].word == "ok"


def test_full_server_still_hands_out(driver: RequestByHand) -> None:
    driver.load(1)

    with driver.full_server():
        _, grant = driver.claim()

    assert numbers(grant) == [1]


def test_any_number_of_handlers(driver: RequestByHand) -> None:
    driver.load(1)

    _, grant = driver.claim(handlers=[f"parts x{number}" for number in range(10_000)] + ["parts h"])

    assert [part.number for part in grant.parts] == [1]
