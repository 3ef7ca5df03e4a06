"""Where results go: a file that can be continued, or a stream that cannot.

A file is cut to the length that was committed before more is added. A stream (a pipe, a terminal, a
device) only ever grows, so after a crash its writer begins anew.
"""

import fcntl
import hashlib
import os
import select
import stat
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from streamq.errors import InvalidValue, StreamqError
from streamq.model import Failure

#: How results are written.
FORMS = ("jsonl", "csv", "raw")
#: A pipe that is ready to be written to takes so many bytes without blocking (POSIX: at least 512,
#: Linux: 4096).
_PIPE_BYTES = select.PIPE_BUF
_WAIT_MS = 100


class OutputError(StreamqError):
    """The output cannot be written. What was committed stays; the same command can go on."""


class OutputExists(InvalidValue):
    """The output file exists and was not begun for this request."""


class Stopped(Exception):
    """The writer was told to stop while nobody read the stream."""


class Output(Protocol):
    """Where a collector writes results."""

    #: The absolute path of the file, to tell outputs apart; "" for a stream.
    name: str

    def open(self, offset: int, *, has_begun: bool, force: bool) -> None:
        """Get ready to write after that offset, and keep other writers out."""

    def lacks(self, offset: int) -> bool:
        """Return whether the output has fewer bytes than that: some of what was written is lost."""

    def cut(self, offset: int) -> None:
        """Drop everything after that offset: the next write goes there."""

    def write(self, data: bytes) -> None:
        """Write the data, and return when they are stored."""

    def look(self) -> None:
        """Check that the output is still wanted, while there is nothing to write."""

    def close(self) -> None:
        """Close the output."""


class FileOutput:
    """A regular file: cut to what was committed, and synced to the disk after each write."""

    def __init__(self, path: Path, request_id: str) -> None:
        self._path = path
        self.name = str(path.resolve())
        self._id = request_id
        self._file: BinaryIO | None = None

    def open(self, offset: int, *, has_begun: bool, force: bool) -> None:
        """Open and lock the file. It stays as it is until it is cut.

        Raises:
            OutputExists: the file is not ours, or is shorter than what was written to it.
            OutputError: the file cannot be written to.
        """
        try:
            size = self._path.stat().st_size if self._path.exists() else -1
            if has_begun:
                self._refuse_shorter(size, offset)
            else:
                check(self._path, force=force)
            file = self._path.open("r+b" if size >= 0 else "a+b", buffering=0)
            self._lock(file)
            _sync_folder(self._path.parent)
        except OSError as error:
            raise self._failed(error) from None
        self._file = file

    def lacks(self, offset: int) -> bool:
        """Return whether the file is gone or shorter than that; once it is open, the open file.

        Raises:
            OutputError: the file cannot be looked at, and may well be there.
        """
        try:
            found = os.fstat(self._file.fileno()) if self._file else self._path.stat()
            return found.st_size < offset
        except FileNotFoundError:
            return offset > 0
        except OSError as error:
            raise self._failed(error) from None

    def cut(self, offset: int) -> None:
        """Cut the file to the offset.

        Raises:
            OutputExists: the file is shorter than that.
            OutputError: the file cannot be written to.
        """
        assert self._file is not None
        try:
            self._refuse_shorter(os.fstat(self._file.fileno()).st_size, offset)
            self._file.truncate(offset)
            self._file.seek(offset)
        except OSError as error:
            raise self._failed(error) from None

    def _refuse_shorter(self, size: int, offset: int) -> None:
        if max(size, 0) >= offset:
            return
        if size < 0:
            what = f"{self._path} is gone, and {offset} bytes were written"
        else:
            what = f"{self._path} has {size} bytes, but {offset} were written"
        raise OutputExists(
            f"{what} for request {self._id}: put it back, or say --force to begin it anew with "
            "the results that the server still has"
        )

    def _lock(self, file: BinaryIO) -> None:
        """Lock the file against other processes of streamq, where the file system can."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise OutputExists(
                f"{self._path} is just being written by somebody else: wait, or name another file"
            ) from None
        except OSError:
            pass

    def write(self, data: bytes) -> None:
        """Add to the file.

        Raises:
            OutputError: the disk is full, or the file was moved or removed.
        """
        assert self._file is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            _sync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from None
        self.look()

    def look(self) -> None:
        """Check that the file is still where it was.

        Raises:
            OutputError: the file was moved or removed.
        """
        assert self._file is not None
        try:
            there = self._path.stat()
        except OSError:
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self._file.fileno())):
            raise OutputError(
                f"{self._path} was moved or removed while it was written; put it back to go on"
            )

    def remove(self) -> None:
        """Delete the file, if this output has opened it."""
        if self._file is not None:
            with suppress(OSError):
                self._path.unlink()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _failed(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write {self._path}: {error.strerror}")


def _sync_folder(folder: Path) -> None:
    """Sync the folder, so that a new file in it is still there after a power failure.

    Some file systems cannot sync a folder: they do it together with the file, or not at all.
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class StreamOutput:
    """Standard output, a pipe or a device."""

    def __init__(self, fd: int, name: str, should_stop: Callable[[], bool]) -> None:
        self._fd = fd
        self.name = ""
        self._what = name
        self._should_stop = should_stop
        self._is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def open(self, offset: int, *, has_begun: bool, force: bool) -> None:
        """Do nothing: a stream needs no preparation."""

    def lacks(self, offset: int) -> bool:
        """Return False: bytes that went into a stream cannot be missing there."""
        return False

    def cut(self, offset: int) -> None:
        """Do nothing: a stream cannot be cut."""

    def write(self, data: bytes) -> None:
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

    def look(self) -> None:
        """Check that the stream still has a reader.

        Raises:
            BrokenPipeError: the reader has closed the stream.
        """
        if self._is_pipe and any(event & select.POLLERR for _, event in self._poll.poll(0)):
            raise BrokenPipeError

    def close(self) -> None:
        """Leave the stream open: another part of the program opened it."""


