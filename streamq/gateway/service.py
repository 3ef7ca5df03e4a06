"""The process of a gateway: its listener, its janitors, its start and its stop."""

import asyncio
import logging
import secrets
import signal
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import uvicorn

from streamq.errors import InvalidValue
from streamq.gateway import supervisor
from streamq.gateway.access import Access
from streamq.gateway.control import Control
from streamq.gateway.dashboard import DashboardBoard
from streamq.gateway.desk import Desk
from streamq.gateway.health import serve_gateway_health
from streamq.gateway.http import gateway_http_application
from streamq.gateway.listener import (
    BACKLOG,
    ListenerConnection,
    Tls,
    allow_connections_to_listener,
    listening_socket,
    listens_on_loopback,
)
from streamq.gateway.loads import Loads
from streamq.gateway.requests import Requests
from streamq.gateway.route import MOST_BODY, Gateway
from streamq.gateway.session import GO_WITHIN_MS, Sessions
from streamq.gateway.ticket import TicketSigner
from streamq.gateway.tls_door import TlsDoor
from streamq.gateway.uploads import Uploads
from streamq.model import LAST_LEVEL
from streamq.protocol.protocol import Protocol
from streamq.queue.lease_keeper import LeaseKeeper
from streamq.settings import Settings
from streamq.telemetry.systemd import Notifier

if TYPE_CHECKING:
    from streamq.gateway.grpc_service import GrpcServer

log = logging.getLogger(__name__)

