"""Routes of the live feed: frames as server-sent events, over WebSocket, or a single one."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import msgspec
from starlette.requests import Request as Asked
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from streamq.dashboard.feed import FeedWatcher
from streamq.errors import StreamqError
from streamq.gateway.access import Access, Visit
from streamq.gateway.dashboard import DashboardBoard
from streamq.gateway.pages import SECURITY, Called, page_with_problems_told
from streamq.gateway.problems import Problem, problem_of
from streamq.gateway.roles import Caller, Role

PATH = "/v1/live"
#: A WebSocket ends with this code if its caller may not watch.
_REFUSED = 1008


def live_routes(board: DashboardBoard, access: Access, called: Called) -> list[BaseRoute]:
    """Return the routes of the feed."""

    async def live(asked: Asked) -> Response:
        topics = asked.query_params.getlist("topic")
        caller = called(asked, Role.READER)
        await board.may_watch(caller, topics)
        if "once" in asked.query_params:
            frames = [await board.feed.frame(topic) for topic in topics]
            headers = {"Cache-Control": "no-store", **SECURITY}
            return Response(b"".join(frames), media_type="text/event-stream", headers=headers)
        return StreamingResponse(
            _live_events(board, access, caller, topics),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **SECURITY},
        )

    async def live_socket(socket: WebSocket) -> None:
        await _serve_live_socket(board, access, socket)

    return [Route(PATH, page_with_problems_told(live)), WebSocketRoute(PATH, live_socket)]


async def _live_events(
    board: DashboardBoard, access: Access, caller: Caller, topics: list[str]
) -> AsyncIterator[bytes]:
    watcher, feed = FeedWatcher(), board.feed
    yield b"retry: 1000\n" + _live_hello(board, caller)
    feed.join(watcher, topics)
    try:
        with suppress(asyncio.CancelledError):
            async for frame in watcher.frames(lambda: feed.is_stopping or access.is_over(caller)):
                yield frame
    finally:
        feed.leave(watcher)


def _live_hello(board: DashboardBoard, caller: Caller) -> bytes:
    told = {"role": caller.role, "name": caller.name, "queues": board.queues_of(caller)}
    return b"event: hello\ndata: " + msgspec.json.encode(told) + b"\n\n"


async def _serve_live_socket(board: DashboardBoard, access: Access, socket: WebSocket) -> None:
    """Tell the frames over WebSocket: each message is an object with its ``event``."""
    address = socket.client.host if socket.client else ""
    certificate = getattr(socket.state, "certificate", "")
    topics = socket.query_params.getlist("topic")
    await socket.accept()
    try:
        # A page of another site can make a browser open a stream, so it is checked like a change.
        caller = access.caller(Visit("CONNECT", socket.headers, address, certificate))
        await board.may_watch(caller, topics)
    except (Problem, StreamqError) as error:
        problem = error if isinstance(error, Problem) else problem_of(error)
        await socket.close(_REFUSED, str(problem)[:120])
        socket.state.stream.goodbye()
        return
    socket.state.stream.accepted()
    left = asyncio.ensure_future(_live_browser_has_left(socket))
    watcher, feed = FeedWatcher(), board.feed
    left.add_done_callback(lambda _: watcher.wake())

    def is_over() -> bool:
        return feed.is_stopping or left.done() or access.is_over(caller)

    watcher.tell("hello", _live_hello(board, caller))
    feed.join(watcher, topics)
    try:
        with suppress(WebSocketDisconnect, RuntimeError):
            async for frames in watcher.frames(is_over):
                for message in live_frames_as_messages(frames):
                    await socket.send_text(message)
            await socket.close()
    finally:
        feed.leave(watcher)
        left.cancel()
        socket.state.stream.goodbye()


def live_frames_as_messages(frames: bytes) -> Iterator[str]:
    """Yield the events of a stream as JSON; their data are not encoded again."""
    for frame in frames.decode().split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in frame.split("\n"))
        if "event" in lines and "data" in lines:
            data = lines["data"][1:]
            yield f'{{"event":"{lines["event"]}"' + (data if data == "}" else f",{data}")


async def _live_browser_has_left(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
