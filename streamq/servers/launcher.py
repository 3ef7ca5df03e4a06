"""Starting server processes that cannot outlive the program.

A launcher owns one supervisor process and, through it, any number of servers. The
supervisor ends them when the launcher's socket closes, and the kernel closes that
socket however the program ends. Nothing here depends on ``atexit`` or on a signal
handler of the program.

The socket is close-on-exec. A child made by ``fork`` without ``exec`` inherits it,
and would keep the servers alive after the program died: so Python's forks
(``os.fork``, ``multiprocessing``) close it in the child, where a launcher is then of
no use. A fork made by a C library is not seen, and its child keeps the servers.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from streamq.errors import ServerError, ServerRefused, ServerUnreachable

T = TypeVar("T")
Address = str | tuple[str, int]
"""The path of a unix socket, or host and port."""

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 10.0
LOCK_WAIT_S = 2.0
"""How long to wait for a directory: so long the server of a killed program needs to end."""

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_ANSWER_TIMEOUT_S = 10.0
_STOP_MARGIN_S = 5.0
_POLL_S = 0.003
_BUS_OFFSET = 10_000
_PORT_TRIES = 8
_PORT_TAKEN = "Address already in use"
_TAIL_LINES = 8


class Launcher:
    """A supervisor process, and the calls it answers. Usable from any thread."""

    def __init__(self, directory: Path, *, own: Sequence[Path] = (), grace_s: float = 1.5) -> None:
        """Lock the directory. The directories in ``own`` are removed at the end."""
        self._owner = os.getpid()
        self._own = own
        self._stop_timeout_s = grace_s + _STOP_MARGIN_S
        self._log = directory / "supervisor.log"
        # Reentrant: a signal handler may call ``stop`` while we wait for an answer.
        self._mutex = threading.RLock()
        self._number = 0
        self._received = b""
        self._is_stopped = False
        self._line, self._process = self._spawn(grace_s)
        _launchers.add(self)
        try:
            self._take(directory)
        except BaseException:
            self.stop()
            raise

    def run(self, argv: Sequence[str], directory: Path, address: Address) -> int:
        """Start a server, wait until it answers at the address, and return its pid."""
        log = directory / "server.log"
        begin = log.stat().st_size if log.exists() else 0
        pid = self._ask("start", str(directory), list(argv))
        if not isinstance(pid, int):
            raise ServerError(f"the supervisor of the server answered {pid!r}")
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_server_ready(address, pid):
            if (code := self._ask("poll", pid)) is not None:
                raise ServerError(
                    f"the server ended at its start, code {code}: {tail_of_log(log, begin)}"
                )
            if _is_server_loading(address, pid):
                deadline = time.monotonic() + START_TIMEOUT_S
            if time.monotonic() > deadline:
                self.end(pid, signal.SIGKILL)
                raise ServerError(f"the server does not answer: {tail_of_log(log, begin)}")
            time.sleep(_POLL_S)
        return pid

    def end(self, pid: int, number: signal.Signals) -> None:
        """Send a server the signal that ends it, and wait until it has ended."""
        self._ask("kill", pid, int(number))
        deadline = time.monotonic() + self._stop_timeout_s
        while self._ask("poll", pid) is None:
            if time.monotonic() > deadline:
                raise ServerError(f"server {pid} does not end")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End all servers and the supervisor. A second call, or a call in a fork, does nothing."""
        if os.getpid() != self._owner:
            return
        with self._mutex:
            if not self._is_stopped:
                self._hang_up()
                self._is_stopped = True

    def forget(self) -> None:
        """Close the socket without ending anything: for the child of a fork."""
        self._line.close()

    def _spawn(self, grace_s: float) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        ours.settimeout(_ANSWER_TIMEOUT_S)
        argv = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(grace_s), *map(str, self._own)]
        try:
            with theirs, self._log.open("ab") as log:
                process = subprocess.Popen(
                    argv,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            self._remove_own()
            raise ServerError(f"cannot start the supervisor of the server: {error}") from error
        return ours, process

    def _take(self, directory: Path) -> None:
        holder = self._ask("lock", str(directory), LOCK_WAIT_S)
        if holder is not None:
            raise ServerError(f"{directory} is in use by another server (process {holder})")

    def _ask(self, verb: str, *arguments: object) -> object:
        with self._mutex:
            self._number += 1
            question = json.dumps([self._number, verb, *arguments])
            try:
                self._line.sendall(question.encode() + b"\n")
                value, error = self._answer()
            except OSError:
                raise ServerError(f"the supervisor of the server is gone{self._cause()}") from None
        if error is not None:
            raise ServerError(f"cannot {verb} the server: {error}")
        return value

    def _cause(self) -> str:
        if self._is_stopped or not self._log.exists():
            return ""
        return f": {tail_of_log(self._log, 0)}"

    def _answer(self) -> tuple[object, object]:
        # If a signal handler raised while we waited, the answer to an earlier question comes first.
        number = None
        while number != self._number:
            while b"\n" not in self._received:
                data = self._line.recv(65536)
                if not data:
                    raise ConnectionError
                self._received += data
            line, self._received = self._received.split(b"\n", 1)
            number, value, error = json.loads(line)
        return value, error

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._line.settimeout(self._stop_timeout_s)
            self._line.shutdown(socket.SHUT_WR)
            while self._line.recv(65536):
                pass
        self._line.close()
        # The supervisor leads the process group of its servers. Until we wait for it, the group's
        # number cannot be given to other processes.
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._remove_own()

    def _remove_own(self) -> None:
        for directory in self._own:
            shutil.rmtree(directory, ignore_errors=True)


_launchers = weakref.WeakSet[Launcher]()


def _forget_launchers() -> None:
    for launcher in _launchers:
        launcher.forget()


os.register_at_fork(after_in_child=_forget_launchers)


def ask_server(address: Address, *words: str, timeout_s: float = 5.0) -> str:
    """Send one command to a server and return its answer, which must be one string.

    Raises: ServerUnreachable, ServerRefused with the error the server answered.
    """
    command = b"*%d\r\n" % len(words)
    for word in map(os.fsencode, words):
        command += b"$%d\r\n%b\r\n" % (len(word), word)
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    try:
        with socket.socket(family) as connection:
            connection.settimeout(timeout_s)
            connection.connect(address)
            connection.sendall(command)
            with connection.makefile("rb") as reply:
                kind, text = reply.read(1), reply.readline().decode().rstrip()
                if kind == b"$":
                    text = reply.read(int(text)).decode()
    except OSError as error:
        raise ServerUnreachable(f"{address}: {error}") from None
    if kind == b"-":
        raise ServerRefused(text)
    if not kind:
        raise ServerUnreachable(f"{address}: it hung up")
    return text


def tail_of_log(log: Path, begin: int) -> str:
    """Return the last 8 lines of a log, from the byte ``begin`` on."""
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:]) or "it said nothing"


