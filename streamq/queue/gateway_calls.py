"""Calls of a gateway over HTTP, for ``Client("https://...")``."""

import http.client
import random
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from streamq.errors import (
    BY_CODE,
    Damaged,
    InvalidValue,
    PartTooLarge,
    ServerBusy,
    ServerError,
    ServerFull,
    ServerRefused,
    ServerUnreachable,
    StreamqError,
)
from streamq.settings import Settings

#: A call waits at most 50 s at a gateway. After this time without an answer the connection is dead.
SILENCE_S = 75.0
#: The pause before a call is repeated: the first one, and the longest.
PAUSE_S = (0.1, 3.0)
#: Errors of one status, where no code word says more.
_BY_STATUS: dict[int, type[StreamqError]] = {
    400: InvalidValue,
    401: ServerRefused,
    403: ServerRefused,
    408: ServerBusy,
    413: PartTooLarge,
    421: ServerRefused,
    429: ServerBusy,
    431: InvalidValue,
    500: ServerError,
    502: ServerUnreachable,
    503: ServerBusy,
    504: ServerUnreachable,
    507: ServerFull,
}
_NOT_NOW = (ServerBusy, ServerUnreachable)


def is_gateway(url: str) -> bool:
    """Return whether a URL is that of a gateway, and not of a server."""
    return url.lower().startswith(("http://", "https://"))


class _Problem(msgspec.Struct):
    """What a gateway says of an error."""

    code: str = ""
    detail: str = ""


class GatewayCalls:
    """Make calls of one gateway. Threads may share it: each has a connection of its own.

    A call that gets no answer is repeated, word for word, for as long as the setting
    ``patience_ms`` says. To the gateway it is the same call.
    """

    def __init__(self, url: str, settings: Settings) -> None:
        found = urlsplit(url)
        if not found.hostname or found.query or found.fragment or found.username:
            raise InvalidValue(f"{url!r:.200} is no URL of a gateway: https://HOST[:PORT]")
        self.url = url.rstrip("/")
        self._path = found.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if settings.key:
            self._headers["Authorization"] = f"Bearer {settings.key}"
        self._patience_s = settings.patience_ms / 1e3
        address = (found.hostname, found.port)
        self._connect: Callable[[], http.client.HTTPConnection]
        if found.scheme.lower() == "https":
            tls = _tls_to_gateway(settings)
            self._connect = lambda: http.client.HTTPSConnection(
                *address, timeout=SILENCE_S, context=tls
            )
        else:
            self._connect = lambda: http.client.HTTPConnection(*address, timeout=SILENCE_S)
        self._own = threading.local()
        self._all: list[http.client.HTTPConnection] = []

    def close(self) -> None:
        """Close the connections."""
        for connection in self._all:
            connection.close()

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the body of the answer.

        Raises:
            StreamqError: the gateway refused, or did not answer for too long. Errors of the server
                are those that a client of the server would raise.
        """
        said = None if body is None else msgspec.json.encode(body)
        until, pause_s = time.monotonic() + self._patience_s, PAUSE_S[0]
        while True:
            try:
                return self._try(method, path, said)
            except _NOT_NOW as error:
                if time.monotonic() > until:
                    raise
                asked_s = getattr(error, "retry_after_s", 0.0)
            # Half of a pause is random, so that many clients do not come back all at once.
            time.sleep(max(asked_s, pause_s * (0.5 + random.random() / 2)))
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def _try(self, method: str, path: str, said: bytes | None) -> bytes:
        connection = self._connection()
        try:
            connection.request(method, self._path + path, said, self._headers)
            response = connection.getresponse()
            text = response.read()
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise ServerRefused(f"the certificate of {self.url} is not trusted: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            # The next try connects anew.
            connection.close()
            raise ServerUnreachable(f"no gateway answers at {self.url}: {error!r}") from None
        if response.status < 300:
            return text
        raise _error_of_gateway(response, text)

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = self._connect()
            self._all.append(connection)
        return connection


def _tls_to_gateway(settings: Settings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.tls_ca_file or None)
    if settings.tls_cert_file:
        context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file or None)
    return context


def _error_of_gateway(response: http.client.HTTPResponse, text: bytes) -> StreamqError:
    """Return the error that the gateway was told of, as a client of the server would raise it."""
    try:
        problem = msgspec.json.decode(text, type=_Problem)
    except msgspec.MsgspecError:
        problem = _Problem()  # a proxy answered
    kind: type[StreamqError] = _BY_STATUS.get(response.status, ServerError)
    if problem.code == "DAMAGED":
        kind = Damaged
    kind = BY_CODE.get(problem.code, kind)
    error = kind(problem.detail or f"the gateway answered {response.status} {response.reason}")
    if isinstance(error, _NOT_NOW):
        after = response.headers.get("Retry-After", "")
        error.retry_after_s = float(after) if after.isdigit() else 0.0  # type: ignore[union-attr]
    return error
