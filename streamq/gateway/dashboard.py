"""The dashboard's part of the gateway: its pages, the live feed, and what operators change."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request as Asked
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as StarletteRoute

from streamq import units
from streamq.dashboard import failures
from streamq.dashboard.feed import MOST_TOPICS, MOST_TOPICS_IN_ALL, Feed, Watcher
from streamq.dashboard.files import POLICY, pages
from streamq.dashboard.report import make_report
from streamq.errors import InvalidValue, StreamqError
from streamq.gateway.messages import Controlled
from streamq.gateway.problems import Problem, problem_of
from streamq.gateway.roles import Caller, Role
from streamq.model import Failure, Status
from streamq.protocol import glances
from streamq.protocol.protocol import Protocol
from streamq.queue.request import Request

#: So many bytes of a payload are shown.
SHOWN_BYTES = 4_096
#: So many changes are remembered.
MOST_ENTRIES = 1_000
#: Addresses of pages. All of them are the same file: what it shows follows from the address.
PAGES = ("/", "/q/{rest:path}", "/r/{rest:path}", "/login")
_SECURITY = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Retry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which failed parts run again: those of a range, or those of a group."""

    first: int = 0
    last: int = 0
    error: str | None = None
    pattern: str = ""


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a part's payload."""

    part: int
    #: How many bytes it has; -1: the server has it no more.
    bytes: int
    text: str = ""
    source: str = ""
    line: int = 0


class Board:
    """Serves the pages. Calls of the server run in threads."""

    def __init__(
        self,
        protocol: Protocol,
        in_thread: Callable[[Callable[[], Any]], Any],
        queues: list[str],
        *,
        is_read_only: bool = False,
    ) -> None:
        self.is_read_only = is_read_only
        self._protocol = protocol
        self._in_thread = in_thread
        self.queues = queues
        self.feed = Feed(protocol)
        #: What was changed through this gateway since it started, the last first.
        self.log: deque[dict[str, Any]] = deque(maxlen=MOST_ENTRIES)

    # What is watched

    async def may_watch(self, caller: Caller, topics: list[str]) -> None:
        """Raise an error unless the caller may watch these topics."""
        if not topics or len(topics) > MOST_TOPICS:
            raise InvalidValue(f"name 1 to {MOST_TOPICS} topics: ?topic=q:default")
        if len(self.feed.topics) > MOST_TOPICS_IN_ALL:
            raise Problem(503, "BUSY", "too many topics are watched", retry_after_s=5)
        for topic in topics:
            found = self.feed.sampler(topic)
            if found.queue:
                self._check_queue(caller, found.queue)
            elif caller.queues is not None:
                status = await self._status(found.request_id)
                self._check_queue(caller, status.queue)

    def _check_queue(self, caller: Caller, queue: str) -> None:
        caller.check_queue(queue)
        if queue not in self.queues:
            raise InvalidValue(f"this gateway does not serve the queue {queue!r:.80}")

    async def _status(self, request_id: str) -> Status:
        name = units.name(request_id, "request id")
        status: Status = await self._in_thread(Request(self._protocol, name).status)
        return status

    # What is changed

    def changed(self, caller: Caller, what: str, request_id: str, body: Any) -> None:
        """Note who changed what, and tell those who watch the request."""
        change = msgspec.to_builtins(body) if what == "change" else {}
        words = [f"{name} {value}" for name, value in change.items() if value is not None]
        self.log.appendleft(
            {
                "t": round(time.time() * 1e3),
                "who": caller.name,
                "what": " ".join(["set" if words else what, *words]),
                "request": request_id,
            }
        )
        self.feed.hurry(request_id)

    async def retry(self, caller: Caller, request_id: str, which: Retry) -> Controlled:
        """Run failed parts again: those of a range, or of a group."""
        status = await self._status(request_id)
        caller.check_queue(status.queue)

        def retry() -> Controlled:
            request = Request(self._protocol, request_id)
            parts = request.retry(self._chosen(request_id, which))
            return Controlled(request.status().state, parts)

        done: Controlled = await self._in_thread(retry)
        return done

    def _chosen(self, request_id: str, which: Retry) -> Iterator[int]:
        found = self._protocol.failures(request_id)
        if which.last:
            return (number for number, _ in found if which.first <= number <= which.last)
        return failures.parts_of_group(found, which.error or "", which.pattern)

    # What is read once

    async def failures(
        self, caller: Caller, request_id: str, first: int, last: int, most: int
    ) -> list[Failure]:
        """Return failures of parts in a range, in no order."""
        status = await self._status(request_id)
        caller.check_queue(status.queue)

        def read() -> list[Failure]:
            found: list[Failure] = []
            for number, text in self._protocol.failures(request_id):
                if first <= number <= last:
                    found += failures.read_failures(text, number)
                if len(found) >= most:
                    break
            return found[:most]

        told: list[Failure] = await self._in_thread(read)
        if caller.role is not Role.OPERATOR:
            told = [msgspec.structs.replace(each, traceback="") for each in told]
        return told

    async def report(self, caller: Caller, request_id: str) -> bytes:
        """Return a request as one HTML file."""
        status = await self._status(request_id)
        caller.check_queue(status.queue)
        told = self.feed.past(f"r:{request_id}")
        page: bytes = await self._in_thread(
            lambda: make_report(self._protocol, request_id, told["points"] if told else None)
        )
        return page

    async def payload(self, caller: Caller, request_id: str, number: int) -> Payload:
        """Return the beginning of a part's payload."""
        status = await self._status(request_id)
        caller.check_queue(status.queue)

        def read() -> Payload:
            from streamq.records.about import Place

            about, payload, size = glances.payload_of(
                self._protocol, request_id, number, SHOWN_BYTES
            )
            place = Place.of(about, self._protocol.inspect(request_id).spec)
            return Payload(
                part=number,
                bytes=size,
                text=payload.decode("utf-8", "replace"),
                source=place.source if place else "",
                line=place.line if place else 0,
            )

        shown: Payload = await self._in_thread(read)
        return shown


