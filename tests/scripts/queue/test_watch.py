"""watch.lua: somebody looks at the timeline, and workers learn of it with their heartbeats."""

import pytest

from streamq import Damaged
from streamq.protocol.keys import QueueKeys
from tests.support.by_hand import RequestByHand


def test_beat_tells_it_until_it_is_over(driver: RequestByHand, queue_keys: QueueKeys) -> None:
    assert driver.protocol.beat(driver.queue, "w1", 60_000).spans == 0

    driver.protocol.watch(driver.queue, 40, 20_000)
    assert driver.protocol.beat(driver.queue, "w1", 60_000).spans == 40
    assert 0 < driver.redis.pttl(queue_keys.watch) <= 20_000

    driver.redis.delete(queue_keys.watch)
    assert driver.protocol.beat(driver.queue, "w1", 60_000).spans == 0


def test_junk_in_its_place_is_set_aside(driver: RequestByHand, queue_keys: QueueKeys) -> None:
    driver.redis.sadd(queue_keys.watch, "junk")
    with pytest.raises(Damaged, match="watch"):
        driver.protocol.beat(driver.queue, "w1", 60_000)

    assert driver.protocol.beat(driver.queue, "w1", 60_000).spans == 0
    driver.redis.set(queue_keys.watch, "many")
    assert driver.protocol.beat(driver.queue, "w1", 60_000).spans == 0
