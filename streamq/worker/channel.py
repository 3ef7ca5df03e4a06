"""How a pool behaves, and words between it and its processes: JSON lines over a socket pair."""

import logging
import secrets
import socket
from collections.abc import Iterator
from threading import Lock
from typing import Any

import msgspec

from streamq.errors import InvalidValue

log = logging.getLogger(__name__)

#: More processes than any machine runs well, and about as many as a parent may have open files for.
MOST_PROCESSES = 512
#: More than enough for coroutines. A pool looks through all its slots again and again.
MOST_SLOTS = 10_000
MOST_SLOTS_IN_ALL = 50_000


def check_capacity(processes: int, slots: int) -> None:
    """Raise InvalidValue for a pool of more slots than one parent can look after."""
    if processes * slots > MOST_SLOTS_IN_ALL:
        raise InvalidValue(
            f"-p {processes} -c {slots} makes {processes * slots} slots: a pool looks after "
            f"{MOST_SLOTS_IN_ALL} at most. Start several pools"
        )


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a pool behaves."""

    processes: int = 1
    grace_s: float = 25.0
    cancel_grace_s: float = 10.0
    is_burst: bool = False
    max_idle_s: float = 0.0
    max_parts: int = 0
    max_memory: int = 0
    is_reloading: bool = False
    #: HUP stops the pool as TERM does, unless it is ignored; else it restarts the processes.
    stops_on_hup: bool = False


def new_pool_word() -> str:
    """A word that no other pool has."""
    return secrets.token_hex(8)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told at its start. The URL may hold a password, so no argument has it."""

    url: str
    prefix: str
    queue: str
    target: str
    #: Under this name a function or a program serves; without one the target is an app.
    handler: str = ""
    #: A program to be run with each part, instead of a target.
    argv: tuple[str, ...] = ()
    #: Whether what handlers print goes to the pool's own stdout, or to stderr.
    keeps_stdout: bool = True
    #: Folders and URLs within which parts may refer to files.
    allow_read: tuple[str, ...] = ()
    slots: int
    levels: tuple[int, ...]
    quantum_ms: int
    lease_ms: int
    max_result: int
    log_level: str
    log_format: str
    #: What the names of the pool's holders begin with: by its heartbeats who reaps knows that the
    #: pool of a holder lives. A pool that is started again has another.
    pool: str = msgspec.field(default_factory=new_pool_word)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A process is ready: its handlers as ``claim`` is told, and the files they came from."""

    handlers: list[str]
    files: list[str]

    @property
    def names(self) -> list[str]:
        """The handlers' names."""
        return [offer.split()[1] for offer in self.handlers]


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """A process cannot load what it was told to: in one line, and the user's own traceback."""

    message: str
    trace: str


class Idle(msgspec.Struct, frozen=True, tag=True):
    """Seconds since a process's last part ended, 0 while one runs."""

    idle_s: float


class Look(msgspec.Struct, frozen=True, tag=True):
    """Something falls due then, by the server's clock (ms): the janitor is to look."""

    at_ms: int


class Order(msgspec.Struct, frozen=True, tag=True):
    """What a pool wants of a process: ``stop`` after what runs, ``quiet``: take nothing more."""

    word: str


Word = Hello | Unfit | Idle | Look | Order
_decode = msgspec.json.Decoder(Word).decode


def _said(line: bytes) -> list[Word]:
    """The word, if it is one: whoever has the socket's number can write to it."""
    try:
        return [_decode(line)]
    except (ValueError, RecursionError):
        log.warning("passed over %.100r between the pool and a process", line)
        return []


class Line:
    """One end of the line."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = b""
        self._lock = Lock()

    def send(self, word: Any) -> bool:
        """Say a word. False when nobody is at the other end."""
        with self._lock:
            try:
                self.socket.sendall(msgspec.json.encode(word) + b"\n")
            except OSError:
                return False
        return True

    def read_config(self) -> Config | None:
        """The first line a process gets; None when its parent has no use for it."""
        line = next(self._lines(), None)
        return msgspec.json.decode(line, type=Config) if line else None

    def words(self) -> Iterator[Word]:
        """Every word until the other end is gone."""
        for line in self._lines():
            yield from _said(line)

    def ready_words(self) -> tuple[list[Word], bool]:
        """The words that have come, and whether the other end is gone; does not wait."""
        is_gone = False
        try:
            while chunk := self.socket.recv(65_536, socket.MSG_DONTWAIT):
                self._buffer += chunk
            is_gone = True
        except BlockingIOError:
            pass
        except OSError:
            is_gone = True
        *lines, self._buffer = self._buffer.split(b"\n")
        return [word for line in lines for word in _said(line)], is_gone

    def _lines(self) -> Iterator[bytes]:
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                yield line
                continue
            try:
                chunk = self.socket.recv(65_536)
            except OSError:
                return
            if not chunk:
                return
            self._buffer += chunk

    def close(self) -> None:
        """Hang up."""
        self.socket.close()
