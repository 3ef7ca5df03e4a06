"""What the slots of a process have done, counted where its parent can see it.

Every slot counts in words of its own, one row for each handler, so no two threads write
the same word; and the memory outlives the process, so nothing that was counted is lost
when it is killed. These are counts of work done here: what a request has finished is
counted by the server, exactly.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

#: Handlers that are counted one by one; those beyond are counted together.
MOST_HANDLERS = 64
#: Upper bounds (s) of the classes that durations of parts are sorted into; the last is open.
BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0)

DONE, FAILED, RETRIED, RECORDS_DONE, RECORDS_FAILED, RAN_US, _FIRST = range(7)
_ROW = _FIRST + len(BOUNDS_S) + 1
#: Words that a slot needs.
WORDS = _ROW * MOST_HANDLERS

Row = tuple[int, ...]
NOTHING: Row = (0,) * _ROW


class Tally:
    """The counts of one process's slots, in the words it is given."""

    def __init__(self, words: memoryview, slots: int) -> None:
        self._words = words
        self._slots = slots

    def count(self, slot: int, handler: int, what: int, number: int = 1) -> None:
        """Add to one of a handler's counts."""
        self._words[self._row(slot, handler) + what] += number

    def ran(self, slot: int, handler: int, took: Sequence[float]) -> None:
        """Parts were run, each for so many seconds."""
        row = self._row(slot, handler)
        self._words[row + RAN_US] += int(sum(took) * 1e6)
        if took and max(took) <= BOUNDS_S[0]:
            self._words[row + _FIRST] += len(took)
            return
        for seconds in took:
            self._words[row + _FIRST + bisect_left(BOUNDS_S, seconds)] += 1

    def rows(self, handlers: int) -> list[Row]:
        """Of each handler what all slots have done."""
        return [self._sum(handler) for handler in range(min(handlers, MOST_HANDLERS))]

    def _sum(self, handler: int) -> Row:
        total = NOTHING
        for slot in range(self._slots):
            row = self._row(slot, handler)
            total = add(total, tuple(self._words[row : row + _ROW]))
        return total

    @staticmethod
    def _row(slot: int, handler: int) -> int:
        return slot * WORDS + min(handler, MOST_HANDLERS - 1) * _ROW


def add(first: Row, second: Row) -> Row:
    """Both together."""
    return tuple(map(sum, zip(first, second, strict=True)))


def add_all(rows: dict[str, Row], more: Mapping[str, Row]) -> None:
    """Add the rows of handlers to what is there, by name."""
    for name, row in more.items():
        rows[name] = add(rows.get(name, NOTHING), row)


def parts(row: Row) -> int:
    """Parts that came to some end, also one that is tried again."""
    return row[DONE] + row[FAILED] + row[RETRIED]


def classes(row: Row) -> Sequence[int]:
    """Parts by how long they ran, one number for each of ``BOUNDS_S`` and one for longer."""
    return row[_FIRST:]
