"""Stopping what takes longer than its time limit: a record of a map, or a part.

Python cannot stop a function from outside, so the parent kills its process. The other slots of that
process are told to end what they run before that, so that nothing of theirs runs twice.
"""

import time

from streamq.worker.process_handle import ProcessHandle
from streamq.worker.slot_table import SlotState

#: The loop of a process stops a coroutine over its time. If the loop is stuck, the parent kills the
#: process 2 s later.
ASYNC_GRACE_MS = 2_000
#: A process says something every second. One that is to end and says nothing for 3 s is stuck.
SILENT_S = 3.0


class TimeLimits:
    """Finds slots that take too long, and kills their processes."""

    def __init__(self, grace_s: float) -> None:
        """``grace_s``: for so long the other slots of a process may go on."""
        self._grace_s = grace_s

    def check(self, handle: ProcessHandle, slot: int, held: SlotState, now_ms: float) -> None:
        """Stop a process one of whose slots takes too long. Its other slots may end theirs."""
        limit_ms = held.timeout_ms + (ASYNC_GRACE_MS if held.is_async else 0)
        if held.limited_ms(now_ms) <= limit_ms:
            handle.late.pop(slot, None)
            handle.overdue.pop(slot, None)
            return
        # The slot may have been read while it went on, so one look is not enough.
        if handle.late.get(slot) != held.at_work:
            handle.late[slot] = held.at_work
            return
        handle.overdue[slot] = held.at_work
        if self._may_kill(handle):
            what = f"part {held.running} of {held.request_id}"
            if held.record:
                what = f"record {held.record} of {what}"
            handle.kill(f"{what} took longer than {held.timeout_ms / 1e3:g} s")

    def _may_kill(self, handle: ProcessHandle) -> bool:
        """Return whether nothing else runs in a process that is to be killed; have it end."""
        overdue = handle.overdue
        if all(overdue.get(slot) == held.at_work for slot, held in handle.held() if held.numbers):
            return True
        now = time.monotonic()
        if not handle.drained_at:
            handle.drained_at = now
            handle.order("stop")
        # A process that says nothing for so long is stuck as a whole.
        is_silent = now - max(handle.heard_at, handle.drained_at) > SILENT_S
        return is_silent or now - handle.drained_at > self._grace_s
