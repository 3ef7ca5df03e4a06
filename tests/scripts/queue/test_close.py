"""close.lua: open -> closed -> (absent), in the queue's indexes."""

import pytest

from streamq.protocol.keys import QueueKeys
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Tokens
from tests.support.by_hand import RequestByHand


@pytest.fixture
def score(driver: RequestByHand, queue_keys: QueueKeys) -> float:
    """The score of a request that is open and due."""
    driver.protocol.mint(driver.queue, driver.id, Tokens(), register="yes")
    return float(driver.redis.zscore(queue_keys.open, driver.id))


def places(driver: RequestByHand, queue_keys: QueueKeys) -> dict[str, float]:
    """The indexes the request is in, and its scores."""
    names = ("open", "due", "closed")
    found = {name: driver.redis.zscore(getattr(queue_keys, name), driver.id) for name in names}
    return {name: score for name, score in found.items() if score is not None}


def test_ended_request_is_open_and_due_no_more(
    driver: RequestByHand, queue_keys: QueueKeys, score: float
) -> None:
    assert driver.protocol.close(driver.queue, driver.id, score, 5_000)

    assert places(driver, queue_keys) == {"closed": 5_000}


def test_request_that_was_registered_anew_stays_open(
    driver: RequestByHand, queue_keys: QueueKeys, score: float
) -> None:
    driver.protocol.mint(driver.queue, driver.id, Tokens(), register="again")
    before = places(driver, queue_keys)

    assert not driver.protocol.close(driver.queue, driver.id, score, 5_000)

    assert places(driver, queue_keys) == before
    assert before["open"] > score


def test_redrive_is_not_closed_by_a_janitor_that_saw_the_end_before_it(
    driver: RequestByHand, queue_keys: QueueKeys, score: float
) -> None:
    driver.load(1)
    driver.give_up(1)
    audit = driver.protocol.audit(driver.id)

    driver.protocol.mint(driver.queue, driver.id, Tokens(), register="again")
    driver.redrive(1)

    assert not driver.protocol.close(driver.queue, driver.id, score, audit.purge_at)
    assert driver.protocol.ids(driver.queue) == [driver.id]


def test_twice_moves_the_moment_of_the_purge(
    driver: RequestByHand, queue_keys: QueueKeys, score: float
) -> None:
    driver.protocol.close(driver.queue, driver.id, score, 5_000)

    assert not driver.protocol.close(driver.queue, driver.id, score, 6_000), "it was closed before"

    assert places(driver, queue_keys) == {"closed": 6_000}


def test_request_that_a_heartbeat_made_open_again_was_closed_before(
    driver: RequestByHand, queue_keys: QueueKeys, score: float
) -> None:
    driver.protocol.close(driver.queue, driver.id, score, 5_000)
    driver.protocol.beat(driver.queue, "w1", 15_000, b"{}", 0, [driver.id])
    assert set(places(driver, queue_keys)) == {"open", "due", "closed"}

    assert not driver.protocol.close(driver.queue, driver.id, 0, 6_000)

    assert places(driver, queue_keys) == {"closed": 6_000}


def test_purged_request_is_nowhere(
    driver: RequestByHand, queue_keys: QueueKeys, score: float
) -> None:
    driver.protocol.close(driver.queue, driver.id, score, 5_000)

    driver.protocol.close(driver.queue, driver.id, -1, 0)

    assert places(driver, queue_keys) == {}


def test_purge_does_not_forget_a_request_that_is_open_again(
    driver: RequestByHand, queue_keys: QueueKeys, score: float
) -> None:
    assert not driver.protocol.close(driver.queue, driver.id, -1, 0)

    assert set(places(driver, queue_keys)) == {"open", "due"}


def test_request_nobody_registered_is_no_error(protocol: Protocol, queue: str) -> None:
    assert not protocol.close(queue, "nobody", 1, 0)


def test_full_server_still_takes_it(driver: RequestByHand, score: float) -> None:
    with driver.full_server():
        assert driver.protocol.close(driver.queue, driver.id, score, 5_000)
