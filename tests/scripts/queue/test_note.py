"""note.lua: the log of a queue."""

from streamq.protocol.glances import glance_at_changes
from streamq.protocol.keys import QueueKeys
from tests.support.by_hand import RequestByHand


def test_the_last_is_told_first_with_the_time_of_the_server(driver: RequestByHand) -> None:
    before = driver.protocol.tick(driver.queue).now_ms
    for text in (b"one", b"two"):
        driver.protocol.note(driver.queue, text)

    found = glance_at_changes(driver.protocol, driver.queue, 9)
    assert [text for _, text in found] == [b"two", b"one"]
    assert before <= found[1][0] <= found[0][0] <= driver.protocol.tick(driver.queue).now_ms
    assert glance_at_changes(driver.protocol, driver.queue, 1) == found[:1]


def test_about_a_thousand_are_kept(driver: RequestByHand, queue_keys: QueueKeys) -> None:
    for number in range(1_300):
        driver.redis.xadd(queue_keys.log, {"change": str(number)})
    driver.protocol.note(driver.queue, b"last")

    assert 1_000 <= driver.redis.xlen(queue_keys.log) < 1_201
    assert glance_at_changes(driver.protocol, driver.queue, 1)[0][1] == b"last"
