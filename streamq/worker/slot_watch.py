"""Looking on while the parts of a lease run in a slot."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from threading import Lock
from typing import Any

from streamq.queue.held_lease import HeldLease
from streamq.queue.outcomes import PartDone, PartNotDone
from streamq.worker import forks
from streamq.worker.part_watch import CancelReason, PartWatch
from streamq.worker.slot_table import SlotTable

_Run = PartDone | PartNotDone

#: What the records of a part came to is kept this often. Parts that are sized by time are shorter.
KEEP_EVERY_S = 0.5
#: Keeping outcomes takes place again only after this many times as long as it took.
KEEP_SHARE = 50


class SlotWatch(PartWatch):
    """Sees which record runs, stops the part between two records, and cancels coroutines.

    The thread of the slot uses it, or the event loop. Any thread may end a stretch.
    """

    def __init__(
        self,
        table: SlotTable,
        slot: int,
        held: HeldLease,
        *,
        timeout_ms: int,
        is_stopping: Callable[[], bool],
        callers: Executor,
    ) -> None:
        """``callers``: threads that speak to the server for coroutines."""
        self._table = table
        self._held = held
        self._callers = callers
        #: From when on it is time to keep what records came to.
        self._keep_at = 0.0
        #: How to get what the records of the part came to, and what of it is kept. The lock is held
        #: while the server is told of it, and for a moment when the part has ended.
        self._snapshot: Callable[[], bytes] | None = None
        self._kept = b""
        self._lock = Lock()
        #: Whether the server said that the part is not this slot's any more.
        self._is_lost = False
        self._slot = slot
        self._limit_s = timeout_ms / 1e3
        self._is_stopping = is_stopping
        #: When the part, or its record that runs, was begun.
        self._began = time.monotonic()
        #: The coroutine that runs the part, and why its call of a handler is cancelled, if it is.
        self.task: asyncio.Task[_Run] | None = None
        self._reason: CancelReason = ""
        #: Whether the coroutine may be cancelled: not while it keeps what records came to.
        self._is_calling = False

    def begin_part(self) -> None:
        """Note that a part is about to be run."""
        self._began = time.monotonic()
        self._keep_at = self._began + KEEP_EVERY_S
        self._is_lost = False
        self._is_calling = True

    def begin(self, index: int) -> None:
        """Note that a record is about to be run."""
        self._reason = ""
        self._began = time.monotonic()
        self._is_calling = True
        if self._limit_s:
            self._table.start_record(self._slot, index, int(self._began * 1e3))

    def tell(self, index: int) -> None:
        """Say that a record of a stretch is about to be run."""
        self._table.start_record(self._slot, index, int(time.monotonic() * 1e3))

    def is_over(self) -> bool:
        """Return whether no record is to run: at a stop, without a lease, or in a forked copy."""
        is_unwanted = self._is_lost or self._table.is_asked_to_stop(self._slot)
        return self._is_stopping() or is_unwanted or forks.is_copy

    def is_due(self) -> bool:
        """Return whether the part has run for so long that what it yielded should be kept."""
        return time.monotonic() >= self._keep_at

    def keep(self, partial: bytes, mark: bytes, *, must: bool = False) -> None:
        """Have the server keep what records came to."""
        self._table.rest(self._slot)
        with self._lock:
            self._keep(partial, mark, must=must)

    def _keep(self, partial: bytes, mark: bytes, *, must: bool) -> None:
        begun = time.monotonic()
        self._is_lost = not self._held.keep(partial, mark, must=must)
        now = time.monotonic()
        self._kept = partial
        # Keeping outcomes may cost a fiftieth of the time: if it takes long, it is done less often.
        self._keep_at = now + max(KEEP_EVERY_S, KEEP_SHARE * (now - begun))

    def offer(self, snapshot: Callable[[], bytes]) -> None:
        """Say how to get what the records of the part came to."""
        self._snapshot = snapshot

    def end_part(self) -> None:
        """Note that the part has ended: what becomes of it is told otherwise."""
        if self._snapshot:
            with self._lock:
                self._snapshot, self._kept = None, b""

    @property
    def is_stuck(self) -> bool:
        """Return whether a record may be taking long while outcomes of others are not kept."""
        return self._snapshot is not None and self.is_due() and not self._lock.locked()

    def keep_if_stuck(self) -> None:
        """Keep what records came to while a record takes long, from another thread."""
        with self._lock:
            if self._snapshot and self.is_due() and (kept := self._snapshot()) != self._kept:
                self._keep(kept, b"", must=False)

    async def keep_later(self, partial: bytes, mark: bytes, *, must: bool = False) -> None:
        """Do the same in another thread. The coroutine is not cancelled meanwhile."""
        self._is_calling = False
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._callers, lambda: self.keep(partial, mark, must=must))

    def end_stretch(self, least_s: float) -> None:
        """End a stretch that has run for so long, after the record that runs."""
        stretch = self.stretch
        if stretch is not None and time.monotonic() - self._began >= least_s:
            stretch.clear()

    # On the event loop

    def start(self, run: Coroutine[Any, Any, _Run]) -> "asyncio.Task[_Run]":
        """Start the coroutine that runs the part."""
        self._reason = ""
        self.task = asyncio.ensure_future(run)
        return self.task

    def cancel_if_due(self) -> None:
        """Cancel a call that takes too long, or whose result nobody wants any more."""
        if not self.task or self._reason or not self._is_calling:
            return
        if self._limit_s and time.monotonic() - self._began > self._limit_s:
            self._reason = "timeout"
        elif self._table.is_asked_to_stop(self._slot):
            self._reason = "unwanted"
        if self._reason:
            self.task.cancel()

    def cancelled(self) -> CancelReason:
        """Return why the call that just ended was cancelled. The part may go on."""
        reason, self._reason = self._reason, ""
        task = asyncio.current_task()
        while task and task.cancelling():
            task.uncancel()
        return reason
