"""audit.lua: which tokens should be out, whatever was believed."""

import pytest

from streamq.errors import RequestUnknown
from streamq.model import State
from streamq.protocol.replies import Tokens
from tests.support.by_hand import RequestByHand


class TestBelief:
    @pytest.mark.parametrize(("believed", "after"), [(0, "0"), (2, "2"), (99, "4")])
    def test_is_lowered_to_what_should_be_out_and_never_raised(
        self, driver: RequestByHand, believed: int, after: str
    ) -> None:
        driver.load(9, limit=5, level=7)
        driver.claim()
        driver.set_meta(out=believed)

        audit = driver.protocol.audit(driver.id)

        assert (audit.state, audit.tokens.count, audit.tokens.to) == (State.OPEN, 4, "h:07")
        assert driver.meta("out") == after

    def test_is_the_same_after_the_second_audit(self, driver: RequestByHand) -> None:
        driver.load(9)
        holder, _ = driver.claim(2)
        driver.fail(holder, 1, delay_ms=60_000)
        driver.protocol.audit(driver.id)
        before = driver.snapshot()

        driver.protocol.audit(driver.id)

        assert driver.snapshot() == before

    def test_is_eight_at_most(self, driver: RequestByHand) -> None:
        driver.load(100, limit=100)

        assert driver.protocol.audit(driver.id).tokens.count == 8

    def test_counts_retries_that_are_due(self, driver: RequestByHand) -> None:
        driver.load(3)
        holder, _ = driver.claim(3)
        driver.fail(holder, 1, delay_ms=60_000)
        driver.handback(holder, [2])

        assert driver.protocol.audit(driver.id).tokens.count == 1

    def test_is_nothing_at_the_limit(self, driver: RequestByHand) -> None:
        driver.load(9, limit=1)
        driver.claim()

        assert driver.protocol.audit(driver.id).tokens.count == 0
        assert driver.meta("out") == "0"

    def test_is_nothing_of_a_paused_request(self, driver: RequestByHand) -> None:
        driver.load(9)
        driver.protocol.pause(driver.id)

        assert driver.protocol.audit(driver.id).tokens == Tokens(0, "h:50")
        assert driver.meta("out") == "0"


class TestLook:
    def test_comes_when_a_retry_falls_due(self, driver: RequestByHand) -> None:
        driver.load(1)
        holder, _ = driver.claim()
        driver.fail(holder, 1, delay_ms=60_000)
        driver.release(holder)

        audit = driver.protocol.audit(driver.id)

        assert audit.tokens == Tokens(0, "h:50", int(driver.retry()[1]))

    def test_comes_when_the_first_lease_would_expire(self, driver: RequestByHand) -> None:
        driver.load(9)
        driver.claim(lease_ms=90_000)
        first, _ = driver.claim(lease_ms=30_000)

        audit = driver.protocol.audit(driver.id)

        assert (audit.tokens.look_ms, audit.expired) == (driver.leases()[first], 0)

    @pytest.mark.parametrize("delay_ms", [5_000, 60_000], ids=["retry", "lease"])
    def test_comes_at_the_first_of_them(self, driver: RequestByHand, delay_ms: int) -> None:
        driver.load(2)
        holder, _ = driver.claim(2, lease_ms=30_000)
        driver.fail(holder, 1, delay_ms=delay_ms)

        look_ms = driver.protocol.audit(driver.id).tokens.look_ms

        assert look_ms == min(driver.retry()[1], driver.leases()[holder])

    def test_comes_when_the_request_starts(self, driver: RequestByHand) -> None:
        driver.load(9, delay_ms=60_000)

        audit = driver.protocol.audit(driver.id)

        assert audit.tokens == Tokens(0, "h:50", int(driver.meta("hold_ms")))

    def test_of_a_held_request_comes_not_before_something_can_start(
        self, driver: RequestByHand
    ) -> None:
        driver.load(1)
        holder, _ = driver.claim()
        driver.fail(holder, 1, delay_ms=60_000)
        driver.release(holder)
        driver.set_meta(hold_ms=driver.now_ms() + 5_000)

        assert driver.protocol.audit(driver.id).tokens.look_ms == driver.retry()[1]

    def test_is_asked_for_again_whatever_was_registered(self, driver: RequestByHand) -> None:
        driver.load(9, delay_ms=60_000)
        driver.set_meta(due_ms=driver.now_ms() + 10)

        assert driver.protocol.audit(driver.id).tokens.look_ms == int(driver.meta("hold_ms"))

    def test_is_not_needed_while_nothing_is_awaited(self, driver: RequestByHand) -> None:
        driver.load(9)

        assert driver.protocol.audit(driver.id).tokens.look_ms == 0


