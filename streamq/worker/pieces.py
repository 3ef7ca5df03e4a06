"""Chooses the order in which the records of a part are run, and how many at a time.

Most parts are one piece, in their order. After a worker died of a part, its records are run in
pieces of a sixteenth. Before each piece the server is told of it, and of what the others came to.
When the worker dies again, the next one knows the piece, and runs that in smaller pieces, until it
is one record. A record of which ``poison`` workers have died is given up without being run, and the
others are run. So one deadly record among N costs ``poison + log16(N)`` workers, rounded up. A part
with many of them costs at most ``poison * (2 + log16(N)) + 1``; then all of it that has no outcome
is given up.
"""

from collections.abc import Iterator, Sequence

from streamq.model import Part
from streamq.worker import marks
from streamq.worker.marks import Late, MarkedRecords

#: The number of pieces in which records are run that may be deadly.
PIECES = 16


def most_deaths_of_piece(records: int, poison: int) -> int:
    """Return how many workers a part may cost before all that is left of it is given up."""
    factor, reach = 2, 1
    while reach < records:
        factor, reach = factor + 1, reach * PIECES
    return poison * factor


class Pieces:
    """The records of a part that have no outcome, in pieces to be run one after another."""

    def __init__(self, part: Part, left: Sequence[int], count: int) -> None:
        """``left``: the records without an outcome, from 0, of so many records of the part."""
        self._part = part
        mark = marks.read_mark(part) if count > 1 else None
        #: The record that took too long in an earlier attempt, if one did.
        self.late = mark if isinstance(mark, Late) and mark.index in left else None
        #: Whether the server is told of each piece before it is run.
        self.is_careful = part.crashes > 0 and count > 1
        begun = mark if isinstance(mark, MarkedRecords) and self.is_careful else None
        #: Records that are given up without being run, because workers died of them.
        self.deadly: list[int] = []
        #: Whether these are all that is left, because the part has cost too many workers.
        self.is_hopeless = self.is_careful and part.crashes > most_deaths_of_piece(
            part.records or count, part.poison
        )
        if self.is_hopeless:
            self.deadly = list(left)
        elif begun and begun.is_single and begun.deaths >= part.poison:
            self.deadly = [begun.start] if begun.start in left else []
        given_up = {*self.deadly}
        self._pieces = self._cut([each for each in left if each not in given_up], begun)

    def _cut(self, left: list[int], begun: MarkedRecords | None) -> list[tuple[list[int], int]]:
        """Return the pieces, each with how many workers died of it: those under suspicion first."""
        if not self.is_careful:
            if not self.late:
                return [(left, 0)]
            # The others have their turn before one that may take too long again.
            late = self.late.index
            return [([each for each in left if each != late], 0), ([late], 0)]
        if begun is None:
            return _records_in_pieces(left, 0)
        suspects = [each for each in left if begun.start <= each < begun.stop]
        others = [each for each in left if not begun.start <= each < begun.stop]
        return _records_in_pieces(
            suspects, begun.deaths if begun.is_single else 0
        ) + _records_in_pieces(others, 0)

    def drop(self, index: int) -> None:
        """Leave out a record that was given up."""
        for piece, _ in self._pieces:
            if index in piece:
                piece.remove(index)

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield each record, and before the first of a piece what the server is to be told."""
        for piece, deaths in self._pieces:
            # The outcomes of the others are kept before the one that took too long is run again.
            mark = b"" if self.late and piece == [self.late.index] else None
            if self.is_careful and piece:
                mark = marks.written_mark(
                    self._part, MarkedRecords(min(piece), max(piece) + 1, deaths)
                )
            for index in piece:
                yield index, mark
                mark = None


def _records_in_pieces(records: list[int], deaths: int) -> list[tuple[list[int], int]]:
    size = -(-len(records) // PIECES)
    return [(records[at : at + size], deaths) for at in range(0, len(records), size or 1)]
