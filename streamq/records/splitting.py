"""Parts out of inputs, at record boundaries, in constant memory. Knows no server.

A part holds the raw bytes of whole records. So all parts together are the input, byte for byte,
without a byte order mark at its beginning. The cursor after a part tells where to go on: file,
byte, record.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec

from streamq.model import CHUNK_BYTES, CHUNK_PARTS, MAX_PART, Spec
from streamq.records import about
from streamq.records.boundaries import (
    Mask,
    blank_lines,
    empty_rows,
    ended_by_newlines,
    mask_of_boundaries,
)
from streamq.records.inputs import COMPRESSED, BadInput, Input, open_input
from streamq.records.sizes import PartSize, Step
from streamq.records.strange import HEAD, strangeness_of

#: How many bytes are read at once, at least.
BLOCK = 2**20
#: Up to this many records, their ends are looked for one by one.
_FEW = 64


class Cursor(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a load has come: the next byte and the next line of a file."""

    file: int = 0
    offset: int = 0
    #: The next line. In a CSV a row may have several of them.
    record: int = 1
    #: How many blank lines, which are no records, were passed in all files.
    blank: int = 0
    #: Digest of all bytes that were taken from standard input, which cannot be read again.
    digest: str = ""
    #: Whether bytes are counted after decompression or decoding, so not as they were sent.
    is_unpacked: bool = False

    @property
    def text(self) -> str:
        """The cursor as the server keeps it; "" at the beginning of the first file."""
        return "" if self == Cursor() else msgspec.json.encode(self).decode()


def blank_lines_before_cursor(cursor: str) -> int:
    """Return how many blank lines were passed, by a cursor as the server keeps it."""
    try:
        return msgspec.json.decode(cursor, type=Cursor).blank if cursor else 0
    except msgspec.DecodeError:
        return 0


def records_in_all(records: int, cursor: str, sizes: Sequence[int]) -> float | None:
    """Estimate how many records there are, by how many came of the bytes that were read.

    ``sizes``: of each file, as ``sizes_of_inputs`` returns them. None: it cannot be told.
    """
    try:
        place = msgspec.json.decode(cursor, type=Cursor)
    except msgspec.DecodeError:
        return None
    loaded = sum(sizes[: place.file]) + place.offset
    return records * sum(sizes) / loaded if loaded and sizes else None


def sizes_of_inputs(spec: Spec) -> list[int]:
    """Return the bytes of each file; none if one is encoded, compressed, or not on this machine."""
    if spec.encoding or any(Path(name).suffix.lower() in COMPRESSED for name in spec.files):
        return []
    try:
        return [Path(name).stat().st_size for name in spec.files]
    except OSError:
        return []


class Chunk(msgspec.Struct):
    """Parts that one call to the server appends, and the cursor after them."""

    payloads: list[bytes]
    #: For each part the text that ``records/about.py`` makes.
    abouts: list[bytes]
    records: int
    size: int
    end: Cursor
    #: Of parts by reference: how many bytes they refer to.
    input_size: int = 0

    def add(self, other: "Chunk") -> None:
        """Append the parts of the chunk that follows."""
        self.payloads += other.payloads
        self.abouts += other.abouts
        self.records += other.records
        self.size += other.size
        self.input_size += other.input_size
        self.end = other.end

    def has_room_for(self, other: "Chunk") -> bool:
        """Return whether one call to the server can carry both."""
        parts = len(self.payloads) + len(other.payloads)
        return parts <= CHUNK_PARTS and self.size + other.size <= CHUNK_BYTES


def split_input(source: Input, spec: Spec, size: PartSize, start: Cursor) -> Iterator[Chunk]:
    """Yield the rest of an input, which stands at the cursor, in chunks of parts.

    Raises:
        BadInput: it is damaged, a record is too long, or a quote is not closed.
    """
    rest, cursor, is_end, mask = b"", start, False, mask_of_boundaries(spec)
    wanted = 0 if size.records else size.bytes + 1
    cut = _cut_by_records if size.records else _cut_by_bytes
    while not is_end:
        source.record = cursor.record
        data, is_end = _fill_buffer_to_split(source, rest, wanted)
        data, seen, total = _masked_data(data, mask, spec, is_end)
        ends, counts = cut(seen, total, size, is_end)
        for chunk in _chunks_of_parts(data, seen, ends, counts, cursor, spec):
            yield chunk
            cursor = chunk.end
        rest = data[ends[-1] :] if ends else data
        if rest and (is_end or len(rest) > size.most):
            raise _record_too_long(source.name, cursor, size, is_open=len(rest) <= size.most)


