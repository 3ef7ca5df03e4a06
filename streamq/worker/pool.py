"""The worker pool: a parent that looks after processes which run handlers.

The parent never imports the user's code. Each process shares a table with it, in which the parent
sees what the process holds. It has those leases renewed, so a handler may keep its process as busy
as it likes. It stops parts that take too long, hands back parts that wait behind a slow one,
replaces processes that die, and takes back at once what they held. When the parent is gone its
processes stop, and the leases expire.
"""

import logging
import selectors
import signal
import socket
import time
from contextlib import suppress

from streamq import backoff
from streamq.errors import AppLoadError
from streamq.queue.lease_keeper import LeaseKeeper
from streamq.queue.renewals import Holding
from streamq.records.sizes import Measured
from streamq.telemetry.metrics import Samples
from streamq.telemetry.systemd import Notifier
from streamq.worker import counters
from streamq.worker.channel import (
    FirstRecords,
    IdleFor,
    LoadFailed,
    PoolOptions,
    ProcessConfig,
    Ready,
    VisitAt,
)
from streamq.worker.file_watch import FileWatch
from streamq.worker.hand_backs import hand_back
from streamq.worker.pool_work import PoolWork
from streamq.worker.process_handle import ProcessHandle
from streamq.worker.signals import Signals
from streamq.worker.slot_table import SlotState
from streamq.worker.spawning import MOST_STARTING, Spawner
from streamq.worker.time_limits import TimeLimits

log = logging.getLogger(__name__)

#: The parent looks at what runs this often, and at an idle pool this often.
TICK_S = 0.04
IDLE_TICK_S = 0.2
#: While a process is about to end the parent looks this often: the process closes its channel a
#: moment before it is gone.
END_TICK_S = 0.002
#: The number of the parent's last call under a lease of a dead process: above all others.
LAST_CALL = 2**53 - 1
#: A process that lived for 5 s is replaced at once, a younger one after a pause.
SETTLED_S = 5.0
LONGEST_PAUSE_MS = 5_000
#: When 3 processes have ended by themselves before the first is ready, the pool gives up.
MOST_STILLBORN = 3
#: Signals that a process brings upon itself. A person sends the others, or the system when it is
#: out of memory: they say nothing about the next process.
OWN_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS}
)
RELOAD_EVERY_S = 0.5


