"""tick.lua: the requests that are due for a look or a purge."""

import pytest

from streamq.protocol.keys import QueueKeys
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Tokens

HOUR_MS = 3_600_000


@pytest.fixture
def due(protocol: Protocol, queue: str, queue_keys: QueueKeys) -> int:
    """Three requests, open since 1, 2, 3; a and b are due, c in an hour. Returns the time."""
    now_ms = protocol.tick(queue).now_ms
    redis = protocol.connection.redis
    redis.zadd(queue_keys.open, {"a": 1, "b": 2, "c": 3})
    redis.zadd(queue_keys.due, {"a": 10, "b": now_ms, "c": now_ms + HOUR_MS})
    return now_ms


def test_due_requests_come_with_their_scores(protocol: Protocol, queue: str, due: int) -> None:
    tick = protocol.tick(queue)

    assert (tick.due, tick.purgeable) == ([("a", 1.0), ("b", 2.0)], [])
    assert due <= tick.now_ms < due + 60_000


def test_next_look_is_later(
    protocol: Protocol, queue: str, queue_keys: QueueKeys, due: int
) -> None:
    tick = protocol.tick(queue, every_ms=7_000)

    scores = dict(protocol.connection.redis.zrange(queue_keys.due, 0, -1, withscores=True))
    assert scores == {b"a": tick.now_ms + 7_000, b"b": tick.now_ms + 7_000, b"c": due + HOUR_MS}
    assert protocol.tick(queue).due == []


def test_many_open_requests_are_looked_at_more_seldom(
    protocol: Protocol, queue: str, queue_keys: QueueKeys, due: int
) -> None:
    many = {f"r{number}": 9 for number in range(997)}
    protocol.connection.redis.zadd(queue_keys.open, many)

    redis = protocol.connection.redis
    first = protocol.tick(queue, every_ms=7_000)
    redis.zadd(queue_keys.due, {"b": 9e15})  # somebody registered it for another time

    looked = [request_id for request_id, _ in first.due]
    second = protocol.tick(queue, every_ms=7_000, looked=looked, lent=first.now_ms + 7_000)

    assert redis.zscore(queue_keys.due, "a") == second.now_ms + 10_000
    assert redis.zscore(queue_keys.due, "b") == 9e15


def test_what_was_not_looked_at_comes_again_soon_however_many_are_open(
    protocol: Protocol, queue: str, queue_keys: QueueKeys, due: int
) -> None:
    """The answer was lost, or whoever asked died."""
    many = {f"r{number}": 9 for number in range(997)}
    protocol.connection.redis.zadd(queue_keys.open, many)

    tick = protocol.tick(queue, every_ms=7_000)

    assert protocol.connection.redis.zscore(queue_keys.due, "a") == tick.now_ms + 7_000


def test_sooner_look_that_is_registered_meanwhile_counts(
    protocol: Protocol, queue: str, due: int
) -> None:
    tick = protocol.tick(queue)

    protocol.push(queue, "b", Tokens(look_ms=tick.now_ms))

    assert protocol.tick(queue).due == [("b", 2.0)]


def test_request_that_is_in_no_other_index_is_registered_again(
    protocol: Protocol, queue: str, queue_keys: QueueKeys, due: int
) -> None:
    protocol.connection.redis.zrem(queue_keys.open, "a")

    assert protocol.tick(queue).due == [("a", 0.0), ("b", 2.0)]
    assert protocol.connection.redis.zscore(queue_keys.open, "a") == 0


def test_request_that_is_closed_is_dropped(
    protocol: Protocol, queue: str, queue_keys: QueueKeys, due: int
) -> None:
    protocol.connection.redis.zrem(queue_keys.open, "a")
    protocol.connection.redis.zadd(queue_keys.closed, {"a": 9e15})

    tick = protocol.tick(queue)

    assert tick.due == [("b", 2.0)]
    assert protocol.connection.redis.zscore(queue_keys.due, "a") is None


def test_takes_as_many_as_asked_for_and_says_that_more_wait(
    protocol: Protocol, queue: str, due: int
) -> None:
    first, second = protocol.tick(queue, limit=1), protocol.tick(queue, limit=1)

    assert [first.due, second.due] == [[("a", 1.0)], [("b", 2.0)]]
    assert first.wait_ms == 0
    assert second.wait_ms > 0


def test_says_how_long_nothing_is_due(
    protocol: Protocol, queue: str, queue_keys: QueueKeys, due: int
) -> None:
    assert protocol.tick(queue, every_ms=7_000).wait_ms == 7_000

    protocol.connection.redis.zadd(queue_keys.due, {"c": due + 5_000})

    assert 0 <= protocol.tick(queue, every_ms=7_000).wait_ms <= 5_000


def test_empty_queue_has_nothing_to_do(protocol: Protocol, queue: str) -> None:
    tick = protocol.tick(queue, every_ms=7_000)

    assert (tick.due, tick.purgeable, tick.wait_ms) == ([], [], 7_000)


def test_closed_requests_come_when_their_retention_is_over(
    protocol: Protocol, queue: str, queue_keys: QueueKeys, due: int
) -> None:
    closed = {"old": 10, "older": 5, "kept": due + HOUR_MS}
    protocol.connection.redis.zadd(queue_keys.closed, closed)

    tick = protocol.tick(queue)

    assert (tick.due, tick.purgeable) == ([("a", 1.0), ("b", 2.0)], ["older", "old"])
    assert protocol.tick(queue, limit=1).purgeable == ["older"]
