"""The socket of a gateway, its TLS, and the limits of a connection before a call is read."""

import asyncio
import fcntl
import logging
import resource
import socket
import ssl
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from streamq.errors import InvalidValue, SettingsError
from streamq.gateway.newcomers import Newcomers
from streamq.gateway.problems import Problem

log = logging.getLogger(__name__)

#: Connections that wait to be accepted.
BACKLOG = 4_096
#: The largest head of a call in bytes, and how long it may take to come.
MOST_HEAD = 2**14
HEAD_S = 30.0
#: How long a caller may read nothing of what is sent to it before it is cut off.
READ_S = 30.0
#: How long a caller that is turned away may take to say goodbye.
REFUSED_S = 1.0
#: Open files of a gateway besides the connections of callers: its own connections, and others.
_OTHER_FILES = 256


class Tls(msgspec.Struct, frozen=True):
    """Files with the certificate, its key, and the CA of client certificates."""

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext | None:
        """Return what connections are made with; None without a certificate.

        Raises:
            InvalidValue: only some of the files are given.
            SettingsError: one of them cannot be used.
        """
        if self.certificate is None or self.key is None:
            if self.certificate or self.key or self.client_ca:
                raise InvalidValue("TLS needs both --tls-cert and --tls-key")
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_ca:
                context.load_verify_locations(self.client_ca)
                # Callers without a certificate need a key.
                context.verify_mode = ssl.CERT_OPTIONAL
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(each) for each in msgspec.structs.astuple(self) if each)
            raise SettingsError(f"TLS: cannot use {files}: {error}") from None
        return context


def listening_socket(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that listens. ``is_shared``: other processes listen at the same port.

    Raises:
        SettingsError: it cannot listen there.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        reason = error.strerror or error
        raise SettingsError(f"cannot listen at {host}:{port}: {reason}") from None
    return listener


def listens_on_loopback(listener: socket.socket) -> bool:
    """Return whether only programs of this machine can reach it."""
    address = str(listener.getsockname()[0])
    return address == "::1" or address.startswith("127.")


def allow_connections_to_listener(connections: int, doors: int = 1) -> None:
    """Allow so many connections at each door, as far as the system does.

    The system is asked for more open files, if it takes that.
    """
    files = connections * doors + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ListenerConnection.most = connections
    if soft != resource.RLIM_INFINITY and soft < files:
        most = max(soft - _OTHER_FILES, soft // 2) // doors
        ListenerConnection.most = min(most, connections)
        log.warning("the system allows %d connections only: see ulimit -n", ListenerConnection.most)


class ImpatientListener(asyncio.Protocol):
    """A connection that is cut off when the caller does not read what is sent to it."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _unread: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Begin to wait for the caller: much is on its way to it."""
        super().pause_writing()
        self._watch(self._unsent())

    def resume_writing(self) -> None:
        """Go on: the caller reads."""
        self._has_read()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._has_read()
        super().connection_lost(exc)

    def _watch(self, left: int) -> None:
        self._unread = self.loop.call_later(READ_S, self._check, left)

    def _check(self, before: int) -> None:
        left = self._unsent()
        if left < before:
            self._watch(left)  # it reads, however slowly
        else:
            # Not close(), which would wait until everything is sent.
            self.transport.abort()

    def _unsent(self) -> int:
        """Return how many bytes the caller has not taken yet, here and in the system."""
        size = self.transport.get_write_buffer_size()
        with suppress(OSError, ValueError):  # a system that does not tell
            number = self.transport.get_extra_info("socket").fileno()
            found = fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4))
            size += int.from_bytes(found, sys.byteorder)
        return size

    def _has_read(self) -> None:
        if self._unread:
            self._unread.cancel()
            self._unread = None


