"""Steering requests: levels, limits, pauses, cancels, retries."""

from typing import Any

import pytest

from streamq import (
    Client,
    InvalidValue,
    Protocol,
    Request,
    RequestEnded,
    State,
)
from streamq.protocol.replies import Token
from tests.queue.common import finish, refusing
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker, indexes, refuse, tokens

on_one_kind = pytest.mark.parametrize("kind", ["valkey"])


class TestSteering:
    def test_pause_and_resume(
        self,
        request_: Request,
        driver: RequestByHand,
        protocol: Protocol,
        queue: str,
        worker: Worker,
    ) -> None:
        request_.pause()

        assert request_.status().paused
        assert driver.claim()[1].word == "paused"
        worker.drain()
        assert worker.ran == []
        request_.resume()
        assert len(tokens(protocol, queue)) == 5
        assert not request_.status().paused
        worker.drain()
        assert request_.wait(timeout=5).state is State.DONE

    def test_set_of_the_level_moves_it_in_the_queue(
        self, request_: Request, protocol: Protocol, queue: str
    ) -> None:
        request_.set(level=7)

        assert request_.status().level == 7
        taken = [protocol.take(queue, ("h",), 0.01) for _ in range(5)]
        assert taken == [Token(request_.id, "h", 7)] * 5

    def test_set_of_the_limit_counts_at_once(
        self, request_: Request, driver: RequestByHand, protocol: Protocol, queue: str
    ) -> None:
        request_.set(limit=1)
        driver.claim()
        assert driver.claim()[1].word == "limit"
        while protocol.take(queue, ("h",), 0.01):
            driver.claim(level=50)

        request_.set(limit=3)

        assert len(tokens(protocol, queue)) == 2
        assert [driver.claim()[1].word for _ in range(3)] == ["ok", "ok", "limit"]

    def test_set_of_the_rate(self, request_: Request, driver: RequestByHand) -> None:
        request_.set(rate="1/h")
        assert [driver.claim()[1].word for _ in range(2)] == ["ok", "held"]

        request_.set(rate="off")

        assert driver.claim()[1].word == "ok"

    @pytest.mark.parametrize(
        "option",
        [{"level": 100}, {"level": True}, {"limit": 0}, {"limit": 1.5}, {"rate": "x"}, {"rate": 0}],
        ids=str,
    )
    @on_one_kind
    def test_set_of_what_cannot_be(
        self, request_: Request, driver: RequestByHand, option: dict[str, Any]
    ) -> None:
        before = driver.snapshot()

        with pytest.raises(InvalidValue, match=next(iter(option))):
            request_.set(**option)

        assert driver.snapshot() == before

    def test_cancel(self, request_: Request, driver: RequestByHand, worker: Worker) -> None:
        holder, _ = driver.claim(3)
        finish(driver, holder, 1, 2, most=1)

        assert request_.cancel() == 3

        assert request_.cancel() == 3
        status = request_.wait(timeout=0)
        assert (status.state, status.parts.running, status.parts.done) == ("cancelled", 0, 2)
        assert worker.drain() == []

    def test_what_has_ended_cannot_be_steered(self, done: Request, driver: RequestByHand) -> None:
        before = driver.snapshot()

        for do in (done.pause, done.resume, done.cancel, lambda: done.set(level=1)):
            with pytest.raises(RequestEnded, match="is done"):
                do()

        assert driver.snapshot() == before

    def test_retry_runs_what_failed(
        self, request_: Request, protocol: Protocol, queue: str, worker: Worker
    ) -> None:
        Worker(protocol, queue, refusing(2, 4)).drain()
        assert indexes(protocol, queue, request_.id) == {"closed"}

        assert request_.retry() == 2

        assert request_.status().state is State.OPEN
        assert indexes(protocol, queue, request_.id) == {"open", "due"}
        assert sorted(worker.drain()) == [(request_.id, 2), (request_.id, 4)]
        status = request_.wait(timeout=5)
        assert (status.state, status.parts.done, status.parts.failed) == ("done", 5, 0)
        assert request_.errors() == []

    def test_retry_of_thousands(self, client: Client, protocol: Protocol, queue: str) -> None:
        request = client.submit([b"x"] * 1_200, handler="h", queue=queue, limit=1)
        Worker(protocol, queue, refuse).drain()
        assert request.status().parts.failed == 1_200

        assert request.retry() == 1_200

        assert len(Worker(protocol, queue).drain()) == 1_200
        assert request.status().state is State.DONE

    def test_retry_of_a_request_that_failed_early_runs_the_rest_too(
        self, client: Client, protocol: Protocol, queue: str, driver: RequestByHand
    ) -> None:
        request = client.submit(
            [b"a", b"b", b"c"], handler="h", queue=queue, id=driver.id, max_failures=0
        )
        driver.give_up(1)
        assert request.wait(timeout=0).state is State.FAILED

        assert request.retry() == 1

        assert sorted(Worker(protocol, queue).drain()) == [(request.id, n) for n in (1, 2, 3)]
        assert request.status().state is State.DONE

    def test_retry_of_nothing_changes_nothing(
        self, done: Request, protocol: Protocol, queue: str, worker: Worker
    ) -> None:
        before = done.status()

        assert done.retry() == 0

        assert done.status() == before
        assert worker.drain() == []
        assert indexes(protocol, queue, done.id) == {"closed"}

    def test_retry_of_what_was_cancelled(
        self, request_: Request, protocol: Protocol, queue: str, worker: Worker
    ) -> None:
        request_.cancel()

        with pytest.raises(RequestEnded, match="cancelled"):
            request_.retry()

        worker.drain()
        assert indexes(protocol, queue, request_.id) == {"closed"}
