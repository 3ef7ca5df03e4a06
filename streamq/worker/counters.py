"""What the slots of a process have done, counted where its parent can see it.

Every slot counts in words of its own, one row for each handler, so no two threads write
the same word; and the memory outlives the process, so nothing that was counted is lost
when it is killed. These are counts of work done here: what a request has finished is
counted by the server, exactly.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from streamq.telemetry.metrics import BOUNDS_S, CLASSES, Samples, Spread

#: Handlers that are counted one by one; those beyond are counted together.
MOST_HANDLERS = 64


class Times(NamedTuple):
    """Where in a row times of parts are: their sum, then how many there are of each class."""

    at: int
    #: What the sum counts, in a second: the longer the times, the less fine.
    units: int

    @property
    def end(self) -> int:
        """Where the next begins."""
        return self.at + 1 + CLASSES


DONE, FAILED, RETRIED, RECORDS_DONE, RECORDS_FAILED, _TIMES = range(6)
RAN = Times(_TIMES, 1_000_000)
#: Of first attempts: those in a backlog of days may be very many.
WAITED = Times(RAN.end, 1_000)
_ROW = WAITED.end
#: Words that a slot needs.
WORDS = _ROW * MOST_HANDLERS
_MOST = 2**63 - 1

Row = tuple[int, ...]
NOTHING: Row = (0,) * _ROW

_PART_STATES = {"done": DONE, "failed": FAILED, "retried": RETRIED}
_RECORD_STATES = {"done": RECORDS_DONE, "failed": RECORDS_FAILED}
_HISTOGRAMS = {
    "streamq_part_duration_seconds": RAN,
    "streamq_part_wait_seconds": WAITED,
}


class SlotCounters:
    """The counts of one process's slots, in the words it is given."""

    def __init__(self, words: memoryview, slots: int) -> None:
        self._words = words
        self._slots = slots

    def count(self, slot: int, handler: int, what: int, number: int = 1) -> None:
        """Add to one of a handler's counts."""
        self._words[self._row(slot, handler) + what] += number

    def observe(
        self, slot: int, handler: int, what: Times, took: Sequence[float], times: int = 1
    ) -> None:
        """Sort times of parts, in seconds; each is that of so many parts."""
        words, at = self._words, self._row(slot, handler) + what.at
        # A server's clock that was set far back makes a wait of decades.
        words[at] = min(_MOST, words[at] + int(sum(took) * times * what.units))
        first = at + 1
        if took and max(took) <= BOUNDS_S[0]:
            words[first] += len(took) * times
            return
        for seconds in took:
            words[first + bisect_left(BOUNDS_S, seconds)] += times

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


def times(row: Row, what: Times) -> tuple[Sequence[int], float]:
    """Parts, one number for each of ``BOUNDS_S`` and one for longer; and all their seconds."""
    return row[what.at + 1 : what.end], row[what.at] / what.units


def work_done(rows: Mapping[str, Row], told: Mapping[tuple[str, str], int]) -> Samples:
    """What was done by each handler, and parts by handler and state that are not in its row."""
    parts = Counter(told)
    for name, row in rows.items():
        parts.update({(name, state): row[word] for state, word in _PART_STATES.items()})
    samples: Samples = {
        "streamq_parts_total": [
            ({"handler": name, "state": state}, number)
            for (name, state), number in sorted(parts.items())
        ],
        "streamq_records_total": [
            ({"handler": name, "state": state}, row[word])
            for name, row in sorted(rows.items())
            for state, word in _RECORD_STATES.items()
        ],
    }
    for metric, what in _HISTOGRAMS.items():
        samples[metric] = [
            ({"handler": name}, Spread(*times(row, what))) for name, row in sorted(rows.items())
        ]
    return samples
