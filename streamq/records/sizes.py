"""Works out how large parts are: as the user said, or by how long their records take."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from streamq.model import MAX_RESULT


class PartSize(msgspec.Struct, frozen=True):
    """How large parts are: whole records up to a number of bytes, or a number of records."""

    bytes: int = 256 * 1024
    records: int = 0
    #: No part, and so no record, may have more bytes.
    most: int = 2**20
    #: Parts are sized by the time that records take, up to ``bytes``; UNSET where they are not.
    #: Then it is as if the field was not there: the size is part of what identifies a load.
    is_automatic: bool | msgspec.UnsetType = msgspec.UNSET


class Step(msgspec.Struct, frozen=True):
    """How many parts a loader may cut before it asks again, and how many records each."""

    records: int
    parts: int


#: More records than a part has room for: the bytes decide.
MOST_RECORDS = 2**40
AS_LARGE_AS_ALLOWED = Step(MOST_RECORDS, 64)

#: A part is to take about this long.
TARGET_S = 0.25
#: The results of a part should have about this many bytes at most: a quarter of the limit, because
#: some records yield more than others.
RESULTS = MAX_RESULT // 4
#: A part has at most this many times as many records as were measured lately.
GROWTH = 16
#: Work for about this long is loaded ahead of the slots, and two parts for each slot at least.
AHEAD_S = 0.5
LEAST_AHEAD = 2
#: A measurement counts less with each later one, so that a slow first call is forgotten.
_FADING = 0.7
#: A process can finish about 1,000 parts of a coroutine in a second.
COROUTINE_S = 1e-3


class Measured(msgspec.Struct, frozen=True):
    """What is known of a handler, and of its records that have run so far."""

    records: int
    seconds: float
    #: How many bytes their results had.
    result_bytes: int = 0
    is_coroutine: bool = False
    #: Whether it is called with each record. A handler that is called with whole parts gets parts
    #: of equal size.
    is_map: bool = True


class RecordPace(msgspec.Struct):
    """How long a record takes, and how large its result is, by the latest measurements."""

    #: How many records were measured lately: earlier ones count less.
    records: float = 0.0
    _seconds: float = 0.0
    _bytes: float = 0.0
    _seen: Measured = Measured(0, 0.0)

    def observe(self, measured: Measured) -> bool:
        """Take a measurement of all records so far. Return whether it told anything new."""
        records = measured.records - self._seen.records
        if records <= 0:
            return False
        seconds = max(0.0, measured.seconds - self._seen.seconds)
        self.records = self.records * _FADING + records
        self._seconds = self._seconds * _FADING + seconds
        size = max(0, measured.result_bytes - self._seen.result_bytes)
        self._bytes = self._bytes * _FADING + size
        self._seen = measured
        return True

    @property
    def record_s(self) -> float:
        """Return how long a record takes; 0 while none has run."""
        return max(1e-9, self._seconds / self.records) if self.records else 0.0

    @property
    def record_bytes(self) -> float:
        """Return how many bytes the result of a record has; 0 while none has run."""
        return self._bytes / self.records if self.records else 0.0


def records_for_size(
    record_s: float, record_bytes: float = 0.0, *, is_coroutine: bool = False, slots: int = 1
) -> int:
    """Return how many records make a part that takes about a quarter of a second.

    They are fewer where the results of so many, of ``record_bytes`` each, would be large. A
    coroutine that waits runs beside others of its process, which has so many ``slots``: it gets
    parts of one record, as long as the process can finish so many parts.
    """
    if is_coroutine and record_s >= COROUTINE_S * slots:
        return 1
    return max(1, int(min(TARGET_S / record_s, RESULTS / max(record_bytes, 1e-9))))


def most_size_by_rate(rate_ms: float) -> int:
    """Return how many records a part may have at most where one may start every ``rate_ms``.

    A rate is charged for all records of a part when the part starts.
    """
    return max(1, int(TARGET_S * 1e3 / rate_ms)) if rate_ms else MOST_RECORDS


class Sizing(Protocol):
    """Decides how large parts are, while they are cut."""

    def step(self, waiting: int, fitting: float) -> Step:
        """Return what to cut next, while so many parts wait for a slot; no parts: ask later.

        ``fitting``: about so many records fit into a part.
        """
        ...


class GrowingSize:
    """Sizes parts by what the records before them took; starts with one record."""

    def __init__(
        self, look: Callable[[], Measured | None], slots: int, at_once: int, most_records: int
    ) -> None:
        """Size parts for processes of so many ``slots``, of which ``at_once`` run in all.

        ``look`` returns what is known of the handler, if anything is. ``most_records``: a part has
        no more records than this.
        """
        self._look = look
        self._slots = slots
        self._at_once = at_once
        self._most_records = most_records
        self._pace = RecordPace()
        #: How many records a part is given, and how many it is to have when it has grown.
        self._records = self._wanted = 1

    def step(self, waiting: int, fitting: float) -> Step:
        """Return what to cut next; no parts while nothing is known, or enough wait for a slot."""
        measured = self._look()
        if measured is None:
            return Step(1, 0)
        if not measured.is_map:
            return AS_LARGE_AS_ALLOWED
        if self._pace.observe(measured):
            self._grow(measured)
        size = min(self._records, fitting)
        part_s = self._pace.record_s * size
        ahead = LEAST_AHEAD
        if part_s and size >= min(self._wanted, fitting):
            ahead = max(ahead, int(AHEAD_S / part_s))
        return Step(self._records, max(0, ahead * self._at_once - waiting))

    def _grow(self, measured: Measured) -> None:
        wanted = records_for_size(
            self._pace.record_s,
            self._pace.record_bytes,
            is_coroutine=measured.is_coroutine,
            slots=self._slots,
        )
        self._wanted = min(wanted, self._most_records)
        self._records = min(self._wanted, max(self._records, int(GROWTH * self._pace.records)))
