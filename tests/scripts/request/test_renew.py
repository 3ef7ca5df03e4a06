"""renew.lua: running -> running, with a later deadline."""

import pytest

from streamq.errors import RequestUnknown
from streamq.model import State
from tests.support.by_hand import RequestByHand


@pytest.fixture
def holder(driver: RequestByHand) -> str:
    """Holds parts 1 and 2 of five, for a moment."""
    driver.load(5)
    holder, _ = driver.claim(2, lease_ms=1_000)
    return holder


def test_moves_the_deadline(driver: RequestByHand, holder: str) -> None:
    state, is_paused, stands = driver.protocol.renew(driver.id, 90_000, {holder: None})

    assert (state, is_paused, stands) == (State.OPEN, False, {holder: True})
    assert 30_000 < driver.leases()[holder] - driver.now_ms() <= 90_000


def test_moves_no_part_and_no_call_number(driver: RequestByHand, holder: str) -> None:
    driver.handback(holder, [2], call=3)
    parts = driver.redis.dump(driver.keys.parts)

    driver.protocol.renew(driver.id, 90_000, {holder: None})

    assert driver.redis.dump(driver.keys.parts) == parts
    assert (driver.holders()[holder], driver.retry()) == ("3", {2: 2})


def test_revives_a_lease_that_is_over_and_not_yet_reaped(
    driver: RequestByHand, holder: str
) -> None:
    driver.expire(holder)

    _, _, stands = driver.protocol.renew(driver.id, 90_000, {holder: None})

    assert stands == {holder: True}
    assert driver.reap().leases == 0
    assert driver.finish(holder, [1]).counted == 1


def test_does_not_bring_back_a_lease_that_was_reaped(driver: RequestByHand, holder: str) -> None:
    driver.expire(holder)
    driver.reap()
    before = driver.snapshot()

    _, _, stands = driver.protocol.renew(driver.id, 90_000, {holder: 1})

    assert stands == {holder: False}
    assert driver.snapshot() == before


def test_answers_for_each_holder_in_turn(driver: RequestByHand, holder: str) -> None:
    other, _ = driver.claim()
    gone, _ = driver.claim()
    driver.release(gone)

    _, _, stands = driver.protocol.renew(driver.id, 90_000, {holder: 1, gone: 4, other: None})

    assert stands == {holder: True, gone: False, other: True}
    assert set(driver.leases()) == {holder, other}


def test_notes_which_part_runs(driver: RequestByHand, holder: str) -> None:
    driver.protocol.renew(driver.id, 90_000, {holder: 2})

    assert driver.holders() == {holder: "0", f"{holder}#": "2"}


def test_notes_that_none_runs(driver: RequestByHand, holder: str) -> None:
    driver.protocol.renew(driver.id, 90_000, {holder: 2})

    driver.protocol.renew(driver.id, 90_000, {holder: None})

    assert driver.holders() == {holder: "0", f"{holder}#": ""}


def test_says_that_the_request_is_paused(driver: RequestByHand, holder: str) -> None:
    driver.protocol.pause(driver.id)

    assert driver.protocol.renew(driver.id, 90_000, {holder: None}) == (
        State.OPEN,
        True,
        {holder: True},
    )


def test_says_that_the_request_was_cancelled(driver: RequestByHand, holder: str) -> None:
    driver.protocol.cancel(driver.id)
    before = driver.snapshot()

    state, _, stands = driver.protocol.renew(driver.id, 90_000, {holder: 1})

    assert (state, stands) == (State.CANCELLED, {holder: False})
    assert driver.snapshot() == before


def test_lease_stands_after_the_request_failed(driver: RequestByHand) -> None:
    driver.load(3, max_failures=0)
    holder, _ = driver.claim()
    driver.give_up(2)

    state, _, stands = driver.protocol.renew(driver.id, 90_000, {holder: 1})

    assert (state, stands) == (State.FAILED, {holder: True})


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.protocol.renew(driver.id, 90_000, {"nobody": 1})

    assert driver.existing_keys() == set()


def test_full_server_still_takes_it(driver: RequestByHand, holder: str) -> None:
    with driver.full_server():
        _, _, stands = driver.protocol.renew(driver.id, 90_000, {holder: 1})

    assert stands == {holder: True}


def test_any_number_of_holders(driver: RequestByHand, holder: str) -> None:
    others: dict[str, int | None] = {f"h{number}": number for number in range(10_000)}

    _, _, stands = driver.protocol.renew(driver.id, 90_000, others | {holder: 1})

    assert [name for name, is_standing in stands.items() if is_standing] == [holder]


def test_longer_lease_is_noted_for_the_grace(driver: RequestByHand, holder: str) -> None:
    driver.protocol.renew(driver.id, 20_000, {holder: None})
    driver.protocol.renew(driver.id, 4_000, {holder: None})

    assert driver.meta("lease_ms") == "12000"
