"""The gateway over gRPC: the same desk, in the same event loop, at a port of its own."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import msgspec
from starlette.requests import ClientDisconnect

from streamq.errors import InvalidValue, SettingsError, StreamqError
from streamq.gateway import grpc_messages as convert
from streamq.gateway import streamq_pb2 as pb
from streamq.gateway.access import Access, Visit
from streamq.gateway.control import ACTIONS
from streamq.gateway.desk import Handed
from streamq.gateway.listener import ListenerConnection, Tls
from streamq.gateway.messages import Leave, Value
from streamq.gateway.operations import MOST_RESULTS
from streamq.gateway.problems import Problem, problem_of
from streamq.gateway.roles import Caller, Role
from streamq.gateway.route import MOST_BODY, Gateway
from streamq.gateway.session_messages import FromWorker, ToWorker

log = logging.getLogger(__name__)

#: How often ``Watch`` looks at the request.
LOOK_S = 1.0
_PACKAGE = "streamq.v1"
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    410: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    502: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    507: grpc.StatusCode.UNAVAILABLE,
}
_OPTIONS = [
    # Clients ping through idle hours; by default a server takes that for an attack.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", MOST_BODY),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", 10_000),
    ("grpc.so_reuseport", 1),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # A connection without a call is closed: strangers who make none must not keep all places. A
    # client connects again when it calls.
    ("grpc.max_connection_idle_ms", 30_000),
]

Context = Any


class GrpcServer:
    """Listens, and serves the two services of the proto."""

    def __init__(self, gateway: Gateway, host: str, port: int, tls: Tls) -> None:
        """Raises:
        SettingsError: it cannot listen there.
        """
        self._gateway = gateway
        most = ("grpc.max_allowed_incoming_connections", ListenerConnection.most)
        self._server = grpc.aio.server(options=[*_OPTIONS, most])
        services = (self._work(), self._requests())
        self._server.add_generic_rpc_handlers(
            (_GrpcDoorkeeper(services, gateway.access, self._refuse),)
        )
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._listen(where, tls)
        except (RuntimeError, OSError) as error:
            raise SettingsError(f"cannot listen at {where} for gRPC: {error}") from None

    async def start(self) -> None:
        """Begin to serve."""
        await self._server.start()

    async def _refuse(self, _: Any, context: Context) -> None:
        try:
            self._caller(context, Role.READER, "")
        except Problem as problem:
            await _abort_grpc_call(context, problem)

    async def stop(self, grace_s: float) -> None:
        """Stop serving. Calls that are on their way have ``grace_s`` to end."""
        await self._server.stop(grace_s)

    def _listen(self, where: str, tls: Tls) -> int:
        if tls.certificate is None or tls.key is None:
            return self._server.add_insecure_port(where)
        credentials = grpc.ssl_server_credentials(
            [(tls.key.read_bytes(), tls.certificate.read_bytes())],
        )
        return self._server.add_secure_port(where, credentials)

    def _work(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            f"{_PACKAGE}.Work",
            {
                "Session": grpc.stream_stream_rpc_method_handler(
                    self._session, pb.FromWorker.FromString, pb.ToWorker.SerializeToString
                ),
                "Take": self._unary(self._take, pb.Ask, Role.WORKER),
                "Report": self._unary(self._report, pb.ReportMessage, Role.WORKER),
                "Beat": self._unary(self._beat, pb.BeatMessage, Role.WORKER),
                "Leave": self._unary(self._leave, pb.Bye, Role.WORKER),
            },
        )

    def _requests(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            f"{_PACKAGE}.Requests",
            {
                "Submit": self._unary(self._submit, pb.NewRequest, Role.LOADER),
                "Load": grpc.stream_unary_rpc_method_handler(
                    self._load, pb.LoadChunk.FromString, pb.Loaded.SerializeToString
                ),
                "Get": self._unary(self._get, pb.RequestId, Role.READER),
                "List": self._unary(self._list, pb.ListAsk, Role.READER),
                "Control": self._unary(self._control, pb.ControlAsk, Role.OPERATOR),
                "Watch": self._streaming(self._watch, pb.RequestId, Role.READER),
                "Results": self._streaming(self._results, pb.ResultsAsk, Role.LOADER),
                "Errors": self._streaming(self._errors, pb.ErrorsAsk, Role.READER),
            },
        )

    def _unary(self, do: Callable[[Caller, Any], Awaitable[Any]], kind: Any, role: Role) -> Any:
        async def handle(message: Any, context: Context) -> Any:
            began, status = time.monotonic(), 200
            try:
                answer = await do(self._caller(context, role, do.__name__), message)
                return (
                    _grpc_granted_parts(answer, context) if isinstance(answer, Handed) else answer
                )
            except (Problem, StreamqError) as error:
                status = _grpc_problem(error).status
                await _abort_grpc_call(context, error)
            finally:
                self._note(do.__name__, status, began)

        return grpc.unary_unary_rpc_method_handler(
            handle, kind.FromString, lambda answer: answer.SerializeToString()
        )

    def _streaming(
        self, do: Callable[[Caller, Any], AsyncIterator[Any]], kind: Any, role: Role
    ) -> Any:
        async def handle(message: Any, context: Context) -> None:
            began, status = time.monotonic(), 200
            try:
                caller = self._caller(context, role, do.__name__)
                async for answer in do(caller, message):
                    await context.write(answer)
            except (Problem, StreamqError) as error:
                status = _grpc_problem(error).status
                await _abort_grpc_call(context, error)
            finally:
                self._note(do.__name__, status, began)

        return grpc.unary_stream_rpc_method_handler(
            handle, kind.FromString, lambda answer: answer.SerializeToString()
        )

    def _caller(self, context: Context, role: Role, what: str) -> Caller:
        headers = {str(name): str(text) for name, text in context.invocation_metadata() or ()}
        headers = {"authorization": headers.get("authorization", ""), "host": "localhost"}
        peer = str(context.peer())
        address = peer.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0]
        caller = self._gateway.access.caller(Visit("POST", headers, address))
        caller.check_role(role, what.strip("_"))
        return caller

    def _note(self, name: str, status: int, began: float) -> None:
        self._gateway.tallies.called(name.strip("_"), status, time.monotonic() - began)

    # Work

    async def _session(self, _: Any, context: Context) -> None:
        async def receive() -> FromWorker | None:
            message = await context.read()
            return None if message is grpc.aio.EOF else convert.worker_message_from_proto(message)

        async def send(message: ToWorker) -> None:
            await context.write(convert.worker_message_to_proto(message))

        try:
            caller = self._caller(context, Role.WORKER, "Session")
            await self._gateway.sessions.serve(caller, receive, send)
        except TimeoutError:
            await _abort_grpc_call(
                context, Problem(408, "SLOW", "no message came, or none was read")
            )
        except (Problem, StreamqError) as error:
            await _abort_grpc_call(context, error)

    async def _take(self, caller: Caller, message: pb.Ask) -> Handed:
        return await self._gateway.desk.take(caller, convert.ask_from_proto(message))

    async def _report(self, caller: Caller, message: pb.ReportMessage) -> Handed:
        return await self._gateway.desk.report(caller, convert.report_from_proto(message))

    async def _beat(self, caller: Caller, message: pb.BeatMessage) -> pb.Verdict:
        verdict = await self._gateway.desk.beat(caller, convert.beat_from_proto(message))
        return pb.Verdict(unwanted=verdict.unwanted, paused=verdict.paused)

    async def _leave(self, caller: Caller, message: pb.Bye) -> pb.Left:
        left = await self._gateway.desk.leave(caller, Leave(list(message.tickets)))
        return pb.Left(released=left.released)

    # Requests

    async def _submit(self, caller: Caller, message: pb.NewRequest) -> pb.Status:
        new = convert.new_request_from_proto(message)
        status, _ = await self._gateway.requests.submit(caller, new)
        log.info("submit %s by %s (%s) over gRPC", status.id, caller.name, caller.role)
        return convert.status_to_proto(status)

    async def _get(self, caller: Caller, message: pb.RequestId) -> pb.Status:
        return convert.status_to_proto(await self._gateway.requests.status(caller, message.id))

    async def _load(self, _: Any, context: Context) -> pb.Loaded:
        began, status = time.monotonic(), 200
        try:
            caller = self._caller(context, Role.LOADER, "Load")
            first = await context.read()
            if first is grpc.aio.EOF or not first.HasField("head"):
                raise InvalidValue("the first message has the head")
            head: pb.LoadHead = first.head
            found, _ = await self._gateway.uploads.put(
                caller,
                head.id,
                convert.upload_from_proto(head),
                _grpc_upload_data(first, context),
                head.begins_at if head.HasField("begins_at") else None,
            )
            log.info("load %s by %s (%s) over gRPC", head.id, caller.name, caller.role)
            return convert.loaded_to_proto(found)
        except (Problem, StreamqError) as error:
            status = _grpc_problem(error).status
            await _abort_grpc_call(context, error)
            raise  # never reached, because abort raises an error of its own
        finally:
            self._note("load", status, began)

    async def _list(self, caller: Caller, message: pb.ListAsk) -> pb.Listed:
        found = await self._gateway.control.requests(
            caller,
            message.queue or "default",
            state=message.state,
            handler=message.handler,
            ended=not message.live_only,
            most=min(message.most or 50, 1_000),
        )
        return convert.requests_to_proto(found)

    async def _control(self, caller: Caller, message: pb.ControlAsk) -> pb.Status:
        control, noted = self._gateway.control, message.action
        if message.action == "purge":
            status = await self._gateway.requests.status(caller, message.id)
            await control.purge(caller, message.id)
        elif message.action == "set":
            status, noted = await control.change(
                caller, message.id, convert.changes_from_proto(message)
            )
        elif message.action in ACTIONS:
            await control.act(caller, message.id, message.action)
            status = await self._gateway.requests.status(caller, message.id)
        else:
            known = ", ".join((*ACTIONS, "set", "purge"))
            raise InvalidValue(f"action {message.action!r:.40} is none of {known}")
        log.info("%s %s by %s (%s) over gRPC", message.action, message.id, caller.name, caller.role)
        if self._gateway.board:
            self._gateway.board.changed(caller.name, "", message.id, noted)
        return convert.status_to_proto(status)

    async def _watch(self, caller: Caller, message: pb.RequestId) -> AsyncIterator[pb.Status]:
        last = None
        while not self._gateway.desk.is_stopping:
            status = await self._gateway.requests.status(caller, message.id)
            if status != last:
                yield convert.status_to_proto(status)
            if not status.state.is_live:
                return
            last = status
            await asyncio.sleep(LOOK_S)

    async def _results(
        self, caller: Caller, message: pb.ResultsAsk
    ) -> AsyncIterator[pb.ResultPart]:
        lines = await self._gateway.requests.results(
            caller, message.id, message.first or 1, message.most or MOST_RESULTS, message.follow
        )
        async for some in lines:
            for line in some.splitlines():
                yield _result_part_to_proto(line)

    async def _errors(self, caller: Caller, message: pb.ErrorsAsk) -> AsyncIterator[pb.GivenUp]:
        page = await self._gateway.control.errors(
            caller, message.id, message.after, message.most or MOST_RESULTS
        )
        for each in page.errors:
            yield convert.failures_to_proto(each)


class _GrpcDoorkeeper(grpc.GenericRpcHandler):
    """Turns those away who have no key, before their messages are read into memory."""

    def __init__(
        self,
        services: tuple[grpc.GenericRpcHandler, ...],
        access: Access,
        refuse: Callable[[Any, Context], Awaitable[None]],
    ) -> None:
        self._services = services
        self._access = access
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(refuse)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return what serves a call; None for one that nobody knows."""
        metadata = dict(handler_call_details.invocation_metadata or ())
        if not self._access.has_key(str(metadata.get("authorization", ""))):
            return self._refusal
        found = (each.service(handler_call_details) for each in self._services)
        return next(filter(None, found), None)


