"""Sessions over WebSocket: each message is a JSON object in a text frame."""

import logging
from contextlib import suppress

import msgspec
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from streamq.errors import StreamqError
from streamq.gateway.access import Access, Visit
from streamq.gateway.problems import Problem, problem_of
from streamq.gateway.session import Sessions, encode_session_message
from streamq.gateway.session_messages import FromWorker, ToWorker

log = logging.getLogger(__name__)

PATH = "/v1/work"
SUBPROTOCOL = "streamq.v1.json"
#: Codes with which a stream is ended: a message that is none, a worker without the right, a worker
#: that is too slow.
_BAD, _REFUSED, _SLOW = 1007, 1008, 1013


async def serve_worker_stream(
    scope: Scope, receive_message: Receive, send_message: Send, access: Access, sessions: Sessions
) -> None:
    """Serve one stream of a worker."""
    socket = WebSocket(scope, receive_message, send_message)
    offered = socket.scope.get("subprotocols", [])
    try:
        caller = access.caller(_visit_of_websocket(socket))
    except Problem as refused:
        # Before a stream is accepted it can only be refused with 403, so it is accepted first and
        # then told the reason.
        await socket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        await socket.close(_REFUSED, str(refused)[:120])
        socket.state.stream.goodbye()
        return
    socket.state.stream.accepted()
    await socket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)

    async def receive() -> FromWorker | None:
        # Not by way of ``socket``: most of the time most streams stand here, and each call below
        # costs memory.
        message = await receive_message()
        text = message.get("text")
        return None if text is None else msgspec.json.decode(text, type=FromWorker)

    async def send(message: ToWorker) -> None:
        with suppress(WebSocketDisconnect, RuntimeError):
            await socket.send_text(encode_session_message(message).decode())

    code, reason = 1000, ""
    try:
        await sessions.serve(caller, receive, send)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        code, reason = _BAD, f"400 INVALID: {error}"
    except (Problem, StreamqError) as error:
        problem = error if isinstance(error, Problem) else problem_of(error)
        code, reason = _REFUSED, str(problem)
    except TimeoutError:
        code, reason = _SLOW, "408 SLOW: no message came, or none was read, in time"
    with suppress(RuntimeError, WebSocketDisconnect):  # the worker has left
        await socket.close(code, reason[:120])
    socket.state.stream.goodbye()


def _visit_of_websocket(socket: WebSocket) -> Visit:
    # A page of another site can make a browser open a stream, so it is checked like a change.
    return Visit(
        "CONNECT",
        socket.headers,
        socket.client.host if socket.client else "",
        getattr(socket.state, "certificate", ""),
    )
