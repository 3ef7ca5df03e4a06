"""The order of work: levels, turns, limits, delays and rates, as tokens and claims show them."""

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from streamq import Client, Janitor, Protocol, Request
from streamq.protocol.keys import QueueKeys
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker, make_due, tokens
from tests.support.waiting import wait_until

on_one_kind = pytest.mark.parametrize("kind", ["valkey"])
Submit = Callable[..., Request]


@pytest.fixture
def submit(client: Client, queue: str) -> Submit:
    """A request of so many parts."""

    def submit(count: int, **options: object) -> Request:
        given = {"handler": "h", "queue": queue, **options}
        return client.submit([b"x"] * count, **given)  # type: ignore[arg-type]

    return submit


@pytest.fixture
def one_by_one(protocol: Protocol, queue: str) -> Callable[[int], list[str]]:
    """Take tokens one at a time and run one part for each. Returns whose they were."""

    def run(count: int) -> list[str]:
        order = []
        for _ in range(count):
            token = protocol.take(queue, ("h",), 0.01)
            assert token
            driver = RequestByHand(protocol, queue, token.request_id)
            holder, grant = driver.claim(level=token.level)
            protocol.push(queue, driver.id, grant.tokens)
            ended = driver.finish(holder, [part.number for part in grant.parts])
            protocol.push(queue, driver.id, ended.tokens)
            order += [driver.id for _ in grant.parts]
        return order

    return run


class TestLevels:
    def test_better_levels_come_first_whatever_is_queued(
        self, submit: Submit, protocol: Protocol, queue: str
    ) -> None:
        levels = [99, 0, 50, 7, 10, 1]
        ids = {submit(2, level=level, limit=1).id: level for level in levels}

        ran = Worker(protocol, queue, most=1).drain()

        assert [ids[request_id] for request_id, _ in ran] == sorted(levels * 2)

    def test_one_that_comes_later_gets_the_next_slot(
        self, submit: Submit, one_by_one: Callable[[int], list[str]]
    ) -> None:
        low = submit(1_000, level=50, limit=100)
        one_by_one(20)

        urgent = submit(3, level=10)

        assert one_by_one(5) == [urgent.id] * 3 + [low.id] * 2

    def test_a_change_counts_for_what_is_queued(
        self, submit: Submit, one_by_one: Callable[[int], list[str]], protocol: Protocol, queue: str
    ) -> None:
        first, second = submit(20, level=20), submit(20, level=30)
        assert one_by_one(3) == [first.id] * 3

        second.set(level=10)
        assert one_by_one(3) == [second.id] * 3
        second.set(level=40)

        # Tokens of a level it has left answer nothing.
        assert one_by_one(8 + 3)[-3:] == [first.id] * 3
        worker = Worker(protocol, queue)
        worker.drain()
        assert Counter(request_id for request_id, _ in worker.ran) == {first.id: 14, second.id: 17}


class TestTurns:
    def test_requests_of_one_level_take_turns(
        self, submit: Submit, one_by_one: Callable[[int], list[str]]
    ) -> None:
        ids = [submit(100, limit=limit).id for limit in (1, 2, 8)]

        order = one_by_one(110)

        # By the tokens each may have out, and none waits longer than all others' tokens.
        share = Counter(order)
        assert share[ids[0]] >= 8
        assert share[ids[1]] >= 16
        for request_id in ids:
            places = [i for i, who in enumerate(order) if who == request_id]
            assert max(b - a for a, b in pairwise(places)) <= 1 + 2 + 8

    def test_equals_get_equal_shares(
        self, submit: Submit, one_by_one: Callable[[int], list[str]]
    ) -> None:
        ids = [submit(100, limit=3).id for _ in range(4)]

        share = Counter(one_by_one(120))

        assert all(abs(share[request_id] - 30) <= 3 for request_id in ids)

    def test_a_huge_request_does_not_bury_a_small_one(
        self, submit: Submit, one_by_one: Callable[[int], list[str]], protocol: Protocol, queue: str
    ) -> None:
        huge = submit(2_000, limit=1_000)
        assert tokens(protocol, queue) == [huge.id] * 8
        one_by_one(30)

        small = submit(1)

        assert small.id in one_by_one(9)

    def test_at_most_eight_tokens_are_out(
        self, submit: Submit, protocol: Protocol, queue: str, driver: RequestByHand
    ) -> None:
        request = submit(500, limit=500, id=driver.id)
        for _ in range(50):
            taken = protocol.take(queue, ("h",), 1)
            assert taken
            _, grant = driver.claim(level=taken.level)
            protocol.push(queue, request.id, grant.tokens)
            make_due(protocol, queue)
            Janitor(protocol, queue).sweep()

            assert len(tokens(protocol, queue)) <= 8

        assert len(driver.leases()) == 50

    @pytest.mark.parametrize("limit", [1, 3, 100])
    def test_tokens_end_when_there_is_nothing_to_start(
        self, submit: Submit, protocol: Protocol, queue: str, driver: RequestByHand, limit: int
    ) -> None:
        request = submit(5, limit=limit, id=driver.id)
        holders: list[str] = []
        taken = 0
        while token := protocol.take(queue, ("h",), 0.01):
            taken += 1
            holder, grant = driver.claim(level=token.level)
            protocol.push(queue, request.id, grant.tokens)
            holders += [holder] * len(grant.parts)
            assert taken <= 20

        assert len(holders) == min(limit, 5)
        make_due(protocol, queue)
        Janitor(protocol, queue).sweep()
        assert tokens(protocol, queue) == []
        # A lease that ends brings one back.
        outcome = driver.finish(holders[0], [1])
        assert outcome.tokens.count == (0 if limit >= 5 else 1)

    def test_tokens_end_with_the_request(
        self, submit: Submit, protocol: Protocol, queue: str
    ) -> None:
        submit(50, limit=100)
        submit(50, limit=100).cancel()
        worker = Worker(protocol, queue)

        steps = 0
        while worker.step():
            steps += 1

        assert steps <= 20
        assert worker.sweep() is False


