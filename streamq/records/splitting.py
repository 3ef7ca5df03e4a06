"""Parts out of inputs, at record boundaries, in constant memory. Knows no server.

A part holds the raw bytes of whole records. So all parts together are the input, byte for byte,
without a byte order mark at its beginning. The cursor after a part tells where to go on: file,
byte, record.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import closing
from itertools import accumulate

import msgspec

from streamq.model import CHUNK_BYTES, CHUNK_PARTS, MAX_PART, Spec
from streamq.records import about
from streamq.records.boundaries import Mask, blank_lines, mask_of
from streamq.records.inputs import MARK, BadInput, Input, open_input

#: At least so many bytes are read at once.
BLOCK = 2**20


class Cursor(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a load has come: the next byte and the next record of a file."""

    file: int = 0
    offset: int = 0
    record: int = 1
    #: Digest of all bytes that were taken from standard input, which cannot be read again.
    digest: str = ""


class PartSize(msgspec.Struct, frozen=True):
    """How large parts are: whole records up to so many bytes, or so many records."""

    bytes: int = 256 * 1024
    records: int = 0
    #: No part, and so no record, may have more bytes.
    most: int = 2**20


class Chunk(msgspec.Struct):
    """Parts that one call to the server appends, and the cursor after them."""

    payloads: list[bytes]
    #: For each part the text that ``records/about.py`` makes.
    abouts: list[bytes]
    records: int
    size: int
    end: Cursor

    def add(self, other: "Chunk") -> None:
        """Append the parts of the chunk that follows."""
        self.payloads += other.payloads
        self.abouts += other.abouts
        self.records += other.records
        self.size += other.size
        self.end = other.end

    def has_room_for(self, other: "Chunk") -> bool:
        """Return whether one call to the server can carry both."""
        parts = len(self.payloads) + len(other.payloads)
        return parts <= CHUNK_PARTS and self.size + other.size <= CHUNK_BYTES


def split(source: Input, spec: Spec, size: PartSize, start: Cursor) -> Iterator[Chunk]:
    """Yield the rest of an input, which stands at the cursor, in chunks of parts.

    Raises:
        BadInput: it is damaged, a record is too long, or a quote is not closed.
    """
    rest, cursor, is_end, mask = b"", start, False, mask_of(spec)
    wanted = 0 if size.records else size.bytes + 1
    cut = _cut_by_records if size.records else _cut_by_bytes
    while not is_end:
        source.record = cursor.record
        data, is_end = _fill(source, rest, wanted)
        seen = mask(data)
        total = len(data)
        if is_end and len(seen) < total:
            # The input ends inside a quote. The records before that quote are good.
            seen = seen[: seen.rfind(b"\n") + 1]
            total = len(seen)
        ends, counts = cut(seen, total, size, is_end)
        for chunk in _chunks(data, ends, counts, cursor, spec):
            yield chunk
            cursor = chunk.end
        rest = data[ends[-1] :] if ends else data
        if rest and (is_end or len(rest) > size.most):
            raise _stuck(source.name, cursor, size, is_open=len(rest) <= size.most)


def _fill(source: Input, rest: bytes, wanted: int) -> tuple[bytes, bool]:
    """Return ``rest`` and at least ``wanted`` bytes in all; and whether the input is at its end."""
    blocks, have = [rest], len(rest)
    while True:
        block = source.read(max(BLOCK, 4 * wanted))
        blocks.append(block)
        have += len(block)
        if not block or have >= wanted:
            return b"".join(blocks), not block


def _cut_by_bytes(
    seen: bytes, total: int, size: PartSize, is_end: bool
) -> tuple[list[int], list[int]]:
    """Return where parts end, and how many records each has. A part that may still grow is left.

    ``total`` bytes were read. Only the records in ``seen`` are known to be complete.
    """
    ends: list[int] = []
    counts: list[int] = []
    begin = 0
    while begin < total:
        is_rest = begin + size.bytes >= total
        if is_rest and not is_end:
            break
        end = total if is_rest else seen.rfind(b"\n", begin, begin + size.bytes) + 1
        # A single record may be larger than the wanted size of a part.
        end = end or seen.find(b"\n", begin, begin + size.most) + 1
        if not end and is_end and total - begin <= size.most:
            end = total
        if not end:
            break
        ends.append(end)
        counts.append(seen.count(b"\n", begin, end) + (seen[end - 1 : end] != b"\n"))
        begin = end
    return ends, counts


