"""One process of a pool, as its parent sees it."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from streamq.worker import counters as tally
from streamq.worker.channel import Config, Hello, Order
from streamq.worker.slot_table import Held
from streamq.worker.spawning import Newborn


class Member:
    """A process: what it was told, what it said, and what it holds."""

    def __init__(self, config: Config, newborn: Newborn) -> None:
        self.config = config
        self.popen, self.line, self.table = newborn
        self.line.send(config)
        self.began = time.monotonic()
        self.hello: Hello | None = None
        self.idle_s = 0.0
        self.is_leaving = False
        #: Whether its end of the line is closed: it ends.
        self.is_ending = False
        self.why_killed = ""
        #: By slot: the part that took too long, of which batch; the batch whose rest was struck;
        #: and since when a batch is told to stop.
        self.overdue: dict[int, tuple[int, int]] = {}
        self.struck: dict[int, int] = {}
        self.told: dict[int, tuple[int, float]] = {}

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.popen.pid

    def rows(self) -> dict[str, tally.Row]:
        """What it has done, by handler."""
        names = self.hello.names if self.hello else []
        rows = self.table.tally.rows(len(names))
        if len(names) > tally.MOST_HANDLERS:
            names = [*names[: tally.MOST_HANDLERS - 1], "(others)"]
        return dict(zip(names, rows, strict=True))

    @property
    def parts(self) -> int:
        """Parts that it has brought to some end."""
        return sum(map(tally.parts, self.rows().values()))

    def held(self, *, is_dead: bool = False) -> list[tuple[int, Held]]:
        """What its slots hold."""
        slots = range(self.config.slots)
        found = ((slot, self.table.read(slot, is_dead=is_dead)) for slot in slots)
        return [(slot, held) for slot, held in found if held]

    def order(self, word: str) -> None:
        """Tell it to ``stop`` or to be ``quiet``."""
        self.is_leaving = self.is_leaving or word == "stop"
        self.line.send(Order(word))

    def kill(self, why: str) -> None:
        """End it at once, and every program that it started."""
        self.why_killed = self.why_killed or why
        self._kill_group()

    def has_ended(self) -> bool:
        """Whether it is gone. Then the programs that it left are ended, too."""
        if self.popen.returncode is None:
            # It is not waited for until they are ended: so long its number is nobody else's.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self._kill_group()
            self.popen.wait()
        return True

    def _kill_group(self) -> None:
        if self.popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def how_it_ended(self) -> str:
        """In words, of one that is gone."""
        code = self.popen.returncode
        if code >= 0:
            return f"ended by itself with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def rss_bytes(self) -> int:
        """Its memory, where the system tells."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGESIZE")
