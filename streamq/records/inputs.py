"""Inputs as bytes: files and standard input, decompressed where they are compressed.

An ``InputIdentity`` shows whether a file has changed. Standard input can be read only once: a load
keeps a digest of the bytes it has taken. When the load is run again with the same bytes, it can go
on.
"""

import bz2
import codecs
import fcntl
import gzip
import hashlib
import importlib
import io
import lzma
import os
import re
import select
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from streamq.errors import InvalidValue
from streamq.records.remote import RemoteFile, head_of_object, is_remote
from streamq.records.unpacking import Unpacked

#: The name of standard input.
STDIN = "-"
#: A compressed input that grows to more than 1,000 times its size, and over 64 MiB, is refused: it
#: was made to fill memory or disk.
MOST_RATIO = 1_000
_RATIO_FROM = 64 * 2**20
#: How many bytes of a file's beginning, and of its end, go into its digest.
_SAMPLE = 2**16
#: How often a reader that waits for standard input calls ``while_waiting``.
_WAIT_S = 0.05
#: The byte order mark of UTF-8. It tells how a text is encoded and is no part of it.
MARK = b"\xef\xbb\xbf"
#: Usual suffixes of compressed files. The first bytes of a file decide how it is compressed.
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_HEAD = 10
_MAGIC = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
}
_FIRST_BYTES = b"\x1fB\xfd\x28"
_DAMAGE = (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError)


class BadInput(InvalidValue):
    """The input cannot be read or split. The text names the file and, where known, the record."""


class Stream(Protocol):
    """A stream of bytes that is read from its beginning to its end."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, perhaps fewer than that many; none at the end."""

    def tell(self) -> int:
        """Return how many bytes were read of the file itself, before decompression."""

    def close(self) -> None:
        """Close the stream."""


class InputIdentity(msgspec.Struct, frozen=True):
    """Name, size, time and a digest of a file, to find out later whether it has changed."""

    name: str
    size: int = 0
    mtime_ns: int = 0
    digest: str = ""

    @classmethod
    def of(cls, path: str) -> "InputIdentity":
        """Return the identity of a file as it is now; of standard input only the name is known.

        Raises:
            BadInput: the file is not there, is no regular file, or cannot be read.
        """
        if path == STDIN:
            if sys.stdin is None and _instead.get() is None:
                # Descriptor 0 may belong to another file by now.
                raise BadInput("standard input is closed")
            return cls(path)
        if is_remote(path):
            found = head_of_object(path)
            return cls(path, found.size, 0, found.version)
        with _errors_with_input_name(path):
            mode = Path(path).stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise BadInput(f"{path} is no regular file: give it on standard input, as -")
            with Path(path).open("rb") as file:
                state = os.fstat(file.fileno())
                digest = _digest_of_beginning(file, state.st_size)
        return cls(path, state.st_size, state.st_mtime_ns, digest)

    @property
    def has_only_grown(self) -> bool:
        """Whether the file, which is not compressed, has more behind the bytes that it had."""
        if self.name == STDIN or not self.mtime_ns:
            return False
        with suppress(OSError), Path(self.name).open("rb") as file:
            is_larger = os.fstat(file.fileno()).st_size > self.size
            if is_larger and _digest_of_beginning(file, self.size) == self.digest:
                file.seek(0)
                return not _kind_of_compression(file.read(_HEAD))
        return False

    def difference(self, then: "InputIdentity") -> str:
        """Return in words what has changed since ``then``; "" if nothing has."""
        if self.name != then.name:
            return f"it was {then.name}, and is {self.name}"
        if self.size != then.size:
            return f"{self.name} had {then.size} bytes, and has {self.size}"
        if self.digest != then.digest:
            return f"{self.name} has other content than it had"
        return f"{self.name} was written to since" if self.mtime_ns != then.mtime_ns else ""

    @property
    def version(self) -> str:
        """What a reference keeps to detect a change: the time of the last write, or the digest."""
        return str(self.mtime_ns) if self.mtime_ns else self.digest


def _digest_of_beginning(file: BinaryIO, size: int) -> str:
    """Return a digest of a file's first ``size`` bytes: of how they begin and how they end."""
    sample = file.read(min(_SAMPLE, size))
    begin = file.seek(max(0, size - _SAMPLE))
    sample += file.read(size - begin)
    return hashlib.blake2b(sample, digest_size=16).hexdigest()