# Routes whose answers are no JSON

Called = Callable[[Asked, Role], Caller]


def routes(board: Board, called: Called) -> list[StarletteRoute]:
    """Return the routes of pages, files and the feed. ``called`` tells who calls, or raises."""

    async def page(_: Asked) -> Response:
        return Response(
            pages().index,
            media_type="text/html; charset=utf-8",
            headers={**_SECURITY, "Cache-Control": "no-cache"},
        )

    async def file(asked: Asked) -> Response:
        found = pages().files.get(asked.path_params["name"])
        if found is None:
            return _told(Problem(404, "PATH", "there is no such file"))
        lasting = asked.path_params["digest"] == pages().digest
        age = "public, max-age=31536000, immutable" if lasting else "no-cache"
        return Response(
            found.content, media_type=found.kind, headers={**_SECURITY, "Cache-Control": age}
        )

    async def live(asked: Asked) -> Response:
        topics = asked.query_params.getlist("topic")
        caller = called(asked, Role.READER)
        await board.may_watch(caller, topics)
        if "once" in asked.query_params:
            frames = [await board.feed.frame(topic) for topic in topics]
            return Response(b"".join(frames), media_type="text/event-stream")
        return StreamingResponse(
            _events(board, caller, topics),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **_SECURITY},
        )

    async def report(asked: Asked) -> Response:
        request_id = asked.path_params["id"]
        content = await board.report(called(asked, Role.READER), request_id)
        disposition = f'attachment; filename="{request_id}.html"'
        return Response(
            content,
            media_type="text/html; charset=utf-8",
            headers={**_SECURITY, "Content-Disposition": disposition},
        )

    return [
        StarletteRoute("/v1/requests/{id}/report.html", _telling(report)),
        *(StarletteRoute(path, page) for path in PAGES),
        StarletteRoute("/static/{digest}/{name}", file),
        StarletteRoute("/v1/live", _telling(live)),
    ]


def _telling(operation: Callable[[Asked], Awaitable[Response]]) -> Callable[..., Any]:
    """Return the operation with its errors told as problem+json."""

    async def answer(asked: Asked) -> Response:
        try:
            return await operation(asked)
        except Problem as problem:
            return _told(problem)
        except StreamqError as error:
            return _told(problem_of(error))

    return answer


async def _events(board: Board, caller: Caller, topics: list[str]) -> AsyncIterator[bytes]:
    watcher = Watcher()
    feed = board.feed
    hello = {"role": caller.role, "name": caller.name, "queues": board.queues}
    yield b"retry: 1000\nevent: hello\ndata: " + msgspec.json.encode(hello) + b"\n\n"
    feed.join(watcher, topics)
    try:
        with suppress(asyncio.CancelledError):
            async for frame in watcher.frames(lambda: feed.is_stopping):
                yield frame
    finally:
        feed.leave(watcher)


def _told(problem: Problem) -> Response:
    return Response(problem.body(), problem.status, headers=problem.headers())
