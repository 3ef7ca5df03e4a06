"""Parts out of files, at record boundaries, in constant memory. Knows no server.

A part holds the raw bytes of whole records, so putting parts together gives the file
back byte for byte. The cursor after a part says where to go on: file, byte, record.
"""

import bz2
import gzip
import importlib
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, cast

import msgspec

from streamq.errors import InvalidValue

#: How much is read at once.
BLOCK = 2**20
#: Decompressed data may be so many times the compressed; beyond that it is a bomb.
MOST_RATIO = 1_000
_RATIO_FROM = 64 * 2**20
_QUOTED = re.compile(rb'"[^"]*"')
_MAGIC = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
}


class BadInput(InvalidValue):
    """The input cannot be read or split. The text names the file and, where known, the record."""


class Cursor(msgspec.Struct, frozen=True):
    """Where a load stands: the next byte and the next record of a file."""

    file: int = 0
    offset: int = 0
    record: int = 1


class Piece(msgspec.Struct, frozen=True):
    """A part to be: whole records, where they came from, and where to go on."""

    payload: bytes
    records: int
    start: Cursor
    end: Cursor


class Size(msgspec.Struct, frozen=True):
    """How large parts are: whole records up to so many bytes, or so many records."""

    bytes: int = 256 * 1024
    records: int = 0
    #: No part is ever larger, and so no record.
    most: int = 2**20


class Boundary(Protocol):
    """Where records end in a buffer of raw bytes."""

    def last(self, data: bytes, end: int) -> int:
        """The position after the last whole record that ends at or before ``end``; 0 for none."""

    def nth(self, data: bytes, count: int) -> tuple[int, int]:
        """The position after so many records, or after those there are, and how many those are."""

    def count(self, data: bytes) -> int:
        """How many records the data are."""


class Lines:
    """Records that end with a newline; the last may lack it."""

    def last(self, data: bytes, end: int) -> int:
        """After the last newline."""
        return data.rfind(b"\n", 0, end) + 1

    def nth(self, data: bytes, count: int) -> tuple[int, int]:
        """After the n-th newline."""
        position = found = 0
        while found < count:
            newline = data.find(b"\n", position)
            if newline < 0:
                break
            position, found = newline + 1, found + 1
        return position, found

    def count(self, data: bytes) -> int:
        """Newlines, and the rest after the last."""
        return data.count(b"\n") + (not data.endswith(b"\n") and bool(data))


class CsvRows:
    """Rows whose quoted fields may hold newlines (RFC 4180: quotes in a field are doubled).

    A newline ends a row where the quotes before it are even in number.
    """

    def last(self, data: bytes, end: int) -> int:
        """After the last newline that is not inside quotes."""
        position = data.rfind(b"\n", 0, end) + 1
        if b'"' not in data[:position]:
            return position
        blank = _QUOTED.sub(lambda match: b"_" * len(match[0]), data[:end])
        open_quote = blank.find(b'"')
        return blank.rfind(b"\n", 0, open_quote if open_quote >= 0 else end) + 1

    def nth(self, data: bytes, count: int) -> tuple[int, int]:
        """After the n-th newline that is not inside quotes."""
        blank = data
        if b'"' in data:
            blank = _QUOTED.sub(lambda match: b"_" * len(match[0]), data)
            open_quote = blank.find(b'"')
            blank = blank[:open_quote] if open_quote >= 0 else blank
        return Lines().nth(blank, count)

    def count(self, data: bytes) -> int:
        """Rows, the last perhaps without its newline."""
        return Lines().count(_QUOTED.sub(b"_", data) if b'"' in data else data)


BOUNDARIES: dict[str, Boundary] = {"lines": Lines(), "jsonl": Lines(), "csv": CsvRows()}


def split(path: str, file: int, form: str, size: Size, start: Cursor) -> Iterator[Piece]:
    """The rest of a file from a cursor on, in pieces.

    Raises:
        BadInput: the file cannot be read, a record is too long, or a quote is not closed.
    """
    boundary = BOUNDARIES[form]
    with open_input(path) as stream:
        skip(stream, path, start.offset)
        yield from _pieces(stream, path, boundary, size, msgspec.structs.replace(start, file=file))


def _pieces(
    stream: BinaryIO, path: str, boundary: Boundary, size: Size, cursor: Cursor
) -> Iterator[Piece]:
    data = b""
    is_end = False
    while not (is_end and not data):
        length, records = _cut(data, boundary, size, is_end)
        if length:
            end = Cursor(cursor.file, cursor.offset + length, cursor.record + records)
            yield Piece(data[:length], records, cursor, end)
            data, cursor = data[length:], end
            continue
        if is_end or len(data) > size.most:
            raise _too_long(path, cursor, size, is_end)
        block = read(stream, path, cursor, max(BLOCK, size.bytes))
        is_end = not block
        data += block


