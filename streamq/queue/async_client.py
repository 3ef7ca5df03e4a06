"""The client and its requests for programs with an event loop.

The calls of ``Client`` and ``Request`` run in threads, and the event loop goes on meanwhile.
Waiting for the end of a request, or for results, takes no thread: the loop sleeps between two
short calls.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

from streamq import units
from streamq.errors import (
    InvalidValue,
    PartlySubmitted,
    ServerBusy,
    ServerUnreachable,
    WaitTimeout,
)
from streamq.model import MAX_PART, PREFIX, Failure, Status
from streamq.protocol.replies import part_of_field
from streamq.queue.client import Client
from streamq.queue.loading import keep_registered
from streamq.queue.request import REGISTER_EVERY_S, Request, decoded_result
from streamq.queue.results import ResultReader
from streamq.records import encoding as codec

T = TypeVar("T")

#: How many calls of one client run at the same time; others wait for their turn.
_THREADS = 8
#: A request is looked at after 5 ms, then after a tenth of the time that was waited so far.
_SOONEST_S, _LATEST_S = 0.005, 0.5


class AsyncClient:
    """Submit requests from a program with an event loop, find them again and list them.

    It has the methods of ``Client``, which return the same types and raise the same errors; each
    has to be awaited. Calls run in up to 8 threads, so none of them stops the event loop. Tasks,
    threads and event loops may share a client. It connects with the first call, or in ``async
    with``.

    Example:
        async with AsyncClient("redis://localhost") as client:
            request = await client.submit(["a", "b"], handler="shout")
            print((await request.wait()).state)
            async for part, result in request.results():
                print(part, result)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = PREFIX,
        max_part: str | int = MAX_PART,
        insecure: bool | None = None,
    ) -> None:
        """Prepare a client. The options are those of ``Client``."""
        self._make = partial(Client, url, prefix=prefix, max_part=max_part, insecure=insecure)
        self._made: Client | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "streamq-client")

    def __repr__(self) -> str:
        return f"Async{self._made!r}" if self._made else "AsyncClient(not connected)"

    async def submit(
        self, payloads: Iterable[Any], *, handler: str, **options: Any
    ) -> "AsyncRequest":
        """Submit payloads as a request, each as one part, and return the request.

        The options are those of ``Client.submit``, and so are the errors. The payloads are read in
        another thread. If the task is cancelled meanwhile, the submission goes on to its end.

        Example:
            request = await client.submit(["a", "b"], handler="shout", id="nightly")
        """
        if hasattr(payloads, "__aiter__"):
            raise InvalidValue("payloads come from an async iterator; give a list of them")
        made = await self._call(lambda: self._client().submit(payloads, handler=handler, **options))
        return AsyncRequest(made, self._call)

    async def submit_many(
        self,
        requests: Mapping[str, Iterable[Any]] | Iterable[Iterable[Any]],
        *,
        handler: str,
        **options: Any,
    ) -> "list[AsyncRequest]":
        """Submit many requests of the same options in few round trips, and return them in order.

        It is ``Client.submit_many``, with its options and errors. If the task is cancelled
        meanwhile, the submission goes on to its end.

        Example:
            sent = await client.submit_many([["a"], ["b", "c"]], handler="shout")
        """
        try:
            made = await self._call(
                lambda: self._client().submit_many(requests, handler=handler, **options)
            )
        except PartlySubmitted as error:
            found = {each: AsyncRequest(made, self._call) for each, made in error.requests.items()}
            raise PartlySubmitted(found, error.errors) from None
        return [AsyncRequest(each, self._call) for each in made]

    async def get(self, request_id: str) -> "AsyncRequest":
        """Return the request with that id.

        Raises:
            RequestUnknown: there is no such request, or it was purged.
        """
        return AsyncRequest(await self._call(lambda: self._client().get(request_id)), self._call)

    async def list(self, queue: str = "default", *, ended: bool = False) -> "list[Status]":
        """Return the status of the queue's unfinished requests, or of the ended ones."""
        return await self._call(lambda: self._client().list(queue, ended=ended))

    async def close(self) -> None:
        """Close the connections."""
        made, self._made = self._made, None
        if made:
            await self._call(made.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        await self._call(self._client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _client(self) -> Client:
        """Return the client, in a thread: connecting takes time."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


class AsyncRequest:
    """Follow a request and steer it, from a program with an event loop.

    ``AsyncClient.submit`` and ``AsyncClient.get`` return one. The attribute ``id`` is the request's
    id. Its methods are those of ``Request``: they return the same, and raise the same errors.

    Example:
        request = await client.get("nightly")
        status = await request.wait(timeout="1h")
    """

    def __init__(
        self, request: Request, call: Callable[[Callable[[], Any]], Awaitable[Any]]
    ) -> None:
        self._request = request
        self._call = call
        self.id = request.id

    def __repr__(self) -> str:
        return f"AsyncRequest({self.id!r})"

    async def status(self) -> Status:
        """Return where the request stands now, and its counts.

        Raises:
            RequestUnknown: there is no such request, or it was purged.
        """
        status: Status = await self._call(self._request.status)
        return status

    async def wait(self, timeout: str | float | None = None) -> Status:
        """Wait until the request has ended, and return its last status.

        The end is noticed within a tenth of the time that was waited, and half a second at most.

        Raises:
            WaitTimeout: it did not end in time.

        Example:
            status = await request.wait(timeout="1h")
        """
        pauses = _Pauses(timeout, f"request {self.id} is not finished")
        status = await self.status()
        register_at = time.monotonic() + 1
        while status.state.is_live:
            await pauses.next()
            with suppress(ServerBusy, ServerUnreachable):
                status = await self.status()
                if status.state.is_live and time.monotonic() > register_at:
                    await self._call(partial(keep_registered, self._request.protocol, status))
                    register_at = time.monotonic() + REGISTER_EVERY_S
        return status

    async def results(self, timeout: str | float | None = None) -> AsyncIterator[tuple[int, Any]]:
        """Yield part numbers and results in input order, as they come, until the request ends.

        Raises:
            WaitTimeout: no result came for that long.

        Example:
            async for part, result in request.results(timeout="5m"):
                print(part, result)
        """
        await self.status()  # Raises if there is no request.
        reader = ResultReader(self._request.protocol, self.id)
        pauses = _Pauses(timeout, f"request {self.id}: no result came")
        while not reader.is_over:
            found = None
            with suppress(ServerBusy, ServerUnreachable):
                found = await self._call(lambda: _read_decoded_results(reader, self.id))
            if found is None:
                if not reader.is_over:
                    await pauses.next()
                continue
            for number, result in found:
                yield number, result
            pauses = _Pauses(timeout, f"request {self.id}: no result came")

    async def errors(self) -> list[Failure]:
        """Return what was given up, ordered by part and record."""
        found: list[Failure] = await self._call(self._request.errors)
        return found

    async def set(self, **changes: Any) -> None:
        """Change the request while it runs. The options are those of ``Request.set``.

        Raises:
            RequestEnded: the request has ended.
        """
        await self._call(lambda: self._request.set(**changes))

    async def pause(self) -> None:
        """Start no more parts. Parts that run go on to their end."""
        await self._call(self._request.pause)

    async def resume(self) -> None:
        """Start parts again."""
        await self._call(self._request.resume)

    async def cancel(self) -> int:
        """End the request now, and return how many parts will not be finished."""
        unfinished: int = await self._call(self._request.cancel)
        return unfinished

    async def retry(self) -> int:
        """Run the failed parts again, under the same id, and return how many they are."""
        parts: int = await self._call(self._request.retry)
        return parts

    async def purge(self) -> None:
        """Remove the ended request and its results from the server now.

        Raises:
            RequestOpen: the request still runs; cancel it first.
        """
        await self._call(self._request.purge)


class _Pauses:
    """Sleeps in the event loop, longer each time, until the time is over."""

    def __init__(self, timeout: str | float | None, message: str) -> None:
        self._begun = time.monotonic()
        self._most = None if timeout is None else units.duration_ms(timeout, "timeout") / 1e3
        self._message = message

    async def next(self) -> None:
        """Sleep once.

        Raises:
            WaitTimeout: the time is over.
        """
        waited = time.monotonic() - self._begun
        pause = min(_LATEST_S, max(_SOONEST_S, waited / 10))
        if self._most is not None:
            if waited >= self._most:
                raise WaitTimeout(f"{self._message} in {self._most:g} s")
            pause = min(pause, self._most - waited)
        await asyncio.sleep(pause)


def _read_decoded_results(reader: ResultReader, request_id: str) -> list[tuple[int, Any]] | None:
    found = reader.read()
    if found is None:
        return None
    return [
        (number, decoded_result(result, number, request_id))
        for number, result in ((part_of_field(field), result) for field, result in found)
        if result not in (codec.NOTHING, codec.FAILED)
    ]
