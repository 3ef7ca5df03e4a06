"""One process of a pool: fills its slots with leases, and obeys its parent.

The process never works out for itself whether it still owns a part: it presents its lease and
accepts the answer (``queue/held_lease.py``). Its parent renews the leases and sees at once when the
process dies, so the process may be busy, stuck or gone without anything being lost.
"""

import os
import secrets
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from threading import Condition, Thread

import msgspec

from streamq.app import App
from streamq.driver.connection import Connection
from streamq.errors import Damaged, ServerError
from streamq.model import Spec
from streamq.protocol.keys import token_list_of
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Grant, Token, Tokens
from streamq.queue.held_lease import report_outage_under_lease
from streamq.queue.outages import Outage
from streamq.queue.taker import KNOWN_REQUESTS, Host, Invitation, Taker
from streamq.records.references import ReferenceReader
from streamq.records.spool import FORMS, SpoolWriter
from streamq.worker.batches import Batches, BatchLease
from streamq.worker.channel import Channel, Command, FirstRecords, IdleFor, ProcessConfig, VisitAt
from streamq.worker.join_runner import make_runner
from streamq.worker.runner import Runner
from streamq.worker.slot_book import SlotBook
from streamq.worker.slot_table import SlotTable

#: A take blocks for up to 10 s. It is ended sooner for a stop, or if the server does not answer.
BLOCK_S = 10.0
#: A server at which a take blocks is asked this often whether it is there.
CHECK_EVERY_S = 4.0
#: A take that is to end is ended again after this time: it may have been just about to block.
WAKE_EVERY_S = 0.005
#: Records that are run at a stretch are quick. A stretch that takes this long is ended, so that
#: what it yielded can be kept.
LONG_STRETCH_S = 0.5
#: The parent is told this often how long there was nothing to do.
IDLE_EVERY_S = 1.0
#: If no room can be made for a part that is to run alone, this process leaves its request to others
#: for 1 s at least.
SUSPECT_PAUSE_S = 1.0
#: The longer such a part has waited, the longer all other slots may be kept free for it.
SUSPECT_SHARE = 0.05
#: A part that this process has not seen for 5 minutes since then has run elsewhere: the time that
#: it had waited does not count any more.
SUSPECT_FORGOTTEN_S = 300.0


