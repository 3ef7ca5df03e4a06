"""A program as a handler: the program reads the records of a part, and prints the result.

A program stays in the process group of the worker process that starts it. The pool kills that group
after a time limit or for a cancelled request, and the process kills it when its pool is gone. So
the program ends, too, with everything that it started.
"""

import os
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from streamq.app import App, Context
from streamq.errors import InvalidValue, ResultTooLarge, StreamqError
from streamq.records.encoding import Verbatim

#: The last 2,000 bytes that a program writes to stderr are kept with its failure.
_TAIL_BYTES = 2_000
_BLOCK = 2**16
#: While a program runs, the handler checks this often whether the result is still wanted.
_LOOK_S = 0.1
#: Without ``pidfd_open`` the handler checks this often whether the program has ended.
_NAP_S = 0.002


class ProgramMissing(StreamqError):
    """There is no such program."""


class ProgramFailed(Exception):
    """A program ended with an exit code or by a signal. The text ends with its last errors."""


def words_of_program(command: str, what: str = "--exec") -> tuple[str, ...]:
    """Return the words of a command as a shell splits them: the program and its arguments.

    ``what`` is the option's name in messages.

    Raises:
        InvalidValue: a quote is not closed, or there are no words.
    """
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise InvalidValue(f"{what} {command!r}: {error}") from None
    if command and not words:
        raise InvalidValue(f"{what} names no program")
    return words


def app_of_program(name: str, argv: Sequence[str], max_result: int) -> App:
    """Return an app whose one handler, of that name, runs the program with each part.

    Raises:
        ProgramMissing: there is no such program.
    """
    path = shutil.which(argv[0])
    if path is None:
        raise ProgramMissing(f"--exec: there is no program {argv[0]!r} that can be run")
    app = App()

    @app.handler(name=name)
    def run(part: bytes, context: Context) -> Verbatim:
        return Verbatim(_ProgramRun([path, *argv[1:]], context, max_result).result(part))

    return app


class _ProgramRun:
    """One run of a program."""

    def __init__(self, argv: list[str], context: Context, max_result: int) -> None:
        self._context = context
        self._max_result = max_result
        self._output: list[bytes] = []
        self._size = 0
        self._errors = b""
        self._rest = memoryview(b"")
        self._looked = time.monotonic()
        self._is_unwanted = False
        self._marks = {
            "STREAMQ_REQUEST_ID": context.request,
            "STREAMQ_PART": str(context.part),
            "STREAMQ_ATTEMPT": str(context.attempt),
            "STREAMQ_SOURCE": context.source,
        }
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | self._marks,
        )

    def result(self, part: bytes) -> bytes:
        """Return what the program prints.

        Raises:
            ProgramFailed: the program ended with an exit code other than 0, or by a signal.
            ResultTooLarge: the program printed too much.
        """
        with self._popen:
            try:
                self._talk(part)
                code = self._await_end()
            except BaseException:
                self._signal(signal.SIGKILL)
                raise
            if self._is_unwanted:
                self._signal(signal.SIGKILL)
        if code:
            how = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
            said = self._errors.decode(errors="replace").strip()
            raise ProgramFailed(f"{how}: {said}" if said else how)
        return b"".join(self._output)

    def _talk(self, part: bytes) -> None:
        """Write the records to the program and read what it prints, as either is possible."""
        popen, self._rest = self._popen, memoryview(part)
        with selectors.DefaultSelector() as selector:
            for stream, event, step in (
                (popen.stdin, selectors.EVENT_WRITE, self._feed),
                (popen.stdout, selectors.EVENT_READ, self._hear),
                (popen.stderr, selectors.EVENT_READ, self._heed),
            ):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, event, (step, stream))
            while selector.get_map():
                for key, _ in selector.select(_LOOK_S):
                    step, stream = key.data
                    if not step(key.fd):
                        selector.unregister(stream)
                        with suppress(OSError):
                            stream.close()
                self._look()

    def _feed(self, fd: int) -> bool:
        """Write as much as the program takes. Return False at the end, or if it stops reading."""
        try:
            self._rest = self._rest[os.write(fd, self._rest[:_BLOCK]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self._rest)

    def _hear(self, fd: int) -> bool:
        """Read what the program prints. Return False at the end."""
        data = os.read(fd, _BLOCK)
        self._output.append(data)
        self._size += len(data)
        if self._size > self._max_result:
            raise ResultTooLarge(f"it printed more than the {self._max_result} bytes allowed")
        return bool(data)

    def _heed(self, fd: int) -> bool:
        """Read what the program writes to stderr, and keep the last. Return False at the end."""
        data = os.read(fd, _BLOCK)
        self._errors = (self._errors + data)[-_TAIL_BYTES:]
        return bool(data)

    def _look(self) -> None:
        """Ask the program to end if its result is not wanted any more."""
        if time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            if self._context.should_stop() and not self._is_unwanted:
                self._is_unwanted = True
                # If it goes on, the pool kills its group after the grace time (--cancel-grace).
                self._signal(signal.SIGTERM)

    def _await_end(self) -> int:
        """Return the exit code. A program may close its stdout long before it ends."""
        while (code := self._popen.poll()) is None:
            _sleep_while_program_runs(self._popen.pid)
            self._look()
        return code

    def _signal(self, number: int) -> None:
        """Signal the program and, on a system with ``/proc``, everything that it started."""
        self._popen.send_signal(number)
        marks = {f"{name}={value}".encode() for name, value in self._marks.items()}
        for path in Path("/proc").glob("[0-9]*/environ"):
            pid = int(path.parent.name)
            with suppress(OSError):  # the process has gone, or is another user's
                is_ours = pid != self._popen.pid and os.getpgid(pid) == os.getpgrp()
                if is_ours and marks <= set(path.read_bytes().split(b"\0")):
                    os.kill(pid, number)


def _sleep_while_program_runs(pid: int) -> None:
    """Sleep until a child ends, for 0.1 s at most."""
    if not hasattr(os, "pidfd_open"):
        time.sleep(_NAP_S)
        return
    with open(os.pidfd_open(pid)) as child, selectors.DefaultSelector() as selector:  # noqa: PTH123
        selector.register(child, selectors.EVENT_READ)
        selector.select(_LOOK_S)
