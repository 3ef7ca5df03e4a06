"""resume.lua: parts start again after a pause."""

import pytest

from streamq.errors import RequestEnded, RequestUnknown
from streamq.model import State
from streamq.protocol.replies import Tokens
from tests.support.by_hand import RequestByHand


def test_parts_start_again_and_are_told_of(driver: RequestByHand) -> None:
    driver.open()
    driver.protocol.pause(driver.id)
    driver.append(3)

    state, tokens = driver.protocol.resume(driver.id)

    assert (state, tokens) == (State.LOADING, Tokens(3, "h:50"))
    assert driver.claim()[1].word == "ok"


def test_tokens_dropped_during_the_pause_are_replaced(driver: RequestByHand) -> None:
    driver.load(3)
    driver.protocol.pause(driver.id)
    for _ in range(3):
        assert driver.claim(level=50)[1].word == "paused"

    _, tokens = driver.protocol.resume(driver.id)

    assert tokens == Tokens(3, "h:50")


def test_tokens_that_are_still_out_are_not(driver: RequestByHand) -> None:
    driver.load(3)
    driver.protocol.pause(driver.id)

    _, tokens = driver.protocol.resume(driver.id)

    assert tokens == Tokens(0, "h:50")


def test_retry_that_is_not_due_gets_a_look(driver: RequestByHand) -> None:
    driver.load(1)
    holder, _ = driver.claim()
    driver.protocol.pause(driver.id)
    driver.fail(holder, 1, delay_ms=60_000)

    _, tokens = driver.protocol.resume(driver.id)

    assert tokens == Tokens(0, "h:50", int(driver.retry()[1]))


def test_request_that_is_not_paused_goes_on(driver: RequestByHand) -> None:
    driver.load(3)

    state, tokens = driver.protocol.resume(driver.id)

    assert (state, bool(tokens)) == (State.OPEN, False)


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_ended_request_cannot_be_resumed(driver: RequestByHand, state: str) -> None:
    driver.load(1)
    driver.set_meta(state=state)
    before = driver.snapshot()

    with pytest.raises(RequestEnded, match=f"the request is {state}"):
        driver.protocol.resume(driver.id)

    assert driver.snapshot() == before


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.protocol.resume(driver.id)

    assert driver.existing_keys() == set()


def test_full_server_still_takes_it(driver: RequestByHand) -> None:
    driver.load(1)
    driver.protocol.pause(driver.id)

    with driver.full_server():
        assert driver.protocol.resume(driver.id)[0] == State.OPEN
