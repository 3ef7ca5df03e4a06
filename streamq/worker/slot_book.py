"""The book of a process's slots: their leases, also in the table that the parent sees."""

import time
from collections.abc import Callable, Mapping, Sequence

from streamq.model import Part
from streamq.queue.outcomes import GIVEN_UP, PartNotDone
from streamq.queue.told import ToldSpan, slot_of_told_span
from streamq.worker import counters
from streamq.worker.slot_table import SlotTable


class SlotBook:
    """A ``LeaseBook`` of one slot. The parent reads it, and speaks for the process if that dies."""

    def __init__(
        self,
        table: SlotTable,
        slot: int,
        handlers: Mapping[str, int],
        note_done: Callable[[str], object] = lambda _: None,
    ) -> None:
        """``handlers`` has the place of each handler among all, for the counters.

        ``note_done`` is called with it whenever parts of a handler are done.
        """
        self._table = table
        self._slot = slot
        self._handlers = handlers
        self._note_done = note_done
        self.name = str(slot)
        #: Of the lease at hand, for its span: since when, how the slot is called, of which request,
        #: and how many parts of it are done, failed and retried.
        self._since_ms = 0
        self._label = self._request = ""
        self._done = self._failed = self._retried = 0

    def hold(self, holder: str, request_id: str) -> None:
        """Write the holder down before its claim is sent."""
        self._table.hold(self._slot, holder, request_id)
        self._since_ms = int(time.time() * 1e3)
        self._label, self._request = slot_of_told_span(holder)[1], request_id
        self._done = self._failed = self._retried = 0

    def deal(self, numbers: Sequence[int]) -> None:
        """Write the parts of a batch down before one of them is run."""
        self._table.deal(self._slot, numbers)

    def next_call(self) -> int:
        """Return the number of the next call under the lease."""
        return self._table.next_call(self._slot)

    def answered(self) -> None:
        """Note that this call was answered."""
        self._table.answered(self._slot)

    def drop(self) -> None:
        """Note that the lease is over."""
        if self._done or self._failed or self._retried:
            now_ms = int(time.time() * 1e3)
            counts = (self._done, self._failed, self._retried)
            span = ToldSpan(self._label, self._since_ms, now_ms, self._request, *counts)
            self._table.spans.add(self._slot, span)
            self._done = self._failed = self._retried = 0
        self._table.drop(self._slot)

    def count_finished(self, handler: str, parts: int, records: int) -> None:
        """Count parts whose results the server has counted."""
        slot, number, count = self._slot, self._handlers[handler], self._table.counters.count
        self._done += parts
        count(slot, number, counters.DONE, parts)
        count(slot, number, counters.RECORDS_DONE, records)
        self._note_done(handler)

    def count_failed(self, handler: str, part: Part, outcome: PartNotDone, word: str) -> None:
        """Count a part that runs again or failed for good."""
        slot, number, count = self._slot, self._handlers[handler], self._table.counters.count
        if word == "retry" and not outcome.is_stopped:
            self._retried += 1
            count(slot, number, counters.RETRIED)
        elif word in GIVEN_UP:
            done, failed = outcome.records
            self._failed += 1
            count(slot, number, counters.FAILED)
            count(slot, number, counters.RECORDS_DONE, done)
            failed = failed if failed >= 0 else part.records or 1
            count(slot, number, counters.RECORDS_FAILED, failed)
