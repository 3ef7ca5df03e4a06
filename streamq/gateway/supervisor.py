"""Runs several processes of one gateway, which share its port, and replaces those that die.

Each process is started anew, because gRPC does not survive a fork. The processes know nothing of
each other: the kernel spreads connections over them.
"""

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from streamq.errors import SettingsError
from streamq.telemetry.health import split_health_address

log = logging.getLogger(__name__)

#: The variable by which processes of one gateway get the secret that signs tickets.
SECRET = "_STREAMQ_GATEWAY_SECRET"
#: A process that died is replaced after this pause.
REST_S = 1.0
LOOK_S = 0.1
#: The exit code of a command with a wrong option: starting it again would not help.
_USAGE = 2


def secret_of_processes(env: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the secret of a process that is one of several; None of one that is alone."""
    return bytes.fromhex(env[SECRET]) if SECRET in env else None


def end_process_with_supervisor() -> None:
    """Send this process TERM as soon as its supervisor is gone, if it has one.

    The supervisor alone holds the other end of the pipe that its processes have as their standard
    input, and writes nothing. So the pipe ends when the supervisor does.
    """

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    if SECRET in os.environ:
        threading.Thread(target=watch, name="watch-supervisor", daemon=True).start()


class GatewaySupervisor:
    """Starts processes, and replaces the dead, until it is told to stop."""

    def __init__(
        self, words: Sequence[str], count: int, host: str, port: int, health_port: str = ""
    ) -> None:
        """``words``: the command that each process runs, without the program.

        ``health_port``: where the first process tells its health. The others do so at the ports
        behind it, because each counts for itself.

        Raises:
            SettingsError: the port cannot be had.
        """
        # A bound socket that does not listen keeps the port, and gets no connections.
        self._port = _reserved_port(host, port)
        where = f"[{host}]" if ":" in host else host
        listen = f"{where}:{self._port.getsockname()[1]}"
        self._command = [sys.executable, "-P", "-m", "streamq.cli", *words, "--listen", listen]
        self._env = os.environ | {SECRET: secrets.token_hex(32)}
        self._count = count
        self._health = split_health_address(health_port) if health_port else None
        self._children: list[subprocess.Popen[bytes]] = []
        self._life, self._life_held = os.pipe()
        self._is_stopping = False

    def run(self, grace_s: float) -> None:
        """Run until INT or TERM comes.

        Raises:
            SettingsError: a process says that its options cannot be.
        """
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            self._children = [self._start(index) for index in range(self._count)]
            while not self._is_stopping:
                time.sleep(LOOK_S)
                self._replace_dead()
        finally:
            self._end(grace_s)
            self._port.close()
            os.close(self._life)
            os.close(self._life_held)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGHUP:
            for child in self._children:
                child.send_signal(number)
        else:
            self._is_stopping = True

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        more = []
        if self._health:
            host, port = self._health
            where = f"[{host}]:" if ":" in host else f"{host}:" if host else ""
            more = ["--health-port", f"{where}{port + index if port else 0}"]
        # In a group of its own, so that Ctrl-C reaches the children only through this process.
        return subprocess.Popen(
            [*self._command, *more], env=self._env, stdin=self._life, process_group=0
        )

    def _replace_dead(self) -> None:
        for index, child in enumerate(self._children):
            code = child.poll()
            if code is None or self._is_stopping:
                continue
            if code == _USAGE:
                raise SettingsError("a process of the gateway could not start: see above")
            log.warning("process %d ended with %d, and is replaced", child.pid, code)
            time.sleep(REST_S)
            self._children[index] = self._start(index)

    def _end(self, grace_s: float) -> None:
        for child in self._children:
            child.terminate()
        until = time.monotonic() + grace_s + 5.0
        for child in self._children:
            try:
                child.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _reserved_port(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError as error:
        reason = error.strerror or error
        raise SettingsError(f"cannot listen at {host}:{port}: {reason}") from None
    return made