class TestLimit:
    def test_holds_however_many_ask(self, submit: Submit, driver: RequestByHand) -> None:
        submit(50, limit=3, id=driver.id)

        words = Counter(driver.claim()[1].word for _ in range(10))

        assert words == {"ok": 3, "limit": 7}

    def test_lowered_it_counts_for_the_next_batch(
        self, submit: Submit, driver: RequestByHand
    ) -> None:
        request = submit(50, limit=3, id=driver.id)
        holders = [driver.claim(2)[0] for _ in range(3)]

        request.set(limit=1)

        assert driver.finish(holders[0], [1, 2], most=2).word == "over"
        assert driver.finish(holders[1], [3, 4], most=2).word == "over"
        assert driver.finish(holders[2], [5, 6], most=2).word == "ok"
        assert driver.claim()[1].word == "limit"

    def test_raised_the_tokens_come_at_once(
        self, submit: Submit, driver: RequestByHand, protocol: Protocol, queue: str
    ) -> None:
        request = submit(50, limit=1, id=driver.id)
        protocol.take(queue, ("h",), 1)
        driver.claim(level=50)
        assert tokens(protocol, queue) == []

        request.set(limit=5)

        assert tokens(protocol, queue) == [request.id] * 4


class TestDelay:
    @pytest.mark.parametrize("how", ["delay", "start_at"])
    def test_nothing_starts_before_its_time(
        self, submit: Submit, driver: RequestByHand, protocol: Protocol, queue: str, how: str
    ) -> None:
        options = {"delay": "1h"} if how == "delay" else {"start_at": time.time() + 3_600}

        submit(3, id=driver.id, **options)

        assert driver.claim()[1].word == "held"
        due = driver.redis.zscore(QueueKeys(queue).due, driver.id)
        assert due <= driver.now_ms() + 3_600_000
        assert Worker(protocol, queue).drain() == []
        hold = int(driver.meta("hold_ms")) - int(driver.meta("created_ms"))
        assert hold == pytest.approx(3_600_000, abs=2_000)

    def test_it_starts_when_the_time_has_come(
        self, submit: Submit, driver: RequestByHand, protocol: Protocol, queue: str
    ) -> None:
        request = submit(3, id=driver.id, delay="100ms")
        janitor, worker = Janitor(protocol, queue), Worker(protocol, queue)

        def works() -> bool:
            janitor.sweep()
            return worker.step()

        wait_until(works)

        status = request.wait(timeout=5)
        assert status.started_ms is not None
        assert status.started_ms >= status.created_ms + 100

    @pytest.mark.parametrize("option", [{"delay": 0}, {"start_at": 1.0}], ids=str)
    def test_a_time_that_has_passed_is_now(
        self, submit: Submit, driver: RequestByHand, option: dict[str, float]
    ) -> None:
        submit(1, id=driver.id, **option)

        assert driver.claim()[1].word == "ok"


class TestRate:
    def test_never_more_than_it_allows_and_nearly_so_many(
        self, submit: Submit, driver: RequestByHand
    ) -> None:
        per_s, seconds = 100, 0.6
        submit(1_000, rate="100/s", limit=1_000, id=driver.id)
        starts: list[tuple[float, float]] = []
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            before = time.monotonic()
            _, grant = driver.claim(20)
            starts += [(before, time.monotonic())] * len(grant.parts)

        # In no stretch of time; the server's clock counts whole milliseconds.
        for i, (earliest, _) in enumerate(starts):
            for k, (_, latest) in enumerate(starts[i:], 1):
                assert k <= per_s * (latest - earliest) + 0.05 * per_s + 1
        assert len(starts) >= 0.8 * per_s * seconds

    def test_tokens_come_when_the_rate_allows(
        self, submit: Submit, protocol: Protocol, queue: str
    ) -> None:
        request = submit(30, rate="100/s", limit=5)
        janitor, worker = Janitor(protocol, queue), Worker(protocol, queue)

        def is_done() -> bool:
            janitor.sweep()
            while worker.step():
                pass
            return not request.status().state.is_live

        wait_until(is_done)

        status = request.status()
        assert status.started_ms is not None
        assert status.finished_ms is not None
        # 30 parts, of which 5 may run ahead and the first waits for none.
        assert status.finished_ms - status.started_ms >= 230

    def test_a_finished_batch_is_no_way_around_it(
        self, submit: Submit, driver: RequestByHand
    ) -> None:
        submit(10, rate="1/h", limit=10, id=driver.id)
        holder, grant = driver.claim(10)
        assert len(grant.parts) == 1

        assert driver.finish(holder, [1], most=10).word == "over"

        assert driver.claim()[1].word == "held"


@on_one_kind
def test_options_reach_the_request(submit: Submit, driver: RequestByHand) -> None:
    submit(1, id=driver.id, level=3, limit=4, rate="10/s", keep="1h", poison=5, max_failures="5%")

    found = [driver.meta(f) for f in ("level", "limit", "rate_ms", "keep_ms", "poison")]
    assert found == ["3", "4", "100.0", "3600000", "5"]
    assert (driver.meta("max_failures"), driver.meta("max_percent")) == ("-1", "5.0")
