"""The client for programs with an event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from streamq import (
    AsyncClient,
    InvalidValue,
    Request,
    RequestEnded,
    RequestOpen,
    RequestUnknown,
    ServerUnreachable,
    State,
    Status,
    WaitTimeout,
)
from tests.support.simulated import Worker

Play = Callable[[Callable[[AsyncClient], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture
def play(url: str) -> Play:
    """Runs a coroutine with a client in an event loop."""

    def play(scene: Callable[[AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        async def whole() -> Any:
            async with AsyncClient(url) as client:
                return await scene(client)

        return asyncio.run(whole())

    return play


def test_submit_wait_and_results(play: Play, queue: str, request_id: str, worker: Worker) -> None:
    async def scene(client: AsyncClient) -> None:
        request = await client.submit([b"a", b"b"], handler="h", queue=queue, id=request_id)
        waiting = asyncio.create_task(request.wait(timeout="30s"))
        reading = asyncio.create_task(_all(request.results(timeout="30s")))
        assert [each.id for each in await client.list(queue)] == [request_id]
        await request.pause()
        assert (await request.status()).paused
        await request.resume()
        await request.set(level=3, limit=2)
        await asyncio.to_thread(worker.drain)

        status = await waiting

        assert isinstance(status, Status)
        assert (status.state, status.level, status.limit) == (State.DONE, 3, 2)
        assert [number for number, _ in await reading] == [1, 2]
        assert await request.errors() == []
        assert repr(request) == f"AsyncRequest({request_id!r})"
        assert repr(client).startswith("AsyncClient(")
        with pytest.raises(RequestEnded):
            await request.cancel()
        await request.purge()
        with pytest.raises(RequestUnknown, match=request_id):
            await request.status()
        with pytest.raises(RequestUnknown, match=request_id):
            await client.get(request_id)

    play(scene)


async def _all(results: AsyncIterator[tuple[int, Any]]) -> list[tuple[int, Any]]:
    return [each async for each in results]


def test_the_same_errors_as_of_the_client(play: Play, request_: Request) -> None:
    async def scene(client: AsyncClient) -> None:
        request = await client.get(request_.id)
        with pytest.raises(WaitTimeout, match="not finished"):
            await request.wait(timeout=0.05)
        with pytest.raises(WaitTimeout, match="no result"):
            await _all(request.results(timeout=0.05))
        with pytest.raises(RequestOpen):
            await request.purge()
        with pytest.raises(InvalidValue):
            await client.submit("text", handler="h")
        with pytest.raises(InvalidValue, match="async"):
            await client.submit(_Endless(), handler="h")
        assert await request.cancel() == 5
        assert (await request.wait()).state is State.CANCELLED

    play(scene)


class _Endless:
    """What looks like an async iterator of payloads."""

    def __iter__(self) -> Any:
        raise AssertionError("nobody reads it")

    def __aiter__(self) -> Any:
        raise AssertionError("nobody reads it")


def test_no_server() -> None:
    async def scene() -> None:
        client = AsyncClient("redis://127.0.0.1:1")
        assert repr(client) == "AsyncClient(not connected)"
        with pytest.raises(ServerUnreachable):
            await client.get("x")
        await client.close()

    asyncio.run(scene())


def test_event_loop_goes_on_meanwhile(play: Play, queue: str, request_id: str) -> None:
    """The payloads come only when the event loop says so, and so does the end of the request."""
    may_go_on = threading.Event()

    def payloads() -> Iterator[str]:
        yield "first"
        assert may_go_on.wait(30), "the event loop stood still"
        yield "second"

    async def scene(client: AsyncClient) -> None:
        asyncio.get_running_loop().call_later(0.01, may_go_on.set)
        request = await client.submit(payloads(), handler="h", queue=queue, id=request_id)
        waits = [asyncio.create_task(request.wait(timeout="30s")) for _ in range(100)]
        reading = asyncio.create_task(_all(request.results(timeout="30s")))
        while not (await request.status()).parts.total:
            await asyncio.sleep(0)
        await request.cancel()
        assert {each.state for each in await asyncio.gather(*waits)} == {State.CANCELLED}
        assert await reading == []

    play(scene)
