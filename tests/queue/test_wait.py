"""Waiting for the end of a request."""

import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from streamq import (
    Client,
    InvalidValue,
    Request,
    State,
    WaitTimeout,
)
from streamq.servers.local import LocalServer
from tests.queue.common import finish
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker
from tests.support.waiting import allowed_s, wait_until

on_one_kind = pytest.mark.parametrize("kind", ["valkey"])


@contextmanager
def in_thread(do: Callable[[], Any]) -> Generator[Future[Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(do)


class TestWait:
    def test_for_one_that_has_ended_already(self, done: Request) -> None:
        assert done.wait(timeout=0).state is State.DONE

    def test_is_told_of_the_end(
        self, request_: Request, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("streamq.queue.request.LOOK_EVERY_S", 60)
        holder, _ = driver.claim(5)

        with in_thread(lambda: request_.wait(timeout=20)) as waiting:
            wait_until(lambda: is_heard(driver))
            begin = time.monotonic()
            finish(driver, holder, 1, 2, 3, 4, 5)
            status = waiting.result()

        assert status.state is State.DONE
        assert time.monotonic() - begin < allowed_s(10)

    @pytest.mark.parametrize("end", ["cancel", "fail"])
    def test_is_told_of_every_kind_of_end(
        self, client: Client, queue: str, driver: RequestByHand, end: str
    ) -> None:
        request = client.submit([b"a"], handler="h", queue=queue, id=driver.id, max_failures=0)

        with in_thread(lambda: request.wait(timeout=20)) as waiting:
            wait_until(lambda: is_heard(driver))
            if end == "cancel":
                request.cancel()
            else:
                driver.give_up(1)
            status = waiting.result()

        assert status.state == {"cancel": State.CANCELLED, "fail": State.FAILED}[end]

    def test_finds_an_end_of_which_it_was_not_told(
        self, request_: Request, driver: RequestByHand
    ) -> None:
        with in_thread(lambda: request_.wait(timeout=20)) as waiting:
            wait_until(lambda: is_heard(driver))
            driver.set_meta(state="done", finished_ms=driver.now_ms())
            begin = time.monotonic()

            assert waiting.result().state is State.DONE
        assert time.monotonic() - begin < allowed_s(5)

    def test_survives_the_loss_of_its_subscription(
        self, request_: Request, driver: RequestByHand, worker: Worker
    ) -> None:
        at = {"target_nodes": "primaries"} if hasattr(driver.redis, "get_primaries") else {}
        with in_thread(lambda: request_.wait(timeout=20)) as waiting:
            wait_until(lambda: is_heard(driver))
            for _ in range(3):
                driver.redis.execute_command("CLIENT KILL", "TYPE", "pubsub", **at)
            worker.drain()

            assert waiting.result().state is State.DONE

    @pytest.mark.parametrize("timeout", [0.2, "200ms"])
    def test_is_over_in_time(self, request_: Request, timeout: str | float) -> None:
        begin = time.monotonic()

        with pytest.raises(WaitTimeout, match=request_.id):
            request_.wait(timeout=timeout)

        assert 0.2 <= time.monotonic() - begin < allowed_s(1.5)
        with pytest.raises(TimeoutError):
            request_.wait(timeout=0)

    @on_one_kind
    @pytest.mark.parametrize("timeout", ["soon", -1, True], ids=repr)
    def test_time_that_cannot_be(self, request_: Request, timeout: Any) -> None:
        with pytest.raises(InvalidValue, match="timeout"):
            request_.wait(timeout=timeout)
        with pytest.raises(InvalidValue, match="timeout"):
            list(request_.results(timeout=timeout))

    def test_goes_on_over_a_restart_of_the_server_and_so_do_results(self) -> None:
        with tempfile.TemporaryDirectory(prefix="sq") as home:
            server = LocalServer.start(home, persist=True)
            try:
                client = Client(server.url)
                request = client.submit([b"a", b"b"], handler="h")
                driver = RequestByHand(client._protocol, "default", request.id)
                finish(driver, driver.claim()[0], 1)
                read: list[tuple[int, Any]] = []
                with ThreadPoolExecutor(3) as pool:
                    waiting = pool.submit(request.wait, 30)
                    impatient = pool.submit(request.wait, 1.5)
                    reading = pool.submit(lambda: read.extend(request.results(timeout=30)))
                    wait_until(lambda: is_heard(driver, 2) and read)
                    server.kill()
                    server.stop()
                    with pytest.raises(WaitTimeout):
                        impatient.result()
                    server = LocalServer.start(home, persist=True)
                    Worker(client._protocol, "default").drain()

                    assert waiting.result().state is State.DONE
                    reading.result()
                    assert read == [(1, b"r1"), (2, b"B")]
                client.close()
            finally:
                server.stop()


def is_heard(driver: RequestByHand, by: int = 1) -> bool:
    """Whether so many have subscribed to the request's end."""
    channel = driver.keys.events
    at: dict[str, Any] = {}
    if hasattr(driver.redis, "get_node_from_key"):
        at = {"target_nodes": driver.redis.get_node_from_key(channel)}
    [(_, count)] = driver.redis.execute_command("PUBSUB SHARDNUMSUB", channel, **at)
    return bool(count == by)
