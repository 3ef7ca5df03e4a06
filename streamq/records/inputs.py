"""Inputs as bytes: files and standard input, decompressed where they are compressed.

A file can be told from a changed one by its identity. Standard input can be read only
once; what a load took of it is remembered as a digest, so that a load that is run again
with the same bytes can go on.
"""

import bz2
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
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from streamq.errors import InvalidValue
from streamq.records.remote import RemoteFile, head, is_remote

#: The name of standard input.
STDIN = "-"
#: Decompressed data may be so many times the compressed; beyond that it is a bomb.
MOST_RATIO = 1_000
_RATIO_FROM = 64 * 2**20
#: So much of a file's beginning and end is compared when a load goes on.
_SAMPLE = 2**16
#: How often whoever waits for standard input looks up.
_WAIT_S = 0.05
#: What a text in UTF-8 may begin with. It says how the text is encoded and is no part of it.
MARK = b"\xef\xbb\xbf"
#: How the names of compressed files end, as a rule; what is in them decides.
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_HEAD = 10
_MAGIC = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
}
_PACKED_BYTES = 2**17
_FIRST_BYTES = b"\x1fB\xfd\x28"
_DAMAGE = (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError)


class BadInput(InvalidValue):
    """The input cannot be read or split. The text names the file and, where known, the record."""


class Stream(Protocol):
    """Bytes one after another."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, perhaps fewer than that many; none at the end."""

    def tell(self) -> int:
        """Return how many bytes were read of what it is made from."""

    def close(self) -> None:
        """Let go of it."""


class Identity(msgspec.Struct, frozen=True):
    """What tells a file from a changed one."""

    name: str
    size: int = 0
    mtime_ns: int = 0
    digest: str = ""

    @classmethod
    def of(cls, path: str) -> "Identity":
        """Return the file as it is now; of standard input nothing but the name is known.

        Raises:
            BadInput: it is not there, is no regular file, or cannot be read.
        """
        if path == STDIN:
            if sys.stdin is None:
                # Its number may be another file's by now.
                raise BadInput("standard input is closed")
            return cls(path)
        if is_remote(path):
            found = head(path)
            return cls(path, found.size, 0, found.version)
        with _named(path):
            mode = Path(path).stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise BadInput(f"{path} is no regular file: give it on standard input, as -")
            with Path(path).open("rb") as file:
                state = os.fstat(file.fileno())
                sample = file.read(_SAMPLE)
                file.seek(max(0, state.st_size - _SAMPLE))
                sample += file.read(_SAMPLE)
        digest = hashlib.blake2b(sample, digest_size=16).hexdigest()
        return cls(path, state.st_size, state.st_mtime_ns, digest)

    def difference(self, then: "Identity") -> str:
        """What changed since, in words; "" for nothing."""
        if self.name != then.name:
            return f"it was {then.name}, and is {self.name}"
        if self.size != then.size:
            return f"{self.name} had {then.size} bytes, and has {self.size}"
        if self.digest != then.digest:
            return f"{self.name} has other content than it had"
        return f"{self.name} was written to since" if self.mtime_ns != then.mtime_ns else ""

    @property
    def version(self) -> str:
        """What tells it from a changed one of the same size, for those who only look."""
        return str(self.mtime_ns) if self.mtime_ns else self.digest


class Input:
    """One input, open and decompressed. ``unread`` puts back what was only looked at."""

    def __init__(self, name: str, raw: Stream) -> None:
        self.name = name
        #: The record that is read next, for those who are told of damage.
        self.record = 1
        self._raw = raw
        self._given = 0
        self._back = b""
        self._kind, head = _recognised(raw, name)
        self._stream: Any = _Rest(head, raw)
        self._damage: tuple[type[Exception], ...] = _DAMAGE
        if self._kind:
            opener, error = _opener(self._kind, name)
            self._stream = opener(io.BufferedReader(self._stream))
            self._damage = (*_DAMAGE, error)

    @property
    def is_compressed(self) -> bool:
        """Whether what is read is not what the file holds."""
        return bool(self._kind)

    def read(self, size: int) -> bytes:
        """Return the next bytes, perhaps fewer than that many; none at the end.

        Raises:
            BadInput: it is damaged, cut short or too large when decompressed.
        """
        if self._back:
            given, self._back = self._back[:size], self._back[size:]
            return given
        try:
            data: bytes = self._stream.read1(size) if self._kind else self._stream.read(size)
        except EOFError:
            raise self._bad("the file is cut off: its compressed data have no end") from None
        except self._damage as error:
            raise self._bad(str(error)) from None
        self._given += len(data)
        is_much = self._kind and self._given > _RATIO_FROM
        if is_much and self._given > MOST_RATIO * max(1, self._raw.tell()):
            raise self._bad(f"it grows to more than {MOST_RATIO} times its size")
        return data

    def _bad(self, why: str) -> BadInput:
        return BadInput(f"{self.name}: after record {self.record - 1}: {why}")

    def unread(self, data: bytes) -> None:
        """Have it read again."""
        self._back = data + self._back

    def mark(self) -> bytes:
        """Return the mark that stands here, or nothing; the next read gives it all the same."""
        found, block = b"", b"_"
        while block and len(found) < len(MARK) and MARK.startswith(found):
            block = self.read(len(MARK) - len(found))
            found += block
        self.unread(found)
        return MARK if found == MARK else b""

    def skip(self, offset: int, see: Callable[[bytes], None] = lambda _: None) -> int:
        """Pass over so many bytes, as far as there are, showing them. Returns how many."""
        left = offset
        while left > 0 and (block := self.read(min(left, 2**20))):
            see(block)
            left -= len(block)
        return offset - left

    def seek(self, offset: int) -> None:
        """Go on at that byte of what is read; it is a file and was not read from yet."""
        if self._kind:
            if self.skip(offset) < offset:
                raise BadInput(f"{self.name} is shorter than it was")
        else:
            self._stream, self._back = self._raw, b""
            self._raw.seek(offset)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Let go of it; standard input stays."""
        if self.name != STDIN:
            self._raw.close()


class _Stdin(io.RawIOBase):
    """Standard input: what is there is given, and while nothing is, something else is done."""

    def __init__(self) -> None:
        self.while_waiting: Callable[[], None] = lambda: None
        self._position = 0
        with suppress(OSError, AttributeError):
            fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, 2**20)

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read as much as there is, up to the buffer's size."""
        while not select.select([0], [], [], _WAIT_S)[0]:
            self.while_waiting()
        count = os.readv(0, [buffer])
        self._position += count
        return count

    def tell(self) -> int:
        """Return how many bytes were read."""
        return self._position