class Input:
    """One open input, decompressed. ``unread`` puts bytes back that were only inspected."""

    def __init__(self, name: str, raw: Stream) -> None:
        self.name = name
        #: Number of the line that is read next; messages about damage name it.
        self.record = 1
        self._raw = raw
        #: How many bytes were read, and how many there are of a file that may grow meanwhile.
        self._given = 0
        self._most = -1
        self._last = b""
        self._back = b""
        self._kind, head = _recognised_compression(raw, name)
        self._stream: Any = _RestOfInput(head, raw)
        self._damage: tuple[type[Exception], ...] = _DAMAGE
        self._encoding = ""
        self._decoder: codecs.IncrementalDecoder | None = None
        if self._kind:
            opener, error = _decompressor(self._kind, name)
            self._stream = opener(io.BufferedReader(self._stream))
            self._damage = (*_DAMAGE, error)

    @property
    def is_compressed(self) -> bool:
        """Whether the input is decompressed, so that the bytes read are not those of the file."""
        return bool(self._kind)

    def read(self, size: int) -> bytes:
        """Return the next bytes, perhaps fewer than that many; none at the end.

        Raises:
            BadInput: the input is damaged, cut short, too large when decompressed, or not encoded
                as was said.
        """
        if self._back:
            given, self._back = self._back[:size], self._back[size:]
            return given
        if self._decoder is None:
            return self._unpacked(size)
        while True:
            data = self._unpacked(size)
            try:
                text = self._decoder.decode(data, final=not data).encode()
            except UnicodeError as error:
                raise self._bad(f"it is not {self._encoding}: {error}") from None
            if text or not data:
                self._back = text[size:]
                return text[:size]

    def end_at(self, size: int) -> None:
        """Read no more than the first bytes, so many: what is added to the file is left out.

        A line that had no end by then is read to its end. Compressed files are read as they are.
        """
        self._most = -1 if self._kind else size

    def decode_from(self, encoding: str) -> None:
        """Make UTF-8 of what is read, which is encoded so; "" is UTF-8. Once is enough."""
        if encoding and not self._decoder:
            self._encoding = encoding
            self._decoder = codecs.getincrementaldecoder(encoding)()

    def head(self, size: int) -> bytes:
        """Return how the rest begins, so many bytes at most. The next read returns it again.

        Of standard input only what has come is returned: the rest may be long in coming.
        """
        found = block = self.read(size)
        while block and len(found) < size and self._has_more():
            block = self.read(size - len(found))
            found += block
        self.unread(found)
        return found

    def _has_more(self) -> bool:
        """Return whether a read need not wait; of compressed standard input that is not known."""
        if not isinstance(self._raw, ArrivingInput):
            return True
        return bool(self._back) or (not self._kind and self._raw.is_ready())

    def _unpacked(self, size: int) -> bytes:
        """Return the next bytes, decompressed."""
        try:
            data: bytes = self._stream.read1(size) if self._kind else self._bounded(size)
        except EOFError:
            raise self._bad("the file is cut off: its compressed data have no end") from None
        except self._damage as error:
            raise self._bad(str(error)) from None
        self._given += len(data)
        is_much = self._kind and self._given > _RATIO_FROM
        if is_much and self._given > MOST_RATIO * max(1, self._raw.tell()):
            raise self._bad(
                f"decompressed it has more than {MOST_RATIO} times its size, which is refused"
            )
        return data

    def _bounded(self, size: int) -> bytes:
        left = size if self._most < 0 else self._most - self._given
        if left > 0:
            data: bytes = self._stream.read(min(size, left))
        elif self._last == b"\n" or self._given == 0:
            return b""
        else:
            line, end, _ = self._stream.read(size).partition(b"\n")
            data = line + end
        self._last = data[-1:]
        return data

    def _bad(self, why: str) -> BadInput:
        return BadInput(f"{self.name}: after line {self.record - 1}: {why}")

    def unread(self, data: bytes) -> None:
        """Put the bytes back: the next ``read`` returns them first."""
        self._back = data + self._back

    def mark(self) -> bytes:
        """Return the byte order mark if it stands here, else nothing.

        The next read returns it again.
        """
        found, block = b"", b"_"
        while block and len(found) < len(MARK) and MARK.startswith(found):
            block = self.read(len(MARK) - len(found))
            found += block
        self.unread(found)
        return MARK if found == MARK else b""

    def skip(self, offset: int, see: Callable[[bytes], None] = lambda _: None) -> int:
        """Read up to so many bytes and show them to ``see``. Return how many there were."""
        left = offset
        while left > 0 and (block := self.read(min(left, 2**20))):
            see(block)
            left -= len(block)
        return offset - left

    def seek(self, offset: int) -> None:
        """Go to that byte of the data, in a file of which all that was read was un-read."""
        if self._kind or self._decoder:
            if self.skip(offset) < offset:
                raise BadInput(f"{self.name} is shorter than it was")
        else:
            self._stream, self._back = self._raw, b""
            self._raw.seek(offset)  # type: ignore[attr-defined]
            self._given, self._last = offset, b"\n"

    def close(self) -> None:
        """Close the file; standard input stays open."""
        if self.name != STDIN:
            self._raw.close()


