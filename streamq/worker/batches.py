"""Running the parts of a lease, batch after batch: in the thread of a slot, or as coroutines.

A slot marks a part as started in the slot table before it runs it, and as ended after it. The
parent may strike a part that is not started, and stops one that takes too long.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread

from streamq.app import Context
from streamq.model import Failure, Part
from streamq.protocol.replies import Grant
from streamq.queue.held_lease import LeaseGone
from streamq.queue.outcomes import PartDone, PartNotDone
from streamq.queue.taker import Claimed, Taker
from streamq.worker import counters, forks
from streamq.worker.runner import Runner
from streamq.worker.slot_table import SlotTable
from streamq.worker.slot_watch import SlotWatch

log = logging.getLogger(__name__)

#: Coroutines share this many threads for their calls, so that connections stay few.
ASYNC_CALLERS = 8
#: Coroutines that take too long, or that nobody wants any more, are looked for this often.
WATCH_S = 0.1
#: When the unsent results of a batch exceed this many bytes, the slot sends them and hands the
#: other parts of the batch back without running them. The limit is four times the payload of a
#: batch (1 MiB), so this is rare.
_MOST_UNSENT = 2**22
#: The same of parts of a spread that have more than so many children, which the server adds in one
#: step: 5,000 take it some 20 ms.
_MOST_CHILDREN_UNSENT = 4_000


class BatchLease:
    """A lease that a slot works under: whose turn it is, how long it lasts, and what runs."""

    def __init__(self, slot: int, claimed: Claimed[Runner], handler: int) -> None:
        """``handler`` is the place of the request's handler among all, for the counters."""
        self.held, grant, known = claimed
        self.slot = slot
        self.handler = handler
        self.runner = known.work
        self.takes_context = known.work.handler.context_name is not None
        self.pace = known.pace
        self.part_began = time.monotonic()
        #: After ``late_at`` no parts are asked for, and after ``stop_at``, a little later, none is
        #: begun: other requests are to have a turn. Parts that were asked for in time are rather
        #: run than handed back.
        self.late_at = self.part_began + known.pace.quantum_s
        self.stop_at = self.late_at + known.pace.quantum_s / 4
        #: When the batch at hand was asked for, and how long it took to come.
        self.asked_at = self.held.asked_at
        self.call_s = 0.0
        #: Since when the request's parts could be run, by the clock of this process.
        self.waiting_since = self.held.handed_at - grant.waited_ms / 1e3
        #: Of the batch at hand: how long its parts waited, how many of them are retries, and
        #: whether there is but one.
        self.waited_s = 0.0
        self.retried = 0
        self.is_single = False
        #: What looks on while its parts run.
        self.watch: SlotWatch | None = None
        self.handed(grant)

    def share_turn(self, before: "BatchLease") -> None:
        """Take no more time than is left of the turn of the lease before."""
        self.late_at = min(self.late_at, before.late_at)
        self.stop_at = min(self.stop_at, before.stop_at)

    def handed(self, grant: Grant) -> None:
        """Note that a batch has come."""
        now = self.held.handed_at
        self.call_s = now - self.asked_at
        self.waited_s = now - self.waiting_since
        self.retried = grant.retried
        self.is_single = len(grant.parts) == 1


