"""reap.lua: running -> retry under an expired lease; running -> failed for poison."""

import msgspec
import pytest

from streamq.errors import RequestUnknown
from streamq.model import Failure, State
from streamq.protocol.replies import Tokens
from tests.support.by_hand import HOUR_MS, RequestByHand


@pytest.fixture
def dead(driver: RequestByHand) -> str:
    """Held parts 1 to 3 of six, and its lease has expired."""
    driver.load(6)
    holder, _ = driver.claim(3)
    driver.expire(holder)
    return holder


class TestLeases:
    def test_parts_go_to_the_front_and_the_lease_ends(
        self, driver: RequestByHand, dead: str
    ) -> None:
        reaped = driver.reap()

        assert (reaped.leases, reaped.parts, reaped.state) == (1, 3, State.OPEN)
        assert driver.retry() == {1: 1, 2: 2, 3: 3}
        assert (driver.leases(), driver.holders(), driver.consumers()) == ({}, {}, set())
        assert driver.left() == 6

    def test_lease_that_stands_is_not_touched(self, driver: RequestByHand, dead: str) -> None:
        alive, _ = driver.claim()

        driver.reap()

        assert (set(driver.leases()), driver.held(alive)) == ({alive}, [4])

    def test_deadline_is_checked_when_the_parts_are_moved(
        self, driver: RequestByHand, dead: str
    ) -> None:
        driver.protocol.renew(driver.id, 20_000, {dead: None})
        before = driver.redis.dump(driver.keys.parts)

        reaped = driver.reap()

        assert (reaped.leases, reaped.parts) == (0, 0)
        assert driver.redis.dump(driver.keys.parts) == before

    def test_twice_takes_nothing_more(self, driver: RequestByHand, dead: str) -> None:
        driver.reap()
        before = driver.snapshot()

        reaped = driver.reap()

        assert (reaped.leases, reaped.parts, bool(reaped.tokens)) == (0, 0, False)
        assert driver.snapshot() == before

    def test_takes_as_many_leases_as_asked_for(self, driver: RequestByHand) -> None:
        driver.load(6)
        for holder in [driver.claim()[0] for _ in range(3)]:
            driver.expire(holder)

        counts = [driver.reap(limit=2).leases for _ in range(3)]

        assert counts == [2, 1, 0]

    def test_lease_with_nothing_pending_ends(self, driver: RequestByHand, dead: str) -> None:
        driver.handback(dead, [1, 2, 3])

        reaped = driver.reap()

        assert (reaped.leases, reaped.parts, driver.leases()) == (1, 0, {})
        assert driver.tries() == {}

    def test_very_many_parts_are_taken_back_to_the_last(self, driver: RequestByHand) -> None:
        driver.load(1_100)
        holder, _ = driver.claim(1_000)
        driver.finish(holder, [], 100)
        driver.expire(holder)

        assert driver.reap().parts == 1_100
        assert list(driver.retry()) == list(range(1, 1_101))
        assert len(driver.tries()) == 1_100

    def test_returns_tokens_for_what_was_taken_back(self, driver: RequestByHand, dead: str) -> None:
        driver.set_meta(out=0)

        assert driver.reap().tokens == Tokens(6, "h:50")