class Pool:
    """A parent and its processes."""

    def __init__(
        self,
        config: ProcessConfig,
        options: PoolOptions,
        keeper: LeaseKeeper,
        notifier: Notifier | None = None,
        spawner: Spawner | None = None,
    ) -> None:
        self._config = config
        self._spawner = spawner or Spawner(config.slots)
        self._options = options
        self._keeper = keeper
        self._notifier = notifier or Notifier({})
        #: When the pool last looked after its processes, by the monotonic clock.
        self.ticked_at = time.monotonic()
        self._handles: list[ProcessHandle] = []
        self._work = PoolWork(self._handles, config.slots, options.processes)
        #: How many processes died that nobody had told to end.
        self._deaths = 0
        self._selector = selectors.DefaultSelector()
        self._bell, self._button = socket.socketpair()
        self._button.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._pauses = self._stillborn = 0
        self._start_at = 0.0
        self._stop_at = 0.0
        self._is_stopping = self._was_ready = self._is_unwanted = False
        #: The signal that ended the pool without waiting for what ran, if one did.
        self._cold = 0
        self._signals = Signals(self._ring)
        keeper.paces = self._work.paces
        keeper.tallies = self._work.tallies
        keeper.spans = self._work.spans
        self._time_limits = TimeLimits(options.cancel_grace_s)
        self._interrupts = 0
        #: The first signal that told the pool to stop, if one did.
        self.stopped_by = 0
        #: Handlers of which a heartbeat was told to tell what their first records took.
        self._measured: set[str] = set()
        self._files = FileWatch()
        self._looked = time.monotonic()
        self._quiet = False
        # To look through many slots takes longer: a pool of 1,000 slots is looked at every 100 ms.
        self._tick_s = max(TICK_S, options.processes * config.slots * 1e-4)

    def run(self) -> int:
        """Run until told to stop or nothing is left to do. Returns the exit code.

        Raises:
            AppLoadError: the user's module cannot be loaded.
        """
        self._signals.install(stops_on_hup=self._options.stops_on_hup)
        self._keeper.start()
        try:
            while not self._is_stopping or self._handles:
                self._obey_signals()
                self._fill()
                self._read_messages(self._pause_s())
                self._replace_dead()
                self._keeper.hold(self._look_after_all())
                self._look_around()
                self.ticked_at = time.monotonic()
                self._notifier.alive()
        finally:
            for handle in list(self._handles):
                handle.kill("the pool ends")
                handle.popen.wait()
                self._forget(handle)
                self._take_back(handle)
            self._keeper.stop()
            self._selector.close()
            self._bell.close()
            self._button.close()
            self._signals.restore()
        return 128 + self._cold if self._cold else 0

    def processes(self) -> list[int]:
        """Return the ids of its processes."""
        return [handle.pid for handle in self._handles]

    @property
    def busy(self) -> int:
        """Return how many slots hold parts."""
        return len(self._keeper.holdings)

    @property
    def retried(self) -> int:
        """Return how often a part had to run again."""
        told = sum(n for (_, state), n in self._keeper.counts.copy().items() if state == "retried")
        return self._work.retried() + told

    def measured(self) -> dict[str, Measured]:
        """Return what is known of each handler's records; nothing while no process is ready."""
        return self._work.measured()

    def end(self) -> None:
        """End the pool now, from another thread: nobody wants what its processes would still do."""
        self._is_stopping = self._is_unwanted = True
        self._ring()

    def stop(self) -> None:
        """Stop the pool politely, as TERM does; from any thread."""
        self._signals.note(signal.SIGTERM)

    def _ring(self) -> None:
        """Wake the pool's loop."""
        with suppress(OSError):  # it was woken already, or has ended
            self._button.send(b".")

    def unready(self) -> str:
        """Say why no part would be run here now; empty when one would."""
        if self._is_stopping:
            return "stopping"
        if self._quiet:
            return "quiet: it takes nothing more"
        if not any(handle.ready for handle in self._handles):
            return "no process is ready"
        return "" if self._keeper.is_server_up else "the server does not answer"

    def samples(self) -> Samples:
        """Return metrics of what the pool has done, and of how it is."""
        return {
            **counters.samples_of_work_done(self._work.rows(), self._keeper.counts.copy()),
            **self._keeper.samples(),
            "streamq_worker_slots_busy": [({}, self.busy)],
            "streamq_worker_processes": [
                ({}, sum(handle.ready is not None for handle in self._handles))
            ],
            "streamq_process_deaths_total": [({}, self._deaths)],
        }

    # Processes

    def _fill(self) -> None:
        staying = sum(not handle.is_leaving for handle in self._handles)
        if self._is_stopping or time.monotonic() < self._start_at:
            return
        starting = sum(handle.ready is None for handle in self._handles)
        for _ in range(min(self._options.processes - staying, MOST_STARTING - starting)):
            try:
                handle = ProcessHandle(self._config, self._spawner.take())
            except OSError as error:
                log.error("no process can be started: %s", error)
                self._start_later()
                return
            if self._quiet:
                handle.order("quiet")
            self._handles.append(handle)
            self._selector.register(handle.channel.socket, selectors.EVENT_READ, handle)

    def _start_later(self) -> None:
        self._pauses += 1
        pause_ms = backoff.delay_ms(self._pauses, 200, LONGEST_PAUSE_MS)
        self._start_at = time.monotonic() + pause_ms / 1e3

    def _pause_s(self) -> float:
        """Return for how long the loop may wait for messages."""
        if any(handle.is_ending for handle in self._handles):
            return END_TICK_S
        return self._tick_s if self._keeper.holdings else IDLE_TICK_S

    def _read_messages(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._bell:
                self._bell.recv(1)
                continue
            handle: ProcessHandle = key.data
            messages, is_gone = handle.channel.ready_messages()
            handle.heard_at = time.monotonic()
            for message in messages:
                self._on_message(handle, message)
            if is_gone:
                handle.is_ending = True
                self._selector.unregister(key.fileobj)
                handle.channel.socket.close()

    def _on_message(self, handle: ProcessHandle, message: object) -> None:
        if isinstance(message, Ready):
            handle.ready = message
            self._keeper.announce(message.names)
            self._files.add(message.files)
            if not self._was_ready:
                self._was_ready = True
                slots = self._options.processes * self._config.slots
                names = ", ".join(self._keeper.handlers)
                log.info("worker %s ready: %d slots, handlers %s", self._keeper.name, slots, names)
                self._notifier.ready(f"{slots} slots")
        elif isinstance(message, LoadFailed):
            if not self._was_ready:
                raise AppLoadError(message.message, message.trace)
            log.error("%s\n%s", message.message, message.trace)
        elif isinstance(message, VisitAt):
            self._keeper.expect(message.at_ms)
        elif isinstance(message, IdleFor):
            handle.idle_s = message.idle_s
        elif isinstance(message, FirstRecords) and message.handler not in self._measured:
            self._measured.add(message.handler)
            self._keeper.tell_soon()

    def _replace_dead(self) -> None:
        """Replace processes that are gone, and take back at once what they held."""
        for handle in [each for each in self._handles if each.has_ended()]:
            code = handle.popen.returncode
            done = handle.parts
            self._forget(handle)
            was_busy = self._take_back(handle)
            self._deaths += not handle.is_leaving and not self._is_unwanted
            if self._is_unwanted:
                log.debug("process %d ended", handle.pid)
            elif handle.why_killed:
                log.warning("process %d was stopped: %s", handle.pid, handle.why_killed)
            elif not handle.is_leaving or code:
                log.warning("process %d %s; it is replaced", handle.pid, handle.how_it_ended())
            is_young = time.monotonic() - handle.began < SETTLED_S
            # A part that kills its process is charged with a crash. Only after a process that died
            # without running a part there is a pause.
            if is_young and not (was_busy or handle.why_killed or handle.is_leaving):
                self._start_later()
                self._stillborn += code >= 0 or -code in OWN_SIGNALS
                if not self._was_ready and self._stillborn >= MOST_STILLBORN:
                    how = handle.how_it_ended()
                    raise AppLoadError(
                        f"{self._config.target}: its process {how} when loading it", ""
                    )
            elif done or was_busy:
                self._pauses = 0

    def _forget(self, handle: ProcessHandle) -> None:
        """Drop a process that is gone; what it has done stays counted."""
        self._work.forget(handle)

    def _take_back(self, handle: ProcessHandle) -> bool:
        """Hand back what a dead process held. Returns whether a part was running.

        Only the part that was running when it died is charged, and none if the parent killed it. A
        part over its time limit is failed for that alone, also if its process died of itself.
        """
        for message in handle.channel.ready_messages()[0]:
            self._on_message(handle, message)
        was_busy = False
        for slot, held in handle.held(is_dead=True):
            was_busy = was_busy or held.running is not None
            # The slot may have gone on to its next part or record before the process was gone.
            is_overdue = handle.overdue.get(slot) == held.at_work
            if is_overdue and held.running is not None:
                self._keeper.time_out(handle.holding(held), LAST_CALL - 1)
            crashed = None if handle.why_killed or is_overdue else held.running
            self._keeper.release(handle.holding(held), LAST_CALL, crashed)
        with suppress(KeyError, ValueError):
            self._selector.unregister(handle.channel.socket)
        handle.channel.close()
        handle.table.close()
        return was_busy

    # Looking after what runs

    def _look_after_all(self) -> list[Holding]:
        """Look after every process. Returns what they hold."""
        holdings: list[Holding] = []
        for handle in self._handles:
            held = handle.held()
            holdings += [handle.holding(each) for _, each in held if each.numbers]
            self._look_after(handle, held)
        return holdings

    def _look_after(self, handle: ProcessHandle, holdings: list[tuple[int, SlotState]]) -> None:
        now_ms = time.monotonic() * 1e3
        for slot, held in holdings:
            if held.running is None:
                continue
            ran_ms = now_ms - held.since_ms
            if ran_ms > self._config.quantum_ms or self._is_stopping:
                hand_back(self._keeper, handle, slot, held)
            if held.timeout_ms:
                self._time_limits.check(handle, slot, held, now_ms)
            self._check_wanted(handle, slot, held)

    def _check_wanted(self, handle: ProcessHandle, slot: int, held: SlotState) -> None:
        """Ask a slot to stop whose lease is lost or whose request is cancelled; then kill it."""
        if not self._keeper.is_unwanted(held.holder):
            handle.asked_to_stop.pop(slot, None)
            return
        handle.table.ask_to_stop(slot, held)
        version, since = handle.asked_to_stop.setdefault(slot, (held.version, time.monotonic()))
        if version == held.version and time.monotonic() - since > self._options.cancel_grace_s:
            handle.kill(f"it would not stop part {held.running} of {held.request_id}")

    # Time

    def _look_around(self) -> None:
        now = time.monotonic()
        if self._is_stopping:
            self._enforce_stop(now)
        if now - self._looked < RELOAD_EVERY_S:
            return
        self._looked = now
        if self._options.is_reloading:
            self._reload()
        for handle in self._handles:
            self._retire(handle)
        if not self._is_stopping and self._is_finished():
            self._stop("nothing is left to do")

    def _enforce_stop(self, now: float) -> None:
        """Make every process end, also one that was just being started."""
        for handle in self._handles:
            if self._is_unwanted:
                handle.kill("its work is not wanted any more")
            if not handle.is_leaving:
                handle.order("stop")
            if handle.ready is None:
                handle.kill("it was not ready yet")
            if now > self._stop_at:
                handle.kill("it did not end within the grace time")

    def _retire(self, handle: ProcessHandle) -> None:
        options = self._options
        is_worn = options.max_parts and handle.parts >= options.max_parts
        is_fat = options.max_memory and handle.parts and handle.rss_bytes() > options.max_memory
        if (is_worn or is_fat) and not handle.is_leaving:
            log.info("process %d is replaced after %d parts", handle.pid, handle.parts)
            handle.order("stop")

    def _is_finished(self) -> bool:
        options = self._options
        if not self._handles or not all(handle.ready for handle in self._handles):
            return False
        idle_s = min(handle.idle_s for handle in self._handles)
        if any(handle.held() for handle in self._handles):
            return False
        if options.max_idle_s and idle_s >= options.max_idle_s:
            return True
        return options.is_burst and idle_s > 0 and self._keeper.is_nothing_left()

    def _reload(self) -> None:
        changed = self._files.changed()
        if changed:
            log.info("%s changed", ", ".join(changed))
            self._replace_all()

    def _replace_all(self) -> None:
        for handle in self._handles:
            handle.order("stop")

    # Signals

    def _obey_signals(self) -> None:
        while (number := self._signals.next()) is not None:
            is_hup = number == signal.SIGHUP
            if number == signal.SIGTERM or (is_hup and self._options.stops_on_hup):
                self._stop("told to stop", number)
            elif number == signal.SIGINT:
                self._on_int()
            elif number == signal.SIGQUIT:
                self._stop_now(number)
            elif is_hup:
                log.info("HUP: every process is replaced when it has finished what it runs")
                self._replace_all()
            elif number == signal.SIGUSR1:
                self._be_quiet()
            elif number == signal.SIGUSR2:
                self._dump()

    def _stop(self, why: str, number: int = 0) -> None:
        if self._is_stopping:
            return
        self.stopped_by = number
        self._is_stopping = True
        self._stop_at = time.monotonic() + self._options.grace_s
        busy = sum(len(handle.held()) for handle in self._handles)
        log.info("%s: finishing %d parts, up to %g s", why, busy, self._options.grace_s)
        self._notifier.stopping(why)
        for handle in self._handles:
            handle.order("stop")

    def _stop_now(self, number: int) -> None:
        self._is_stopping = True
        self._cold = number
        self.stopped_by = self.stopped_by or number
        self._notifier.stopping("stopped now")
        for handle in self._handles:
            handle.kill("stopped now")

    def _on_int(self) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            self._stop_now(signal.SIGINT)
        else:
            self._stop("interrupted (again to stop now; nothing is lost)", signal.SIGINT)

    def _be_quiet(self) -> None:
        self._quiet = True
        log.info("quiet: taking nothing more")
        for handle in self._handles:
            handle.order("quiet")

    def _dump(self) -> None:
        for handle in self._handles:
            handle.dump()
