"""claim.lua: waiting, retry -> running."""

from streamq.keys import QueueKeys
from tests.driver import Driver


def test_hands_out_parts_in_input_order_under_a_lease(driver: Driver) -> None:
    driver.load(5)

    holder, grant = driver.claim(3)

    assert grant.word == "ok"
    assert [(part.number, part.payload) for part in grant.parts] == [
        (1, b"1"),
        (2, b"2"),
        (3, b"3"),
    ]
    assert driver.redis.zscore(driver.keys.leases, holder) > 0


def test_is_refused_at_the_limit_and_the_token_is_dropped(driver: Driver) -> None:
    driver.load(5, limit=1)
    driver.claim()

    _, grant = driver.claim(level=50)

    assert (grant.word, grant.parts, grant.tokens.count) == ("limit", [], 0)
    assert driver.redis.zcard(driver.keys.leases) == 1


def test_with_nothing_to_run_leaves_no_lease_and_no_consumer(driver: Driver) -> None:
    driver.open()

    _, grant = driver.claim(level=50)

    assert (grant.word, grant.tokens.count) == ("empty", 0)
    assert driver.redis.zcard(driver.keys.leases) == 0
    assert driver.redis.xinfo_consumers(driver.keys.parts, "w") == []


def test_repeated_after_a_lost_reply_returns_the_same_parts(driver: Driver) -> None:
    driver.load(5)
    holder, first = driver.claim(2)

    _, again = driver.claim(2, holder=holder)

    assert [part.number for part in again.parts] == [part.number for part in first.parts]
    assert driver.redis.zcard(driver.keys.leases) == 1


def test_token_of_a_former_level_is_dropped(driver: Driver) -> None:
    driver.load(5)
    driver.protocol.set(driver.id, level=3)

    _, grant = driver.claim(level=50)

    assert (grant.word, grant.parts) == ("level", [])


def test_level_of_the_list_is_the_level_of_the_token(driver: Driver) -> None:
    tokens = driver.load(3, level=7)
    driver.protocol.push(driver.queue, driver.id, tokens)

    assert driver.redis.llen(QueueKeys(driver.queue, level=7).tokens) == 3
    assert driver.protocol.take(driver.queue, 1) == (driver.id, 7)
