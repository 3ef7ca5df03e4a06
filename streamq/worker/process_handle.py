"""One process of a pool, as its parent sees it."""

import logging
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from streamq.queue.renewals import Holding
from streamq.worker import counters
from streamq.worker.channel import Command, CommandWord, ProcessConfig, Ready
from streamq.worker.slot_table import SlotState
from streamq.worker.spawning import SpawnedProcess

log = logging.getLogger(__name__)

#: What a slot ran at one moment: the batch, by the slot's version; the part; and its record.
Overdue = tuple[int, int | None, int]


class HandBack:
    """What was handed back of a batch: of which, by how many calls, and whether the last was late.

    A batch is known by the version of its slot.
    """

    def __init__(self, version: int, calls: int) -> None:
        self.version = version
        self.calls = calls
        self.is_late = False

    def came_late(self) -> None:
        """Note that a call of the slot came first; from any thread."""
        self.is_late = True


class ProcessHandle:
    """The parent's handle of a process: what it was told, what it said, and what it holds."""

    def __init__(self, config: ProcessConfig, spawned: SpawnedProcess) -> None:
        self.config = config
        self.popen, self.channel, self.table = spawned
        self.channel.send(config)
        self.began = time.monotonic()
        self.ready: Ready | None = None
        self.idle_s = 0.0
        self.is_leaving = False
        #: Whether its end of the channel is closed: it is about to end.
        self.is_ending = False
        self.why_killed = ""
        #: By slot: the batch and the part that took too long; what was handed back; the batch
        #: that was asked to stop, and since when. A batch is known by the slot's version.
        self.overdue: dict[int, Overdue] = {}
        #: What seemed to take too long at the last look, by slot: the next one makes sure.
        self.late: dict[int, Overdue] = {}
        #: When its other slots were told to end because one takes too long, or 0; and when it last
        #: said anything.
        self.drained_at = 0.0
        self.heard_at = self.began
        self.handed_back: dict[int, HandBack] = {}
        self.asked_to_stop: dict[int, tuple[int, float]] = {}

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self.popen.pid

    def rows(self) -> dict[str, counters.Row]:
        """Return what it has done, by handler."""
        names = self.ready.names if self.ready else []
        rows = self.table.counters.rows(len(names))
        if len(names) > counters.MOST_HANDLERS:
            names = [*names[: counters.MOST_HANDLERS - 1], "(others)"]
        return dict(zip(names, rows, strict=True))

    @property
    def parts(self) -> int:
        """Return how many parts it has brought to some end."""
        return sum(map(counters.parts_counted, self.rows().values()))

    def held(self, *, is_dead: bool = False) -> list[tuple[int, SlotState]]:
        """Return what its slots hold."""
        slots = range(self.config.slots)
        found = ((slot, self.table.read(slot, is_dead=is_dead)) for slot in slots)
        return [(slot, held) for slot, held in found if held]

    def holding(self, state: SlotState) -> Holding:
        """Return what one of its slots holds, as the lease keeper is told."""
        return Holding(
            request_id=state.request_id,
            holder=state.holder,
            handler=state.handler,
            running=state.running,
            since_ms=state.since_ms,
            progress=state.progress,
            timeout_ms=state.timeout_ms,
            attempt=state.attempt,
            retry_ms=state.retry_ms,
            record=state.record,
            pid=self.pid,
        )

    def order(self, word: CommandWord) -> None:
        """Send it a command."""
        self.is_leaving = self.is_leaving or word == "stop"
        self.channel.send(Command(word))

    def kill(self, why: str) -> None:
        """Kill it at once, with every program that it started."""
        self.why_killed = self.why_killed or why
        if self.popen.returncode is None:
            self._kill_group()

    def has_ended(self) -> bool:
        """Tell whether it is gone. If so, kill the programs that it left."""
        if self.popen.returncode is None:
            if not hasattr(os, "waitid"):  # macOS, before Python 3.13
                if self.popen.poll() is None:
                    return False
                # No other process gets its id while one is left in its group. If none is left, the
                # id is free only since a moment ago.
                self._kill_group()
                return True
            # WNOWAIT leaves its exit code to be waited for: until then no other process gets its
            # id.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self._kill_group()
            self.popen.wait()
        return True

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def how_it_ended(self) -> str:
        """Say in words how a process that is gone has ended."""
        code = self.popen.returncode
        if code >= 0:
            return f"ended by itself with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def rss_bytes(self) -> int:
        """Return its memory in bytes; 0 where the system does not tell."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return _rss_by_ps(self.pid)
        return pages * os.sysconf("SC_PAGESIZE")

    def dump(self) -> None:
        """Log what its slots run, and have it print where each of its threads is."""
        for slot, held in self.held():
            log.info(
                "process %d slot %d: part %s of %s in %s for %.1f s, %d in hand",
                self.pid,
                slot,
                held.running,
                held.request_id,
                held.handler,
                time.monotonic() - held.since_ms / 1e3,
                len(held.numbers),
            )
        if self.ready:
            os.kill(self.pid, signal.SIGUSR2)


def _rss_by_ps(pid: int) -> int:
    """Return the memory of a process by ``ps``, where there is no ``/proc``; 0 if that fails."""
    try:
        ran = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=False, timeout=5
        )
        return int(ran.stdout) * 1024
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0