class WorkerProcess:
    """The process: its slots, and the loop that fills them."""

    def __init__(self, config: ProcessConfig, app: App, table: SlotTable, channel: Channel) -> None:
        self._config = config
        self._app = app
        self._table = table
        self._channel = channel
        self._reader = ReferenceReader(config.allow_read, config.base)
        self._spool = SpoolWriter(config.spool, config.form) if config.spool else None
        self._protocol = Protocol(Connection(config.url), config.prefix)
        self._runner_for = lru_cache(64)(self._make_runner)  # most requests have the same
        host = Host(
            name=f"{config.pool}.{secrets.token_hex(8)}",
            queue=config.queue,
            levels=config.levels,
            offers={name: handler.offer for name, handler in app.handlers.items()},
            lease_ms=config.lease_ms,
            quantum_s=config.quantum_ms / 1e3,
        )
        self._taker = Taker(self._protocol, host, self._prepare, self._ask_for_visit)
        self._handlers = {name: number for number, name in enumerate(app.handlers)}
        #: Handlers of which records are done here.
        self._known: set[str] = set()
        self._books = [
            SlotBook(table, slot, self._handlers, self._note_done) for slot in range(config.slots)
        ]
        self._batches = Batches(table, self._taker, is_alone=self._is_alone, ended=self._end)
        self._changed = Condition()
        self._free = list(range(config.slots))
        self._is_stopping = self._is_quiet = False
        #: Parts that are to run alone and found no room yet: since when, and until when their
        #: request is left to others.
        self._suspects: dict[tuple[str, int], tuple[float, float]] = {}
        #: Since when a token is waited for, or 0.
        self._taking_since = 0.0
        #: The slot whose part is to run with nothing beside it, or -1.
        self._exclusive = -1
        self._pid = os.getpid()
        self._said_idle = self._idle_since = time.monotonic()
        self._threads = ThreadPoolExecutor(config.slots, "slot")

    # Taking

    def run(self) -> None:
        """Take and run until told to stop, then wait for what runs."""
        Thread(target=self._obey, name="control", daemon=True).start()
        Thread(target=self._tick, name="clock", daemon=True).start()
        outage = Outage(report_outage_under_lease)
        while not self._is_stopping:
            slot = self._await_slot()
            if slot is None:
                continue
            try:
                taken = self._take(slot)
                outage.over()
            except (ServerError, Damaged) as error:
                self._give_slot(slot)
                if self._is_stopping:
                    continue
                self._rest(outage.failed(error))
                continue
            if taken is None:
                self._give_slot(slot)
            else:
                self._begin(*taken)
        self._taker.give_back_tokens()
        self._await_all_free()
        self._say_idle(force=True)

    def _take(self, slot: int) -> tuple[BatchLease, Grant] | None:
        """Wait for a token, and claim parts for the slot. Returns None if there are none."""
        self._taking_since = time.monotonic()
        try:
            # After the line above: ``_obey`` sees it, and ends the take.
            if self._is_stopping or self._is_quiet:
                return None
            invitation = self._taker.next_token(BLOCK_S, self._has_room)
        finally:
            self._taking_since = 0.0
        if invitation is None:
            return None
        return self._claim(slot, invitation)

    def _claim(self, slot: int, invitation: Invitation) -> tuple[BatchLease, Grant] | None:
        claimed = self._taker.claim(invitation, self._books[slot])
        if claimed is None:
            return None
        lease, grant, known = claimed
        timeout_ms, is_async = known.work.timeout_ms, known.work.handler.is_async
        # A coroutine's lease ends on the event loop, which must not wait for a claim.
        if not (invitation.was_waiting or is_async):
            lease.keep_one = self._taker.keep_one
        # Before the batch is dealt: from then on the parent looks after its parts.
        self._table.describe(slot, grant.handler, timeout_ms=timeout_ms, is_async=is_async)
        lease.begin(grant)
        return BatchLease(slot, claimed, self._handlers[grant.handler]), grant

    def _go_on(self, before: BatchLease, token: Token) -> bool:
        """Run parts of the next stage of a flow in the slot. Returns whether there were any.

        All stages that a slot runs so have one turn together, as a lease has: a request of a better
        level may have come meanwhile.
        """
        is_over = time.monotonic() > before.late_at
        if is_over or self._is_stopping or self._is_quiet or self._exclusive >= 0:
            self._taker.push(token.request_id, Tokens(1, token_list_of(token.handler, token.level)))
            return False
        taken = self._claim(before.slot, Invitation(token, was_waiting=False))
        if taken is None:
            return False
        lease, grant = taken
        if _is_suspect(grant) and not self._is_alone(lease.slot):
            # Only the thread that takes tokens makes room. If two slots waited for it at once, the
            # one that gives up would end the time alone of the other.
            lease.held.release()
            lease.held.drop()
            return False
        lease.share_turn(before)
        self._begin(lease, grant)
        return True

    def _prepare(self, request_id: str, grant: Grant) -> Runner:
        return self._runner_for(grant.handler, grant.spec).for_request(request_id)

    def _make_runner(self, handler: str, text: bytes) -> Runner:
        spec = msgspec.json.decode(text, type=Spec)
        own, most = self._app.handlers[handler], self._config.max_result
        if spec.stage:
            return make_runner(self._protocol, own, spec, most, self._reader)
        spool = self._shared_spool(spec) if spec.spool else self._spool
        return Runner(own, spec, most, "", self._reader, spool)

    def _shared_spool(self, spec: Spec) -> SpoolWriter | None:
        """Return what keeps results in the folder that a request names, if that is allowed."""
        folder = Path(spec.spool).resolve()
        allowed = [Path(each).resolve() for each in self._config.shared_spools]
        if spec.spool_form not in FORMS or not any(map(folder.is_relative_to, allowed)):
            return None
        return SpoolWriter(str(folder), spec.spool_form, mode=0o666)

    def _ask_for_visit(self, at_ms: int) -> None:
        self._channel.send(VisitAt(at_ms))

    def _note_done(self, handler: str) -> None:
        """Tell the parent, once for each handler, that records of it are done here."""
        if handler not in self._known:
            self._known.add(handler)
            self._channel.send(FirstRecords(handler))

    # Slots

    def _await_slot(self) -> int | None:
        with self._changed:
            while not self._is_stopping:
                if self._free and not self._is_quiet and self._exclusive < 0:
                    return self._free.pop()
                self._changed.wait()
        return None

    def _give_slot(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            if slot == self._exclusive:
                self._exclusive = -1
            self._changed.notify_all()

    def _await_all_free(self, but: int = 0, timeout_s: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._free) >= self._config.slots - but, timeout_s
            )

    def _has_room(self) -> bool:
        """Tell whether nothing runs beside the slot that a token is taken for."""
        return len(self._free) >= self._config.slots - 1

    def _is_alone(self, slot: int) -> bool:
        return self._config.slots == 1 or self._exclusive == slot

    def _make_room(self, lease: BatchLease, number: int) -> bool:
        """Wait for a quantum until nothing runs beside a part that is to run alone.

        Where other slots are never free at once, the wait is longer and longer: a twentieth of the
        time that the part has waited. Then the request is left to others for the other nineteen.
        So the part is run at some time, and costs the other slots a twentieth of theirs.
        """
        now = time.monotonic()
        request_id = lease.held.request_id
        part = (request_id, number)
        since, known_until = self._suspects.pop(part, (now, now))
        if now - known_until > SUSPECT_FORGOTTEN_S:
            since = now
        wait_s = max(lease.pace.quantum_s, (now - since) * SUSPECT_SHARE)
        self._exclusive = lease.slot
        if self._await_all_free(but=1, timeout_s=wait_s):
            return True
        alone_s = max(SUSPECT_PAUSE_S, wait_s * (1 / SUSPECT_SHARE - 1))
        self._suspects[part] = since, time.monotonic() + alone_s
        while len(self._suspects) > KNOWN_REQUESTS:
            del self._suspects[next(iter(self._suspects))]
        self._taker.leave_to_others(request_id, alone_s)
        return False

    def _begin(self, lease: BatchLease, grant: Grant) -> None:
        # A suspect part may kill this process. If nothing runs beside it, it is clear which part
        # did.
        if _is_suspect(grant) and not self._make_room(lease, grant.parts[0].number):
            lease.held.release()
            self._end(lease)
            return
        if lease.runner.handler.is_async:
            self._batches.serve_async(lease, grant)
        elif self._config.slots == 1:
            self._batches.serve(lease, grant)
        else:
            self._threads.submit(self._batches.serve, lease, grant)

    def _end(self, lease: BatchLease) -> None:
        lease.held.drop()
        self._idle_since = time.monotonic()
        try:
            if lease.held.follow and self._go_on(lease, lease.held.follow):
                return
        except (ServerError, Damaged) as error:
            report_outage_under_lease(error)
        self._give_slot(lease.slot)
        self._say_idle()

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping, seconds)

    # Telling the parent, and obeying it

    def _obey(self) -> None:
        for message in self._channel.messages():
            if isinstance(message, Command):
                with self._changed:
                    self._is_quiet = message.word == "quiet"
                    self._is_stopping = self._is_stopping or message.word == "stop"
                    self._changed.notify_all()
                if self._is_stopping:
                    self._batches.stop()
                # The take may be just about to block, so to wake it once may not be enough.
                while self._taking_since:
                    self._protocol.connection.wake()
                    time.sleep(WAKE_EVERY_S)
        # The parent is gone, and nobody renews the leases: what runs here may run elsewhere soon.
        # The programs that handlers started are in the group that this process leads.
        if os.getpgrp() == self._pid:
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def _tick(self) -> None:
        """Tell the parent how long there was nothing to do, and leave servers that hang."""
        checked = 0.0
        while True:
            time.sleep(IDLE_EVERY_S)
            self._say_idle()
            self._batches.keep_stuck()
            self._batches.end_stretches(least_s=0.0 if self._is_stopping else LONG_STRETCH_S)
            now, since = time.monotonic(), self._taking_since
            if since and now - max(since, checked) > CHECK_EVERY_S:
                self._protocol.connection.check_waits()
                checked = time.monotonic()
            self._taker.give_back_tokens()

    def _say_idle(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._said_idle < IDLE_EVERY_S:
            return
        self._said_idle = now
        is_idle = len(self._free) + (self._taking_since > 0) >= self._config.slots
        self._channel.send(IdleFor(now - self._idle_since if is_idle else 0.0))


def _is_suspect(grant: Grant) -> bool:
    """Tell whether a part among those granted may kill its process."""
    return bool(grant.retried) and any(part.is_suspect for part in grant.parts)


def main() -> None:
    """Run ``entry.main``.

    ``spawning`` names this module in the command line of a process. A pool that runs while its
    package is upgraded or downgraded in place goes on starting processes by that name.
    """
    from streamq.worker import entry

    entry.main()
