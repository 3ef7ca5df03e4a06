"""Who was charged a crash: every charge that a server makes, as it makes it.

A part's charges are forgotten when it is finished, so looking at the end tells nothing. MONITOR
tells of each write of a script; a connection that breaks with its server is made again.
"""

import re
import socket
import threading
from collections.abc import Callable, Sequence

from streamq.servers.launcher import LOOPBACK

#: A write of what went wrong with a part: "errors crashes alone run records".
_WRITE = re.compile(rb'"HSET" "[^"]*\{r:([^}"]+)\}:tries" "(\d+)" "\d+ (\d+) \d+ \d+ \d+"')
_LOOK_S = 0.02


class Ledger:
    """Listens to the servers at the ports, which are asked for again when one has gone."""

    def __init__(self, ports: Sequence[Callable[[], int]]) -> None:
        self._seen: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        ready = [threading.Event() for _ in ports]
        for port, is_ready in zip(ports, ready, strict=True):
            threading.Thread(target=self._listen, args=(port, is_ready), daemon=True).start()
        for is_ready in ready:
            is_ready.wait(10)

    @property
    def charges(self) -> int:
        """How many crashes were charged so far. A replica repeats its primary: counted once."""
        with self._lock:
            return sum(self._seen.values())

    def close(self) -> None:
        """Listen no more."""
        self._is_over.set()

    def _listen(self, port: Callable[[], int], is_ready: threading.Event) -> None:
        while not self._is_over.is_set():
            try:
                with socket.create_connection((LOOPBACK, port()), 1) as link:
                    link.sendall(b"MONITOR\r\n")
                    self._read(link, is_ready)
            except OSError:
                self._is_over.wait(_LOOK_S)

    def _read(self, link: socket.socket, is_ready: threading.Event) -> None:
        link.settimeout(0.2)
        rest = b""
        while not self._is_over.is_set():
            try:
                data = link.recv(2**20)
            except TimeoutError:
                continue
            if not data:
                raise ConnectionResetError
            is_ready.set()
            *lines, rest = (rest + data).split(b"\r\n")
            for line in lines:
                if b":tries" in line and (found := _WRITE.search(line)):
                    self._note(found)

    def _note(self, found: "re.Match[bytes]") -> None:
        key, crashes = (found[1].decode(), int(found[2])), int(found[3])
        with self._lock:
            self._seen[key] = max(self._seen.get(key, 0), crashes)