class ArrivingInput(io.RawIOBase):
    """A stream whose bytes come when they come. Calls a function while there are none."""

    def __init__(self) -> None:
        self.while_waiting: Callable[[], None] = lambda: None
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def is_ready(self, within_s: float = 0.0) -> bool:
        """Return whether bytes, or the end, are there or come within that time."""
        raise NotImplementedError

    def read_ready(self, buffer: Any) -> int:
        """Read the bytes that are there, up to the buffer's size; none at the end."""
        raise NotImplementedError

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes, and read those that are there."""
        while not self.is_ready(_WAIT_S):
            self.while_waiting()
        count = self.read_ready(buffer)
        self._position += count
        return count

    def tell(self) -> int:
        """Return how many bytes were read."""
        return self._position


class _Stdin(ArrivingInput):
    """Standard input."""

    def __init__(self) -> None:
        super().__init__()
        with suppress(OSError, AttributeError):
            fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, 2**20)

    def is_ready(self, within_s: float = 0.0) -> bool:
        """Return whether bytes, or the end, are there or come within that time."""
        return bool(select.select([0], [], [], within_s)[0])

    def read_ready(self, buffer: Any) -> int:
        """Read the bytes that are there, up to the buffer's size; none at the end."""
        return os.readv(0, [buffer])


class _RestOfInput(io.RawIOBase):
    """The bytes that were read to recognise the format, and then the rest of the stream."""

    def __init__(self, head: bytes, raw: Stream) -> None:
        self._head = head
        self._raw = raw

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, as the decompressing readers do."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        return self._raw.read(size)


@cache
def _raw_stdin() -> _Stdin:
    return _Stdin()


@cache
def _whole_stdin() -> Input:
    return Input(STDIN, _raw_stdin())


def encoding_named(name: str, what: str) -> str:
    """Return the usual name of an encoding of text; "" for UTF-8, which needs no decoding.

    Raises:
        InvalidValue: there is no such encoding.
    """
    if not name:
        return ""
    try:
        found = codecs.lookup(name)
        "".encode(found.name)  # raises for one that is not of text
    except (LookupError, ValueError):
        raise InvalidValue(
            f"{what} {name!r} is no encoding of text: say latin-1, cp1252, utf-16 or another"
        ) from None
    return "" if found.name == "utf-8" else found.name


def stdin(while_waiting: Callable[[], None] = lambda: None) -> Input:
    """Return the one shared input for standard input.

    Code that only inspected its beginning (for a CSV's header) has put those bytes back. While no
    bytes come, ``while_waiting`` is called every 50 ms; an error that it raises ends the read.
    """
    found = _instead.get()
    raw: ArrivingInput = found[0] if found else _raw_stdin()
    raw.while_waiting = while_waiting
    return found[1] if found else _whole_stdin()


#: The stream that this thread reads instead of standard input, if any.
_instead: ContextVar[tuple[ArrivingInput, Input] | None] = ContextVar("instead", default=None)


@contextmanager
def input_as_stdin(stream: ArrivingInput) -> Iterator[Input]:
    """Read another stream as standard input, in this thread."""
    source = Input(STDIN, stream)
    token = _instead.set((stream, source))
    try:
        yield source
    finally:
        _instead.reset(token)


def open_input(name: str, encoding: str = "") -> Input:
    """Open an input. It is decompressed if it is compressed, and made UTF-8 of its encoding.

    Raises:
        BadInput: the input is not there, is a folder, or cannot be read.
    """
    found = stdin() if name == STDIN else _opened_input(name)
    found.decode_from(encoding)
    return found


def _opened_input(name: str) -> Input:
    if is_remote(name):
        return Input(name, RemoteFile(name))
    with _errors_with_input_name(name):
        file = Path(name).open("rb", buffering=0)  # noqa: SIM115  the Input closes it
        try:
            return Input(name, file)
        except BaseException:
            file.close()
            raise


def _recognised_compression(raw: Stream, name: str) -> tuple[str, bytes]:
    """Return how a stream is compressed ("" if not), and the bytes that were read to find out."""
    with _errors_with_input_name(name):
        head = raw.read(_HEAD) or b""
        while head and head[:1] in _FIRST_BYTES and len(head) < _HEAD:
            more = raw.read(_HEAD - len(head))
            if not more:
                break
            head += more
    return _kind_of_compression(head), head


def _kind_of_compression(head: bytes) -> str:
    return next((kind for kind, magic in _MAGIC.items() if magic.match(head)), "")


def _decompressor(kind: str, name: str) -> tuple[Callable[[Any], Any], type[Exception]]:
    """Return what decompresses this kind, and the error that only this kind raises for damage."""
    if kind == "gzip":
        # It is three times as fast as the standard library, and may be missing.
        with suppress(ImportError):
            igzip: Any = importlib.import_module("isal.igzip_lib")
            return partial(Unpacked, partial(igzip.IgzipDecompressor, igzip.DECOMP_GZIP)), (
                igzip.error
            )
        return gzip.open, zlib.error
    if kind == "bzip2":
        return partial(Unpacked, bz2.BZ2Decompressor), OSError
    if kind == "xz":
        return partial(Unpacked, lzma.LZMADecompressor), lzma.LZMAError
    for module in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            zstd: Any = importlib.import_module(module)
            return partial(Unpacked, zstd.ZstdDecompressor), zstd.ZstdError
    raise BadInput(f"{name} is zstd: pip install 'streamq[zstd]'")


@contextmanager
def _errors_with_input_name(name: str) -> Iterator[None]:
    """Raise errors of the system as BadInput, with the name of the input."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{name}: {error.strerror or error}") from None
