"""The ASGI application: finds the route of a call, decodes the body, encodes the answer."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from streamq.errors import StreamqError
from streamq.gateway import live, pages, websocket
from streamq.gateway.access import Access, Visit
from streamq.gateway.courier import WasLost
from streamq.gateway.listener import ListenerConnection
from streamq.gateway.problems import Problem, problem_of
from streamq.gateway.roles import LOCAL, Caller, Role
from streamq.gateway.route import MOST_BODY, Answer, Call, Gateway, Route
from streamq.gateway.routes import ROUTES

log = logging.getLogger(__name__)

#: The largest body of a call that anybody may make: a login, which has a key.
MOST_OF_ANYBODY = 2**12
_TITLES = {404: ("PATH", "there is no such route"), 405: ("METHOD", "the route has other methods")}


#: Headers of every answer: what browsers may do with it.
SAFETY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def gateway_http_application(gateway: Gateway, *, is_read_only: bool = False) -> ASGIApp:
    """Return the application that serves all routes of the table.

    Calls of workers take no way through the framework: there may be thousands that wait, and each
    layer of it costs memory for each of them, and time for each call.

    ``is_read_only``: answer only what readers may ask.
    """
    others = http_framework_application(gateway, is_read_only=is_read_only)
    of_workers = {
        (each.method, each.path): each
        for each in ROUTES
        if each.role is Role.WORKER and "{" not in each.path
    }

    async def call(route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response = await _answer_http_call(gateway, route, request, is_read_only)
        except Exception as error:
            log.exception("%s %s", route.method, route.path)
            response = await _http_internal_error_response(request, error)
        await response(scope, receive, send)

    def front(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        kind, path = scope["type"], scope["path"]
        if kind == "http" and (route := of_workers.get((scope["method"], path))):
            return call(route, scope, receive, send)
        if kind == "websocket" and path == websocket.PATH and not is_read_only:
            return websocket.serve_worker_stream(
                scope, receive, send, gateway.access, gateway.sessions
            )
        return others(scope, receive, send)

    return front


async def _answer_http_call(
    gateway: Gateway, route: Route, request: Request, is_read_only: bool
) -> Response:
    began = time.monotonic()
    told = await _serve_http_route(gateway, route, request, is_read_only)
    gateway.tallies.called(route.name, told.status_code, time.monotonic() - began)
    return told


def http_framework_application(gateway: Gateway, *, is_read_only: bool = False) -> Starlette:
    """Return what serves all routes and the pages, by way of the framework."""
    by_path: dict[str, dict[str, Route]] = {}
    for route in ROUTES:
        by_path.setdefault(route.path, {})[route.method] = route

    def endpoint(routes: dict[str, Route]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            method = "GET" if request.method == "HEAD" else request.method
            return await _answer_http_call(gateway, routes[method], request, is_read_only)

        return answer

    def called(request: Request, role: Role) -> Caller:
        caller = gateway.access.caller(_visit_of_http(request))
        caller.check_role(role, request.url.path)
        request.state.connection.accepted()
        return caller

    return Starlette(
        routes=[
            *(
                StarletteRoute(path, endpoint(routes), methods=list(routes))
                for path, routes in by_path.items()
            ),
            *(pages.page_routes(gateway.board, gateway.access, called) if gateway.board else ()),
            *(live.live_routes(gateway.board, gateway.access, called) if gateway.board else ()),
        ],
        exception_handlers={
            HTTPException: _no_such_http_route,
            Exception: _http_internal_error_response,
        },
    )


async def _serve_http_route(
    gateway: Gateway, route: Route, request: Request, is_read_only: bool
) -> Response:
    try:
        if is_read_only and not Role.READER.allows(route.role):
            raise Problem(403, "READONLY", "this gateway only tells, and changes nothing")
        call = _read_http_head(gateway.access, route, request)
        answer = await _answer_of_call(gateway, route, request, call)
    except ClientDisconnect:
        return Response(status_code=499)  # the caller has left, so nobody reads this answer
    except Problem as problem:
        return _http_problem_response(problem)
    except StreamqError as error:
        meant = problem_of(error)
        if meant.status >= 500:
            log.warning("%s %s: %s", request.method, route.path, error)
        return _http_problem_response(meant)
    _note_change_over_http(call, route, request, answer.status)
    if route.is_change and gateway.board:
        changed = request.path_params.get("id", "")
        gateway.board.changed(call.caller.name, call.visit.address, changed, answer.noted)
    connection: ListenerConnection = request.state.connection
    return _http_response(answer, connection.was_reset)


async def _answer_of_call(gateway: Gateway, route: Route, request: Request, call: Call) -> Answer:
    if route.takes_file:  # the operation sees that the caller has left, as the end of the body
        call.stream = request.stream()
        return await route.operation(gateway, call)
    with gateway.bodies.of(call.caller) as body:
        if route.body is not None:
            most = MOST_OF_ANYBODY if route.role is Role.ANYBODY else MOST_BODY
            call.body = _decoded_http_body(await body.read(request, most), route.body)
        return await _while_http_caller_is_there(request, route.operation(gateway, call))


def _read_http_head(access: Access, route: Route, request: Request) -> Call:
    """Read who calls. Callers without the right are refused before the body."""
    visit = _visit_of_http(request)
    # A login has its key in the body, so nobody is refused before that is read.
    caller = LOCAL if route.role is Role.ANYBODY else access.caller(visit)
    caller.check_role(route.role, route.path)
    if not route.is_of_all:
        caller.check_request(request.path_params.get("id", ""))
    if route.role is not Role.ANYBODY:
        connection: ListenerConnection = request.state.connection
        connection.accepted()
    query = request.query_params if request.scope["query_string"] else {}
    return Call(caller, request.path_params, query, visit, request.scope["scheme"])


def _visit_of_http(request: Request) -> Visit:
    return Visit(
        request.method,
        request.headers,
        request.client.host if request.client else "",
        getattr(request.state, "certificate", ""),
    )


def _note_change_over_http(call: Call, route: Route, request: Request, status: int) -> None:
    """Log who changed which request. Keys, tickets and payloads are never logged."""
    if route.is_change:
        what = request.path_params.get("id", "")
        who, address = call.caller, call.visit.address
        log.info(
            "%s %s: %s by %s (%s) at %s", route.name, what, status, who.name, who.role, address
        )


def _decoded_http_body(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, "INVALID", "the body is not what the call takes", str(error)) from None


async def _while_http_caller_is_there(request: Request, operation: Awaitable[Answer]) -> Answer:
    """Return the operation's answer, or end the operation when the caller has left."""
    task, has_left = asyncio.current_task(), False
    assert task

    def leave() -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    connection: ListenerConnection = request.state.connection
    connection.tell_lost(leave)
    try:
        return await operation
    except asyncio.CancelledError:
        if not has_left:
            raise
        task.uncancel()
        raise ClientDisconnect from None
    finally:
        connection.tell_lost(None)


