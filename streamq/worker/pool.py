"""The worker pool: a parent that looks after processes which run handlers.

The parent never imports the user's code. It renews the leases its processes hold, from
a table each of them shares with it, so that a handler may keep its process as busy as it
likes. It stops parts that take too long, hands back parts that wait behind a slow one,
replaces processes that die, and takes back at once what they held. When the parent is
gone its processes stop, and the leases expire.
"""

import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from streamq import backoff
from streamq.errors import AppLoadError
from streamq.telemetry.metrics import Samples
from streamq.telemetry.systemd import Notifier
from streamq.worker import counters as tally
from streamq.worker.channel import Config, Hello, Idle, Look, PoolOptions, Unfit
from streamq.worker.lease_keeper import Keeper
from streamq.worker.process_handle import Member
from streamq.worker.slot_table import CALL_STEP, Held
from streamq.worker.spawning import MOST_STARTING, Nursery

log = logging.getLogger(__name__)

#: How often the parent looks at what runs; and while nothing does.
TICK_S = 0.04
IDLE_TICK_S = 0.2
#: And while a process is about to end: its line is closed a moment before it is gone.
END_TICK_S = 0.002
#: A call of the parent's under a lease whose process is dead comes after all others.
LAST_CALL = 2**53 - 1
#: A process that lived this long is replaced at once, a younger one after a pause.
SETTLED_S = 5.0
LONGEST_PAUSE_MS = 5_000
#: When so many processes end by themselves before the first is ready, none will be.
MOST_STILLBORN = 3
#: Signals that a process brings upon itself. Any other is sent by somebody: a person, the system
#: that is out of memory. It says nothing about the next process.
OWN_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS}
)
#: A coroutine over its time is stopped by its own loop; if that is stuck, by the parent after this.
ASYNC_GRACE_MS = 2_000
RELOAD_EVERY_S = 0.5