def split_by_steps(
    source: Input, spec: Spec, size: PartSize, start: Cursor, steer: Callable[[], Step]
) -> Iterator[Chunk]:
    """Yield the same as ``split_input``, in parts of as many records as ``steer`` says each time.

    Raises:
        BadInput: as ``split_input``.
    """
    rest, cursor, is_end, mask = b"", start, False, mask_of_boundaries(spec)
    while not is_end:
        source.record = cursor.record
        data, is_end = _fill_buffer_to_split(source, rest, 0)
        data, seen, total = _masked_data(data, mask, spec, is_end)
        begin, ends = 0, [0]
        while ends and begin < total:
            ends, counts = _cut_next_parts(seen, begin, total, size, steer(), is_end)
            for chunk in _chunks_of_parts(data, seen, ends, counts, cursor, spec, begin):
                yield chunk
                cursor = chunk.end
            begin = ends[-1] if ends else begin
        rest = data[begin:]
        if rest and (is_end or len(rest) > size.most):
            raise _record_too_long(source.name, cursor, size, is_open=len(rest) <= size.most)


def _masked_data(data: bytes, mask: Mask, spec: Spec, is_end: bool) -> tuple[bytes, bytes, int]:
    """Return the data, the same masked, and how many bytes of it can be cut into parts."""
    seen = mask(data)
    if spec.format == "csv":
        data, seen = ended_by_newlines(data, seen, is_end=is_end)
    if is_end and len(seen) < len(data):
        # The input ends inside a quote. The records before that quote are good.
        seen = seen[: seen.rfind(b"\n") + 1]
        return data, seen, len(seen)
    return data, seen, len(data)


def _cut_next_parts(
    seen: bytes, begin: int, total: int, size: PartSize, step: Step, is_end: bool
) -> tuple[list[int], list[int]]:
    """Return where the next parts end, and how many records each has; at most those of a step."""
    ends: list[int] = []
    counts: list[int] = []
    while begin < total and len(ends) < step.parts:
        end, count = _cut_next_part(seen, begin, total, size, step.records, is_end)
        if not end:
            break
        ends.append(end)
        counts.append(count)
        begin = end
    return ends, counts


def _cut_next_part(
    seen: bytes, begin: int, total: int, size: PartSize, records: int, is_end: bool
) -> tuple[int, int]:
    """Return where a part of so many records ends, and how many it has; 0 if it may still grow."""
    is_all = begin + size.bytes >= total
    if is_all and is_end:
        fitting = total
    else:
        # A single record may be larger than the wanted size of a part.
        fitting = seen.rfind(b"\n", begin, begin + size.bytes) + 1
        fitting = fitting or seen.find(b"\n", begin, begin + size.most) + 1
    if not fitting and is_end and total - begin <= size.most:
        fitting = total
    if not fitting:
        return 0, 0
    # To count the records of a whole part takes longer than to find the end of a few.
    count = records + 1 if records <= _FEW else _count_records(seen, begin, fitting)
    if count > records:
        end = begin
        for found in range(records):
            if end == fitting:
                count = found
                break
            end = seen.find(b"\n", end, fitting) + 1 or fitting
        else:
            return end, records
    if count < records and is_all and not is_end:
        return 0, 0
    return fitting, count


def _count_records(seen: bytes, begin: int, end: int) -> int:
    """Return how many records are there; the last may have no line ending."""
    return seen.count(b"\n", begin, end) + (seen[end - 1 : end] != b"\n")


def _fill_buffer_to_split(source: Input, rest: bytes, wanted: int) -> tuple[bytes, bool]:
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
        counts.append(_count_records(seen, begin, end))
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


def _chunks_of_parts(
    data: bytes,
    seen: bytes,
    ends: list[int],
    counts: list[int],
    start: Cursor,
    spec: Spec,
    begin: int = 0,
) -> Iterator[Chunk]:
    """Yield the parts that end there, in chunks that one call to the server can carry."""
    cursor, first = start, 0
    while first < len(ends):
        most = min(len(ends), first + CHUNK_PARTS)
        last = min(most, bisect_left(ends, begin + CHUNK_BYTES, first, most) + 1)
        here, each = ends[first:last], counts[first:last]
        pairs = list(zip([begin, *here], here, strict=False))
        lines, blank = _number_of_lines(data, seen, pairs, each, spec)
        numbers = list(accumulate(lines, initial=cursor.record))
        cursor = Cursor(
            start.file,
            cursor.offset + here[-1] - begin,
            numbers[-1],
            blank=cursor.blank + sum(blank),
        )
        payloads = [data[one:two] for one, two in pairs]
        abouts = [
            about.about_of_lines(count - empty, start.file, at, height)
            for count, empty, at, height in zip(each, blank, numbers, lines, strict=False)
        ]
        yield Chunk(payloads, abouts, sum(each) - sum(blank), here[-1] - begin, cursor)
        first, begin = last, here[-1]