class JoiningListenerTransport:
    """A transport that sends the head of an answer together with what comes behind it.

    A send wakes the caller, and is most of what a short answer costs: one is enough.
    """

    __slots__ = ("_head", "_loop", "under")

    def __init__(self, under: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.under = under
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        """Send, unless more comes at once."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.endswith(b"\r\n\r\n") and data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._send_head)
            return
        if data:
            self.under.write(data)

    def close(self) -> None:
        """Close when all is sent."""
        self._send_head()
        self.under.close()

    def _send_head(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self.under.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.under, name)


class ListenerConnection(ImpatientListener, HttpToolsProtocol):
    """One connection of a caller: its head must come in time, and be short."""

    #: How many connections there may be, and those of them that make room for others.
    most = 12_000
    newcomers: ClassVar[Newcomers] = Newcomers()
    #: Called when the connection is made: a door may have counted its caller before.
    before_it_counts: Callable[[], None] | None = None
    _waiting: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _is_reset = False
    _tell_lost: Callable[[], None] | None = None

    def tell_lost(self, tell: Callable[[], None] | None) -> None:
        """Set what is called when the connection is lost during a call; None after the call."""
        self._tell_lost = tell

    def was_reset(self) -> bool:
        """Return whether the connection was reset: then bytes may be lost."""
        return self._is_reset

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first call."""
        if self.before_it_counts:
            self.before_it_counts()
        super().connection_made(JoiningListenerTransport(transport, self.loop))  # type: ignore[arg-type]
        if len(self.connections) > self.most and not self.newcomers.make_room():
            detail = f"this gateway has {self.most} connections already"
            busy = Problem(503, "AWAY", "too many connections", detail, retry_after_s=1)
            self._refuse(busy)
            return
        self._expect_head()

    def accepted(self) -> None:
        """Note that the call at hand is of a caller who may make it: it makes no room."""
        self.newcomers.drop(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._is_reset = exc is not None
        self._got_head()
        self.newcomers.drop(self)
        super().connection_lost(exc)
        if self._tell_lost:
            self._tell_lost()

    def data_received(self, data: bytes) -> None:
        """Read on, unless the head of a call has grown too long."""
        if self.transport.is_closing():
            return
        if self._waiting:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD and b"\r\n\r\n" not in data[:MOST_HEAD]:
                self._refuse(Problem(431, "LARGE", "the head of the call is too large"))
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Wait for the rest of the head of a call that begins."""
        super().on_message_begin()
        # Starlette hands the state to the application with every call.
        self.scope["state"]["connection"] = self
        if certificate := _name_in_listener_certificate(self.transport):
            self.app_state = {**self.app_state, "certificate": certificate}
            self.scope["state"] |= self.app_state
        if not self._waiting:
            self._expect_head()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection on."""
        assert isinstance(self.transport, JoiningListenerTransport)
        self.newcomers.drop(self)
        self.transport = self.transport.under
        super().handle_websocket_upgrade()

    def on_headers_complete(self) -> None:
        """Hand the call on."""
        self._got_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP."""
        self._refuse(Problem(400, "INVALID", "that is no HTTP", "the call is no HTTP/1.1"))

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self.newcomers.add(self, self._make_room)
        self._waiting = self.loop.call_later(HEAD_S, self._too_slow)

    def _got_head(self) -> None:
        if self._waiting:
            self._waiting.cancel()
            self._waiting = None

    def _too_slow(self) -> None:
        self._waiting = None
        self._refuse(
            Problem(408, "SLOW", "the call did not come in time", f"it took more than {HEAD_S:g} s")
        )

    def _make_room(self) -> None:
        """Go, because there are too many connections and nobody has said who this one is."""
        if self.cycle and not self.cycle.response_complete:
            self.transport.abort()  # nothing can be said in the middle of an answer
            return
        detail = f"this gateway has {self.most} connections, and others have calls to make"
        self._refuse(Problem(503, "AWAY", "too many connections", detail, retry_after_s=1))

    def _refuse(self, problem: Problem) -> None:
        if self.transport.is_closing():
            return
        self.newcomers.drop(self)
        body = problem.body()
        head = [f"HTTP/1.1 {problem.status} {problem.code}"]
        head += [f"{name}: {value}" for name, value in problem.headers().items()]
        head += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        self.transport.write("\r\n".join(head).encode() + body)
        self.transport.close()
        self.loop.call_later(REFUSED_S, self.transport.abort)


def _name_in_listener_certificate(transport: Any) -> str:
    """Return the common name of the client's certificate; "" without one."""
    certificate = transport.get_extra_info("peercert")
    for fields in (certificate or {}).get("subject", ()):
        for field, value in fields:
            if field == "commonName":
                return str(value)
    return ""