class TestGrace:
    """Nobody is reaped before each holder that lives could be heard, whatever was away."""

    #: With a lease of 20 s: a renewal's patience, the longest rest, and the next renewal.
    GRACE_MS = 8_000

    def test_lease_that_just_expired_is_not_reaped(self, driver: RequestByHand) -> None:
        driver.load(6)
        driver.pass_deadline(driver.claim()[0])

        assert driver.reap().leases == 0
        assert driver.protocol.audit(driver.id).expired == 0
        assert driver.reap().leases == 0

    @pytest.mark.parametrize(("since_ms", "reaped"), [(GRACE_MS - 500, 0), (GRACE_MS, 1)])
    def test_is_as_long_as_one_who_lives_may_be_silent(
        self, driver: RequestByHand, since_ms: int, reaped: int
    ) -> None:
        driver.load(6)
        driver.pass_deadline(driver.claim()[0])
        driver.suspect(since_ms)

        assert driver.reap().leases == reaped

    @pytest.mark.parametrize(("lease_ms", "grace_ms"), [(2_000, 4_000), (8_000, 5_000)])
    def test_is_shorter_with_shorter_leases(
        self, driver: RequestByHand, lease_ms: int, grace_ms: int
    ) -> None:
        driver.load(6)
        driver.pass_deadline(driver.claim(lease_ms=lease_ms)[0])

        driver.suspect(grace_ms - 500)
        assert driver.reap().leases == 0
        driver.suspect(grace_ms)
        assert driver.reap().leases == 1

    def test_of_one_is_not_spent_by_another(self, driver: RequestByHand) -> None:
        driver.load(6)
        dead, slow = (driver.claim()[0] for _ in range(2))
        driver.pass_deadline(dead)
        driver.pass_deadline(slow, self.GRACE_MS - 500)
        driver.suspect(HOUR_MS)

        assert driver.protocol.audit(driver.id).expired == 1
        assert driver.reap().leases == 1
        assert set(driver.leases()) == {slow}

    def test_begins_anew_when_nobody_looked_for_a_while(self, driver: RequestByHand) -> None:
        driver.load(6)
        driver.pass_deadline(driver.claim()[0])
        driver.suspect(HOUR_MS, looked_ms=2_500)

        assert driver.reap().leases == 0
        assert driver.protocol.audit(driver.id).expired == 0
        assert driver.now_ms() - int(driver.meta("suspected_ms")) < 1_000

    def test_begins_anew_when_the_clock_went_back(self, driver: RequestByHand) -> None:
        driver.load(6)
        driver.pass_deadline(driver.claim()[0])
        driver.suspect(HOUR_MS, looked_ms=-HOUR_MS)

        assert driver.reap().leases == 0
        assert driver.protocol.audit(driver.id).expired == 0

    def test_outages_charge_nobody_who_renews_after_them(self, driver: RequestByHand) -> None:
        driver.load(5, poison=3)
        holders = [driver.claim()[0] for _ in range(5)]

        for _ in range(3):  # the server was away for longer than any lease stands
            for holder in holders:
                driver.pass_deadline(holder)
            if "suspected_ms" in driver.protocol.inspect(driver.id).fields:
                driver.suspect(HOUR_MS, looked_ms=HOUR_MS // 2)
            for holder in holders:  # each pool looks before it, or another, renews
                assert driver.protocol.audit(driver.id).expired == 0
                assert driver.reap().leases == 0
                driver.protocol.renew(driver.id, 20_000, {holder: None})

        assert driver.protocol.audit(driver.id).overdue == 0
        assert (driver.tries(), driver.failed(), set(driver.leases())) == ({}, {}, set(holders))


class TestBounds:
    def test_parts_of_a_call_are_bounded_not_only_leases(self, driver: RequestByHand) -> None:
        driver.load(3_000, limit=30)
        for _ in range(30):
            driver.expire(driver.claim(100)[0])

        counts = [driver.reap() for _ in range(4)]

        assert [(each.leases, each.parts) for each in counts] == [(5, 500)] * 4
        assert set(driver.tries().values()) == {"0 0 1 0 0"}

    def test_commands_do_not_grow_with_the_parts(self, driver: RequestByHand) -> None:
        driver.load(600)
        driver.expire(driver.claim(500)[0])
        names = ("hget", "hset", "hmget", "zadd", "xclaim")
        before = driver.commands(names)

        driver.reap()

        after = driver.commands(names)
        assert sum(after[name] - before[name] for name in names) < 20


class TestCharge:
    def test_only_part_is_the_one_that_ran(self, driver: RequestByHand) -> None:
        driver.load(6)
        holder, _ = driver.claim()
        driver.expire(holder)

        driver.reap()

        assert driver.tries() == {1: "0 1 1 0 0"}

    def test_part_that_the_holder_said_it_runs_is_charged(
        self, driver: RequestByHand, dead: str
    ) -> None:
        driver.protocol.renew(driver.id, 20_000, {dead: 2})
        driver.expire(dead)

        driver.reap()

        assert driver.tries() == {1: "0 0 1 0 0", 2: "0 1 1 0 0", 3: "0 0 1 0 0"}

    def test_nobody_is_charged_where_nothing_was_said(
        self, driver: RequestByHand, dead: str
    ) -> None:
        driver.reap()

        assert driver.tries() == dict.fromkeys((1, 2, 3), "0 0 1 0 0")

    def test_nobody_is_charged_when_what_was_said_is_finished(self, driver: RequestByHand) -> None:
        driver.load(6)
        holder, _ = driver.claim(3)
        driver.finish(holder, [1], 1)
        driver.protocol.renew(driver.id, 20_000, {holder: 1})
        driver.expire(holder)

        driver.reap()

        assert driver.tries() == dict.fromkeys((2, 3, 4), "0 0 1 0 0")

    def test_nobody_is_charged_for_a_gateway_that_died_before_it_had_answered(
        self, driver: RequestByHand
    ) -> None:
        driver.load(6)
        for most in (1, 3):
            holder, _ = driver.claim(most, holder=f"gab12.{most}")
            driver.expire(holder)

        reaped = driver.reap()

        assert (reaped.leases, reaped.parts, driver.tries()) == (2, 4, {})

    def test_worker_behind_a_gateway_is_charged_once_it_has_the_parts(
        self, driver: RequestByHand
    ) -> None:
        driver.load(6)
        holder, _ = driver.claim(holder="gab12.1")
        driver.protocol.renew(driver.id, 20_000, {holder: None})
        driver.expire(holder)

        driver.reap()

        assert driver.tries() == {1: "0 1 1 0 0"}

    def test_spends_no_attempt(self, driver: RequestByHand) -> None:
        driver.load(1)
        holder, _ = driver.claim()
        driver.fail(holder, 1)
        driver.finish(holder, [], 1)
        driver.expire(holder)

        driver.reap()

        assert driver.tries() == {1: "1 1 1 0 0"}
        assert driver.claim()[1].parts[0].attempt == 2


class TestPoolThatLives:
    """Its pool would have renewed the lease: the end of it was forgotten, and nobody died."""

    POOL = "0123456789abcdef"

    @pytest.fixture
    def holder(self, driver: RequestByHand) -> str:
        """Said that it runs part 2 of its three; its lease was over a minute ago."""
        driver.load(6)
        holder, _ = driver.claim(3, holder=f"{self.POOL}.fedcba9876543210-0-1")
        driver.protocol.renew(driver.id, 20_000, {holder: 2})
        driver.pass_deadline(holder, 60_000)
        driver.suspect(60_000)
        return holder

    def test_heard_after_the_deadline_no_part_is_charged_or_set_apart(
        self, driver: RequestByHand, holder: str
    ) -> None:
        reaped = driver.protocol.reap(driver.id, heard={"another": 70_000, self.POOL: 55_000})

        assert (reaped.leases, reaped.parts) == (1, 3)
        assert (driver.tries(), driver.retry()) == ({}, {1: 1, 2: 2, 3: 3})
        assert (driver.leases(), driver.consumers()) == ({}, set())

    @pytest.mark.parametrize(
        "heard", [{}, {POOL: 65_000}, {"another": 0}, {f"{POOL}0": 0}, {POOL[:-1]: 0}]
    )
    def test_not_heard_since_the_deadline_it_is_charged(
        self, driver: RequestByHand, holder: str, heard: dict[str, int]
    ) -> None:
        driver.protocol.reap(driver.id, heard=heard)

        assert driver.tries() == {1: "0 0 1 0 0", 2: "0 1 1 0 0", 3: "0 0 1 0 0"}

    def test_each_lease_is_judged_by_its_own_pool(self, driver: RequestByHand, holder: str) -> None:
        dead, _ = driver.claim(holder="fedcba9876543210.0123456789abcdef-0-1")
        driver.expire(dead)

        reaped = driver.protocol.reap(driver.id, heard={self.POOL: 0})

        assert (reaped.leases, driver.tries()) == (2, {4: "0 1 1 0 0"})


class TestPoison:
    def crash(self, driver: RequestByHand) -> None:
        holder, _ = driver.claim()
        driver.expire(holder)
        assert driver.reap().leases == 1

    def test_part_that_killed_three_workers_is_given_up(self, driver: RequestByHand) -> None:
        driver.open()
        driver.append(2, records=7)

        for failed in (0, 0, 1):
            self.crash(driver)
            assert len(driver.failed()) == failed

        assert msgspec.json.decode(driver.failed()[1], type=list[Failure])[0].error == "Poison"
        assert (driver.retry(), driver.entries(), driver.left()) == ({}, [1, 2], 2)
        assert (driver.meta("failed"), driver.meta("records_failed")) == ("1", "7")

    @pytest.mark.parametrize(
        ("unit", "records", "deaths"),
        [
            ("parts", 17, 2),
            ("records", 1, 2),
            # Twice the factor that streamq/worker/pieces.py has for so many, and two.
            ("records", 16, 2 * 3 + 2),
            ("records", 17, 2 * 4 + 2),
        ],
    )
    def test_part_of_several_records_of_a_map_is_given_more_tries(
        self, driver: RequestByHand, unit: str, records: int, deaths: int
    ) -> None:
        driver.open(poison=2)
        driver.append(1, records=records)
        driver.protocol.seal(driver.id, 1, "c1")

        for count in range(1, deaths + 1):
            holder, _ = driver.claim(handlers=(f"{unit} h",))
            driver.expire(holder)
            driver.reap()
            assert len(driver.failed()) == (count == deaths)

    def test_is_counted_apart_from_errors(self, driver: RequestByHand) -> None:
        driver.load(1, retries=2, poison=3)

        for _ in range(2):
            self.crash(driver)
            holder, _ = driver.claim()
            assert driver.fail(holder, 1).word == "retry"
            driver.release(holder)

        assert (driver.tries(), driver.failed()) == ({1: "2 2 1 0 0"}, {})

    def test_last_part_given_up_ends_the_request(self, driver: RequestByHand) -> None:
        driver.load(1, poison=1)

        with driver.published() as published:
            self.crash(driver)

        assert (driver.meta("state"), published) == ("done", ["done"])
        assert driver.existing_keys() == {"meta", "left", "parts", "failed", "tries"}

    def test_failure_beyond_tolerance_does_not_stop_the_reaping(
        self, driver: RequestByHand
    ) -> None:
        driver.load(6, poison=1, max_failures=0)
        for holder in [driver.claim()[0], driver.claim(2)[0]]:
            driver.expire(holder)

        reaped = driver.reap()

        assert (reaped.leases, reaped.parts, reaped.state) == (2, 3, State.FAILED)
        assert (driver.leases(), bool(reaped.tokens)) == ({}, False)
        assert set(driver.failed()) | set(driver.retry()) == {1, 2, 3}


@pytest.mark.parametrize("state", ["done", "cancelled"])
def test_of_an_ended_request_changes_nothing(driver: RequestByHand, dead: str, state: str) -> None:
    if state == "cancelled":
        driver.protocol.cancel(driver.id)
    else:
        driver.finish(dead, [1, 2, 3], 3)
        driver.finish(dead, [4, 5, 6])
    before = driver.snapshot()

    reaped = driver.reap()

    assert (reaped.leases, reaped.state, bool(reaped.tokens)) == (0, State(state), False)
    assert driver.snapshot() == before


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.reap()

    assert driver.existing_keys() == set()


def test_full_server_still_takes_back(driver: RequestByHand, dead: str) -> None:
    with driver.full_server():
        assert driver.reap().parts == 3
