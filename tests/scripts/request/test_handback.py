"""handback.lua: running -> retry for parts that were not started; the lease goes on."""

import pytest

from streamq.errors import RequestUnknown
from streamq.protocol.replies import Tokens
from tests.support.by_hand import RequestByHand


@pytest.fixture
def holder(driver: RequestByHand) -> str:
    """Holds parts 1 to 4 of six."""
    driver.load(6)
    holder, _ = driver.claim(4)
    return holder


def test_parts_go_to_the_front_and_the_lease_goes_on(driver: RequestByHand, holder: str) -> None:
    outcome = driver.handback(holder, [3, 4])

    assert outcome.word == "ok"
    assert driver.retry() == {3: 3, 4: 4}
    assert (set(driver.leases()), driver.held(holder)) == ({holder}, [1, 2])


def test_parts_may_run_beside_others_and_no_attempt_is_spent(
    driver: RequestByHand, holder: str
) -> None:
    driver.handback(holder, [3, 4])

    _, grant = driver.claim(9)
    assert [(part.number, part.attempt) for part in grant.parts] == [(3, 1), (4, 1), (5, 1), (6, 1)]


def test_only_parts_it_holds_are_taken(driver: RequestByHand, holder: str) -> None:
    other, _ = driver.claim()
    driver.finish(holder, [1], 0, call=0)

    driver.handback(holder, [1, 2, 5, 6, 99])

    assert driver.retry() == {2: 2}
    assert (driver.held(holder), driver.held(other)) == ([3, 4], [5])


def test_holder_may_be_left_with_nothing(driver: RequestByHand, holder: str) -> None:
    driver.handback(holder, [1, 2, 3, 4])

    assert (set(driver.leases()), driver.held(holder)) == ({holder}, [])
    assert [part.number for part in driver.finish(holder, [], 1).parts] == [1]


def test_call_is_stored_and_what_runs_is_still_known(driver: RequestByHand, holder: str) -> None:
    driver.protocol.renew(driver.id, 20_000, {holder: 1})

    driver.handback(holder, [2], call=5)

    assert driver.holders() == {holder: "5", f"{holder}#": "1"}


def test_deadline_stays(driver: RequestByHand, holder: str) -> None:
    deadline = driver.leases()[holder]

    driver.handback(holder, [2])

    assert driver.leases() == {holder: deadline}


@pytest.mark.parametrize("call", [3, 4])
def test_lower_or_equal_call_changes_nothing(driver: RequestByHand, holder: str, call: int) -> None:
    driver.handback(holder, [4], call=4)
    before = driver.snapshot()

    outcome = driver.handback(holder, [3], call=call)

    assert (outcome.word, bool(outcome.tokens)) == ("late", False)
    assert driver.snapshot() == before


def test_without_a_lease_changes_nothing(driver: RequestByHand, holder: str) -> None:
    driver.expire(holder)
    driver.reap()
    before = driver.snapshot()

    outcome = driver.handback(holder, [1])

    assert (outcome.word, bool(outcome.tokens)) == ("lost", False)
    assert driver.snapshot() == before


@pytest.mark.parametrize("state", ["done", "cancelled"])
def test_ended_request_answers_its_state(driver: RequestByHand, holder: str, state: str) -> None:
    if state == "cancelled":
        driver.protocol.cancel(driver.id)
    else:
        driver.finish(holder, [1, 2, 3, 4], 2)
        driver.finish(holder, [5, 6])
    before = driver.snapshot()

    outcome = driver.handback(holder, [1])

    assert (outcome.word, bool(outcome.tokens)) == (state, False)
    assert driver.snapshot() == before


def test_request_that_failed_takes_it_and_invites_nobody(driver: RequestByHand) -> None:
    driver.load(5, max_failures=0)
    holder, _ = driver.claim(2)
    driver.give_up(3)

    outcome = driver.handback(holder, [2])

    assert (outcome.word, bool(outcome.tokens)) == ("failed", False)
    assert (driver.retry(), driver.held(holder)) == ({2: 2}, [1])


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.handback("nobody", [1])

    assert driver.existing_keys() == set()


def test_invites_idle_workers_to_what_was_hidden_from_them(driver: RequestByHand) -> None:
    driver.load(4)
    holder, _ = driver.claim(4)
    driver.set_meta(out=0)

    assert driver.handback(holder, [2, 3, 4]).tokens == Tokens(3, "h:50")


def test_full_server_still_takes_it(driver: RequestByHand, holder: str) -> None:
    with driver.full_server():
        assert driver.handback(holder, [4]).word == "ok"


def test_any_number_of_parts_may_be_named(driver: RequestByHand, holder: str) -> None:
    held = set(driver.held(holder))

    driver.handback(holder, range(1, 10_001))

    assert (driver.held(holder), set(driver.retry())) == ([], held)
