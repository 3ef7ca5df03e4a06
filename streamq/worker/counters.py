"""Counts what the slots of a process have done, where its parent can see it.

Every slot counts in words of its own, one row for each handler, so no two threads write the same
word. The memory outlives the process, so nothing that was counted is lost when the process is
killed. These are counts of the work done in this pool. What a request has finished is counted by
the server, exactly.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from streamq.queue.told import ToldTally
from streamq.records.sizes import Measured
from streamq.telemetry.metrics import BOUNDS_S, CLASSES, MetricSpread, Samples

#: Up to 64 handlers are counted one by one. Of more than that, all but the first 63 share a row.
MOST_HANDLERS = 64


class Times(NamedTuple):
    """Where in a row the times of parts are: their sum, then how many there are of each class."""

    at: int
    #: The sum counts so many units in a second; fewer for times that are longer.
    units: int

    @property
    def end(self) -> int:
        """Return where in the row the next begins."""
        return self.at + 1 + CLASSES


DONE, FAILED, RETRIED, RECORDS_DONE, RECORDS_FAILED, _TIMES = range(6)
RAN = Times(_TIMES, 1_000_000)
#: How long first attempts waited, in ms: in a backlog of days very many may have waited for days.
WAITED = Times(RAN.end, 1_000)
#: How many bytes the results of parts had.
RESULT_BYTES = WAITED.end
_ROW = RESULT_BYTES + 1
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
        """Sort times (s) into classes. Each of them is the time of ``times`` parts."""
        words, at = self._words, self._row(slot, handler) + what.at
        # A server's clock that was set back by years makes waits of years: the sum must still fit.
        words[at] = min(_MOST, words[at] + int(sum(took) * times * what.units))
        first = at + 1
        if took and max(took) <= BOUNDS_S[0]:
            words[first] += len(took) * times
            return
        for seconds in took:
            words[first + bisect_left(BOUNDS_S, seconds)] += times

    def rows(self, handlers: int) -> list[Row]:
        """Return for each handler what all slots have done."""
        return [self._sum(handler) for handler in range(min(handlers, MOST_HANDLERS))]

    def _sum(self, handler: int) -> Row:
        total = NOTHING
        for slot in range(self._slots):
            row = self._row(slot, handler)
            total = sum_of_rows(total, tuple(self._words[row : row + _ROW]))
        return total

    @staticmethod
    def _row(slot: int, handler: int) -> int:
        return slot * WORDS + min(handler, MOST_HANDLERS - 1) * _ROW


def sum_of_rows(first: Row, second: Row) -> Row:
    """Return the sum of both rows."""
    return tuple(map(sum, zip(first, second, strict=True)))


def sum_of_all_rows(rows: dict[str, Row], more: Mapping[str, Row]) -> None:
    """Add the rows of handlers to those in ``rows``, by name."""
    for name, row in more.items():
        rows[name] = sum_of_rows(rows.get(name, NOTHING), row)


def parts_counted(row: Row) -> int:
    """Return how many parts came to some end; those that are tried again count, too."""
    return row[DONE] + row[FAILED] + row[RETRIED]


def times_counted(row: Row, what: Times) -> tuple[Sequence[int], float]:
    """Return how many parts are in each class of ``BOUNDS_S`` and beyond, and their seconds."""
    return row[what.at + 1 : what.end], row[what.at] / what.units


def measured_records(row: Row | None, *, is_coroutine: bool, is_map: bool) -> Measured:
    """Return what is known of a handler's records, from what its processes have done."""
    row = row or NOTHING
    _, seconds = times_counted(row, RAN)
    # The time of a batch is counted at its end; records that failed in it may be counted before.
    records = row[RECORDS_DONE] + row[RECORDS_FAILED] if seconds else 0
    return Measured(records, seconds, row[RESULT_BYTES], is_coroutine=is_coroutine, is_map=is_map)


def tally_of_row(row: Row) -> ToldTally:
    """Return what heartbeats tell of a handler's row."""
    classes, seconds = times_counted(row, RAN)
    return ToldTally(row[DONE], row[FAILED], row[RETRIED], round(seconds, 3), list(classes))


def samples_of_work_done(rows: Mapping[str, Row], others: Mapping[tuple[str, str], int]) -> Samples:
    """Return metrics of the rows, and of parts, by handler and state, that are in no row."""
    parts = Counter(others)
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
            ({"handler": name}, MetricSpread(*times_counted(row, what)))
            for name, row in sorted(rows.items())
        ]
    return samples
