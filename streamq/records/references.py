"""Parts by reference: the payload says which bytes of which file the part consists of.

The worker reads these bytes itself, so the data never pass through the server. Anybody who can
submit could then ask for any file, so a worker reads only what ``--allow-read`` covers.
"""

import errno
import os
import stat
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import msgspec

from streamq.app import Abandon
from streamq.errors import InvalidValue
from streamq.model import Spec
from streamq.records.boundaries import bytes_as_loaded
from streamq.records.inputs import Input, InputIdentity
from streamq.records.remote import (
    Object,
    RemoteChanged,
    RemoteFile,
    RemoteMissing,
    RemoteRangeFile,
    is_remote,
    locate_url,
    read_range_of_object,
)
from streamq.records.table_files import TableFile, TableReference

#: So many bytes are read at once: a reference may be made up, and say that it has any number.
_MOST_AT_ONCE = 2**26
#: Of a file that stays open, parts of so many bytes are read so many bytes at a time.
_SMALL = 2**15
_AHEAD = 2**17
#: In place of a checksum, in references to what has none.
NO_CHECK = -1
#: Largest part by reference, in bytes.
MOST_REFERRED = 2**30


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a part by reference."""

    offset: int
    length: int
    #: Of the file when it was loaded: its size, and a version that changes with its content.
    size: int
    version: str
    #: A checksum of the bytes (CRC-32), by which they are good in a file that was written to since,
    #: such as one that grows.
    check: int = NO_CHECK

    @classmethod
    def payload(cls, file: InputIdentity, offset: int, length: int, check: int = NO_CHECK) -> bytes:
        """Return the payload of a part that consists of these bytes of a file."""
        check = check if file.mtime_ns else NO_CHECK
        return msgspec.json.encode(cls(offset, length, file.size, file.version, check))


class _KeptFile:
    """A file that stays open until no thread reads it any more."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self.name = name
        self.file = file
        #: The block that was read last, where it begins, and of which state of the file it is.
        self._block = (0, b"", (0, ""))

    def read(self, reference: Reference) -> bytes:
        """Return the bytes a part refers to. Small parts often follow one another.

        Raises:
            Abandon: the file is too short.
        """
        offset, length = reference.offset, reference.length
        if length > _SMALL:
            return _read_range(self.name, self.file, reference)
        begin, block, state = self._block
        own_state = (reference.size, reference.version)
        if state != own_state or not begin <= offset <= begin + len(block) - length:
            begin, block = offset, os.pread(self.file.fileno(), _AHEAD, offset)
            self._block = begin, block, own_state
        if len(block) < offset - begin + length:
            raise _cut_short(self.name)
        return block[offset - begin : offset - begin + length]

    def __del__(self) -> None:
        self.file.close()


