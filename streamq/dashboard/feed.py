"""The live feed: everybody who watches a topic gets the same frames.

* Every frame tells the whole of its topic. A frame that could not be sent to a watcher yet is
replaced by the next one, so a slow watcher costs no memory and slows nobody.
* A topic is read while somebody watches it, and for ``LINGER_S`` after.
* A topic is not read again before 20 times as long as its last reading took.
* The end of a request is told at once: a message of the server wakes its topic.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from streamq.dashboard.ends import Ends
from streamq.dashboard.samplers import (
    CensusesForSamplers,
    Sampler,
    event_of_sample,
    sampler_of_topic,
)
from streamq.errors import Damaged, RequestUnknown, ServerError, StreamqError
from streamq.model import Spec
from streamq.protocol.protocol import Protocol

log = logging.getLogger(__name__)

#: How long a topic is still read when nobody watches it any more.
LINGER_S = 10.0
#: A reading may take this share of a thread's time.
_TIMES = 20
#: Threads that read.
READERS = 4
#: A watcher is sent a comment when nothing else was sent for this long (s), which keeps its
#: connection open.
COMMENT_S = 15.0
#: The most topics that one watcher may have, and that there may be in all.
MOST_TOPICS, MOST_TOPICS_IN_ALL = 12, 2_000


class FeedWatcher:
    """A watcher of topics, with the latest frame of each that was not sent yet."""

    def __init__(self) -> None:
        self._frames: dict[str, bytes] = {}
        self._has_news = asyncio.Event()

    def tell(self, slot: str, frame: bytes) -> None:
        """Put a frame in place of an older one of the same slot."""
        self._frames[slot] = frame
        self._has_news.set()

    async def frames(self, is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Yield frames as they come, and a comment when none came for a while."""
        while not is_over():
            try:
                async with asyncio.timeout(COMMENT_S):
                    await self._has_news.wait()
            except TimeoutError:
                yield b": still here\n\n"
                continue
            self._has_news.clear()
            frames, self._frames = self._frames, {}
            if frames:
                yield b"".join(frames.values())
        yield b"event: bye\nretry: 500\ndata: {}\n\n"

    def wake(self) -> None:
        """Let ``frames`` see whether it is over."""
        self._has_news.set()


class Topic:
    """A topic and those who watch it."""

    def __init__(self, name: str, sampler: Sampler) -> None:
        self.name = name
        self.sampler = sampler
        self.watchers: set[FeedWatcher] = set()
        self.frame = b""
        self.hurry = asyncio.Event()
        #: What is wrong with it for good: then it is not read again.
        self.error: StreamqError | None = None