#: How often the gateway looks for takes that wait at a server which hangs (s).
CHECK_EVERY_S = 4.0


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway is to serve."""

    host: str
    port: int
    queues: tuple[str, ...]
    #: How long answers that are on their way may take when the gateway stops.
    grace_s: float = 25.0
    #: The file with the keys. Without one everybody may do everything.
    keys: Path | None = None
    tls: Tls = Tls()
    #: Whether other machines may be listened to without TLS: a proxy in front has it.
    is_insecure: bool = False
    #: Where to listen for gRPC, if at all: host and port.
    grpc: tuple[str, int] | None = None
    #: The URL that browsers use, if it is another than where the gateway listens.
    origin: str = ""
    #: Where to tell health and metrics without a key; nowhere if it is "".
    health_port: str = ""
    #: How many connections of callers there may be.
    connections: int = ListenerConnection.most
    #: Answer what readers may ask, and nothing else. Such a gateway is no janitor.
    is_read_only: bool = False


def serve_gateway(
    protocol: Protocol, options: ServiceOptions, started: Callable[[str], object] = lambda _: None
) -> None:
    """Serve until INT or TERM comes. ``started`` is told the URL when it listens.

    Raises:
        InvalidValue: the gateway would listen beyond loopback without keys.
        SettingsError: it cannot listen there.
    """
    access = Access(options.keys, frozenset({options.host}), options.origin)
    tls = options.tls.context()
    for host, port in filter(None, (options.grpc,)):
        with listening_socket(host, port, is_shared=True) as door:
            _check_service_is_guarded(door, options, access, has_tls=tls is not None)
    own_secret = supervisor.secret_of_processes()
    supervisor.end_process_with_supervisor()
    listener = _listener_of_gateway_service(options, is_shared=own_secret is not None)
    _check_service_is_guarded(listener, options, access, has_tls=tls is not None)
    address = listener.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    url = f"{'https' if tls else 'http'}://{shown}:{address[1]}"
    settings = Settings.from_env()
    keepers = {
        queue: LeaseKeeper(
            protocol,
            queue,
            # Names of holders do not begin with this word: the gateway does not renew leases, so
            # its heartbeat says nothing about them.
            secrets.token_hex(8),
            slots=0,
            lease_ms=settings.lease_ms,
            beat_ms=settings.beat_ms,
            audit_ms=settings.audit_ms,
            levels=range(LAST_LEVEL + 1),
        )
        for queue in ([] if options.is_read_only else options.queues)
    }
    signer = TicketSigner(access.secret or own_secret or secrets.token_bytes(32))
    access.on_secret = signer.use
    desk = Desk(protocol, keepers, signer, f"g{secrets.token_hex(8)}")
    desk.check_again, desk.is_key_over = access.check_again, access.is_over
    requests = Requests(protocol, desk, settings.team, is_read_only=options.is_read_only)
    uploads = Uploads(protocol, desk, settings.team)
    sessions = Sessions(desk)
    control = Control(protocol, desk, options.queues)
    board = DashboardBoard(
        protocol,
        desk.in_thread,
        list(options.queues),
        is_read_only=options.is_read_only,
        queue_of=control.queue_of,
    )
    gateway = Gateway(
        desk,
        requests,
        Loads(protocol, desk, settings.team),
        uploads,
        control,
        access,
        sessions,
        lambda: _why_gateway_is_unready(desk, keepers.values()),
        board,
    )
    config = uvicorn.Config(
        gateway_http_application(gateway, is_read_only=options.is_read_only),
        interface="asgi3",
        http=ListenerConnection,
        loop="uvloop",
        ws=_service_for_websockets(),
        ws_max_size=MOST_BODY,
        # Compression would take gigabytes for thousands of sockets.
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # The address of a caller is that of its connection, whatever a header says.
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(options.grace_s)),
    )
    config.load()

    async def stopping() -> None:
        desk.stop_waiting()
        board.feed.stop()
        await sessions.close(min(options.grace_s, GO_WITHIN_MS / 1e3))

    def beside() -> "GrpcServer | None":
        return _service_for_grpc(gateway, options, started)

    server = _GatewayServer(
        config, tls, stopping, beside, options.grace_s, lambda: started(url), access.look_again
    )
    over = threading.Event()
    checks = threading.Thread(
        target=_end_takes_at_hung_server, args=(protocol, over), name="checks", daemon=True
    )
    for keeper in keepers.values():
        keeper.start()
    checks.start()
    try:
        log.info("serving %s at %s", ", ".join(options.queues), url)
        with serve_gateway_health(
            options.health_port,
            gateway,
            protocol,
            keepers,
            options.queues,
            lambda: server.ticked_at,
        ):
            server.run(sockets=[listener])
    finally:
        over.set()
        listener.close()
        board.feed.close()
        uploads.close()
        desk.close()
        for keeper in keepers.values():
            keeper.stop()
        log.info("stopped")


class _GatewayServer(uvicorn.Server):
    """Answers calls that wait when it is told to stop, so that they do not hold it up."""

    def __init__(
        self,
        config: uvicorn.Config,
        tls: ssl.SSLContext | None,
        stopping: Callable[[], Awaitable[None]],
        beside: "Callable[[], GrpcServer | None]",
        grace_s: float,
        started: Callable[[], object],
        look_again: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._stopping = stopping
        self._beside = beside
        self._grace_s = grace_s
        self._grpc: GrpcServer | None = None
        self._started = started
        self._look_again = look_again
        self._notifier = Notifier()
        #: When the event loop was last seen running.
        self.ticked_at = time.monotonic()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup([] if self._tls else sockets)
        if self._tls:
            self.servers += [self._door(each, self._tls) for each in sockets or ()]
        self._grpc = self._beside()
        if self._grpc:
            await self._grpc.start()
        self._notifier.ready("serving")
        self._started()

    def _door(self, listener: socket.socket, tls: ssl.SSLContext) -> Any:
        """Return what stands for a server of asyncio."""

        def connection() -> ListenerConnection:
            return ListenerConnection(self.config, self.server_state, self.lifespan.state)

        return TlsDoor(listener, tls, connection, self.server_state.connections)

    async def on_tick(self, counter: int) -> bool:
        """Tell systemd that the loop turns."""
        self.ticked_at = time.monotonic()
        self._notifier.alive()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what waits, then end as uvicorn does."""
        self._notifier.stopping("told to stop")
        await self._stopping()
        if self._grpc:
            await self._grpc.stop(self._grace_s)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Stop at INT and TERM; a second one cuts what is still on its way. HUP reads keys again.

        uvicorn would raise the signal again in the end, and the process would end as if killed.
        """

        def on_signal(number: int, _: FrameType | None) -> None:
            self.force_exit = self.should_exit
            self.should_exit = True

        def on_hangup(_: int, frame: FrameType | None) -> None:
            self._look_again()

        actions: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            signal.SIGINT: on_signal,
            signal.SIGTERM: on_signal,
            signal.SIGHUP: on_hangup,
        }
        heeded = [each for each in actions if signal.getsignal(each) is not signal.SIG_IGN]
        before = {number: signal.signal(number, actions[number]) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _listener_of_gateway_service(options: ServiceOptions, *, is_shared: bool) -> socket.socket:
    """Return the socket that callers come to, with room for as many as may come."""
    allow_connections_to_listener(options.connections, doors=2 if options.grpc else 1)
    return listening_socket(options.host, options.port, is_shared=is_shared)


def _check_service_is_guarded(
    listener: socket.socket, options: ServiceOptions, access: Access, *, has_tls: bool
) -> None:
    """Refuse to listen to other machines without keys, or without TLS."""
    if listens_on_loopback(listener):
        return
    where = f"--listen {options.host}:{options.port} is open to other machines"
    listener_is_ok = access.has_keys and (has_tls or options.is_insecure)
    if not listener_is_ok:
        listener.close()
    if not access.has_keys:
        raise InvalidValue(
            f"{where}, and without keys anybody there could read and change everything: listen on "
            "127.0.0.1, or make keys (streamq serve key NAME --role ROLE) and give --keys FILE"
        )
    if not listener_is_ok:
        raise InvalidValue(
            f"{where}, and without TLS anybody between could read the keys: give --tls-cert and "
            "--tls-key, or --insecure if a proxy in front has TLS or you trust the network"
        )


def _service_for_websockets() -> "type[asyncio.Protocol] | Literal['none']":
    """Return what serves streams: the extra ``serve`` brings a package for it."""
    if find_spec("websockets"):
        from streamq.gateway.websocket_connection import WebSocketStream

        return WebSocketStream
    log.warning("no WebSocket streams: pip install 'streamq[serve]' brings the package websockets")
    return "none"


def _service_for_grpc(
    gateway: Gateway, options: ServiceOptions, started: Callable[[str], object]
) -> "GrpcServer | None":
    """Listen for gRPC, if that is asked for. It belongs to the event loop that runs."""
    if options.grpc is None:
        return None
    from streamq.gateway.grpc_service import GrpcServer

    server = GrpcServer(gateway, *options.grpc, options.tls)
    started(f"{options.grpc[0]}:{server.port} (gRPC)")
    return server


def _why_gateway_is_unready(desk: Desk, keepers: Collection[LeaseKeeper]) -> str:
    if desk.is_stopping:
        return "the gateway stops"
    if not all(keeper.is_server_up for keeper in keepers):
        return "the server does not answer"
    return ""


def _end_takes_at_hung_server(protocol: Protocol, over: threading.Event) -> None:
    """End takes that wait at a server which hangs."""
    while not over.wait(CHECK_EVERY_S):
        try:
            protocol.connection.check_waits()
        except Exception:
            log.exception("checks go on after")
