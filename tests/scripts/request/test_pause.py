"""pause.lua: no more parts start; what runs goes on to its end."""

import pytest

from streamq.errors import RequestEnded, RequestUnknown
from streamq.model import State
from tests.support.by_hand import RequestByHand


def test_no_more_parts_start(driver: RequestByHand) -> None:
    driver.load(3)

    assert driver.protocol.pause(driver.id) == State.OPEN

    assert driver.meta("paused") == "1"
    assert driver.claim()[1].word == "paused"


def test_what_runs_goes_on_to_its_end(driver: RequestByHand) -> None:
    driver.load(2)
    holder, _ = driver.claim(2)

    driver.protocol.pause(driver.id)

    assert driver.held(holder) == [1, 2]
    assert driver.finish(holder, [1, 2]).word == "done"


def test_twice_is_once(driver: RequestByHand) -> None:
    driver.load(3)
    driver.protocol.pause(driver.id)
    before = driver.snapshot()

    driver.protocol.pause(driver.id)

    assert driver.snapshot() == before


def test_request_may_be_loaded_meanwhile(driver: RequestByHand) -> None:
    driver.open()

    assert driver.protocol.pause(driver.id) == State.LOADING

    assert not driver.append(3)
    state, tokens = driver.protocol.seal(driver.id, 3, "c3")
    assert (state, bool(tokens)) == (State.OPEN, False)


def test_nothing_that_changes_meanwhile_invites(driver: RequestByHand) -> None:
    driver.load(9, limit=3)
    one, _ = driver.claim(3)
    other, _ = driver.claim()
    driver.protocol.pause(driver.id)
    driver.set_meta(out=0)

    tokens = [
        driver.fail(one, 1).tokens,
        driver.handback(one, [2]).tokens,
        driver.release(one).tokens,
        driver.finish(other, [4], 1).tokens,
        driver.protocol.set(driver.id, level=3, limit=9)[1],
        driver.reap().tokens,
        driver.protocol.audit(driver.id).tokens,
    ]

    assert not any(tokens)


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_ended_request_cannot_be_paused(driver: RequestByHand, state: str) -> None:
    driver.load(1)
    driver.set_meta(state=state)
    before = driver.snapshot()

    with pytest.raises(RequestEnded, match=f"the request is {state}"):
        driver.protocol.pause(driver.id)

    assert driver.snapshot() == before


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.protocol.pause(driver.id)

    assert driver.existing_keys() == set()


def test_full_server_still_takes_it(driver: RequestByHand) -> None:
    driver.load(1)

    with driver.full_server():
        assert driver.protocol.pause(driver.id) == State.OPEN
