"""beat.lua: a worker's heartbeat, and the queue's indexes it mends."""

import pytest

from streamq import Damaged
from streamq.protocol.keys import QueueKeys
from streamq.protocol.replies import Tokens
from tests.support.by_hand import RequestByHand

DAY_MS = 86_400_000


def worker_keys(driver: RequestByHand, worker: str) -> QueueKeys:
    return QueueKeys(driver.queue, worker=worker)


class TestWorker:
    def test_lives_and_says_so(self, driver: RequestByHand) -> None:
        driver.protocol.beat(driver.queue, "w1", 60_000, b"says this")

        keys = worker_keys(driver, "w1")
        assert driver.protocol.workers(driver.queue) == {"w1": b"says this"}
        assert 0 < driver.redis.pttl(keys.worker) <= 60_000
        assert driver.redis.zscore(keys.workers, "w1") > 0

    def test_says_the_latest(self, driver: RequestByHand) -> None:
        driver.protocol.beat(driver.queue, "w1", 60_000, b"this")
        keys = worker_keys(driver, "w1")
        driver.redis.zadd(keys.workers, {"w1": driver.protocol.tick(driver.queue).now_ms - 9_000})

        driver.protocol.beat(driver.queue, "w1", 90_000, b"that")

        assert driver.protocol.workers(driver.queue) == {"w1": b"that"}
        assert 60_000 < driver.redis.pttl(keys.worker) <= 90_000

    def test_that_goes_leaves_nothing(self, driver: RequestByHand) -> None:
        driver.protocol.beat(driver.queue, "w1", 60_000, b"this")

        driver.protocol.beat(driver.queue, "w1", 0)

        keys = worker_keys(driver, "w1")
        assert driver.redis.exists(keys.worker) == 0
        assert driver.redis.zscore(keys.workers, "w1") is None

    def test_that_is_silent_for_a_day_is_forgotten(self, driver: RequestByHand) -> None:
        now_ms = driver.protocol.tick(driver.queue).now_ms
        keys = worker_keys(driver, "w1")
        scores = {"gone": now_ms - DAY_MS, "longer": 1, "silent": now_ms - DAY_MS + 60_000}
        driver.redis.zadd(keys.workers, scores)

        assert driver.protocol.beat(driver.queue, "w1", 60_000).forgotten == 2

        assert driver.redis.zrange(keys.workers, 0, -1) == [b"silent", b"w1"]


class TestIndex:
    def test_that_was_lost_is_mended(self, driver: RequestByHand, queue_keys: QueueKeys) -> None:
        driver.protocol.beat(driver.queue, "w1", 60_000, lease_ms=9_000, requests=["a", "b"])

        now_ms = driver.protocol.tick(driver.queue).now_ms
        assert driver.redis.zrange(queue_keys.open, 0, -1, withscores=True) == [
            (b"a", 0),
            (b"b", 0),
        ]
        assert 0 < driver.redis.zscore(queue_keys.due, "a") - now_ms <= 9_000

    def test_that_is_there_keeps_its_score(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        driver.redis.zadd(queue_keys.open, {"a": 17})

        driver.protocol.beat(driver.queue, "w1", 60_000, requests=["a"])

        assert driver.redis.zscore(queue_keys.open, "a") == 17

    def test_look_after_a_death_comes_no_later_than_the_lease_ends(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        driver.protocol.push(driver.queue, "late", Tokens(look_ms=10**14))

        driver.protocol.beat(driver.queue, "w1", 60_000, lease_ms=9_000, requests=["late"])

        now_ms = driver.protocol.tick(driver.queue).now_ms
        assert 0 < driver.redis.zscore(queue_keys.due, "late") - now_ms <= 9_000

    def test_sooner_look_stays(self, driver: RequestByHand, queue_keys: QueueKeys) -> None:
        driver.protocol.push(driver.queue, "soon", Tokens(look_ms=17))

        driver.protocol.beat(driver.queue, "w1", 60_000, requests=["soon"])

        assert driver.redis.zscore(queue_keys.due, "soon") == 17

    def test_of_a_worker_that_holds_nothing_is_left_alone(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        driver.protocol.beat(driver.queue, "w1", 60_000)

        assert driver.redis.exists(queue_keys.open) == 0
        assert driver.redis.exists(queue_keys.due) == 0


def test_full_server_still_takes_it(driver: RequestByHand) -> None:
    with driver.full_server():
        driver.protocol.beat(driver.queue, "w1", 60_000, b"this", requests=["a"])

    assert driver.protocol.ids(driver.queue) == ["a"]


def test_any_number_of_requests(driver: RequestByHand, queue_keys: QueueKeys) -> None:
    requests = [f"r{number}" for number in range(10_000)]

    driver.protocol.beat(driver.queue, "w1", 60_000, b"", 20_000, requests)

    assert driver.redis.zcard(queue_keys.due) == 10_000


@pytest.mark.parametrize("name", ["workers", "worker:w1"])
def test_key_of_another_type_is_put_aside_for_the_next(
    driver: RequestByHand, queue_keys: QueueKeys, name: str
) -> None:
    key = QueueKeys(driver.queue, spoilt=name)
    driver.redis.set(key.spoilt, "not ours")

    with pytest.raises(Damaged, match="renamed"):
        driver.protocol.beat(driver.queue, "w1", 60_000, b"says this")
    driver.protocol.beat(driver.queue, "w1", 60_000, b"says this")

    assert driver.protocol.workers(driver.queue) == {"w1": b"says this"}
    assert driver.redis.get(key.aside) == b"not ours"


def test_worker_whose_key_is_of_another_type_is_passed_over(driver: RequestByHand) -> None:
    for name in ("w1", "w2", "w3"):
        driver.protocol.beat(driver.queue, name, 60_000, name.encode())
    spoilt = QueueKeys(driver.queue, worker="w2").worker
    driver.redis.delete(spoilt)
    driver.redis.set(spoilt, "not ours")
    driver.redis.delete(QueueKeys(driver.queue, worker="w3").worker)

    found = driver.protocol.beats(driver.queue)

    assert {name: said for name, (_, said) in found.items()} == {"w1": b"w1"}
    assert found["w1"][0] == driver.redis.zscore(QueueKeys(driver.queue).workers, "w1")
