"""The messages between a pool and its processes: JSON lines over a socket pair."""

import logging
import secrets
import socket
from collections.abc import Iterator
from threading import Lock
from typing import Any, Literal

import msgspec

from streamq.errors import InvalidValue

log = logging.getLogger(__name__)

#: More processes than any machine runs well, and about as many as a parent may open files for.
MOST_PROCESSES = 512
#: Enough for coroutines. The parent looks through all slots every 40 ms, so they are limited.
MOST_SLOTS = 10_000
MOST_SLOTS_IN_ALL = 50_000


def check_capacity_of_pool(processes: int, slots: int) -> None:
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
    """Return a word that no other pool has."""
    return secrets.token_hex(8)


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told at its start, and not by arguments: the URL may hold a password."""

    url: str
    prefix: str
    queue: str
    target: str
    #: The name under which a function or a program serves; empty if the target is an app.
    handler: str = ""
    #: If the target is a flow: the names under which its handlers serve, and by them their own.
    serves: dict[str, str] = {}
    #: The program to be run with each part, if there is no target.
    argv: tuple[str, ...] = ()
    #: Whether what handlers print goes to the pool's own stdout, or to stderr.
    keeps_stdout: bool = True
    #: Folders and URLs within which parts may refer to files.
    allow_read: tuple[str, ...] = ()
    #: The folder that names of files are relative to, if it is not the one the process is in.
    base: str = ""
    #: The folder for spools, and the form of the lines in them; "" for none.
    spool: str = ""
    form: str = ""
    #: Folders of other machines, too, in which requests may have their results kept.
    shared_spools: tuple[str, ...] = ()
    #: URLs below which webhooks may be posted.
    allow_post: tuple[str, ...] = ()
    slots: int
    levels: tuple[int, ...]
    quantum_ms: int
    lease_ms: int
    max_result: int
    log_level: str
    log_format: str
    #: What the names of the pool's holders begin with. Its heartbeats tell a janitor by this name
    #: that the pool of a holder lives. A pool that is started again has another.
    pool: str = msgspec.field(default_factory=new_pool_word)


# The tags of messages are older than the names of their classes. They stay: a pool that runs while
# its package is upgraded in place starts processes of the new version.


class Ready(msgspec.Struct, frozen=True, tag="Hello"):
    """Says that a process is ready: its handlers, as ``claim`` is told, and their files."""

    handlers: list[str]
    files: list[str]
    #: Names of the handlers that are coroutines. An earlier version does not say.
    coroutines: list[str] = []

    def is_map(self, name: str) -> bool:
        """Return whether the handler is called with each record, not with a part."""
        return any(offer.split()[:2] == ["records", name] for offer in self.handlers)

    @property
    def names(self) -> list[str]:
        """Return the handlers' names."""
        return [offer.split()[1] for offer in self.handlers]


class LoadFailed(msgspec.Struct, frozen=True, tag="Unfit"):
    """Says that a process cannot load the user's code: why, and the user's own traceback."""

    message: str
    trace: str


class IdleFor(msgspec.Struct, frozen=True, tag="Idle"):
    """Says how many seconds ago a process's last part ended; 0 while one runs."""

    idle_s: float


class VisitAt(msgspec.Struct, frozen=True, tag="Look"):
    """Says that something falls due then (ms of the server's clock): the janitor is to come."""

    at_ms: int


class FirstRecords(msgspec.Struct, frozen=True, tag="First"):
    """Says that records of a handler are done in a process for the first time."""

    handler: str


#: ``stop``: end after what runs. ``quiet``: take nothing more. ``go``: take again.
CommandWord = Literal["stop", "quiet", "go"]


class Command(msgspec.Struct, frozen=True, tag="Order"):
    """Says what the parent wants of a process."""

    word: CommandWord


Message = Ready | LoadFailed | IdleFor | VisitAt | FirstRecords | Command
_decode = msgspec.json.Decoder(Message).decode


def _read_message(line: bytes) -> list[Message]:
    """Return the message, if it is one: a handler can write anything to the socket."""
    try:
        return [_decode(line)]
    except (ValueError, RecursionError):
        log.warning("passed over %.100r between the pool and a process", line)
        return []


class Channel:
    """One end of the connection between the parent and a process."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = b""
        self._lock = Lock()

    def send(self, message: Any) -> bool:
        """Send a message. Returns False when nobody is at the other end."""
        with self._lock:
            try:
                self.socket.sendall(msgspec.json.encode(message) + b"\n")
            except OSError:
                return False
        return True

    def read_config(self) -> ProcessConfig | None:
        """Return what the first line says; None if the parent has no use for the process."""
        line = next(self._lines(), None)
        return msgspec.json.decode(line, type=ProcessConfig) if line else None

    def messages(self) -> Iterator[Message]:
        """Yield every message until the other end is gone."""
        for line in self._lines():
            yield from _read_message(line)

    def ready_messages(self) -> tuple[list[Message], bool]:
        """Return the messages that have come, and whether the other end is gone; do not wait."""
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
        return [message for line in lines for message in _read_message(line)], is_gone

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
        """Close this end."""
        self.socket.close()