async def _grpc_upload_data(chunk: pb.LoadChunk, context: Context) -> AsyncIterator[bytes]:
    """Yield the bytes of a file, up to the chunk that is marked as the last.

    Raises:
        ClientDisconnect: the stream ended before.
    """
    while True:
        yield chunk.data
        if chunk.is_last:
            return
        try:
            chunk = await context.read()
        except (asyncio.CancelledError, grpc.aio.UsageError, grpc.aio.AbortError):
            raise ClientDisconnect from None
        if chunk is grpc.aio.EOF:
            raise ClientDisconnect


def _result_part_to_proto(line: bytes) -> pb.ResultPart:
    found = msgspec.json.decode(line, type=_GrpcLine)
    if found.part is None:
        return pb.ResultPart(next=found.next, is_over=found.is_over)
    values = [found.result] if found.results is None else found.results
    return pb.ResultPart(part=found.part, values=[convert.result_to_proto(each) for each in values])


class _GrpcLine(msgspec.Struct):
    """A line of results, or the last one."""

    part: int | None = None
    result: Value | None = None
    results: list[Value | None] | None = None
    next: int = 0
    is_over: bool = False


def _grpc_granted_parts(handed: Handed, context: Context) -> pb.Grant:
    """Return the granted parts. They go back if the call ends before they reach the worker."""

    def over(context: Context) -> None:
        if context.cancelled():
            handed.undo()
        else:
            handed.delivered(lambda: False)

    context.add_done_callback(over)
    return convert.grant_to_proto(handed.granted)


def _grpc_problem(error: Problem | StreamqError) -> Problem:
    return error if isinstance(error, Problem) else problem_of(error)


async def _abort_grpc_call(context: Context, error: Problem | StreamqError) -> None:
    """End a call with the status that belongs to the error."""
    problem = _grpc_problem(error)
    code = _CODES.get(problem.status, grpc.StatusCode.INTERNAL)
    more = tuple((f"streamq-{name}", str(text)) for name, text in problem.more.items())
    metadata = (("streamq-code", problem.code), *more)
    await context.abort(code, problem.detail or problem.title, metadata)
