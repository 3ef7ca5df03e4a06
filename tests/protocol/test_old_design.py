"""Faults of the design that streamq grew from: each is shown there, and then shown to be gone.

``Seed`` is that design in small: tokens alone keep the limit, a counter alone knows the end.
"""

from collections.abc import Callable
from typing import Any

import pytest
from redis import RedisCluster, ResponseError

from streamq import Client, Janitor, Protocol, RequestUnknown, State
from streamq.protocol.replies import Token, Tokens
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker, make_due, tokens

INSERT = """
redis.call("SET", KEYS[2], #ARGV)
redis.call("XADD", KEYS[1], "*", "req", "0")
redis.call("XTRIM", KEYS[1], "MAXLEN", 0)
redis.call("XGROUP", "CREATE", KEYS[1], "g", "$")
for _, part in ipairs(ARGV) do
  redis.call("XADD", KEYS[1], "*", "req", part)
end
"""
DONE = """
if redis.call("DECR", KEYS[2]) == 0 then
  redis.call("XGROUP", "DESTROY", KEYS[1], "g")
  redis.call("DEL", KEYS[1], KEYS[2])
  redis.call("PUBLISH", ARGV[1], "1")
else
  redis.call("XACK", KEYS[1], "g", ARGV[2])
end
"""


class Seed:
    """One request of the old design, and what its workers do."""

    def __init__(self, redis: Any, name: str) -> None:
        self.redis = redis
        self.name = name
        self.stream = f"seed:{{{name}}}:sub"
        self.counter = f"seed:{{{name}}}:counter"
        self.list = f"seed:{{req-{name}}}:50"

    def submit(self, parts: list[str], limit: int = 1) -> None:
        self.redis.eval(INSERT, 2, self.stream, self.counter, *parts)
        for _ in range(limit):
            self.redis.lpush(self.list, self.name)

    def take(self) -> str | None:
        popped: bytes | None = self.redis.rpop(self.list)
        return popped.decode() if popped else None

    def read(self, worker: str) -> tuple[str, str]:
        """The next part of the request, as its id and content."""
        [[_, [[id_, fields]]]] = self.redis.xreadgroup("g", worker, {self.stream: ">"}, count=1)
        return id_.decode(), fields[b"req"].decode()

    def done(self, part: str) -> None:
        self.redis.eval(DONE, 2, self.stream, self.counter, self.name, part)

    def is_complete(self) -> bool:
        return not self.redis.exists(self.stream)


@pytest.fixture
def seed(protocol: Protocol, request_id: str) -> Seed:
    return Seed(protocol.connection.redis, request_id)


class TestAPartTakenOverIsCountedOnce:
    def test_seed_counts_it_twice_and_ends_with_a_part_unread(self, seed: Seed) -> None:
        seed.submit(["a", "b", "c"])
        part, _ = seed.read("w1")
        seed.redis.xclaim(seed.stream, "g", "w2", 0, [part])

        seed.done(part)
        seed.done(part)
        second, content = seed.read("w2")
        seed.done(second)

        assert content == "b"
        assert seed.is_complete()

    def test_here_the_one_who_lost_it_changes_nothing(self, driver: RequestByHand) -> None:
        driver.load(3)
        first, _ = driver.claim()
        driver.expire(first)
        driver.reap()
        second, grant = driver.claim()
        assert [part.number for part in grant.parts] == [1]

        late = driver.finish(first, [1])
        counted = driver.finish(second, [1], most=1)
        end = driver.finish(second, [2], most=1)

        assert (late.word, late.counted) == ("lost", 0)
        assert (counted.counted, end.counted) == (1, 1)
        assert [part.number for part in end.parts] == [3]
        assert (driver.left(), driver.meta("state")) == (1, "open")


