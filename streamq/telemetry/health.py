"""Health, metrics and scale over HTTP, for load balancers, Prometheus and autoscalers.

The HTTP server runs in a thread of the parent, beside the loop that it reports on. ``/livez`` asks
no other server: it tells whether that loop still turns. A Redis server that is away makes a pool
not ready, but is no reason to restart the pool.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import msgspec

from streamq import units
from streamq.errors import Damaged, InvalidValue, ServerError, SettingsError
from streamq.telemetry import metrics

log = logging.getLogger(__name__)

#: After this many seconds without a turn the loop counts as stuck.
STUCK_S = 10.0
#: A connection on which the client sends nothing is closed after this many seconds.
_SILENT_S = 5.0
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"

Reply = tuple[HTTPStatus, str, bytes]


class HealthSource(msgspec.Struct, frozen=True):
    """Functions that tell how the process is."""

    #: When the loop last turned, by ``time.monotonic``.
    ticked_at: Callable[[], float]
    #: Why the process is not ready; empty when it is.
    unready: Callable[[], str]
    samples: Callable[[], metrics.Samples]
    #: How many slots the queues could use now.
    wanted: Callable[[], int]


class HealthServer:
    """Answers at an address until it is closed."""

    def __init__(self, address: str, subject: HealthSource) -> None:
        """Listen at ``PORT`` (on every interface) or ``HOST:PORT``; port 0 is a free one.

        An IPv6 address is in brackets, ``[::1]:8080``.

        Raises:
            SettingsError: this process cannot listen there.
        """
        host, port = split_health_address(address)
        try:
            self._server = _listen_for_health(host, port, subject)
        except OSError as error:
            reason = error.strerror or error
            raise SettingsError(f"cannot listen for --health-port {address}: {reason}") from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="health", daemon=True
        )
        self._thread.start()
        shown = str(self._server.server_address[0])
        shown = f"[{shown}]" if ":" in shown else shown
        log.info("health on http://%s:%d/livez, readyz, metrics, scale", shown, self.port)

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _HealthSocket(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, family: socket.AddressFamily, address: tuple[str, int], subject: HealthSource
    ) -> None:
        self.subject = subject
        self.address_family = family
        super().__init__(address, _HealthHandler)

    def server_bind(self) -> None:
        """Bind the socket. A socket for every IPv6 interface takes IPv4, too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _listen_for_health(host: str, port: int, subject: HealthSource) -> _HealthSocket:
    if not host:
        # This fails where there is no IPv6, or where it is switched off.
        with suppress(OSError):
            return _HealthSocket(socket.AF_INET6, ("::", port), subject)
        return _HealthSocket(socket.AF_INET, ("0.0.0.0", port), subject)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A name may have several addresses. IPv4 is taken first, since most probes use it.
    family = min((each[0] for each in found), key=lambda family: family != socket.AF_INET)
    return _HealthSocket(family, (host, port), subject)


class _HealthHandler(BaseHTTPRequestHandler):
    server: _HealthSocket
    timeout = _SILENT_S
    server_version = "streamq"
    sys_version = ""
    _PAGES: ClassVar[dict[str, Callable[[HealthSource], Reply]]]

    def do_GET(self) -> None:
        """Answer with one of the pages."""
        page = self._PAGES.get(self.path.partition("?")[0])
        if page is None:
            known = ", ".join(self._PAGES)
            status, kind, body = HTTPStatus.NOT_FOUND, _TEXT, f"there are {known}\n".encode()
        else:
            status, kind, body = page(self.server.subject)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        """Answer as ``do_GET``, without the body."""
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Log at the level debug: probes come every few seconds."""
        log.debug("%s %s", self.client_address[0], format % args)


def _livez_reply(subject: HealthSource) -> Reply:
    silent_s = time.monotonic() - subject.ticked_at()
    return _health_reply("" if silent_s < STUCK_S else f"no sign of life for {silent_s:.0f} s")


def _readyz_reply(subject: HealthSource) -> Reply:
    return _health_reply(subject.unready())


def _health_reply(problem: str) -> Reply:
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    return status, _TEXT, f"{problem or 'ok'}\n".encode()


def _metrics_reply(subject: HealthSource) -> Reply:
    return HTTPStatus.OK, metrics.CONTENT_TYPE, metrics.metrics_text(subject.samples())


def _scale_reply(subject: HealthSource) -> Reply:
    try:
        value = subject.wanted()
    except (ServerError, Damaged):
        # The message leaves out the server's address: anybody may ask here.
        body = {"error": "the server does not answer"}
        return HTTPStatus.SERVICE_UNAVAILABLE, _JSON, msgspec.json.encode(body)
    return HTTPStatus.OK, _JSON, msgspec.json.encode({"value": value})


_HealthHandler._PAGES = {
    "/livez": _livez_reply,
    "/readyz": _readyz_reply,
    "/metrics": _metrics_reply,
    "/scale": _scale_reply,
}


def split_health_address(address: str) -> tuple[str, int]:
    """Return host and port of ``--health-port``; the host is "" if only a port is named.

    Raises:
        InvalidValue: it is no address.
    """
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not port.isdecimal() or is_bracketed != (":" in host):
        raise InvalidValue(f"--health-port {address!r}: write 8080, 127.0.0.1:8080 or [::1]:8080")
    return host[1:-1] if is_bracketed else host, units.whole(int(port), "--health-port", 0, 65_535)
