"""Puts results of retried parts in their place in an output that was written in order."""

from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO, NamedTuple

import msgspec

from streamq.errors import UNREADABLE
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import part_of_field
from streamq.records import encoding as codec
from streamq.records.encoding import Item
from streamq.records.gaps import Filling, Gap, GapFile, GapFiller
from streamq.records.inputs import Input
from streamq.records.writer import Writer

#: Makes a writer for lines that stand alone, with the columns that the output has.
MakeWriter = Callable[[], Writer]


class _Record(msgspec.Struct):
    """The number of a failed record (0: the whole part). Nothing else of a failure is read."""

    record: int = 0


class _PartInPlace(NamedTuple):
    """The outcomes of a part's records, of all of its runs."""

    items: list[Item]
    endings: bytes

    def line(self, record: int, writer: Writer, part: int) -> bytes:
        """Return the line of a record; nothing where it has none."""
        items, endings = self.items[record - 1 : record], self.endings[record - 1 : record]
        return writer.line(items[0], endings, part, record) if items else b""


class InPlace:
    """Knows the gaps of one output, and fills them."""

    def __init__(self, protocol: Protocol, request_id: str, file: GapFile) -> None:
        self._protocol = protocol
        self._id = request_id
        self._file = file
        #: Which file of gaps counts; 0 while none is kept.
        self.generation = 0
        self._gaps: list[Gap] = []
        self._parts: set[int] = set()

    def begin(self, generation: int, before: int) -> None:
        """Go on with gaps that were committed, of parts before that number.

        0 stands for an output that has nothing yet. Where the file is gone no gaps are known, and
        none are noted any more.
        """
        if generation:
            found = self._file.read(generation, before)
        else:
            found, generation = [], 1
            self._file.write(generation, found)
        self._file.remove_others(0 if found is None else generation)
        self.generation = 0 if found is None else generation
        self._keep(found or [])

    def note(self, gaps: list[Gap]) -> None:
        """Keep gaps that come after all others. They count when the output is committed."""
        if gaps:
            self._file.add(self.generation, gaps)
            self._gaps += gaps
            self._parts |= {gap.part for gap in gaps}

    def has(self, part: int) -> bool:
        """Return whether a result of the part has a place."""
        return part in self._parts

    def gaps_of(self, part: int, result: bytes, make: MakeWriter, offset: int) -> list[Gap]:
        """Return the gaps of a part some of whose records may have failed.

        ``offset``: where its lines begin.
        """
        failed = self._failed([part]).get(part, set())
        return [
            Gap(part, record, offset + at)
            for record, at in _records_failed_in_place(
                _PartInPlace(*codec.decode_result(result)), failed, make(), part
            )
        ]

    def fill(
        self, results: Mapping[str, bytes], make: MakeWriter, packing: str, size: int, head: int
    ) -> "OutputFilledInPlace":
        """Get ready to put results, by their fields, into the gaps of an output of that size."""
        return OutputFilledInPlace(
            self._gaps,
            _outcomes_merged_in_place(results),
            self._failed(_parts_of_results_in_place(results)),
            make,
            packing,
            size,
            head,
        )

    def prepare(self, filled: "OutputFilledInPlace") -> int:
        """Write down the gaps that the filled output has. Return which file will count."""
        self._file.write(self.generation + 1, filled.gaps)
        return self.generation + 1

    def filled(self, filled: "OutputFilledInPlace") -> None:
        """Go on with what ``prepare`` has written: the output is committed."""
        self.generation += 1
        self._keep(filled.gaps)
        self._file.remove_others(self.generation)

    def end(self, *, is_complete: bool) -> None:
        """Delete the gaps if no failure is left whose retry could fill one of them."""
        if is_complete and not self._gaps:
            self._file.remove_others(0)

    def _keep(self, gaps: list[Gap]) -> None:
        self._gaps = gaps
        self._parts = {gap.part for gap in gaps}

    def _failed(self, parts: list[int]) -> dict[int, set[int]]:
        """Return the failed records of those parts that have any; 0 for the whole part."""
        texts = self._protocol.failures_of(self._id, parts)
        return {
            part: _failed_records_in_place(text)
            for part, text in zip(parts, texts, strict=True)
            if text is not None
        }


class OutputFilledInPlace:
    """A copy of an output with results in their places, as it is written."""

    def __init__(
        self,
        gaps: list[Gap],
        parts: dict[int, _PartInPlace],
        failed: dict[int, set[int]],
        make: MakeWriter,
        packing: str,
        size: int,
        head: int,
    ) -> None:
        self._before = gaps
        self._parts = parts
        self._failed = failed
        self._make = make
        self._packing = packing
        self._size = size
        self._head = head
        #: Of the copy: its gaps, its size before compression, its last byte, its columns, and how
        #: many bytes of header it begins with.
        self.gaps: list[Gap] = []
        self.size = 0
        self.last = b""
        self.header: list[str] | None = None
        self.head = head

    def copy(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the copy of the open file."""
        source = Input("the output", file) if self._packing else file
        filler = GapFiller(source, self._size, self._head)
        for block in filler.copy(self._before, self._filling):
            self.size += len(block)
            yield block
        self.gaps, self.last = filler.gaps, filler.last

    def _filling(self, gap: Gap) -> Filling | None:
        found, failed = self._parts.get(gap.part), self._failed.get(gap.part, set())
        if found is None:
            return None
        writer = self._writer()
        if gap.record:
            line = found.line(gap.record, writer, gap.part)
            return Filling(line) if line or not failed & {0, gap.record} else None
        lines = writer.lines(codec.encode_result(found.items, found.endings), gap.part)
        if not self.header:
            self.header, self.head = writer.header, writer.head
        missing = tuple(_records_failed_in_place(found, failed, self._writer(), gap.part))
        lead = self.head if writer.head else 0
        is_verbatim = len(found.items) == 1 and codec.is_verbatim(found.items[0])
        return Filling(lines, is_verbatim, tuple((n, at + lead) for n, at in missing))

    def _writer(self) -> Writer:
        """Return a writer for lines that stand alone."""
        writer = self._make()
        if self.header:
            writer.header = self.header
        return writer


def _records_failed_in_place(
    found: _PartInPlace, failed: set[int], writer: Writer, part: int
) -> Iterator[tuple[int, int]]:
    """Yield the records that failed, and how many bytes of lines stand before each."""
    if not failed:
        return
    at = 0
    for number, item in enumerate(found.items, 1):
        if item is None and failed & {0, number}:
            yield number, at
        at += len(found.line(number, writer, part))


def _outcomes_merged_in_place(results: Mapping[str, bytes]) -> dict[int, _PartInPlace]:
    """Return the outcome of each part. A later run has only the records that failed before."""
    merged: dict[int, _PartInPlace] = {}
    for field in sorted(results, key=_run_of_part_in_place):
        items, endings = codec.decode_result(results[field])
        if (before := merged.get(part_of_field(field))) and len(before.items) == len(items):
            pairs = zip(before.items, items, strict=True)
            items = [old if new is None else new for old, new in pairs]
        merged[part_of_field(field)] = _PartInPlace(items, endings)
    return merged


def _run_of_part_in_place(field: str) -> int:
    return int(field.partition(".")[2] or 0)


def _parts_of_results_in_place(results: Mapping[str, bytes]) -> list[int]:
    return sorted({part_of_field(field) for field in results})


def _failed_records_in_place(text: bytes) -> set[int]:
    try:
        return {each.record for each in msgspec.json.decode(text, type=list[_Record])}
    except UNREADABLE:
        return {0}