def test_finds_leases_that_have_expired_and_leaves_them_to_be_reaped(driver: RequestByHand) -> None:
    driver.load(9)
    for holder in [driver.claim()[0] for _ in range(3)][:2]:
        driver.expire(holder)

    audit = driver.protocol.audit(driver.id)

    assert (audit.expired, audit.overdue) == (2, 2)
    assert len(driver.leases()) == 3


class TestSuspicion:
    def test_is_noted_and_looked_at_again_within_a_second(self, driver: RequestByHand) -> None:
        driver.load(9)
        driver.pass_deadline(driver.claim()[0])

        audit = driver.protocol.audit(driver.id)

        now = driver.now_ms()
        assert (audit.expired, audit.overdue) == (0, 1)
        assert now < audit.tokens.look_ms <= now + 1_000
        assert driver.meta("suspected_ms") == driver.meta("looked_ms")

    @pytest.mark.parametrize("since_ms", [1_500, 3_000])
    def test_lasts_from_look_to_look(self, driver: RequestByHand, since_ms: int) -> None:
        """The look before may have been the first one."""
        driver.load(9)
        driver.pass_deadline(driver.claim()[0])
        driver.suspect(since_ms, looked_ms=1_500)
        since = driver.meta("suspected_ms")

        driver.protocol.audit(driver.id)

        assert driver.meta("suspected_ms") == since
        assert driver.now_ms() - int(driver.meta("looked_ms")) < 1_000

    def test_ends_when_every_lease_was_renewed(self, driver: RequestByHand) -> None:
        driver.load(9)
        holder, _ = driver.claim()
        driver.expire(holder)
        driver.protocol.renew(driver.id, 20_000, {holder: None})

        assert driver.protocol.audit(driver.id).overdue == 0
        assert (driver.meta("suspected_ms"), driver.meta("looked_ms")) == ("", "")


def test_failed_request_is_not_to_be_closed_while_a_lease_stands(driver: RequestByHand) -> None:
    driver.load(3, max_failures=0)
    dead, _ = driver.claim()
    driver.give_up(2)
    assert driver.meta("state") == "failed"

    audit = driver.protocol.audit(driver.id)
    assert (audit.purge_at, audit.tokens.look_ms) == (0, driver.leases()[dead])
    driver.expire(dead)
    audit = driver.protocol.audit(driver.id)
    assert (audit.purge_at, audit.expired) == (0, 1)
    driver.reap()

    assert driver.protocol.audit(driver.id).purge_at > 0
    assert driver.retry() == {1: 1}


def test_request_that_runs_is_not_to_be_purged(driver: RequestByHand) -> None:
    driver.load(9)

    assert driver.protocol.audit(driver.id).purge_at == 0


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_ended_request_is_to_be_purged_after_its_retention(
    driver: RequestByHand, state: str
) -> None:
    driver.load(9, keep_ms=60_000)
    driver.set_meta(state=state, finished_ms=1_000)

    audit = driver.protocol.audit(driver.id)

    assert (audit.state, audit.purge_at, audit.tokens.count) == (State(state), 61_000, 0)


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.protocol.audit(driver.id)

    assert driver.existing_keys() == set()


def test_reports_once_what_somebody_else_added_to_the_stream(driver: RequestByHand) -> None:
    driver.load(2)
    driver.redis.xadd(driver.keys.parts, {"not": "ours"})
    driver.claim(9)

    assert driver.protocol.audit(driver.id).strays == 1
    assert driver.protocol.audit(driver.id).strays == 0


def test_full_server_still_audits(driver: RequestByHand) -> None:
    driver.load(9)

    with driver.full_server():
        assert driver.protocol.audit(driver.id).tokens.count == 8
