"""Worker pools as users start them, and what their handlers noted down."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import warm
from tests.support.secure import as_role
from tests.support.waiting import wait_until

APPS = Path(__file__).parent / "apps"


class Note(NamedTuple):
    """A line of the handlers' log: S start, E end, C told to stop, F forked."""

    word: str
    time: float
    pid: int
    request: str
    part: int


def read_notes(log: Path) -> list[Note]:
    """What handlers noted so far. A last line without its end may be half written: it is left."""
    whole, _, _ = log.read_text().rpartition("\n") if log.exists() else ("", "", "")
    words = (line.split() for line in whole.splitlines())
    return [Note(w, float(t), int(pid), request, int(n)) for w, t, pid, request, n in words]


class Fleet:
    """Pools on one server; all are ended with the test."""

    def __init__(self, url: str, queue: str, folder: Path) -> None:
        self.url = url
        self.queue = queue
        self.log = folder / "notes"
        self._folder = folder
        self._pools: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        *options: str,
        target: str = "tasks:app",
        cwd: Path = APPS,
        audit_ms: int = 500,
        program: tuple[str, ...] = ("-m", "streamq.cli"),
    ) -> "subprocess.Popen[bytes]":
        """A pool, from its command line."""
        errors = (self._folder / f"pool{len(self._pools)}.err").open("wb")
        environment = os.environ | {
            "STREAMQ_URL": as_role(self.url, "worker"),
            "STREAMQ_QUEUE": self.queue,
            "STREAMQ_TEST_LOG": str(self.log),
            "STREAMQ_AUDIT_MS": str(audit_ms),
        }
        command = [sys.executable, *program, "worker", *filter(None, [target]), *options]
        pool = subprocess.Popen(
            command, env=environment, cwd=cwd, stderr=errors, stdout=subprocess.PIPE
        )
        errors.close()
        self._pools.append(pool)
        return pool

    def ready(self, *options: str, **others: Any) -> "subprocess.Popen[bytes]":
        """A pool that has begun to take parts."""
        pool = self.start(*options, **others)
        wait_until(lambda: "ready" in self.errors(pool) or pool.poll() is not None, 15)
        return pool

    def errors(self, pool: "subprocess.Popen[bytes]") -> str:
        """What a pool said on stderr."""
        return (self._folder / f"pool{self._pools.index(pool)}.err").read_text()

    def notes(self, word: str = "", request: str = "") -> list[Note]:
        """What handlers noted, in the order of writing."""
        return [
            note
            for note in read_notes(self.log)
            if word in ("", note.word) and request in ("", note.request)
        ]

    def is_running(self) -> bool:
        """Whether no pool has ended."""
        return all(pool.poll() is None for pool in self._pools)

    def children(self, pool: "subprocess.Popen[bytes]") -> list[int]:
        """Ids of a pool's processes."""
        path = Path(f"/proc/{pool.pid}/task/{pool.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def command(self, *words: str) -> Any:
        """What a command prints as JSON."""
        own = {"STREAMQ_URL": as_role(self.url, words[0]), "STREAMQ_QUEUE": self.queue}
        done = warm.run([*warm.MODULE, *words, "--json"], env=os.environ | own)
        done.check_returncode()
        return json.loads(done.stdout)

    def end(self) -> None:
        """End every pool that still runs."""
        for pool in self._pools:
            if pool.poll() is None:
                pool.send_signal(signal.SIGQUIT)
        for pool in self._pools:
            try:
                pool.wait(10)
            except subprocess.TimeoutExpired:
                pool.kill()
                pool.wait()
            if pool.stdout:
                pool.stdout.close()


def most_at_once(notes: list[Note]) -> int:
    """How many parts ran at the same time at most."""
    running = most = 0
    for note in sorted(notes, key=lambda each: each.time):
        running += {"S": 1, "E": -1}.get(note.word, 0)
        most = max(most, running)
    return most
