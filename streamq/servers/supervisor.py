"""The process between a program and the servers it started.

The supervisor lives as long as its standard input, a socket whose other end the program has. That
socket closes when the program stops the supervisor, exits, or is killed with signal 9. Then the
supervisor sends every server SIGTERM, and after a grace SIGKILL, and removes the directories that
were only ours. Stopping and crashing take the same way, so every normal stop tests the way of a
crash.

This is a program, not a module: ``streamq.servers.launcher`` runs it by path, as ``python -I -S
supervisor.py GRACE_S [DIRECTORY_TO_REMOVE ...]``. It imports a few modules of the standard library
and nothing of streamq, and is up in 30 ms. It must have only one thread: the signal that ends a
server together with its parent is sent when the parent's *thread* ends.

Each line it reads is a JSON list ``[number, verb, *arguments]``, and each line it writes is the
answer, ``[number, value, error]``.
"""

import ctypes
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable

POLL_S = 0.005
PR_SET_PDEATHSIG = 1


class Supervisor:
    """The servers that run, and the calls that the program may make."""

    def __init__(self) -> None:
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def answer(self, line: bytes) -> bytes:
        """Carry out the call in a line, and return the answer."""
        number, verb, *arguments = json.loads(line)
        verbs: dict[str, Callable[..., object]] = {
            "lock": self.lock,
            "start": self.start,
            "kill": self.kill,
            "poll": self.poll,
        }
        try:
            reply = [number, verbs[verb](*arguments), None]
        except OSError as error:
            reply = [number, None, str(error)]
        return json.dumps(reply).encode() + b"\n"

    def lock(self, directory: str, wait_s: float) -> str | None:
        """Lock a directory, or return which process has it.

        The servers inherit the lock, so it is free only when the last of them is gone.
        """
        file = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + wait_s
        while not _try_lock(file):
            if time.monotonic() > deadline:
                holder = os.read(file, 20).decode() or "unknown"
                os.close(file)
                return holder
            time.sleep(POLL_S)
        os.ftruncate(file, 0)
        os.write(file, str(os.getpid()).encode())
        os.set_inheritable(file, True)
        return None

    def start(self, directory: str, argv: list[str]) -> int:
        """Start a server in its directory, where ``server.log`` gets all it prints."""
        parent = os.getpid()
        # SIGCHLD is blocked until the pid is noted as started: an earlier server may have had the
        # same pid, and then the end of the new one would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
        pid = os.fork()
        if pid == 0:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
                self._become(directory, argv, parent)
            except BaseException as error:  # noqa: BLE001 - a forked child must never go on as its parent
                os.write(2, f"cannot run {argv[0]}: {error}\n".encode())
            finally:
                os._exit(127)
        self._ended.pop(pid, None)
        if pid not in self._started:
            self._started.append(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
        return pid

    def kill(self, pid: int, number: int) -> None:
        """Send a signal, unless the server has ended: another process may have its pid by now."""
        if pid in self._started and pid not in self._ended:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return

    def poll(self, pid: int) -> int | None:
        """Return the exit code of a server that has ended, else None."""
        return self._ended.get(pid)

    def reap(self, *_: object) -> None:
        """Note which servers have ended. Runs as a signal handler, so between any two steps."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._ended[pid] = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to every server, SIGKILL after the grace, and wait until all have ended."""
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self._any_left() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._signal_all(signal.SIGKILL)
        while self._any_left():
            time.sleep(POLL_S)

    def _signal_all(self, number: int) -> None:
        for pid in self._started:
            self.kill(pid, number)

    def _any_left(self) -> bool:
        return any(pid not in self._ended for pid in self._started)

    def _become(self, directory: str, argv: list[str], parent: int) -> None:
        os.chdir(directory)
        log = os.open("server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 2)
        os.dup2(log, 1)
        # Standard input is the program's socket. A server that kept it open would hide our end from
        # the program.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self._die_with(parent)
        os.execv(argv[0], argv)

    def _die_with(self, parent: int) -> None:
        # TERM rather than KILL, so that the append-only file is written to its end.
        if self._libc is not None:
            self._libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            raise SystemExit("its supervisor is gone")


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main() -> None:
    """Serve the program until it hangs up."""
    grace_s, *own = sys.argv[1:]
    supervisor = Supervisor()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, supervisor.reap)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # The program's thread may have started us with signals blocked.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        for line in sys.stdin.buffer:
            os.write(0, supervisor.answer(line))
    except ConnectionError:
        pass  # The program died with an answer unread.
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        supervisor.end(float(grace_s))
        for directory in own:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