def _cut_by_records(
    seen: bytes, total: int, size: PartSize, is_end: bool
) -> tuple[list[int], list[int]]:
    """Return the same for parts of so many records each, or as many as fit."""
    lengths = [len(line) + 1 for line in seen.split(b"\n")]
    lengths[-1] -= 1
    if not is_end or not lengths[-1]:
        lengths.pop()
    begins = list(accumulate(lengths, initial=0))
    if size.records == 1 and max(lengths, default=0) <= size.most:
        return begins[1:], [1] * len(lengths)
    ends: list[int] = []
    counts: list[int] = []
    first = 0
    while first < len(lengths):
        last = first + size.records
        if last > len(lengths) and not is_end and total - begins[first] <= size.most:
            break
        fitting = bisect_right(begins, begins[first] + size.most) - 1
        last = min(last, len(lengths), fitting)
        if last == first:
            break
        ends.append(begins[last])
        counts.append(last - first)
        first = last
    return ends, counts


def _chunks(
    data: bytes, ends: list[int], counts: list[int], start: Cursor, spec: Spec
) -> Iterator[Chunk]:
    """Yield the parts that end there, in chunks that one call to the server can carry."""
    cursor, first, begin = start, 0, 0
    while first < len(ends):
        most = min(len(ends), first + CHUNK_PARTS)
        last = min(most, bisect_left(ends, begin + CHUNK_BYTES, first, most) + 1)
        here, each = ends[first:last], counts[first:last]
        numbers = list(accumulate(each, initial=cursor.record))
        cursor = Cursor(start.file, cursor.offset + here[-1] - begin, numbers[-1])
        payloads = [data[one:two] for one, two in zip([begin, *here], here, strict=False)]
        abouts = [about.of_lines(n, start.file, at) for n, at in zip(each, numbers, strict=False)]
        records = sum(each)
        if spec.format == "jsonl":
            for index, payload in enumerate(payloads):
                if blank := blank_lines(payload):
                    lines = each[index]
                    first_line = numbers[index]
                    abouts[index] = about.of_lines(lines - blank, start.file, first_line, lines)
                    records -= blank
        yield Chunk(payloads, abouts, records, here[-1] - begin, cursor)
        first, begin = last, here[-1]


def _stuck(name: str, cursor: Cursor, size: PartSize, *, is_open: bool) -> BadInput:
    if is_open:
        return BadInput(f"{name}: record {cursor.record}: a quote is not closed")
    return BadInput(
        f"{name}: record {cursor.record}, at byte {cursor.offset}, is longer than the "
        f"{size.most} bytes a part may have"
    )


def whole(source: Input, file: int, most: int) -> Chunk:
    """Return an input as one part.

    Raises:
        BadInput: the input cannot be read, or has more bytes than a part may have.
    """
    blocks, size = [], 0
    while size <= most and (block := source.read(max(BLOCK, most + 1))):
        blocks.append(block)
        size += len(block)
    if size > most:
        raise BadInput(f"{source.name} is larger than the {most} bytes a part may have")
    return Chunk([b"".join(blocks)], [about.of_whole_file(file)], 1, size, Cursor(file + 1))


def first_record(source: Input, mask: Mask, most: int) -> bytes:
    """Return the first record, with a byte order mark and its line ending, and un-read it."""
    data, block = b"", b"_"
    while block and len(data) <= most:
        text = data.removeprefix(MARK)
        if end := mask(text).find(b"\n") + 1:
            source.unread(data)
            return data[: len(data) - len(text) + end]
        block = source.read(BLOCK)
        data += block
    source.unread(data)
    text = data.removeprefix(MARK)
    if len(data) > most or len(mask(text)) < len(text):
        raise _stuck(source.name, Cursor(), PartSize(most=most), is_open=len(data) <= most)
    return data


def header_of(name: str, spec: Spec) -> bytes:
    """Return the first row of a CSV, with its line ending."""
    with closing(open_input(name)) as source:
        return first_record(source, mask_of(spec), MAX_PART)
