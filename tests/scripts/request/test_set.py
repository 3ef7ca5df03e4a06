"""set.lua: level, limit and rate of a request that runs."""

from collections.abc import Callable

import pytest

from streamq.errors import RequestEnded, RequestUnknown
from streamq.model import State
from streamq.protocol.replies import Tokens
from tests.support.by_hand import RequestByHand, cancelled, done, failed


def test_what_is_not_given_stays(driver: RequestByHand) -> None:
    driver.load(9, level=7, limit=3, rate_ms=5.0)
    before = driver.snapshot()

    state, tokens = driver.protocol.set(driver.id)

    assert (state, bool(tokens)) == (State.OPEN, False)
    assert driver.snapshot() == before


def test_may_change_while_loading(driver: RequestByHand) -> None:
    driver.open()

    state, _ = driver.protocol.set(driver.id, level=3, limit=2, rate_ms=0.5)

    assert state == State.LOADING
    assert [driver.meta(f) for f in ("level", "limit", "rate_ms")] == ["3", "2", "0.5"]


class TestLevel:
    def test_tokens_of_the_old_one_are_written_off(self, driver: RequestByHand) -> None:
        driver.load(5)
        assert driver.meta("out") == "5"

        _, tokens = driver.protocol.set(driver.id, level=3)

        assert tokens == Tokens(5, "h:03")
        assert (driver.meta("level"), driver.meta("out")) == ("3", "5")

    def test_same_one_writes_nothing_off(self, driver: RequestByHand) -> None:
        driver.load(5)

        _, tokens = driver.protocol.set(driver.id, level=50)

        assert (tokens, driver.meta("out")) == (Tokens(0, "h:50"), "5")

    def test_of_a_request_with_nothing_to_start_needs_no_tokens(
        self, driver: RequestByHand
    ) -> None:
        driver.load(1)
        driver.claim()

        _, tokens = driver.protocol.set(driver.id, level=3)

        assert (tokens, driver.meta("out")) == (Tokens(0, "h:03"), "0")


class TestLimit:
    def test_raised_invites_more(self, driver: RequestByHand) -> None:
        driver.load(9, limit=1)

        _, tokens = driver.protocol.set(driver.id, limit=4)

        assert (tokens, driver.meta("out")) == (Tokens(3, "h:50"), "4")

    def test_lowered_takes_no_lease_away(self, driver: RequestByHand) -> None:
        driver.load(9, limit=4)
        holders = {driver.claim()[0] for _ in range(3)}

        _, tokens = driver.protocol.set(driver.id, limit=1)

        assert (tokens.count, set(driver.leases())) == (0, holders)


class TestWeight:
    def test_raised_invites_more(self, driver: RequestByHand) -> None:
        driver.load(40, limit=40)
        assert driver.meta("out") == "8"

        _, tokens = driver.protocol.set(driver.id, weight=20)

        assert (tokens, driver.meta("out")) == (Tokens(12, "h:50"), "20")

    def test_lowered_lets_claims_use_up_the_others(self, driver: RequestByHand) -> None:
        driver.load(40, limit=40)
        driver.protocol.set(driver.id, weight=2)

        pushed = [driver.claim(level=50)[1].tokens.count for _ in range(8)]

        assert pushed == [0, 0, 0, 0, 0, 0, 1, 1]
        assert driver.meta("out") == "2"

    def test_of_the_submission_bounds_what_is_out(self, driver: RequestByHand) -> None:
        assert driver.load(40, limit=40, weight=3).count == 3

        assert driver.protocol.audit(driver.id).weight == 3

    def test_that_is_no_number_is_as_none(self, driver: RequestByHand) -> None:
        driver.load(40, limit=40, weight=3)
        driver.set_meta(weight="heavy")

        assert driver.protocol.audit(driver.id).tokens.count == 8


class TestRate:
    def test_holds_from_now_on(self, driver: RequestByHand) -> None:
        driver.load(9)

        driver.protocol.set(driver.id, rate_ms=60_000)

        assert [driver.claim(9)[1].word for _ in range(2)] == ["ok", "held"]

    def test_faster_one_does_not_wait_for_the_slower(self, driver: RequestByHand) -> None:
        driver.load(9, rate_ms=60_000.0)
        driver.claim(level=50)
        assert driver.claim(level=50)[1].word == "held"

        _, tokens = driver.protocol.set(driver.id, rate_ms=30_000)

        assert tokens.count > 0
        assert driver.claim()[1].word == "ok"

    def test_zero_lifts_it(self, driver: RequestByHand) -> None:
        driver.load(9, rate_ms=60_000.0)
        driver.claim()

        driver.protocol.set(driver.id, rate_ms=0)

        assert len(driver.claim(9)[1].parts) == 8


@pytest.mark.parametrize("become", [done, failed, cancelled])
def test_ended_request_is_not_changed(
    driver: RequestByHand, become: Callable[[RequestByHand], None]
) -> None:
    driver.load(1, max_failures=0)
    become(driver)
    before = driver.snapshot()

    with pytest.raises(RequestEnded, match=f"the request is {become.__name__}"):
        driver.protocol.set(driver.id, level=3)

    assert driver.snapshot() == before


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.protocol.set(driver.id, limit=3)

    assert driver.existing_keys() == set()


def test_full_server_still_takes_it(driver: RequestByHand) -> None:
    driver.load(9, limit=1)

    with driver.full_server():
        _, tokens = driver.protocol.set(driver.id, limit=2)

    assert tokens.count == 1
