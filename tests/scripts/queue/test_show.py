"""show.lua: spans that workers tell."""

from streamq.protocol.glances import glance_at_spans
from streamq.protocol.keys import QueueKeys
from tests.support.by_hand import RequestByHand


def test_what_was_told_is_read_once_and_goes(driver: RequestByHand, queue_keys: QueueKeys) -> None:
    driver.protocol.show(driver.queue, b"one")
    first = glance_at_spans(driver.protocol, driver.queue, "0", 9)
    driver.protocol.show(driver.queue, b"two")

    assert [text for _, text in first] == [b"one"]
    assert [text for _, text in glance_at_spans(driver.protocol, driver.queue, first[0][0], 9)] == [
        b"two"
    ]
    assert 0 < driver.redis.pttl(queue_keys.spans) <= 60_000


def test_what_is_older_than_a_minute_goes(driver: RequestByHand, queue_keys: QueueKeys) -> None:
    old_ms = driver.redis.time()[0] * 1_000 - 90_000
    with driver.redis.pipeline(transaction=False) as pipe:
        for number in range(2_400):
            pipe.xadd(queue_keys.spans, {"told": "x"}, id=f"{old_ms}-{number + 1}")
        pipe.execute()
    driver.protocol.show(driver.queue, b"last")

    # A stream is cut by whole nodes, of a hundred entries each.
    assert driver.redis.xlen(queue_keys.spans) <= 101
