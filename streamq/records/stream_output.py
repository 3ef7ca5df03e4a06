"""Standard output, a pipe or a device as an output: it only ever grows."""

import os
import select
import stat
from collections.abc import Callable

from streamq.records.output import OutputError, Written

#: How many bytes a pipe takes without blocking when it is ready to be written to (POSIX: at least
#: 512, Linux: 4096).
_PIPE_BYTES = select.PIPE_BUF
_WAIT_MS = 100


class Stopped(Exception):
    """The writer was told to stop while nobody read the stream."""


class StreamOutput:
    """Standard output, a pipe or a device."""

    def __init__(self, fd: int, name: str, should_stop: Callable[[], bool]) -> None:
        self._fd = fd
        self.name = self.inode = self.packing = ""
        self._what = name
        self._should_stop = should_stop
        self._is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def open(self, offset: int, *, has_begun: bool, force: bool) -> None:
        """Do nothing: a stream needs no preparation."""

    def recover(self, written: Written) -> None:
        """Do nothing: a stream has no other version."""

    def lacks(self, written: Written) -> bool:
        """Return False: bytes that went into a stream cannot be missing there."""
        return False

    def cut(self, written: Written, *, has_begun: bool) -> None:
        """Do nothing: a stream cannot be cut."""

    def tail(self, offset: int) -> str:
        """Return "": a stream cannot be read again."""
        return ""

    def settle(self) -> None:
        """Do nothing: a stream was never cut."""

    def write(self, data: bytes, *, is_last: bool = False) -> int:
        """Write all data, as fast as the reader takes them.

        Raises:
            BrokenPipeError: the reader has closed the stream.
            OutputError: the stream cannot be written to.
            Stopped: this process was told to stop while nobody reads.
        """
        rest = memoryview(data)
        while rest:
            # A pipe may stay full for ever, and a blocked write could not be stopped.
            while self._is_pipe and not self._poll.poll(_WAIT_MS):
                if self._should_stop():
                    raise Stopped
            try:
                rest = rest[os.write(self._fd, rest[:_PIPE_BYTES] if self._is_pipe else rest) :]
            except BrokenPipeError:
                raise
            except OSError as error:
                raise OutputError(f"cannot write {self._what}: {error.strerror}") from None
        return len(data)

    def look(self) -> None:
        """Check that the stream still has a reader.

        Raises:
            BrokenPipeError: the reader has closed the stream.
        """
        if self._is_pipe and any(event & select.POLLERR for _, event in self._poll.poll(0)):
            raise BrokenPipeError

    def close(self) -> None:
        """Leave the stream open: another part of the program opened it."""
