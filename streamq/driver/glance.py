"""Asks a server a question or two within a fraction of a second, without redis-py.

Importing redis-py takes longer than anybody waits for a completion in a shell. Whatever goes wrong
here, the answer is None.
"""

import socket
import ssl
import time
from typing import Any

from streamq.driver.url import ServerURL

#: How long all questions together may take.
MOST_S = 0.12


class Glance:
    """A connection for a moment."""

    def __init__(self, url: str) -> None:
        self._url = ServerURL(url)
        self._end = time.monotonic() + MOST_S
        self._socket: socket.socket | None = None
        self._read = b""

    def ask(self, *words: str) -> Any:
        """Return the answer to a command: text, a number or a list; None if there is none."""
        try:
            if self._socket is None:
                self._connect(self._url.hosts[0] if self._url.hosts else None)
            answer = self._send(*words)
            if isinstance(answer, _Refusal) and answer.startswith("MOVED "):
                host, _, port = answer.split()[2].rpartition(":")
                first = self._url.hosts[0][0] if self._url.hosts else ""
                self._connect((host or first, int(port)))
                answer = self._send(*words)
        except (OSError, ValueError, IndexError, RecursionError):
            return None
        return None if isinstance(answer, _Refusal) else answer

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()

    def _connect(self, host: tuple[str, int] | None) -> None:
        self.close()
        self._read = b""
        if host is None:
            found = socket.socket(socket.AF_UNIX)
            found.settimeout(self._left())
            found.connect(self._url.path)
        else:
            found = socket.create_connection(host, self._left())
        options = self._url.options
        if options.get("ssl"):
            found = _tls_of_glance(options).wrap_socket(
                found, server_hostname=host[0] if host else None
            )
        self._socket = found
        if "password" in options:
            user = options.get("username")
            self._send("AUTH", *([str(user)] if user else []), str(options["password"]))
        if options.get("db"):
            self._send("SELECT", str(options["db"]))

    def _left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _send(self, *words: str) -> Any:
        assert self._socket is not None
        parts = [f"*{len(words)}\r\n".encode()]
        for word in words:
            data = word.encode()
            parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
        self._socket.settimeout(self._left())
        self._socket.sendall(b"".join(parts))
        return self._reply()

    def _reply(self) -> Any:
        line = self._until_newline()
        kind, rest = line[:1], line[1:]
        if kind == "-":
            return _Refusal(rest)
        if kind == ":":
            return int(rest)
        if kind == "$":
            return None if rest == "-1" else self._take(int(rest) + 2)[:-2]
        if kind == "*":
            return [self._reply() for _ in range(int(rest))]
        return rest

    def _until_newline(self) -> str:
        while b"\r\n" not in self._read:
            self._more()
        line, _, self._read = self._read.partition(b"\r\n")
        return line.decode(errors="replace")

    def _take(self, size: int) -> str:
        while len(self._read) < size:
            self._more()
        data, self._read = self._read[:size], self._read[size:]
        return data.decode(errors="replace")

    def _more(self) -> None:
        assert self._socket is not None
        self._socket.settimeout(self._left())
        data = self._socket.recv(2**16)
        if not data:
            raise ConnectionError
        self._read += data


class _Refusal(str):
    """The text of an error that a server answered with."""


def _tls_of_glance(options: dict[str, Any]) -> ssl.SSLContext:
    authority = options.get("ssl_ca_certs")
    context = ssl.create_default_context(cafile=authority)
    if certificate := options.get("ssl_certfile"):
        context.load_cert_chain(certificate, options.get("ssl_keyfile"))
    return context