class Pool:
    """A parent and its processes."""

    def __init__(
        self,
        config: Config,
        options: PoolOptions,
        keeper: Keeper,
        notifier: Notifier | None = None,
        nursery: Nursery | None = None,
    ) -> None:
        self._config = config
        self._nursery = nursery or Nursery(config.slots)
        self._options = options
        self._keeper = keeper
        self._notifier = notifier or Notifier({})
        #: When the pool last looked after its processes, by the clock that never jumps.
        self.ticked_at = time.monotonic()
        #: What processes have done that are gone, and how many died against our will.
        self._past: dict[str, tally.Row] = {}
        self._counting = threading.Lock()
        self._deaths = 0
        self._members: list[Member] = []
        self._selector = selectors.DefaultSelector()
        self._bell, self._button = socket.socketpair()
        self._button.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._pauses = self._stillborn = 0
        self._start_at = 0.0
        self._stop_at = 0.0
        self._is_stopping = self._was_ready = self._is_unwanted = False
        #: The signal that ended it without waiting for what ran, if one did.
        self._cold = 0
        self._signals: deque[int] = deque()
        self._interrupts = 0
        #: The first signal that told it to stop, if one did.
        self.stopped_by = 0
        self._files: dict[str, float] = {}
        self._looked = time.monotonic()
        self._quiet = False
        # Many slots take longer to look through, and one in a thousand can wait a little.
        self._tick_s = max(TICK_S, options.processes * config.slots * 1e-4)

    def run(self) -> int:
        """Run until told to stop or nothing is left to do. Returns the exit code.

        Raises:
            AppLoadError: the user's module cannot be loaded.
        """
        previous = self._install_signals()
        self._keeper.start()
        try:
            while not self._is_stopping or self._members:
                self._obey_signals()
                self._fill()
                self._hear(self._pause_s())
                self._bury()
                self._keeper.hold(self._look_after_all())
                self._look_around()
                self.ticked_at = time.monotonic()
                self._notifier.alive()
        finally:
            for member in list(self._members):
                member.kill("the pool ends")
                member.popen.wait()
                self._forget(member)
                self._take_back(member)
            self._keeper.stop()
            self._bell.close()
            self._button.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return 128 + self._cold if self._cold else 0

    def processes(self) -> list[int]:
        """Ids of its processes."""
        return [member.pid for member in self._members]

    @property
    def busy(self) -> int:
        """Slots that hold parts."""
        return len(self._keeper.holdings)

    @property
    def retried(self) -> int:
        """Parts that are to run again, counted each time."""
        told = sum(n for (_, state), n in self._keeper.counts.copy().items() if state == "retried")
        return sum(row[tally.RETRIED] for row in self._rows().values()) + told

    def end(self) -> None:
        """End now, from another thread: what its processes would still do is not wanted."""
        self._is_stopping = self._is_unwanted = True
        self._ring()

    def stop(self) -> None:
        """Stop politely, as TERM does; from any thread."""
        self._signals.append(signal.SIGTERM)
        self._ring()

    def _ring(self) -> None:
        """Let nothing be waited for any longer."""
        with suppress(OSError):  # it is ringing, or nobody is there any more
            self._button.send(b".")

    def unready(self) -> str:
        """Why no part would be run here now; empty when one would."""
        if self._is_stopping:
            return "stopping"
        if self._quiet:
            return "quiet: it takes nothing more"
        if not any(member.hello for member in self._members):
            return "no process is ready"
        return "" if self._keeper.is_server_up else "the server does not answer"

    def samples(self) -> Samples:
        """What the pool has done, and how it is."""
        return {
            **tally.work_done(self._rows(), self._keeper.counts.copy()),
            **self._keeper.samples(),
            "streamq_worker_slots_busy": [({}, self.busy)],
            "streamq_worker_processes": [({}, sum(m.hello is not None for m in self._members))],
            "streamq_process_deaths_total": [({}, self._deaths)],
        }

    def _rows(self) -> dict[str, tally.Row]:
        """What all processes have done, also those that are gone, by handler."""
        with self._counting:
            rows = dict(self._past)
            for member in self._members:
                tally.add_all(rows, member.rows())
        return rows

    # Processes

    def _fill(self) -> None:
        staying = sum(not member.is_leaving for member in self._members)
        if self._is_stopping or time.monotonic() < self._start_at:
            return
        starting = sum(member.hello is None for member in self._members)
        for _ in range(min(self._options.processes - staying, MOST_STARTING - starting)):
            try:
                member = Member(self._config, self._nursery.take())
            except OSError as error:
                log.error("no process can be started: %s", error)
                self._start_later()
                return
            if self._quiet:
                member.order("quiet")
            self._members.append(member)
            self._selector.register(member.line.socket, selectors.EVENT_READ, member)

    def _start_later(self) -> None:
        self._pauses += 1
        pause_ms = backoff.delay_ms(self._pauses, 200, LONGEST_PAUSE_MS)
        self._start_at = time.monotonic() + pause_ms / 1e3

    def _pause_s(self) -> float:
        """How long nothing need be looked at."""
        if any(member.is_ending for member in self._members):
            return END_TICK_S
        return self._tick_s if self._keeper.holdings else IDLE_TICK_S

    def _hear(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._bell:
                self._bell.recv(1)
                continue
            member: Member = key.data
            words, is_gone = member.line.ready_words()
            for word in words:
                self._heard(member, word)
            if is_gone:
                member.is_ending = True
                self._selector.unregister(key.fileobj)
                member.line.socket.close()

    def _heard(self, member: Member, word: object) -> None:
        if isinstance(word, Hello):
            member.hello = word
            self._keeper.announce(word.names)
            self._files |= {file: _mtime(file) for file in word.files}
            if not self._was_ready:
                self._was_ready = True
                slots = self._options.processes * self._config.slots
                names = ", ".join(self._keeper.handlers)
                log.info("worker %s ready: %d slots, handlers %s", self._keeper.name, slots, names)
                self._notifier.ready(f"{slots} slots")
        elif isinstance(word, Unfit):
            if not self._was_ready:
                raise AppLoadError(word.message, word.trace)
            log.error("%s\n%s", word.message, word.trace)
        elif isinstance(word, Look):
            self._keeper.expect(word.at_ms)
        elif isinstance(word, Idle):
            member.idle_s = word.idle_s

    def _bury(self) -> None:
        """Replace processes that are gone, and take back at once what they held."""
        for member in [m for m in self._members if m.has_ended()]:
            code = member.popen.returncode
            done = member.parts
            self._forget(member)
            was_busy = self._take_back(member)
            self._deaths += not member.is_leaving and not self._is_unwanted
            if self._is_unwanted:
                log.debug("process %d ended", member.pid)
            elif member.why_killed:
                log.warning("process %d was stopped: %s", member.pid, member.why_killed)
            elif not member.is_leaving or code:
                log.warning("process %d %s; it is replaced", member.pid, member.how_it_ended())
            is_young = time.monotonic() - member.began < SETTLED_S
            # A part that kills its process is charged for it; only a process that cannot even
            # live without one is given a pause.
            if is_young and not (was_busy or member.why_killed or member.is_leaving):
                self._start_later()
                self._stillborn += code >= 0 or -code in OWN_SIGNALS
                if not self._was_ready and self._stillborn >= MOST_STILLBORN:
                    how = member.how_it_ended()
                    raise AppLoadError(
                        f"{self._config.target}: its process {how} when loading it", ""
                    )
            elif done or was_busy:
                self._pauses = 0

    def _forget(self, member: Member) -> None:
        """A process is gone; what it has done stays counted."""
        with self._counting:
            self._members.remove(member)
            tally.add_all(self._past, member.rows())

    def _take_back(self, member: Member) -> bool:
        """Hand back what a dead process held. Returns whether a part was running.

        Only what was running when it died is charged, and not if it was ended on purpose.
        """
        for word in member.line.ready_words()[0]:
            self._heard(member, word)
        was_busy = False
        for slot, held in member.held(is_dead=True):
            was_busy = was_busy or held.running is not None
            # The slot may have gone on to its next part before the process was gone.
            is_overdue = member.overdue.get(slot) == (held.version, held.running)
            if is_overdue and held.running is not None:
                self._keeper.time_out(held, LAST_CALL - 1)
            crashed = None if member.why_killed else held.running
            self._keeper.release(held, LAST_CALL, crashed)
        with suppress(KeyError, ValueError):
            self._selector.unregister(member.line.socket)
        member.line.close()
        member.table.close()
        return was_busy

    # Looking after what runs

    def _look_after_all(self) -> list[tuple[int, Held]]:
        """Look after every process. Returns what they hold."""
        holdings = []
        for member in self._members:
            held = member.held()
            holdings += [(member.pid, each) for _, each in held if each.numbers]
            self._look_after(member, held)
        return holdings

    def _look_after(self, member: Member, holdings: list[tuple[int, Held]]) -> None:
        now_ms = time.monotonic() * 1e3
        for slot, held in holdings:
            if held.running is None:
                continue
            ran_ms = now_ms - held.since_ms
            if ran_ms > self._config.quantum_ms or self._is_stopping:
                self._hand_back(member, slot, held)
            limit_ms = held.timeout_ms + (ASYNC_GRACE_MS if held.is_async else 0)
            if held.timeout_ms and ran_ms > limit_ms:
                member.overdue[slot] = (held.version, held.running)
                seconds = held.timeout_ms / 1e3
                part = f"part {held.running} of {held.request_id}"
                member.kill(f"{part} took longer than {seconds:g} s")
            self._check_told(member, slot, held)

    def _hand_back(self, member: Member, slot: int, held: Held) -> None:
        """Give the rest of a batch to others, once."""
        is_last = len(held.numbers) <= held.current + 1
        if is_last or member.struck.get(slot) == held.version:
            return
        numbers = member.table.strike(slot, held)
        if numbers:
            member.struck[slot] = held.version
            self._keeper.hand_back(held, held.calls * CALL_STEP + 1, numbers)

    def _check_told(self, member: Member, slot: int, held: Held) -> None:
        """A lease is lost or its request cancelled: tell the slot, and stop it after a while."""
        if not self._keeper.is_unwanted(held.holder):
            member.told.pop(slot, None)
            return
        member.table.tell(slot, held)
        version, since = member.told.setdefault(slot, (held.version, time.monotonic()))
        if version == held.version and time.monotonic() - since > self._options.cancel_grace_s:
            member.kill(f"it would not stop part {held.running} of {held.request_id}")

    # Time

    def _look_around(self) -> None:
        now = time.monotonic()
        if self._is_stopping:
            self._urge(now)
        if now - self._looked < RELOAD_EVERY_S:
            return
        self._looked = now
        if self._options.is_reloading:
            self._reload()
        for member in self._members:
            self._retire(member)
        if not self._is_stopping and self._is_finished():
            self._stop("nothing is left to do")

    def _urge(self, now: float) -> None:
        """See to it that every process ends, also one that was just being started."""
        for member in self._members:
            if self._is_unwanted:
                member.kill("its work is not wanted any more")
            if not member.is_leaving:
                member.order("stop")
            if member.hello is None:
                member.kill("it was not ready yet")
            if now > self._stop_at:
                member.kill("it did not end within the grace time")

    def _retire(self, member: Member) -> None:
        options = self._options
        is_worn = options.max_parts and member.parts >= options.max_parts
        is_fat = options.max_memory and member.parts and member.rss_bytes() > options.max_memory
        if (is_worn or is_fat) and not member.is_leaving:
            log.info("process %d is replaced after %d parts", member.pid, member.parts)
            member.order("stop")

    def _is_finished(self) -> bool:
        options = self._options
        if not self._members or not all(member.hello for member in self._members):
            return False
        idle_s = min(member.idle_s for member in self._members)
        if any(member.held() for member in self._members):
            return False
        if options.max_idle_s and idle_s >= options.max_idle_s:
            return True
        return options.is_burst and idle_s > 0 and self._keeper.is_nothing_left()

    def _reload(self) -> None:
        changed = [file for file, then in self._files.items() if _mtime(file) != then]
        if changed:
            log.info("%s changed", ", ".join(changed))
            self._files = {}
            self._replace_all()

    def _replace_all(self) -> None:
        for member in self._members:
            member.order("stop")

    # Signals

    def _install_signals(self) -> dict[int, Callable[..., object] | int | None]:
        """Let signals only be noted: they may come between any two steps of the loop.

        Only the main thread may do that. In another one the pool heeds no signals.
        """
        if threading.current_thread() is not threading.main_thread():
            return {}

        def note(number: int, _: FrameType | None) -> None:
            self._signals.append(number)
            self._ring()

        numbers = (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGQUIT,
            signal.SIGHUP,
            signal.SIGUSR1,
            signal.SIGUSR2,
        )
        # What is ignored since our start stays so: INT by a shell, for what runs in the background,
        # and HUP by nohup. To a pool that HUP does not stop it says something else.
        may_be_ignored = [signal.SIGINT]
        if self._options.stops_on_hup:
            may_be_ignored.append(signal.SIGHUP)
        return {
            number: signal.signal(number, note)
            for number in numbers
            if number not in may_be_ignored or signal.getsignal(number) is not signal.SIG_IGN
        }

    def _obey_signals(self) -> None:
        while self._signals:
            number = self._signals.popleft()
            is_hup = number == signal.SIGHUP
            if number == signal.SIGTERM or (is_hup and self._options.stops_on_hup):
                self._stop("told to stop", number)
            elif number == signal.SIGINT:
                self._on_int()
            elif number == signal.SIGQUIT:
                self._stop_now(number)
            elif is_hup:
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
        busy = sum(len(member.held()) for member in self._members)
        log.info("%s: finishing %d parts, up to %g s", why, busy, self._options.grace_s)
        self._notifier.stopping(why)
        for member in self._members:
            member.order("stop")

    def _stop_now(self, number: int) -> None:
        self._is_stopping = True
        self._cold = number
        self.stopped_by = self.stopped_by or number
        self._notifier.stopping("stopped now")
        for member in self._members:
            member.kill("stopped now")

    def _on_int(self) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            self._stop_now(signal.SIGINT)
        else:
            self._stop("interrupted (again to stop now; nothing is lost)", signal.SIGINT)

    def _be_quiet(self) -> None:
        self._quiet = True
        log.info("quiet: taking nothing more")
        for member in self._members:
            member.order("quiet")

    def _dump(self) -> None:
        for member in self._members:
            for slot, held in member.held():
                ran_s = time.monotonic() - held.since_ms / 1e3
                log.info(
                    "process %d slot %d: part %s of %s in %s for %.1f s, %d in hand",
                    member.pid,
                    slot,
                    held.running,
                    held.request_id,
                    held.handler,
                    ran_s,
                    len(held.numbers),
                )
            if member.hello:
                os.kill(member.pid, signal.SIGUSR2)


def _mtime(file: str) -> float:
    try:
        return Path(file).stat().st_mtime
    except OSError:
        return 0.0