def _http_response(answer: Answer, was_reset: WasLost) -> Response:
    if answer.lines is not None:
        return StreamingResponse(
            answer.lines, answer.status, SAFETY | answer.headers, "application/x-ndjson"
        )
    if answer.text:
        return Response(answer.text, answer.status, SAFETY | answer.headers, "text/plain")
    if answer.body is None:
        return Response(status_code=answer.status, headers=SAFETY | answer.headers)
    return Response(
        msgspec.json.encode(answer.body),
        answer.status,
        headers=SAFETY | answer.headers,
        media_type="application/json",
        background=_HttpSent(answer.delivered, was_reset) if answer.delivered else None,
    )


class _HttpSent(BackgroundTask):
    """A task that Starlette runs when an answer is out; it tells the operation so."""

    def __init__(self, delivered: Callable[[WasLost], None], was_reset: WasLost) -> None:
        self._delivered = delivered
        self._was_reset = was_reset

    async def __call__(self) -> None:
        """Tell the operation that its answer is out."""
        self._delivered(self._was_reset)


def _http_problem_response(problem: Problem) -> Response:
    return Response(problem.body(), problem.status, headers=SAFETY | problem.headers())


async def _no_such_http_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, title = _TITLES.get(error.status_code, ("ERROR", str(error.detail)))
    told = _http_problem_response(Problem(error.status_code, code, title))
    told.headers.update(error.headers or {})
    return told


async def _http_internal_error_response(request: Request, error: Exception) -> Response:
    # Starlette raises the error again, and uvicorn logs it with its traceback.
    return _http_problem_response(
        Problem(500, "ERROR", "the gateway stumbled", "its log says over what")
    )