class Feed:
    """Reads topics for those who watch. Belongs to an event loop; calls of the server do not."""

    def __init__(
        self, protocol: Protocol, sizes_of: Callable[[Spec], Sequence[int]] = lambda _: ()
    ) -> None:
        """``sizes_of``: the sizes of a request's files, where these are on this machine."""
        self._protocol = protocol
        self._censuses = CensusesForSamplers(protocol, sizes_of)
        self._topics: dict[str, Topic] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._readers = ThreadPoolExecutor(READERS, "feed")
        self._ends: Ends | None = None
        self.is_stopping = False

    @property
    def watchers(self) -> int:
        """The number of watchers."""
        # Copies, because another thread may ask.
        topics = list(self._topics.values())
        return len({each for topic in topics for each in topic.watchers.copy()})

    @property
    def topics(self) -> list[str]:
        """The topics that are read."""
        return list(self._topics)

    def sampler(self, topic: str) -> Sampler:
        """Return what reads the topic; InvalidValue if there is no such topic."""
        if topic in self._topics:
            return self._topics[topic].sampler
        return sampler_of_topic(self._protocol, self._censuses, topic)

    def past(self, topic: str) -> Any:
        """Return what is known of a topic's time before; None if nobody watches it."""
        return self._topics[topic].sampler.past() if topic in self._topics else None

    async def frame(self, topic: str) -> bytes:
        """Return the frame of a topic once, for those who cannot keep a stream open."""
        watcher = FeedWatcher()
        self.join(watcher, [topic])
        try:
            while not (found := self._topics[topic].frame):
                await watcher._has_news.wait()
                watcher._has_news.clear()
            return found
        finally:
            self.leave(watcher)

    def join(self, watcher: FeedWatcher, topics: Iterable[str]) -> None:
        """Let somebody watch these topics."""
        for name in topics:
            topic = self._topics.get(name)
            if topic is None:
                topic = self._topics[name] = Topic(name, self.sampler(name))
                task = asyncio.get_running_loop().create_task(self._read_on(topic))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            topic.watchers.add(watcher)
            past = topic.sampler.past()
            if past is not None:
                watcher.tell(f"past {name}", event_of_sample(name, "past", past))
            if topic.frame:
                watcher.tell(name, topic.frame)

    def leave(self, watcher: FeedWatcher) -> None:
        """Let somebody watch no more."""
        for topic in self._topics.values():
            topic.watchers.discard(watcher)

    def hurry(self, request_id: str) -> None:
        """Read the topics of a request now: it has changed, or has ended."""
        for topic in self._topics.values():
            if topic.sampler.request_id == request_id:
                topic.hurry.set()

    def hurry_topic(self, name: str) -> None:
        """Read a topic now, if somebody watches it."""
        if name in self._topics:
            self._topics[name].hurry.set()

    def stop(self) -> None:
        """Tell everybody goodbye: the gateway stops."""
        self.is_stopping = True
        for topic in self._topics.values():
            topic.hurry.set()
            for watcher in topic.watchers:
                watcher.wake()

    def close(self) -> None:
        """End the threads."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self._ends:
            self._ends.close()

    async def _read_on(self, topic: Topic) -> None:
        """Read a topic for as long as somebody watches."""
        loop = asyncio.get_running_loop()
        request_id = topic.sampler.request_id
        if request_id:
            if self._ends is None:
                self._ends = Ends(
                    self._protocol, lambda each: loop.call_soon_threadsafe(self.hurry, each)
                )
            self._ends.watch(request_id)
        lonely_since, is_first = 0.0, True
        try:
            while not self.is_stopping and not (
                lonely_since and time.monotonic() - lonely_since > LINGER_S
            ):
                topic.hurry.clear()  # before it is read: what ends meanwhile is read again at once
                took_s = await self._read_once(topic)
                if is_first and (past := topic.sampler.past()) is not None:
                    # The first reading may have loaded the history that the server stores.
                    for watcher in topic.watchers:
                        watcher.tell(
                            f"past {topic.name}", event_of_sample(topic.name, "past", past)
                        )
                is_first = False
                pause_s = max(topic.sampler.every_s, _TIMES * took_s)
                try:
                    async with asyncio.timeout(pause_s):
                        await topic.hurry.wait()
                except TimeoutError:
                    pass
                lonely_since = 0.0 if topic.watchers else lonely_since or time.monotonic()
        finally:
            self._topics.pop(topic.name, None)
            if request_id and self._ends and not self._is_read(request_id):
                self._ends.leave(request_id)

    def _is_read(self, request_id: str) -> bool:
        return any(each.sampler.request_id == request_id for each in self._topics.values())

    async def _read_once(self, topic: Topic) -> float:
        loop = asyncio.get_running_loop()
        begun = time.monotonic()
        kind = topic.name.partition(":")[0]

        def read() -> bytes:
            return event_of_sample(topic.name, kind, topic.sampler.read())

        try:
            frame = await loop.run_in_executor(self._readers, read)
        except RequestUnknown:
            frame = event_of_sample(
                topic.name, "gone", {"says": "there is no such request, or no more"}
            )
        except Damaged as error:
            frame = event_of_sample(topic.name, "wrong", {"says": str(error)})
        except ServerError:
            frame = event_of_sample(topic.name, "away", {"says": "the server does not answer"})
        except Exception:
            log.exception("the topic %s could not be read", topic.name)
            frame = event_of_sample(topic.name, "wrong", {"says": "the gateway stumbled over it"})
        topic.frame = frame
        for watcher in topic.watchers:
            watcher.tell(topic.name, frame)
        return time.monotonic() - begun