class ReferenceReader:
    """Reads what parts refer to, within the folders and URLs that are allowed."""

    def __init__(self, allowed: Iterable[str], base: str = "") -> None:
        """``base``: in a run, the folder that names are relative to."""
        self._base = base
        #: In a run: the file that was read last. The next part is often of the same.
        self._last: _KeptFile | None = None
        #: The table that was read last, and of which file.
        self._table: tuple[Any, TableFile] | None = None
        self._table_lock = Lock()
        self._urls = [locate_url(each) for each in allowed if is_remote(each)]
        self._paths = {
            os.path.realpath(Path(base, each)) for each in allowed if not is_remote(each)
        }

    def close(self) -> None:
        """Close the file that is kept open."""
        self._last = None
        self._close_table()

    def read(self, name: str, payload: bytes, spec: Spec) -> bytes:
        """Return the bytes a part refers to; of a whole file, its decompressed content.

        Raises:
            Abandon: the file is not allowed, is not there, or has changed since it was loaded.
        """
        reference = msgspec.json.decode(payload, type=Reference)
        with _abandon_bad_reference(name):
            if is_remote(name):
                return self._read_url(name, reference, spec)
            return self._read_file(name, reference, spec)

    def read_table(
        self, name: str, payload: bytes, form: str, columns: Sequence[str] | None = None
    ) -> Any:
        """Return the rows a part refers to, as a ``pyarrow.Table``; perhaps only some columns.

        Raises:
            Abandon: as of ``read``.
        """
        reference = msgspec.json.decode(payload, type=TableReference)
        with _abandon_bad_reference(name), self._table_lock:
            return self._table_of(name, reference, form).read(reference, columns)

    def _table_of(self, name: str, reference: TableReference, form: str) -> TableFile:
        key = name, reference.size, reference.version, form
        if self._table is None or self._table[0] != key:
            self._close_table()
            source = self._table_source(name, reference)
            try:
                self._table = key, TableFile(name, source, form)
            except BaseException:
                source.close()
                raise
        elif not is_remote(name):
            self._check_unchanged(name, self._table[1].file, reference)
        return self._table[1]

    def _table_source(self, name: str, reference: TableReference) -> Any:
        if is_remote(name):
            self._check_url(name)
            return RemoteRangeFile(name, Object(reference.size, reference.version))
        file = self._opened(name)
        try:
            self._check_unchanged(name, file, reference)
        except BaseException:
            file.close()
            raise
        return file

    def _check_unchanged(self, name: str, file: BinaryIO, then: Reference | TableReference) -> None:
        if why := self._has_changed(file, then):
            raise Abandon(f"{name} has changed since it was loaded: {why}")

    def _close_table(self) -> None:
        if self._table:
            self._table[1].close()
            self._table = None

    def _read_url(self, url: str, reference: Reference, spec: Spec) -> bytes:
        self._check_url(url)
        then = Object(reference.size, reference.version)
        if spec.format != "file":
            return bytes_as_loaded(
                read_range_of_object(url, reference.offset, reference.length, then), spec
            )
        with closing(RemoteFile(url)) as file:
            if file.object != then:
                raise RemoteChanged
            return _whole_content(Input(url, file))

    def _check_url(self, url: str) -> None:
        location = locate_url(url)
        if not any(each.covers(location) for each in self._urls):
            raise self._refusal(url)

    def _read_file(self, name: str, reference: Reference, spec: Spec) -> bytes:
        if spec.format == "file":
            with self._opened(name) as file:
                self._check_unchanged(name, file, reference)
                return _whole_content(Input(name, file))
        kept = self._last
        if kept and kept.name == name:
            with suppress(Abandon):  # another file may be in its place by now
                return self._checked(kept, reference, spec)
        kept = _KeptFile(name, self._opened(name))
        data = self._checked(kept, reference, spec)
        if self._base:
            self._last = kept
        return data

    def _checked(self, kept: _KeptFile, reference: Reference, spec: Spec) -> bytes:
        """Return the bytes a part refers to, if they are those that were loaded."""
        name, file = kept.name, kept.file
        data = kept.read(reference)
        if why := self._has_changed(file, reference):
            # The block that was read last may be of before the change.
            data = bytes_as_loaded(_read_range(name, file, reference), spec)
            if reference.check == NO_CHECK or zlib.crc32(data) != reference.check:
                raise Abandon(f"{name} has changed since it was loaded: {why}")
            return data
        return bytes_as_loaded(data, spec)

    def _opened(self, name: str) -> BinaryIO:
        """Open a regular file that may be read."""
        path = Path(os.path.realpath(Path(self._base, name)))
        inside = (each for each in (path, *path.parents) if str(each) in self._paths)
        if (folder := next(inside, None)) is None:
            raise self._refusal(name)
        try:
            file = os.fdopen(_open_below_folder(folder, path), "rb")
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR):
                raise self._refusal(name) from None
            raise
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise Abandon(f"{name} is no regular file")
        return file

    def _has_changed(self, file: BinaryIO, then: Reference | TableReference) -> str | None:
        """Return in words how a file differs from the one that was loaded; None if it does not."""
        state = os.fstat(file.fileno())
        if state.st_size != then.size:
            return f"it had {then.size} bytes, and has {state.st_size}"
        return None if str(state.st_mtime_ns) == then.version else "it was written to"

    def _refusal(self, name: str) -> Abandon:
        return Abandon(f"this worker may not read {name}: --allow-read does not cover it")


class _abandon_bad_reference(AbstractContextManager[None]):  # noqa: N801  it is used as a function
    """Raise Abandon for a file that is not there, is not allowed or has changed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, (FileNotFoundError, RemoteMissing)):
            raise Abandon(f"{self._name} cannot be read here: {error}") from None
        if isinstance(error, RemoteChanged):
            raise Abandon(f"{self._name} has changed since it was loaded") from None
        if isinstance(error, InvalidValue):
            raise Abandon(str(error)) from None


def _open_below_folder(folder: Path, path: Path) -> int:
    """Open a file in a folder or below it. Follow no link, even one that was put there just now."""
    if folder == path:  # the file itself is allowed
        folder = path.parent
    *parents, name = path.relative_to(folder).parts
    # O_PATH opens a folder that this user may pass through but not list.
    passing = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
    at = os.open(folder, passing)
    try:
        for each in parents:
            below = os.open(each, passing | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)


def _read_range(name: str, file: BinaryIO, reference: Reference) -> bytes:
    blocks, offset, left = [], reference.offset, reference.length
    while left and (block := os.pread(file.fileno(), min(left, _MOST_AT_ONCE), offset)):
        blocks.append(block)
        offset, left = offset + len(block), left - len(block)
    if left:
        raise _cut_short(name)
    return b"".join(blocks) if len(blocks) > 1 else blocks[0] if blocks else b""


def _cut_short(name: str) -> Abandon:
    return Abandon(f"{name} has changed since it was loaded: it was cut short")


def _whole_content(source: Input) -> bytes:
    """Return the whole decompressed content of an input."""
    blocks, size = [], 0
    while block := source.read(2**22):
        blocks.append(block)
        size += len(block)
        if size > MOST_REFERRED:
            raise Abandon(
                f"{source.name} holds more than the {MOST_REFERRED} bytes a part may have"
            )
    return b"".join(blocks)
