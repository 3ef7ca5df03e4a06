"""Runs commands in forks of a process that has imported the libraries already.

A new interpreter needs 0.2 to 0.5 seconds of CPU before a command does anything, most of it for
the driver and the library of command lines. So one process imports those once for each process of
pytest, and forks for every command. It imports nothing of streamq: each command does that itself.

A command gets a new interpreter all the same if it depends on how an interpreter starts (see
``_EARLY``), if another command is running, and if coverage is measured.
"""

import gc
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.waiting import IS_TRACED, allowed_s

MODULE = [sys.executable, "-m", "streamq.cli"]
SCRIPT = str(Path(sys.executable).with_name("streamq"))
_ROOT = Path(__file__).parents[2]
_LIBRARIES = ("asyncio", "csv", "hiredis", "inspect", "msgspec", "redis", "ssl", "typer")
#: An interpreter reads variables that begin so when it starts, and never again.
_EARLY = ("COVERAGE_", "LANG", "LC_", "LD_", "PYTHON", "TZ")
#: A message of so many bytes surely fits into the socket.
_MOST_BYTES = 100_000
Done = subprocess.CompletedProcess[bytes]
#: The process that forks, and the way to it. Whoever uses them has the lock.
_forker: "tuple[subprocess.Popen[bytes], socket.socket] | None" = None
_lock = threading.Lock()


def run(
    words: list[str],
    *,
    env: dict[str, str],
    cwd: Path | None = None,
    input: bytes | None = None,
    stdout: Any = subprocess.PIPE,
    timeout: float = 60.0,
) -> Done:
    """Run a command of streamq to its end, as ``subprocess.run`` does."""
    order = json.dumps([words, env, str(cwd or Path.cwd())]).encode()
    is_plain = words[0] == SCRIPT or words[:3] == MODULE
    if (
        is_plain
        and stdout is subprocess.PIPE
        and len(order) < _MOST_BYTES
        and _early(env) == _early(os.environ)
        and not IS_TRACED
        and _lock.acquire(blocking=False)
    ):
        try:
            return _run_in_a_fork(words, order, input, timeout)
        finally:
            _lock.release()
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
    done: Done = subprocess.run(
        words,
        **given,
        env=env,
        cwd=cwd,
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=allowed_s(timeout),
        check=False,
    )
    return done


def run_text(words: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command as ``run`` does, with what it wrote as text."""
    done = run(words, **options)
    texts = [(text or b"").decode().replace("\r\n", "\n") for text in (done.stdout, done.stderr)]
    return subprocess.CompletedProcess(words, done.returncode, *texts)


def _early(env: Any) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_EARLY)}


def _run_in_a_fork(words: list[str], order: bytes, given: bytes | None, timeout: float) -> Done:
    global _forker
    _forker = _forker or _start()
    _, door = _forker
    deadline = time.monotonic() + timeout
    stdin, feeding = (os.open(os.devnull, os.O_RDONLY), None) if given is None else os.pipe()
    (reading, stdout), (reading_errors, stderr) = os.pipe(), os.pipe()
    socket.send_fds(door, [order], [stdin, stdout, stderr])
    for number in (stdin, stdout, stderr):
        os.close(number)
    pid = int(door.recv(100))
    written: dict[int, bytes] = {}
    threads = [
        threading.Thread(target=_drain, args=(reading, 1, written)),
        threading.Thread(target=_drain, args=(reading_errors, 2, written)),
    ]
    if feeding is not None:
        threads.append(threading.Thread(target=_feed, args=(feeding, given)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    is_late = any(thread.is_alive() for thread in threads)
    if is_late:
        os.kill(pid, signal.SIGKILL)
    code = int(door.recv(100))
    if is_late:
        raise subprocess.TimeoutExpired(words, timeout)
    return Done(words, code, written[1], written[2])


def _feed(pipe: int, given: bytes) -> None:
    with suppress(BrokenPipeError), open(pipe, "wb") as file:  # a command need not read it all
        file.write(given)


def _drain(pipe: int, number: int, written: dict[int, bytes]) -> None:
    with open(pipe, "rb") as file:
        written[number] = file.read()


def end() -> None:
    """End the process that forks, if there is one."""
    global _forker
    if _forker:
        process, door = _forker
        door.close()
        process.wait()
        _forker = None


def _start() -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start the process that forks. It ends when the socket is closed, so not after this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return process, ours


def _serve(door: socket.socket) -> tuple[list[str], dict[str, str], str]:
    """Fork for each order. Return in the fork, with its order; the process itself never does."""
    while True:
        order, files, _, _ = socket.recv_fds(door, _MOST_BYTES, 3)
        if not order:
            os._exit(0)
        pid = os.fork()
        if not pid:
            break
        for number in files:
            os.close(number)
        door.send(b"%d" % pid)
        _, status = os.waitpid(pid, 0)
        door.send(b"%d" % os.waitstatus_to_exitcode(status))
    door.close()
    for wanted, number in enumerate(files):
        os.dup2(number, wanted)
        os.close(number)
    words, env, cwd = json.loads(order)
    return words, env, cwd


def _stream(number: int, old: Any) -> io.TextIOWrapper:
    """Open a standard stream as an interpreter does that starts with this file."""
    is_input = number == 0
    buffering = 0 if old.write_through and not is_input else -1
    return io.TextIOWrapper(
        open(number, "rb" if is_input else "wb", buffering, closefd=False),
        old.encoding,
        old.errors,
        None if is_input else "\n",
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )


def _main() -> None:
    # Ctrl-C in the terminal is for the commands and for pytest.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for library in _LIBRARIES:
        import_module(library)
    gc.collect()
    gc.freeze()
    words, env, cwd = _serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = sys.__stdin__ = _stream(0, sys.stdin)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, sys.stderr)  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    if words[0] == SCRIPT:
        sys.argv, sys.path[0] = words, str(Path(SCRIPT).parent)
        runpy.run_path(SCRIPT, run_name="__main__")
    else:
        sys.argv, sys.path[0] = words[2:], cwd
        runpy.run_module("streamq.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
