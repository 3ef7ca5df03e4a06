"""Reading the results of a request, while it runs and after."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from streamq import (
    Client,
    Protocol,
    Request,
    State,
    WaitTimeout,
)
from streamq.model import Failure
from tests.queue.common import finish, refusing
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker
from tests.support.waiting import allowed_s, wait_until


class TestResults:
    def test_come_in_input_order_while_it_runs(
        self, request_: Request, driver: RequestByHand
    ) -> None:
        results = request_.results(timeout=5)
        holders = [driver.claim()[0] for _ in range(5)]

        finish(driver, holders[0], 1)
        assert next(results) == (1, b"r1")
        finish(driver, holders[2], 3)
        finish(driver, holders[1], 2)
        assert [next(results), next(results)] == [(2, b"r2"), (3, b"r3")]
        assert request_.status().state is State.OPEN
        finish(driver, holders[4], 5)
        finish(driver, holders[3], 4)

        assert list(results) == [(4, b"r4"), (5, b"r5")]

    def test_come_while_it_loads(
        self, client: Client, queue: str, driver: RequestByHand, worker: Worker
    ) -> None:
        seen: list[tuple[int, Any]] = []

        def payloads() -> Iterator[bytes]:
            yield b"a"
            wait_until(lambda: worker.step())
            seen.append(next(client.get(driver.id).results(timeout=5)))
            yield b"b"

        client.submit(payloads(), handler="h", queue=queue, id=driver.id)

        assert seen == [(1, b"A")]

    def test_parts_that_failed_have_none(
        self, request_: Request, protocol: Protocol, queue: str, driver: RequestByHand
    ) -> None:
        results = request_.results(timeout=5)
        driver.give_up(1)
        holder, _ = driver.claim(1)
        finish(driver, holder, 2)
        assert next(results) == (2, b"r2")

        Worker(protocol, queue, refusing(4)).drain()

        assert list(results) == [(3, b"C"), (5, b"E")]

    def test_end_with_a_request_that_was_cancelled(
        self, request_: Request, driver: RequestByHand
    ) -> None:
        holder, _ = driver.claim(2)
        finish(driver, holder, 2)
        request_.cancel()

        assert list(request_.results(timeout=5)) == [(2, b"r2")]

    def test_thousands_and_large_ones(self, client: Client, protocol: Protocol, queue: str) -> None:
        request = client.submit([b"%d" % n for n in range(1_600)], handler="h", queue=queue)
        Worker(protocol, queue, lambda part: part.payload * 2_000, most=200).drain()

        results = list(request.results())

        assert results == [(n + 1, b"%d" % n * 2_000) for n in range(1_600)]
        assert list(request.results()) == results

    def test_nothing_new_for_too_long(self, request_: Request) -> None:
        begin = time.monotonic()

        with pytest.raises(WaitTimeout, match=r"no result for 0\.2 s"):
            list(request_.results(timeout=0.2))

        assert 0.2 <= time.monotonic() - begin < allowed_s(1.5)

    def test_what_retries_yielded_comes_after_the_others_each_after_the_last(
        self, request_: Request, protocol: Protocol, queue: str
    ) -> None:
        for fail in [(1, 2, 4), (1, 2), *[(1,)] * 10]:
            Worker(protocol, queue, refusing(*fail)).drain()
            assert request_.retry() == len(fail)
        Worker(protocol, queue).drain()

        first = [(3, b"C"), (5, b"E")]
        assert list(request_.results()) == [*first, (4, b"D"), (2, b"B"), (1, b"A")]

    def test_also_of_a_retry_while_it_runs(
        self, request_: Request, driver: RequestByHand, worker: Worker
    ) -> None:
        driver.give_up(1)

        assert request_.retry() == 1
        worker.drain()

        assert list(request_.results()) == [(n, b"ABCDE"[n - 1 : n]) for n in (2, 3, 4, 5, 1)]

    def test_errors_are_sorted_by_part(
        self, request_: Request, protocol: Protocol, queue: str, driver: RequestByHand
    ) -> None:
        for number in (5, 4, 3, 2, 1):
            driver.redis.hset(
                driver.keys.failed, number, msgspec.json.encode([Failure(error=f"E{number}")])
            )
        assert [e.error for e in request_.errors()] == ["E1", "E2", "E3", "E4", "E5"]
        driver.redis.unlink(driver.keys.failed)

        Worker(protocol, queue, refusing(2, 4)).drain()

        assert request_.errors() == [
            Failure(error="ValueError", message=f"no {n}", part=n, attempts=1) for n in (2, 4)
        ]
        assert request_.wait().parts.failed == 2