class Batches:
    """Runs the parts of leases until each lease is over."""

    def __init__(
        self,
        table: SlotTable,
        taker: Taker[Runner],
        *,
        is_alone: Callable[[int], bool],
        ended: Callable[[BatchLease], None],
    ) -> None:
        """``is_alone`` says of a slot whether nothing runs beside it; ``ended`` is given each lease
        that is over.
        """
        self._table = table
        self._taker = taker
        self._is_alone = is_alone
        self._ended = ended
        #: Whether the process is to stop: then neither a part nor a record is begun any more.
        self.is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callers = ThreadPoolExecutor(ASYNC_CALLERS, "caller")
        #: By slot: what looks on while its parts run.
        self._watches: dict[int, SlotWatch] = {}
        forks.end_stretches = self.end_stretches

    def stop(self) -> None:
        """Begin neither a part nor a record any more; from any thread."""
        self.is_stopping = True
        self.end_stretches()

    def end_stretches(self, least_s: float = 0.0) -> None:
        """End stretches of records that have run for so long, from any thread.

        Their results can then be kept, and the slot sees whether they are to stop.
        """
        for watch in list(self._watches.values()):
            watch.end_stretch(least_s)

    def keep_stuck(self) -> None:
        """Keep what records of plain functions came to where another record takes long."""
        for watch in list(self._watches.values()):
            if watch.is_stuck:
                self._callers.submit(watch.keep_if_stuck)

    def _look_on(self, lease: BatchLease) -> SlotWatch:
        if lease.watch is None:
            lease.watch = SlotWatch(
                self._table,
                lease.slot,
                lease.held,
                timeout_ms=lease.runner.timeout_ms,
                is_stopping=lambda: self.is_stopping,
                callers=self._callers,
            )
        self._watches[lease.slot] = lease.watch
        return lease.watch

    # In the thread of a slot

    def serve(self, lease: BatchLease, grant: Grant) -> None:
        """Run batches of plain functions until the lease is over."""
        try:
            while grant.parts:
                grant = self._finish(lease, self._run_batch(lease, grant.parts))
        except LeaseGone:
            self._release_quietly(lease)
        except BaseException as error:  # noqa: BLE001  it is logged there
            self._fail_internally(lease, error)
        finally:
            self._watches.pop(lease.slot, None)
            self._ended(lease)

    def _run_batch(self, lease: BatchLease, parts: list[Part]) -> int:
        """Run parts one after another. Returns how many to ask for next, 0 to end the lease."""
        slot, table, run, held = lease.slot, self._table, lease.runner.run, lease.held
        clock, watch = time.monotonic, self._look_on(lease)
        begun = now = clock()
        took: list[float] = []
        size = 0
        for index, part in enumerate(parts):
            if not self._may_start(lease, index, part, now):
                break
            held.part = part
            watch.begin_part()
            outcome = run(part, self._context(lease, part) if lease.takes_context else None, watch)
            watch.end_part()
            if forks.is_copy:
                # A handler that forked and returned must not go on as a second worker.
                os._exit(0)
            table.end(slot, index)
            started, now = now, clock()
            took.append(now - started)
            size += outcome.size
            if isinstance(outcome, PartDone):
                held.record(part, outcome)
                lease.runner.troubles.went_well()
            elif held.fail(part, outcome):
                now = clock()
            else:
                break
        table.counters.observe(slot, lease.handler, counters.RAN, took)
        table.counters.count(slot, lease.handler, counters.RESULT_BYTES, size)
        return self._next_most(lease, begun, len(took), len(parts))

    def _finish(self, lease: BatchLease, most: int) -> Grant:
        grant = lease.held.finish(most, is_alone=self._is_alone(lease.slot))
        if grant.parts:
            lease.handed(grant)
        return grant

    def _release_quietly(self, lease: BatchLease) -> None:
        """End the lease if it stands: nobody works under it any more."""
        with suppress(Exception):
            lease.held.release()

    def _fail_internally(self, lease: BatchLease, error: BaseException) -> None:
        """Fail the current part for an error of streamq itself, lest it runs again at once."""
        held = lease.held
        text = "slot %d stumbled over a part of %s"
        log.error(text, lease.slot, held.request_id, exc_info=error)
        with suppress(Exception):
            if held.part:
                failure = Failure(error="InternalError", message="see the worker's log")
                held.fail(held.part, PartNotDone("retry", 1_000, [failure], (0, -1)))
        self._release_quietly(lease)

    def _may_start(self, lease: BatchLease, index: int, part: Part, now: float) -> bool:
        held = lease.held
        is_much = held.size > _MOST_UNSENT or held.handed > _MOST_CHILDREN_UNSENT
        if (index and (is_much or now > lease.stop_at)) or self.is_stopping:
            return False
        if lease.runner.timeout_ms:
            self._table.expect(lease.slot, part.attempt, lease.runner.retry_ms(part))
        lease.part_began = now
        if not self._table.start(lease.slot, index, int(now * 1e3)):
            return False
        if lease.is_single:
            # It may run for long. Of several parts only some may be begun: they are counted
            # together.
            self._count_waits(lease, 1)
        return True

    def _next_most(self, lease: BatchLease, begun: float, ran: int, given: int) -> int:
        now = time.monotonic()
        if not lease.is_single:
            self._count_waits(lease, ran)
        lease.pace.observe(ran, now - begun)
        self._taker.note_pace(lease.held.handler, lease.pace)
        lease.asked_at = now
        # Parts that come too late to be run would only go back.
        left_s = lease.late_at - now - lease.call_s
        if ran < given or self.is_stopping or left_s <= 0 or not lease.held.wants_more:
            return 0
        return lease.pace.most(left_s)

    def _count_waits(self, lease: BatchLease, begun: int) -> None:
        first = begun - lease.retried
        if first > 0:
            waited = (lease.waited_s,)
            self._table.counters.observe(lease.slot, lease.handler, counters.WAITED, waited, first)

    def _context(self, lease: BatchLease, part: Part) -> Context:
        slot, table = lease.slot, self._table
        return Context(
            lease.held.request_id.partition("/")[0],
            part.number,
            part.attempt,
            source=lease.runner.source_of(part),
            should_stop=lambda: table.is_asked_to_stop(slot),
            progress=lambda percent: table.set_progress(slot, percent),
        )

    # On the event loop

    def serve_async(self, lease: BatchLease, grant: Grant) -> None:
        """Run batches of coroutines until the lease is over; does not wait for that."""
        asyncio.run_coroutine_threadsafe(self._serve_async(lease, grant), self._event_loop())

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            forks.loop = self._loop = asyncio.new_event_loop()
            Thread(target=self._run_loop, args=(self._loop,), name="loop", daemon=True).start()
            asyncio.run_coroutine_threadsafe(self._watch(), self._loop)
        return self._loop

    @staticmethod
    def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            # Without the loop the coroutines' slots would hang. The parent takes back what they
            # hold.
            os._exit(1)

    async def _serve_async(self, lease: BatchLease, grant: Grant) -> None:
        loop = asyncio.get_running_loop()
        try:
            while grant.parts:
                most = await self._run_batch_async(lease, grant.parts)
                grant = await loop.run_in_executor(self._callers, self._finish, lease, most)
        except LeaseGone:
            await loop.run_in_executor(self._callers, self._release_quietly, lease)
        except Exception as error:  # noqa: BLE001  it is logged there
            await loop.run_in_executor(self._callers, self._fail_internally, lease, error)
        finally:
            self._watches.pop(lease.slot, None)
            self._ended(lease)

    async def _run_batch_async(self, lease: BatchLease, parts: list[Part]) -> int:
        loop, held, watch = asyncio.get_running_loop(), lease.held, self._look_on(lease)
        begun = time.monotonic()
        took: list[float] = []
        size = 0
        for index, part in enumerate(parts):
            if not self._may_start(lease, index, part, time.monotonic()):
                break
            held.part = part
            outcome = await self._run_async(lease, part, watch)
            if forks.is_copy:
                os._exit(0)
            self._table.end(lease.slot, index)
            took.append(time.monotonic() - lease.part_began)
            size += outcome.size
            if isinstance(outcome, PartDone):
                held.record(part, outcome)
                lease.runner.troubles.went_well()
            elif not await loop.run_in_executor(self._callers, held.fail, part, outcome):
                break
        self._table.counters.observe(lease.slot, lease.handler, counters.RAN, took)
        self._table.counters.count(lease.slot, lease.handler, counters.RESULT_BYTES, size)
        return self._next_most(lease, begun, len(took), len(parts))

    async def _run_async(
        self, lease: BatchLease, part: Part, watch: SlotWatch
    ) -> PartDone | PartNotDone:
        context = self._context(lease, part) if lease.takes_context else None
        watch.begin_part()
        try:
            return await watch.start(lease.runner.run_async(part, context, watch))
        except asyncio.CancelledError:
            # It had not begun with its records.
            if watch.cancelled() == "timeout":
                return lease.runner.time_out(part)
            return PartNotDone("snooze", 0, [], (0, -1), is_stopped=True)
        finally:
            watch.task = None

    async def _watch(self) -> None:
        """Stop coroutines that take too long, or whose result nobody wants any more."""
        while True:
            await asyncio.sleep(WATCH_S)
            for watch in list(self._watches.values()):
                watch.cancel_if_due()