def _cut(data: bytes, boundary: Boundary, size: Size, is_end: bool) -> tuple[int, int]:
    """How many bytes and records the next piece has; 0 when more must be read first."""
    if size.records:
        return _cut_by_records(data, boundary, size, is_end)
    if len(data) <= size.bytes and not is_end:
        return 0, 0
    length = len(data) if is_end and len(data) <= size.bytes else boundary.last(data, size.bytes)
    if not length and not is_end:
        length = boundary.nth(data[: size.most + 1], 1)[0]
    elif not length:
        length = boundary.nth(data, 1)[0] or len(data)
    if is_end and not _is_whole(data[:length], boundary):
        length = boundary.last(data, length)
    if length > size.most:
        return 0, 0
    return length, boundary.count(data[:length]) if length else 0


def _cut_by_records(data: bytes, boundary: Boundary, size: Size, is_end: bool) -> tuple[int, int]:
    length, records = boundary.nth(data, size.records)
    if records < size.records and is_end and length < len(data):
        length, records = len(data), records + 1
    elif records < size.records and not is_end and len(data) <= size.most:
        return 0, 0
    if length > size.most:
        # So many records are too much for one part: as many as fit.
        length = boundary.last(data, size.most)
        records = boundary.count(data[:length]) if length else 0
    if is_end and length and not _is_whole(data[:length], boundary):
        length = boundary.last(data, length)
        records = boundary.count(data[:length]) if length else 0
    return length, records


def _is_whole(data: bytes, boundary: Boundary) -> bool:
    """Whether no quote is left open at the end of the input."""
    return not isinstance(boundary, CsvRows) or data.count(b'"') % 2 == 0


def _too_long(path: str, cursor: Cursor, size: Size, is_end: bool) -> BadInput:
    if is_end:
        return BadInput(f"{path}: record {cursor.record}: a quote is not closed")
    return BadInput(
        f"{path}: record {cursor.record}, at byte {cursor.offset}, is longer than the "
        f"{size.most} bytes a part may have"
    )


def open_input(path: str) -> BinaryIO:
    """The file's content, decompressed if it is compressed; ``-`` is not for this.

    Raises:
        BadInput: it is not there, is a folder, or cannot be read.
    """
    try:
        file = Path(path).open("rb")  # noqa: SIM115  the caller closes what is made of it
        head = file.read(10)
        file.seek(0)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    kind = next((name for name, magic in _MAGIC.items() if magic.match(head)), "")
    return _decompressed(file, kind, path)


def _decompressed(file: BinaryIO, kind: str, path: str) -> BinaryIO:
    if not kind:
        return file
    if kind == "zstd":
        return cast(BinaryIO, _zstd(file, path))
    openers: dict[str, Callable[[BinaryIO], Any]] = {
        "gzip": lambda raw: gzip.open(raw, "rb"),  # noqa: SIM115  _Bounded closes it
        "bzip2": lambda raw: bz2.open(raw, "rb"),  # noqa: SIM115  _Bounded closes it
        "xz": lambda raw: lzma.open(raw, "rb"),  # noqa: SIM115  _Bounded closes it
    }
    return cast(BinaryIO, _Bounded(openers[kind](file), file))


def _zstd(file: BinaryIO, path: str) -> IO[bytes]:
    for module in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            zstd: Any = importlib.import_module(module)
            return cast(IO[bytes], _Bounded(zstd.open(file, "rb"), file))
    raise BadInput(f"{path} is zstd: pip install 'streamq[zstd]'")


class _Bounded:
    """A decompressed stream that refuses to become a thousand times what it was."""

    def __init__(self, stream: IO[bytes], file: BinaryIO) -> None:
        self._stream = stream
        self._file = file
        self._given = 0

    def read(self, size: int) -> bytes:
        """The next bytes."""
        data = self._stream.read(size)
        self._given += len(data)
        if self._given > _RATIO_FROM and self._given > MOST_RATIO * max(1, self._file.tell()):
            raise ValueError(f"it grows to more than {MOST_RATIO} times its size")
        return data

    def close(self) -> None:
        """Close both."""
        self._stream.close()
        self._file.close()

    def __enter__(self) -> "_Bounded":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def whole_file(path: str, file: int, most: int) -> Piece:
    """A file as one piece.

    Raises:
        BadInput: it cannot be read, or has more bytes than a part may have.
    """
    with open_input(path) as stream:
        data = read(stream, path, Cursor(file), most + 1)
        while len(data) <= most and (more := read(stream, path, Cursor(file), most + 1)):
            data += more
    if len(data) > most:
        raise BadInput(f"{path} is larger than the {most} bytes a part may have")
    return Piece(data, 1, Cursor(file), Cursor(file + 1))


def read(stream: BinaryIO, path: str, cursor: Cursor, size: int) -> bytes:
    """The next bytes of an input.

    Raises:
        BadInput: it is damaged, cut short or too large when decompressed.
    """
    try:
        return stream.read(size)
    except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise BadInput(f"{path}: after record {cursor.record - 1}: {error}") from None


def skip(stream: BinaryIO, path: str, offset: int) -> None:
    """Pass over what was loaded already."""
    if isinstance(stream, _Bounded):
        while offset > 0:
            block = read(stream, path, Cursor(), min(offset, BLOCK))
            if not block:
                raise BadInput(f"{path} is shorter than it was")
            offset -= len(block)
    else:
        stream.seek(offset)
