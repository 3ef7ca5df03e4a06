"""Giving parts that wait behind a slow one to other slots.

The parent strikes them from the batch of the slot, and hands them back under the slot's lease. Its
call has a number between two of the slot's. If a call of the slot comes first, the server answers
that the parent's is late: the parts are struck and still held, so the parent makes another.
"""

from streamq.queue.lease_keeper import LeaseKeeper
from streamq.worker.process_handle import HandBack, ProcessHandle
from streamq.worker.slot_table import CALL_STEP, SlotState

#: The parent calls at most so often for one batch: its numbers stay below that of the slot's next
#: call.
_MOST_CALLS = CALL_STEP // 2


def hand_back(keeper: LeaseKeeper, handle: ProcessHandle, slot: int, held: SlotState) -> None:
    """Give the rest of a slot's batch to others: once, or until the server has heard it."""
    if len(held.numbers) <= held.current + 1:
        return
    last, calls = handle.handed_back.get(slot), 0
    if last and last.version == held.version:
        if not last.is_late or last.calls >= _MOST_CALLS:
            return
        calls = last.calls
    numbers = handle.table.strike(slot, held)
    if numbers:
        this = handle.handed_back[slot] = HandBack(held.version, calls + 1)
        call = held.calls * CALL_STEP + this.calls
        keeper.hand_back(handle.holding(held), call, numbers, this.came_late)
