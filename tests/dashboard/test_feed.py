"""The feed: one reading for all who watch, absolute frames, ends at once, none if nobody looks."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from streamq import Client, Protocol
from streamq.dashboard import feed as feeds
from streamq.dashboard.feed import Feed, FeedWatcher
from streamq.errors import InvalidValue
from tests.support.waiting import allowed_s


def run(protocol: Protocol, work: Callable[[Feed], Awaitable[None]]) -> None:
    async def inner() -> None:
        feed = Feed(protocol)
        try:
            await asyncio.wait_for(work(feed), 30)
        finally:
            feed.stop()
            feed.close()

    asyncio.run(inner())


def events(chunk: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in chunk.decode().split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in block.splitlines())
        if "event" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


async def told(frames: AsyncIterator[bytes], kind: str) -> Any:
    async for chunk in frames:
        for event, data in events(chunk):
            if event == kind:
                return data["told"]
    raise AssertionError(kind)


def test_many_watchers_cost_the_server_what_one_does(
    client: Client, protocol: Protocol, queue: str
) -> None:
    client.submit([1, 2], handler="h", queue=queue)

    async def work(feed: Feed) -> None:
        reads = 0
        watchers = [FeedWatcher() for _ in range(200)]
        for watcher in watchers:
            feed.join(watcher, [f"q:{queue}"])
        sampler = feed.sampler(f"q:{queue}")
        original = sampler.read

        def counted() -> Any:
            nonlocal reads
            reads += 1
            return original()

        sampler.read = counted  # type: ignore[method-assign]
        frames = [watcher.frames(lambda: False) for watcher in watchers]
        for each in frames:
            assert (await told(each, "q"))["open"] == 1
        assert feed.topics == [f"q:{queue}"]
        assert feed.watchers == 200
        before = reads
        await asyncio.sleep(2.2)
        assert 1 <= reads - before <= 3
        chunks = {id(w._frames[f"q:{queue}"]) for w in watchers}
        assert len(chunks) == 1  # encoded once: the same bytes for everybody

    run(protocol, work)


def test_one_who_does_not_read_holds_one_frame(
    client: Client, protocol: Protocol, queue: str
) -> None:
    async def work(feed: Feed) -> None:
        watcher = FeedWatcher()
        feed.join(watcher, [f"q:{queue}"])
        await asyncio.sleep(3.2)
        assert set(watcher._frames) <= {f"q:{queue}", f"past q:{queue}"}

    run(protocol, work)


def test_end_is_told_at_once(client: Client, protocol: Protocol, queue: str) -> None:
    request = client.submit([1, 2], handler="h", queue=queue)

    async def work(feed: Feed) -> None:
        watcher = FeedWatcher()
        feed.join(watcher, [f"r:{request.id}"])
        topic = feed._topics[f"r:{request.id}"]
        topic.sampler.every_s = 60
        frames = watcher.frames(lambda: False)
        assert (await told(frames, "r"))["status"]["state"] == "open"
        await asyncio.sleep(0.6)  # the subscription is made by another thread
        begun = time.monotonic()
        await asyncio.get_running_loop().run_in_executor(None, request.cancel)
        assert (await told(frames, "r"))["status"]["state"] == "cancelled"
        assert time.monotonic() - begun < allowed_s(5)

    run(protocol, work)


def test_end_during_a_reading_is_told_at_once(
    client: Client, protocol: Protocol, queue: str
) -> None:
    request = client.submit([1, 2], handler="h", queue=queue)

    async def work(feed: Feed) -> None:
        watcher, loop = FeedWatcher(), asyncio.get_running_loop()
        feed.join(watcher, [f"r:{request.id}"])
        sampler = feed.sampler(f"r:{request.id}")
        sampler.every_s = 60
        original, heard = sampler.read, threading.Event()

        def read_while_it_ends() -> Any:
            found = original()
            sampler.read = original  # type: ignore[method-assign]
            request.cancel()
            loop.call_soon_threadsafe(feed.hurry, request.id)
            loop.call_soon_threadsafe(heard.set)
            heard.wait(10)
            return found

        sampler.read = read_while_it_ends  # type: ignore[method-assign]
        frames = watcher.frames(lambda: False)
        assert (await told(frames, "r"))["status"]["state"] == "open"
        begun = time.monotonic()
        assert (await told(frames, "r"))["status"]["state"] == "cancelled"
        assert time.monotonic() - begun < allowed_s(5)

    run(protocol, work)


def test_topic_that_nobody_watches_is_read_no_more(
    protocol: Protocol, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "LINGER_S", 0.2)

    async def work(feed: Feed) -> None:
        watcher = FeedWatcher()
        feed.join(watcher, [f"q:{queue}"])
        await told(watcher.frames(lambda: False), "q")
        feed.leave(watcher)
        while feed.topics:
            await asyncio.sleep(0.05)

    run(protocol, work)


def test_request_that_is_gone_and_topics_that_are_none(protocol: Protocol, queue: str) -> None:
    async def work(feed: Feed) -> None:
        watcher = FeedWatcher()
        feed.join(watcher, ["r:never-was"])
        assert "no such request" in (await told(watcher.frames(lambda: False), "gone"))["says"]
        for topic in ("nothing", "z:default", "r:<b>", "t:default?state=odd", "t:default?page=x"):
            with pytest.raises(InvalidValue):
                feed.sampler(topic)

    run(protocol, work)
