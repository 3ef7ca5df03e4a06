"""The slot table: what each slot of a process holds and runs, in memory that its parent sees too.

The parent renews leases, stops parts that take too long and hands back parts that wait behind a
slow one. It does so whatever the process is doing, even while a handler holds the GIL. So the two
must agree, without waiting for each other, which parts were started. The slot writes `current` and
then reads `cut`; the parent writes `cut` and then reads `current`. The one that reads second sees
what the other wrote, so no part is both started and struck.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from threading import Lock

import msgspec

from streamq.queue.pace import MOST_PARTS
from streamq.units import EPILOGUES
from streamq.worker import counters, spans
from streamq.worker.spans import Spans

#: The value of `cut` while no part is struck.
UNCUT = 2**62
#: Calls of a slot are numbered 1,000, 2,000 and so on: the numbers between are for calls that the
#: parent makes under the same lease.
CALL_STEP = 1_000

#: The number of an attempt shares a word with the delay after the attempt.
_ATTEMPTS = 2**16
#: The number of a record shares a word with the moment at which it was begun, so that the parent
#: never reads one without the other. A part has at most a million records.
_RECORDS = 2**21

_WORDS = 16
_TEXT = 64
_HOLDER = _WORDS * 8
_REQUEST = _HOLDER + _TEXT
_HANDLER = _REQUEST + _TEXT
_NUMBERS = (_HANDLER + _TEXT) // 8
_SLOT = _NUMBERS + MOST_PARTS

(
    VERSION,
    CALLS,
    CURRENT,
    ENDED,
    COUNT,
    PROGRESS,
    ASKED_TO_STOP,
    CUT,
    SINCE_MS,
    TIMEOUT_MS,
    IS_ASYNC,
    RETRY_MS,
    RECORD,
    STAGE,
) = range(14)
#: The words from CALLS to ASKED_TO_STOP at the beginning of a lease, and the texts behind them.
_BEGIN = struct.pack("=6q", 0, -1, -1, 0, 0, 0)
_NAMES = struct.Struct(f"={_TEXT}s{_TEXT}s")

# No processor moves a load before a store if two locks are taken and left between them. On those
# named here one lock is a fence already.
_first, _second = Lock(), Lock()
_IS_ORDERED = os.uname().machine in ("x86_64", "i686")


def _memory_fence() -> None:
    with _first:
        pass
    if _IS_ORDERED:
        return
    with _second:
        pass


class SlotState(msgspec.Struct, frozen=True):
    """What a slot held at one moment."""

    version: int
    #: Calls of the slot that were answered.
    calls: int
    current: int
    #: Whether the current part has ended, and waits to be finished.
    is_ended: bool
    since_ms: int
    timeout_ms: int
    progress: int
    asked_to_stop: int
    is_async: bool
    #: How long the running part waits if it is stopped and runs again, and which attempt it is.
    retry_ms: int
    attempt: int
    #: The record that runs, from 1, and since when, as one word; 0 where the part is not run record
    #: by record, or records have no limit; -1 between two records.
    record_word: int
    holder: str
    request_id: str
    handler: str
    numbers: tuple[int, ...]

    @property
    def running(self) -> int | None:
        """Return the number of the part that runs, if one does."""
        if 0 <= self.current < len(self.numbers) and not self.is_ended:
            return self.numbers[self.current]
        return None

    @property
    def at_work(self) -> "tuple[int, int | None, int]":
        """Return what runs: the batch, by the slot's version; the part; and its record."""
        return self.version, self.running, self.record_word

    @property
    def record(self) -> int:
        """Return which record of the part runs, from 1; 0 if that is not known."""
        return self.record_word % _RECORDS if self.record_word > 0 else 0

    def limited_ms(self, now_ms: float) -> float:
        """Return for how long that runs to which the time limit applies: a record, or the part."""
        if self.record_word < 0:
            return 0.0
        return now_ms - (self.record_word // _RECORDS or self.since_ms)


class SlotTable:
    """The slots of one process. The process and its parent map the same memory."""

    def __init__(self, fd: int, slots: int) -> None:
        self._memory = mmap.mmap(fd, _table_size(slots))
        self._words = memoryview(self._memory).cast("q")
        self._rows = [self._words[slot * _SLOT :][:_WORDS] for slot in range(slots)]
        self.slots = slots
        #: The counters of the slots, which stand behind the states of the slots.
        ends = (slots * _SLOT, slots * (_SLOT + counters.WORDS))
        self._counts = self._words[ends[0] : ends[1]]
        self.counters = counters.SlotCounters(self._counts, slots)
        self.spans = Spans(self._words[ends[1] :])

    @classmethod
    def create(cls, slots: int) -> "tuple[SlotTable, int]":
        """Return a new table, and the file descriptor to hand to the process."""
        fd = os.memfd_create("streamq") if hasattr(os, "memfd_create") else _unlinked_file()
        os.truncate(fd, _table_size(slots))
        return cls(fd, slots), fd

    def close(self) -> None:
        """Unmap it."""
        self.spans.release()
        for view in (*self._rows, self._counts):
            view.release()
        self._words.release()
        self._memory.close()

    # The slot's side.

    def hold(self, slot: int, holder: str, request_id: str) -> None:
        """Write down that a lease is about to begin: its holder and its request."""
        at = slot * _SLOT
        words = self._words
        words[at + VERSION] += 1
        _memory_fence()
        begin = (at + CALLS) * 8
        self._memory[begin : begin + len(_BEGIN)] = _BEGIN
        # An id may have all 64 bytes, so the stage of a place has a word of its own.
        request_id, slash, stage = request_id.partition("/")
        _NAMES.pack_into(self._memory, at * 8 + _HOLDER, holder.encode(), request_id.encode())
        words[at + STAGE] = _stage_as_word(stage) if slash else 0
        _memory_fence()
        words[at + VERSION] += 1

    def describe(self, slot: int, handler: str, *, timeout_ms: int, is_async: bool) -> None:
        """Write down what the request wants. It comes before the first batch is dealt."""
        at = slot * _SLOT
        self._write(at * 8 + _HANDLER, handler)
        self._words[at + TIMEOUT_MS] = timeout_ms
        self._words[at + IS_ASYNC] = is_async

    def _write(self, start: int, text: str) -> None:
        self._memory[start : start + _TEXT] = text.encode().ljust(_TEXT, b"\0")

    def deal(self, slot: int, numbers: Sequence[int]) -> None:
        """Write down a new batch of parts, of which none is started.

        Raises:
            ValueError: it is more than a slot can hold.
        """
        if len(numbers) > MOST_PARTS:
            raise ValueError(f"{len(numbers)} parts are more than the {MOST_PARTS} of a slot")
        at = slot * _SLOT
        words = self._words
        words[at + VERSION] += 1
        _memory_fence()
        words[at + CURRENT] = words[at + ENDED] = -1
        words[at + CUT] = UNCUT
        words[at + COUNT] = len(numbers)
        for index, number in enumerate(numbers, at + _NUMBERS):
            words[index] = number
        _memory_fence()
        words[at + VERSION] += 1

    def expect(self, slot: int, attempt: int, retry_ms: int) -> None:
        """Write down attempt and retry delay of the part about to start.

        The parent needs them if it has to kill this process because the part takes too long.
        """
        self._words[slot * _SLOT + RETRY_MS] = retry_ms * _ATTEMPTS + min(attempt, _ATTEMPTS - 1)

    def start(self, slot: int, index: int, now_ms: int) -> bool:
        """Start a part of the batch, unless it was struck or the lease is not wanted any more."""
        row = self._rows[slot]
        row[PROGRESS] = row[RECORD] = 0
        row[SINCE_MS] = now_ms
        row[CURRENT] = index
        _memory_fence()
        return index < row[CUT] and not row[ASKED_TO_STOP]

    def start_record(self, slot: int, index: int, now_ms: int) -> None:
        """Write down that a record of the part is begun: from now on the time limit is for it."""
        self._rows[slot][RECORD] = now_ms * _RECORDS + index + 1

    def rest(self, slot: int) -> None:
        """Write down that the part goes on, but no record of it runs: no time limit is for that."""
        self._rows[slot][RECORD] = -1

    def end(self, slot: int, index: int) -> None:
        """Mark the part that was started as ended: it runs no more, but is not finished yet."""
        self._rows[slot][ENDED] = index

    def next_call(self, slot: int) -> int:
        """Return the number of the slot's next call under its lease.

        Calls that the parent makes meanwhile have lower numbers, so this one is never too late.
        """
        return (self._words[slot * _SLOT + CALLS] + 1) * CALL_STEP

    def answered(self, slot: int) -> None:
        """Note that the slot's call was answered."""
        self._words[slot * _SLOT + CALLS] += 1

    def is_asked_to_stop(self, slot: int) -> bool:
        """Tell whether the parent said that the lease is lost or the request cancelled."""
        return self._words[slot * _SLOT + ASKED_TO_STOP] != 0

    def set_progress(self, slot: int, percent: float) -> None:
        """Write down how far the running part is: 0 to 100 percent."""
        self._words[slot * _SLOT + PROGRESS] = round(min(100.0, max(0.0, percent)))

    def drop(self, slot: int) -> None:
        """Write down that the lease is over."""
        self.hold(slot, "", "")

    # The parent's side.

    def read(self, slot: int, *, is_dead: bool = False) -> SlotState | None:
        """Return what the slot holds, or None when it holds nothing or is just changing.

        A dead process changes nothing any more, so for it what it was just writing counts.
        """
        at = slot * _SLOT
        words = self._words
        version = words[at + VERSION]
        if not self._memory[at * 8 + _HOLDER] or (version % 2 and not is_dead):
            return None
        _memory_fence()
        texts = [
            bytes(self._memory[at * 8 + offset : at * 8 + offset + _TEXT])
            .rstrip(b"\0")
            .decode("ascii", "replace")
            for offset in (_HOLDER, _REQUEST, _HANDLER)
        ]
        count = words[at + COUNT]
        held = SlotState(
            version,
            words[at + CALLS],
            words[at + CURRENT],
            words[at + CURRENT] == words[at + ENDED],
            words[at + SINCE_MS],
            words[at + TIMEOUT_MS],
            words[at + PROGRESS],
            words[at + ASKED_TO_STOP],
            bool(words[at + IS_ASYNC]),
            *divmod(words[at + RETRY_MS], _ATTEMPTS),
            words[at + RECORD],
            texts[0],
            texts[1] + _stage_of_word(words[at + STAGE]),
            texts[2],
            tuple(words[at + _NUMBERS : at + _NUMBERS + count]),
        )
        _memory_fence()
        return held if words[at + VERSION] == version else None

    def strike(self, slot: int, held: SlotState) -> tuple[int, ...]:
        """Strike what the slot has not started. Returns the parts that it never will start."""
        at = slot * _SLOT
        words = self._words
        cut = held.current + 1
        while cut < len(held.numbers):
            words[at + CUT] = cut
            _memory_fence()
            if words[at + VERSION] != held.version:
                # The slot dealt another batch meanwhile. It stops early, and hands parts back
                # itself.
                return ()
            if words[at + CURRENT] < cut:
                return held.numbers[cut:]
            cut = words[at + CURRENT] + 1
        return ()

    def ask_to_stop(self, slot: int, held: SlotState) -> None:
        """Tell the slot that its lease is lost or its request cancelled."""
        if self._words[slot * _SLOT + VERSION] == held.version:
            self._words[slot * _SLOT + ASKED_TO_STOP] = 1


def _stage_as_word(stage: str) -> int:
    """Return a word that stands for the stage of a place."""
    return int(stage) if stage.isdigit() else -1 - EPILOGUES.index(stage)


def _stage_of_word(word: int) -> str:
    if not word:
        return ""
    return f"/{word if word > 0 else EPILOGUES[-1 - word]}"


def _table_size(slots: int) -> int:
    return slots * (_SLOT + counters.WORDS + spans.WORDS) * 8


def _unlinked_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
