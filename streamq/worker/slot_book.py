"""The book of a process's slots: their leases, also in the table that the parent sees."""

from collections.abc import Mapping, Sequence

from streamq.model import Part
from streamq.queue.outcomes import GIVEN_UP, PartNotDone
from streamq.worker import counters
from streamq.worker.slot_table import SlotTable


class SlotBook:
    """A ``LeaseBook`` of one slot. The parent reads it, and speaks for the process if that dies."""

    def __init__(self, table: SlotTable, slot: int, handlers: Mapping[str, int]) -> None:
        """``handlers`` has the place of each handler among all, for the counters."""
        self._table = table
        self._slot = slot
        self._handlers = handlers
        self.name = str(slot)

    def hold(self, holder: str, request_id: str) -> None:
        """Write the holder down before its claim is sent."""
        self._table.hold(self._slot, holder, request_id)

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
        self._table.drop(self._slot)

    def count_finished(self, handler: str, parts: int, records: int) -> None:
        """Count parts whose results the server has counted."""
        slot, number, count = self._slot, self._handlers[handler], self._table.counters.count
        count(slot, number, counters.DONE, parts)
        count(slot, number, counters.RECORDS_DONE, records)

    def count_failed(self, handler: str, part: Part, outcome: PartNotDone, word: str) -> None:
        """Count a part that runs again or failed for good."""
        slot, number, count = self._slot, self._handlers[handler], self._table.counters.count
        if word == "retry" and not outcome.is_stopped:
            count(slot, number, counters.RETRIED)
        elif word in GIVEN_UP:
            done, failed = outcome.records
            count(slot, number, counters.FAILED)
            count(slot, number, counters.RECORDS_DONE, done)
            failed = failed if failed >= 0 else part.records or 1
            count(slot, number, counters.RECORDS_FAILED, failed)