def form_of(name: str) -> str:
    """Return the form for a file of that name: jsonl, csv, or raw lines as handlers return them."""
    return {".jsonl": "jsonl", ".csv": "csv"}.get(Path(name).suffix.lower(), "raw")


def errors_beside(path: Path) -> Path:
    """Return the file that the failures of an output are written to."""
    return path.with_name(f"{path.stem}.errors.jsonl")


def check_errors(
    path: Path, error: type[StreamqError] = OutputExists, ours: Collection[str] = ()
) -> None:
    """Raise an error if another program's file stands where the failures are to be written.

    A link counts as another program's, wherever it leads. An empty file does not, and neither does
    one whose digest is among ``ours``.
    """
    place = errors_beside(path)
    with suppress(FileNotFoundError):
        found = place.lstat()
        if stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and not found.st_size):
            return
        # "" is the digest of no regular file: a link has it, and is not ours.
        if errors_digest(path) not in {each for each in ours if each}:
            raise error(
                f"{place} exists, and failures are to be written there: remove it, or say --force"
            )


def errors_digest(path: Path) -> str:
    """Return a digest of the failures beside an output; "" where there is no regular file."""
    place = errors_beside(path)
    try:
        is_file = stat.S_ISREG(place.lstat().st_mode)
        return digest_of(place.read_bytes()) if is_file else ""
    except OSError:
        return ""


def digest_of(lines: bytes) -> str:
    """Return a digest of failures, to compare them with others; "" where there are none."""
    return hashlib.blake2b(lines, digest_size=16).hexdigest() if lines else ""


def error_lines(failures: Iterable[Failure]) -> bytes:
    """Return failures as they are written beside an output, one JSON object a line."""
    return b"".join(msgspec.json.encode(each) + b"\n" for each in failures)


def write_errors(path: Path, lines: bytes) -> Path:
    """Write failures beside an output and return the file's path; without any, remove the file.

    The file is replaced in one step. A link is replaced, not followed.

    Raises:
        OutputError: the file cannot be written.
    """
    place = errors_beside(path)
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        if lines:
            draft.write_bytes(lines)
            draft.replace(place)
        else:
            # The file of an earlier run would tell of failures that do not exist any more.
            place.unlink(missing_ok=True)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OutputError(f"cannot write {place}: {error.strerror}") from None
    return place


def refuse_inputs(path: Path, inputs: Iterable[str]) -> None:
    """Raise InvalidValue if an output or the failures beside it would replace an input."""
    for place in (path, errors_beside(path)):
        if not place.is_file():
            continue
        found = place.stat()
        for name in inputs:
            with suppress(OSError):
                if os.path.samestat(found, Path(name).stat()):
                    raise InvalidValue(f"{place} is one of the inputs: give -o another name")


def check(path: Path, *, force: bool) -> None:
    """Check that a new output may be written there.

    Raises:
        InvalidValue: there is no such folder, or the path is a folder.
        OutputExists: the file has content already.
    """
    if not path.parent.is_dir():
        raise InvalidValue(f"there is no folder {path.parent}")
    if path.is_dir():
        raise InvalidValue(f"{path} is a folder")
    if path.is_file() and path.stat().st_size and not force:
        raise OutputExists(f"{path} exists: remove it, or say --force")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidValue(f"{path} cannot be written: Permission denied")
    if not force:
        check_errors(path)


def is_stream(path: Path) -> bool:
    """Return whether the path is a pipe or a device, whose output cannot be continued."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _sync(fd: int) -> None:
    """Make sure that what was written is on the disk. macOS has no ``fdatasync``."""
    getattr(os, "fdatasync", os.fsync)(fd)