class TestBTokenOfADeadWorkerComesBack:
    def test_seed_has_nothing_left_that_could_tell(self, seed: Seed) -> None:
        seed.submit(["a"])

        assert seed.take() == seed.name  # and dies

        assert seed.redis.xpending(seed.stream, "g")["pending"] == 0
        assert seed.take() is None
        assert not seed.is_complete()

    def test_here_the_next_sweep_pushes_another(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        request = client.submit([b"a"], handler="h", queue=queue, limit=1)
        assert protocol.take(queue, ("h",), 1) == Token(request.id, "h", 50)  # and dies
        assert tokens(protocol, queue) == []

        make_due(protocol, queue)
        Janitor(protocol, queue).sweep()

        assert tokens(protocol, queue) == [request.id]
        Worker(protocol, queue).step()
        assert request.status().state is State.DONE


class TestCFinishingAgainLeavesNoKey:
    def test_seed_makes_a_counter_of_minus_one_that_never_expires(self, seed: Seed) -> None:
        seed.submit(["a"])
        part, _ = seed.read("w1")
        seed.done(part)
        assert seed.is_complete()

        seed.done(part)

        assert seed.redis.get(seed.counter) == b"-1"
        assert seed.redis.ttl(seed.counter) == -1

    def test_here_nothing_changes_after_the_end_and_after_the_purge(
        self, driver: RequestByHand
    ) -> None:
        driver.load(1)
        holder, _ = driver.claim()
        assert driver.finish(holder, [1]).word == "done"
        before = driver.snapshot()

        again = driver.finish(holder, [1])

        assert (again.word, again.counted) == ("done", 0)
        assert driver.snapshot() == before
        driver.protocol.purge(driver.id, force=True)
        with pytest.raises(RequestUnknown):
            driver.finish(holder, [1])
        assert driver.existing_keys() == set()


class TestDFinishedPartsAreFreed:
    def test_seed_keeps_every_part_until_the_end(self, seed: Seed) -> None:
        seed.submit(["x"] * 100)

        for _ in range(50):
            seed.done(seed.read("w1")[0])

        assert seed.redis.xlen(seed.stream) == 100

    def test_here_only_those_not_finished_take_memory(self, driver: RequestByHand) -> None:
        driver.load(100)

        holder, grant = driver.claim(50)
        driver.finish(holder, [part.number for part in grant.parts])

        assert driver.redis.xlen(driver.keys.parts) == 50


class TestETokensLeftOrLostDoNoHarm:
    def test_seed_meets_an_error_and_every_error_shrinks_the_limit(self, seed: Seed) -> None:
        seed.submit(["a"], limit=2)
        seed.done(seed.read("w1")[0])

        assert seed.take() == seed.name
        with pytest.raises(ResponseError, match="NOGROUP"):
            seed.read("w2")
        # It drops the token on any error, so one of the network does the same:
        other = Seed(seed.redis, f"{seed.name}-other")
        other.submit(["a", "b", "c"], limit=2)
        other.take()  # the read fails, and the token is dropped
        other.take()
        other.read("w1")
        assert other.take() is None  # of two that may run, one runs, for ever

    def test_here_a_token_left_is_answered_and_one_lost_is_replaced(
        self, client: Client, driver: RequestByHand, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        client.submit([b"a", b"b", b"c"], handler="h", queue=queue, id=request_id, limit=2)
        protocol.take(queue, ("h",), 1)  # the claim fails on the way, and the token is lost

        make_due(protocol, queue)
        Janitor(protocol, queue).sweep()

        grants = [driver.claim(level=50)[1].word for _ in tokens(protocol, queue)]
        assert grants == ["ok", "ok"]
        assert protocol.inspect(request_id).count("leases") == 2
        protocol.cancel(request_id)
        assert driver.claim(level=50)[1].word == "cancelled"


class TestFRequestWithoutPartsEnds:
    def test_seed_waits_for_a_count_that_never_comes(self, seed: Seed) -> None:
        seed.submit([])

        assert seed.redis.get(seed.counter) == b"0"
        assert not seed.is_complete()

    def test_here_it_is_done_at_once(self, client: Client, queue: str) -> None:
        status = client.submit([], handler="h", queue=queue).wait(timeout=5)

        assert (status.state, status.parts.total) == (State.DONE, 0)


class TestGLoadingDoesNotBlockTheServer:
    PARTS = 20_000

    def test_one_call_of_the_seed_takes_long_and_none_of_ours_does(
        self, seed: Seed, client: Client, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        def usage_of(name: str, key: str, do: Callable[[], object]) -> tuple[int, int]:
            """Calls of a command on the key's server, and the microseconds they took."""
            before = _stats(protocol.connection.redis, key, name)
            do()
            after = _stats(protocol.connection.redis, key, name)
            return after[0] - before[0], after[1] - before[1]

        seed_calls, seed_us = usage_of("eval", seed.stream, lambda: seed.submit(["x"] * self.PARTS))
        calls, us = usage_of(
            "evalsha",
            protocol.keys(request_id).meta,
            lambda: client.submit([b"x"] * self.PARTS, handler="h", queue=queue, id=request_id),
        )

        assert seed_calls == 1
        assert calls >= self.PARTS / 500
        assert seed_us > 10 * us / calls


def _stats(redis: Any, key: str, name: str) -> tuple[int, int]:
    at = {}
    if isinstance(redis, RedisCluster):
        at = {"target_nodes": redis.get_node_from_key(key)}  # type: ignore[no-untyped-call]
    found = redis.info("commandstats", **at).get(f"cmdstat_{name}", {"calls": 0, "usec": 0})
    return found["calls"], found["usec"]


class TestAlsoByReading:
    def test_seed_submits_in_two_steps_and_a_crash_between_leaves_no_tokens(
        self, seed: Seed
    ) -> None:
        seed.submit(["a"], limit=0)  # the second step never came

        assert seed.take() is None
        assert not seed.is_complete()

    def test_here_the_sweep_makes_up_for_the_second_step(
        self, driver: RequestByHand, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        protocol.mint(queue, request_id, Tokens(), register="yes")
        driver.load(1)  # its tokens were never pushed

        assert Worker(protocol, queue).drain() == [(request_id, 1)]

        assert driver.meta("state") == "done"

    def test_seed_tells_of_the_end_once_and_keeps_no_record(self, seed: Seed) -> None:
        seed.submit(["a"])
        seed.done(seed.read("w1")[0])

        assert not seed.redis.exists(seed.stream)
        assert not seed.redis.exists(seed.counter)

    def test_here_the_end_is_there_for_those_who_come_late(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        request = client.submit([b"a"], handler="h", queue=queue)
        Worker(protocol, queue).drain()

        assert request.wait(timeout=5).state is State.DONE
        assert list(request.results()) == [(1, b"A")]