def start_on_free_port(run: Callable[[int], T]) -> T:
    """Call ``run`` with a free port, and with another one if a program takes the port first."""
    for _ in range(_PORT_TRIES - 1):
        try:
            return run(_free_port())
        except ServerError as error:
            if _PORT_TAKEN not in str(error):
                raise
    return run(_free_port())


def _free_port() -> int:
    # Ports below those that the system gives to clients, so that a server that restarts finds its
    # port still free. From the system's randomness, because forked processes would otherwise draw
    # the same numbers.
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.randrange(11_000, 20_000)
        if _is_port_free(port) and _is_port_free(port + _BUS_OFFSET):
            return port
    raise ServerError(f"no free port found on {LOOPBACK}")


def _is_port_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _is_server_ready(address: Address, pid: int) -> bool:
    """Return whether our server, and not another one at this address, answers commands."""
    with suppress(ServerUnreachable, ServerRefused):
        return _is_our_server(address, pid) and ask_server(address, "PING") == "PONG"
    return False


def _is_server_loading(address: Address, pid: int) -> bool:
    with suppress(ServerUnreachable, ServerRefused):
        return _is_our_server(address, pid) and "\nloading:1" in ask_server(
            address, "INFO", "persistence"
        )
    return False


def _is_our_server(address: Address, pid: int) -> bool:
    return f"\nprocess_id:{pid}\r" in ask_server(address, "INFO", "server", timeout_s=1.0)
