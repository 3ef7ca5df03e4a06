"""aside.lua: keys of a queue that are of another type."""

import pytest

from streamq.protocol.keys import QueueKeys
from tests.support.by_hand import RequestByHand

INDEXES = ["due", "open", "closed", "workers"]


@pytest.mark.parametrize("index", INDEXES)
def test_key_of_another_type_is_renamed(
    driver: RequestByHand, queue_keys: QueueKeys, index: str
) -> None:
    driver.redis.set(getattr(queue_keys, index), "not ours")

    assert driver.protocol.set_aside(driver.queue) == [queue_keys.aside + index]
    assert driver.redis.get(queue_keys.aside + index) == b"not ours"


@pytest.mark.parametrize("index", INDEXES)
def test_key_of_its_type_stays(driver: RequestByHand, queue_keys: QueueKeys, index: str) -> None:
    driver.redis.zadd(getattr(queue_keys, index), {"a": 1})

    # As somebody calls it who saw it spoilt, a moment ago.
    assert not driver.protocol.aside(driver.queue, index, "zset")
    assert driver.redis.zrange(getattr(queue_keys, index), 0, -1) == [b"a"]


def test_list_of_tokens(driver: RequestByHand) -> None:
    keys = QueueKeys(driver.queue, to="h:50")
    driver.redis.set(keys.tokens, "not ours")

    assert driver.protocol.set_aside(driver.queue, (keys.tokens,)) == [keys.aside + "tokens:h:50"]


def test_what_is_due_is_told_by_what_is_open(driver: RequestByHand, queue_keys: QueueKeys) -> None:
    driver.redis.zadd(queue_keys.open, {"a": 1, "b": 2})
    driver.redis.set(queue_keys.due, "not ours")

    driver.protocol.set_aside(driver.queue)

    assert driver.redis.zrange(queue_keys.due, 0, -1, withscores=True) == [(b"a", 1), (b"b", 2)]


def test_what_is_open_is_told_by_what_is_due(driver: RequestByHand, queue_keys: QueueKeys) -> None:
    driver.redis.zadd(queue_keys.due, {"a": 1, "b": 2})
    driver.redis.set(queue_keys.open, "not ours")

    driver.protocol.set_aside(driver.queue)

    assert driver.redis.zrange(queue_keys.open, 0, -1, withscores=True) == [(b"a", 0), (b"b", 0)]
