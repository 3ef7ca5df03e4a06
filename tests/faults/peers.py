"""The kill test for other queues, each in an environment of its own: ``make faults-peers``.

Every 500 ms a random process of the workers is killed with signal 9, for 20 seconds; a worker
that is gone is started again at once. Then they may take as long as they like, until nothing
has happened for 30 seconds. The same is done to streamq, with the same number of slots.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from streamq import Client
from streamq.server import LocalServer
from tests.faults.verdict import missing, repeated
from tests.fleet import Note

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARTS = 2_000
KILL_S, EVERY_S, PATIENCE_S = 20.0, 0.5, 30.0


class Peer(NamedTuple):
    """How a queue's worker is started, so many times, and what was set."""

    name: str
    command: str
    workers: int
    settings: str


PEERS = [
    Peer("streamq", "streamq worker handlers:app -p 2 -c 2 --lease 2s", 2, "lease 2 s"),
    Peer(
        "rq",
        "rq worker -q --worker-ttl 5 --maintenance-interval 2 --job-monitoring-interval 1 -u {url}",
        8,
        "job timeout 2 s, monitoring 1 s, maintenance 2 s, 10 retries",
    ),
    Peer(
        "celery",
        "celery -q -A peer_apps worker -c 4 --without-mingle --without-gossip",
        2,
        "acks_late, reject_on_worker_lost, visibility timeout 2 s, prefetch 1",
    ),
    Peer(
        "dramatiq",
        "dramatiq peer_apps -p 2 -t 2",
        2,
        "heartbeat timeout 2 s, maintenance at every call, 10 retries",
    ),
    Peer("arq", "arq peer_apps.Settings", 2, "job timeout 2 s (a claim stands 10 s longer)"),
    Peer("streaq", "streaq run peer_apps:worker", 2, "idle timeout 2 s, 10 tries"),
]


class Trial:
    """One queue put through the test."""

    def __init__(self, peer: Peer, bin_: Path, folder: Path, url: str) -> None:
        self._peer = peer
        self._bin = bin_ if peer.name != "streamq" else Path(sys.executable).parent
        self._log = folder / f"{peer.name}.notes"
        self._errors = folder / f"{peer.name}.err"
        self._url = url
        self._env = os.environ | {
            "PEERS_URL": url,
            "PEERS_NAME": peer.name,
            "STREAMQ_URL": url,
            "STREAMQ_TEST_LOG": str(self._log),
            "STREAMQ_AUDIT_MS": "1000",
            "PYTHONPATH": str(HERE),
        }

    def run(self) -> str:
        """Do it, and return a row of the table."""
        self._submit()
        self._workers = [self._start() for _ in range(self._peer.workers)]
        begun = time.monotonic()
        kills = self._kill_for_a_while()
        self._await_silence()
        for worker in self._workers:
            _kill(_tree(worker.pid))
            worker.wait()
        notes = self._notes()
        lost = missing(notes, PARTS)
        took = max((note.time for note in notes), default=begun) - begun
        end = f"{took:.0f} s" if not lost else "not at its end"
        name, settings = self._peer.name, self._peer.settings
        return f"| {name} | {settings} | {kills} | {lost:,} | {repeated(notes):,} | {end} |"

    def _submit(self) -> None:
        if self._peer.name == "streamq":
            with Client(self._url) as client:
                client.submit([b"8"] * PARTS, handler="work", limit=8)
            return
        words = [str(self._bin / "python"), str(HERE / "peer_apps.py"), str(PARTS)]
        if self._peer.name in ("rq", "celery", "dramatiq"):
            # Else what it sends would be named after the program and not after the module.
            code = f"import peer_apps; peer_apps.submit({PARTS})"
            words = [str(self._bin / "python"), "-c", code]
        subprocess.run(words, env=self._env, cwd=HERE, check=True)

    def _start(self) -> "subprocess.Popen[bytes]":
        program, *rest = self._peer.command.format(url=self._url).split()
        with self._errors.open("ab") as errors:
            return subprocess.Popen(
                [str(self._bin / program), *rest],
                env=self._env,
                cwd=HERE,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )

    def _kill_for_a_while(self) -> int:
        chance = random.Random(1)
        kills = 0
        while not self._log.exists():
            time.sleep(0.1)
        end = time.monotonic() + KILL_S
        while time.monotonic() < end and missing(self._notes(), PARTS):
            time.sleep(EVERY_S)
            pids = [pid for worker in self._workers for pid in _tree(worker.pid)]
            if pids:
                _kill([chance.choice(pids)])
                kills += 1
            self._look_after()
        return kills

    def _look_after(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker.poll() is not None:
                self._workers[index] = self._start()

    def _await_silence(self) -> None:
        seen, since = -1, time.monotonic()
        while missing(self._notes(), PARTS) and time.monotonic() - since < PATIENCE_S:
            self._look_after()
            time.sleep(0.5)
            size = self._log.stat().st_size
            if size != seen:
                seen, since = size, time.monotonic()

    def _notes(self) -> list[Note]:
        words = (line.split() for line in self._log.read_text().splitlines())
        return [Note(w, float(t), int(pid), name, int(n)) for w, t, pid, name, n in words]


def _tree(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in _tree(int(child)))]


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Put each through the test, and print a table."""
    names = sys.argv[1:]
    print("| queue | settings | kills | not run to the end | run again | all done after |")
    print("|---|---|---:|---:|---:|---|", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    for peer in PEERS:
        if not names or peer.name in names:
            with LocalServer.start(port=0) as server:
                trial = Trial(peer, ROOT / ".venv-peers" / peer.name / "bin", folder, server.url)
                print(trial.run(), flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