def _number_of_lines(
    data: bytes, seen: bytes, pairs: list[tuple[int, int]], counts: list[int], spec: Spec
) -> tuple[list[int], list[int]]:
    """Return how many lines each part has, and how many of its records are blank: no records."""
    if spec.format == "jsonl":
        return counts, [blank_lines(data[begin:end]) for begin, end in pairs]
    if spec.format != "csv":
        return counts, [0] * len(pairs)
    lines = counts if seen is data else [_count_records(data, begin, end) for begin, end in pairs]
    return lines, [empty_rows(seen[begin:end]) for begin, end in pairs]


def _record_too_long(name: str, cursor: Cursor, size: PartSize, *, is_open: bool) -> BadInput:
    if is_open:
        return BadInput(f"{name}: line {cursor.record}: a quote is not closed")
    return BadInput(
        f"{name}: line {cursor.record}, at byte {cursor.offset}, is longer than the "
        f"{size.most} bytes a part may have; with --by-reference and a larger --bytes workers read "
        "it themselves"
    )


def input_as_one_part(source: Input, file: int, most: int) -> Chunk:
    """Return an input as one part.

    Raises:
        BadInput: the input cannot be read, or has more bytes than a part may have.
    """
    blocks, size = [], 0
    while size <= most and (block := source.read(max(BLOCK, most + 1))):
        blocks.append(block)
        size += len(block)
    if size > most:
        raise BadInput(
            f"{source.name} is larger than the {most} bytes a part may have: with --by-reference "
            "workers read it themselves"
        )
    return Chunk([b"".join(blocks)], [about.about_of_whole_file(file)], 1, size, Cursor(file + 1))


class Beginning(NamedTuple):
    """How a CSV begins: its header, and how many bytes and lines stand before and in it."""

    header: bytes
    size: int
    lines: int


def beginning_of_csv(source: Input, spec: Spec, most: int, *, has_header: bool) -> Beginning:
    """Return the beginning of a CSV: rows that are left out, empty rows, and its header.

    The next read returns all of it again.

    Raises:
        BadInput: a row of it has more bytes than that, or a quote in it is not closed.
    """
    mask, text = mask_of_boundaries(spec), source.mark()
    size, lines, left = len(text), 0, spec.skip_rows
    source.skip(size)
    while True:
        row = first_record(source, mask, most) if left or has_header else b""
        if not row or (not left and row.strip(b"\r\n")):
            break
        left = max(0, left - 1)
        source.skip(len(row))
        text, lines = text + row, lines + _count_records(row, 0, len(row))
    source.unread(text)
    header = row if has_header else b""
    height = _count_records(header, 0, len(header)) if header else 0
    return Beginning(header, len(text) + len(header), lines + height)


def first_record(source: Input, mask: Mask, most: int) -> bytes:
    """Return the first row of a CSV, with its line ending, and un-read it."""
    data, block = b"", b"_"
    while block and len(data) <= most:
        block = source.read(BLOCK)
        data += block
        mended, seen = ended_by_newlines(data, mask(data), is_end=not block)
        if end := seen.find(b"\n") + 1:
            source.unread(data)
            return mended[:end]
    source.unread(data)
    if len(data) > most or len(mask(data)) < len(data):
        raise _record_too_long(
            source.name, Cursor(), PartSize(most=most), is_open=len(data) <= most
        )
    return data


def header_of_csv(name: str, spec: Spec) -> bytes:
    """Return the header of a CSV, with its line ending."""
    with closing(open_input(name, spec.encoding)) as source:
        refuse_to_split_strange(source, spec)
        return beginning_of_csv(source, spec, MAX_PART, has_header=True).header


def refuse_to_split_strange(source: Input, spec: Spec) -> None:
    """Raise BadInput if an input from which nothing was read yet holds no records."""
    if why := strangeness_of(source.name, source.head(HEAD), spec.format):
        raise BadInput(f"{source.name}: {why}")