class _Rest(io.RawIOBase):
    """What was read already, and then the rest."""

    def __init__(self, head: bytes, raw: Stream) -> None:
        self._head = head
        self._raw = raw

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As ``read``; for those that decompress."""
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


def stdin(while_waiting: Callable[[], None] = lambda: None) -> Input:
    """Standard input. There is one, and who has only looked at it has put that back.

    While nothing comes ``while_waiting`` is called again and again; what it raises ends the
    read.
    """
    _raw_stdin().while_waiting = while_waiting
    return _whole_stdin()


def open_input(name: str) -> Input:
    """Return an input, decompressed if it is compressed.

    Raises:
        BadInput: it is not there, is a folder, or cannot be read.
    """
    if name == STDIN:
        return stdin()
    if is_remote(name):
        return Input(name, RemoteFile(name))
    with _named(name):
        file = Path(name).open("rb", buffering=0)  # noqa: SIM115  the Input closes it
        try:
            return Input(name, file)
        except BaseException:
            file.close()
            raise


def _recognised(raw: Stream, name: str) -> tuple[str, bytes]:
    """Return how it is compressed, "" for not, and the bytes that were read to see it."""
    with _named(name):
        head = raw.read(_HEAD) or b""
        while head and head[:1] in _FIRST_BYTES and len(head) < _HEAD:
            more = raw.read(_HEAD - len(head))
            if not more:
                break
            head += more
    return next((kind for kind, magic in _MAGIC.items() if magic.match(head)), ""), head


def _opener(kind: str, name: str) -> tuple[Callable[[Any], Any], type[Exception]]:
    """What decompresses, and what it says of damage besides what all of them say."""
    if kind == "gzip":
        return gzip.open, zlib.error
    if kind == "bzip2":
        return partial(_Unpacked, bz2.BZ2Decompressor), OSError
    if kind == "xz":
        return partial(_Unpacked, lzma.LZMADecompressor), lzma.LZMAError
    for module in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            zstd: Any = importlib.import_module(module)
            return partial(_Unpacked, zstd.ZstdDecompressor), zstd.ZstdError
    raise BadInput(f"{name} is zstd: pip install 'streamq[zstd]'")


class _Unpacked:
    """What compressed streams hold, one behind the other. Zeros behind them are padding.

    The readers of the standard library end where something else follows, and say nothing.
    """

    def __init__(self, make: Callable[[], Any], raw: io.BufferedReader) -> None:
        self._make = make
        self._raw = raw
        self._stream = make()

    def read1(self, size: int) -> bytes:
        """Return the next bytes, perhaps fewer than that many; none at the end."""
        while True:
            stream, given = self._stream, b""
            if stream.eof:
                given = self._next_stream()
                if not given:
                    return b""
            elif stream.needs_input and not (given := self._raw.read1(_PACKED_BYTES)):
                raise EOFError
            if data := self._stream.decompress(given, size):
                return bytes(data)

    def _next_stream(self) -> bytes:
        """Get ready for the stream that follows. Returns how it begins; nothing at the end."""
        given: bytes = self._stream.unused_data
        while not (given := given.lstrip(b"\0")):
            given = self._raw.read1(_PACKED_BYTES)
            if not given:
                return b""
        self._stream = self._make()
        return given


@contextmanager
def _named(name: str) -> Iterator[None]:
    """What the system says of an input, with its name."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{name}: {error.strerror or error}") from None
