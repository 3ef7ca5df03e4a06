"""Gaps in an output: where the lines of failed records would stand, in input order.

While results are written in order, a collector notes a gap for each record that failed, and for
each part without a result. When such parts were retried, their lines are put there: the output is
copied to a draft with the new lines in their places, and the draft takes its place. Knows no
server.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

_COPY = 2**20


class Gap(NamedTuple):
    """The place of a part's result; with ``record``, of that record's alone."""

    part: int
    record: int
    #: Bytes of the output before it, as they were before compression.
    offset: int


class Filling(NamedTuple):
    """What is put into a gap, and what is still missing of it: record, and bytes before it."""

    lines: bytes
    #: A program made the lines: not even a newline is added to them.
    is_verbatim: bool = False
    missing: tuple[tuple[int, int], ...] = ()


#: Returns what goes into a gap. None: nothing, and the gap stays. An empty filling closes it.
Fill = Callable[[Gap], Filling | None]


def gaps_beside(path: Path, request_id: str) -> Path:
    """Return where the gaps of an output are kept if there is no folder for them."""
    return path.with_name(f".{path.name}.gaps-{request_id}")


class GapFile:
    """Keeps the gaps of one output in files ``PLACE.1``, ``PLACE.2``, one for each filling.

    The collector commits which of them counts, in the step in which it commits the output.
    """

    def __init__(self, place: Path) -> None:
        self._place = place

    def read(self, generation: int, before: int) -> list[Gap] | None:
        """Return the gaps of parts before that number; None where there is no such file.

        Later gaps were noted and not committed: they are taken out of the file.
        """
        path = self._path(generation)
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except OSError:
            return None
        found = [_gap_of_line(line) for line in lines]
        kept = [gap for gap in found if gap and gap.part < before]
        if len(kept) < len(found):
            self.write(generation, kept)
        return kept

    def write(self, generation: int, gaps: Iterable[Gap]) -> None:
        """Write the file, in one step.

        Raises:
            OSError: it cannot be written.
        """
        path = self._path(generation)
        draft = path.with_name(f"{path.name}.new")
        _write_gaps(draft, gaps, "wb")
        draft.replace(path)

    def add(self, generation: int, gaps: Iterable[Gap]) -> None:
        """Add gaps that come after all others.

        Raises:
            OSError: they cannot be written.
        """
        _write_gaps(self._path(generation), gaps, "ab")

    def remove_others(self, generation: int) -> None:
        """Delete all files but that one; with 0, all of them."""
        name = self._place.name
        for path in self._place.parent.glob("*"):
            number = path.name.removeprefix(f"{name}.").removesuffix(".new")
            is_ours = path.name.startswith(f"{name}.") and number.isdigit()
            if is_ours and path != self._path(generation):
                with suppress(OSError):
                    path.unlink()

    def _path(self, generation: int) -> Path:
        return self._place.with_name(f"{self._place.name}.{generation}")


def _write_gaps(path: Path, gaps: Iterable[Gap], mode: str) -> None:
    with path.open(mode) as file:
        file.write(b"".join(b"%d %d %d\n" % gap for gap in gaps))
        file.flush()
        os.fsync(file.fileno())


def _gap_of_line(line: bytes) -> Gap | None:
    """Return the gap of a line; None for one that was not written to its end."""
    words = line.split()
    is_whole = line.endswith(b"\n") and len(words) == len(Gap._fields)
    return Gap(*map(int, words)) if is_whole and all(map(bytes.isdigit, words)) else None


class GapSource(Protocol):
    """The output as it is, decompressed."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, perhaps fewer than that many; none at the end."""


class GapFiller:
    """Copies an output with new lines in its gaps. ``gaps`` and ``last`` are for the copy."""

    def __init__(self, source: GapSource, size: int, head: int) -> None:
        """``size``: of the whole source. ``head``: a header of so many bytes comes before all."""
        self._source = source
        self._size = size
        self._head = head
        self._read = self._written = 0
        #: The gaps that the copy has.
        self.gaps: list[Gap] = []
        #: The last byte of the copy so far.
        self.last = b""

    def copy(self, gaps: Iterable[Gap], fill: Fill) -> Iterator[bytes]:
        """Yield the copy. The gaps come in the order of the output."""
        for gap in gaps:
            yield from map(self._noted, self._up_to(max(gap.offset, self._head)))
            if (filling := fill(gap)) is None:
                self.gaps.append(gap._replace(offset=self._written))
                continue
            lines, skipped = self._fitted(filling)
            begin = self._written + skipped
            self.gaps += [Gap(gap.part, *(n, begin + at)) for n, at in filling.missing]
            if lines:
                yield self._noted(lines)
        yield from map(self._noted, self._up_to(self._size))

    def _up_to(self, offset: int) -> Iterator[bytes]:
        while self._read < offset:
            data = self._source.read(min(_COPY, offset - self._read))
            if not data:
                raise EOFError("the output is shorter than it was")
            self._read += len(data)
            yield data

    def _noted(self, data: bytes) -> bytes:
        self._written += len(data)
        self.last = data[-1:]
        return data

    def _fitted(self, filling: Filling) -> tuple[bytes, int]:
        """Return the lines, apart from their neighbours; and how many bytes were put before them.

        The last line of a file may have no newline. What was written after it began with one.
        """
        lines = filling.lines
        if filling.is_verbatim or not lines:
            return lines, 0
        is_end = self._read >= self._size
        if self.last in (b"", b"\n"):
            return lines if is_end or lines.endswith(b"\n") else lines + b"\n", 0
        return b"\n" + (lines if is_end else lines.removesuffix(b"\n")), 1
