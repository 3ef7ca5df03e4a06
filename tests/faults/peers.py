"""The kill test for other queues, each in an environment of its own: ``make faults-peers``.

Every 500 ms a random process of the workers is killed with signal 9, for ten seconds; a worker
that is gone is started again at once. Then they may take as long as they like, until nothing
has happened for 20 seconds. The same is done to streamq, with the same number of slots. Each is
put through it three times, and the worst of each figure is what the table says.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from streamq import Client
from streamq.servers.local import LocalServer
from tests.faults.report import replaced
from tests.faults.verdict import missing, repeated
from tests.support.fleet import read_notes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARTS = 2_000
RUNS = 3
KILL_S, EVERY_S, PATIENCE_S = 10.0, 0.5, 20.0
PAGE = ROOT / "docs" / "faults.md"
HEAD = """| queue | version | settings | kills | not run to the end | run again | all done after |
|---|---|---|--:|--:|--:|---|
"""


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


class Outcome(NamedTuple):
    """What came of one run."""

    kills: int
    lost: int
    again: int
    took_s: float


class Trial:
    """One queue put through the test, once."""

    def __init__(self, peer: Peer, seed: int, folder: Path, url: str) -> None:
        self._peer = peer
        self._chance = random.Random(seed)
        self._bin = bin_of(peer)
        self._log = folder / f"{peer.name}{seed}.notes"
        self._errors = folder / f"{peer.name}{seed}.err"
        self._url = url
        self._started: list[subprocess.Popen[bytes]] = []
        self._env = os.environ | {
            "PEERS_URL": url,
            "PEERS_NAME": peer.name,
            "STREAMQ_URL": url,
            "STREAMQ_TEST_LOG": str(self._log),
            "STREAMQ_AUDIT_MS": "1000",
            "PYTHONPATH": str(HERE),
        }

    def run(self) -> Outcome:
        """Do it."""
        self._submit()
        self._workers = [self._start() for _ in range(self._peer.workers)]
        begun = time.monotonic()
        kills = self._kill_for_a_while()
        self._await_silence()
        for worker in self._started:
            # Those below a worker that was killed may live on; they are of its group.
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        notes = read_notes(self._log)
        took_s = max((note.time for note in notes), default=begun) - begun
        return Outcome(kills, missing(notes, PARTS), repeated(notes), took_s)

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
            worker = subprocess.Popen(
                [str(self._bin / program), *rest],
                env=self._env,
                cwd=HERE,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        self._started.append(worker)
        return worker

    def _kill_for_a_while(self) -> int:
        kills = 0
        while not self._log.exists():
            time.sleep(0.1)
        end = time.monotonic() + KILL_S
        while time.monotonic() < end and missing(read_notes(self._log), PARTS):
            time.sleep(EVERY_S)
            pids = [pid for worker in self._workers for pid in _tree(worker.pid)]
            if pids:
                _kill([self._chance.choice(pids)])
                kills += 1
            self._look_after()
        return kills

    def _look_after(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker.poll() is not None:
                self._workers[index] = self._start()

    def _await_silence(self) -> None:
        seen, since = -1, time.monotonic()
        while missing(read_notes(self._log), PARTS) and time.monotonic() - since < PATIENCE_S:
            self._look_after()
            time.sleep(0.5)
            size = self._log.stat().st_size
            if size != seen:
                seen, since = size, time.monotonic()


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


def bin_of(peer: Peer) -> Path:
    """Where its programs are."""
    own = Path(sys.executable).parent
    return own if peer.name == "streamq" else ROOT / ".venv-peers" / peer.name / "bin"


def version_of(peer: Peer) -> str:
    """Which of its versions is there."""
    code = f"from importlib.metadata import version; print(version({peer.name!r}))"
    words = [str(bin_of(peer) / "python"), "-c", code]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def row(peer: Peer, outcomes: list[Outcome]) -> str:
    """The worst of each figure."""
    stuck = sum(outcome.lost > 0 for outcome in outcomes)
    longest = f"{max(outcome.took_s for outcome in outcomes):.0f} s"
    cells = [
        peer.name,
        version_of(peer),
        peer.settings,
        f"{max(outcome.kills for outcome in outcomes)}",
        f"{max(outcome.lost for outcome in outcomes):,}",
        f"{max(outcome.again for outcome in outcomes):,}",
        f"never in {stuck} of {len(outcomes)} runs" if stuck else longest,
    ]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Put each through the test, print a table, and write it into the page if it is whole."""
    names = sys.argv[1:]
    rows = []
    print(HEAD, end="", flush=True)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        for peer in PEERS:
            if names and peer.name not in names:
                continue
            outcomes = []
            for seed in range(1, RUNS + 1):
                with LocalServer.start(port=0) as server:
                    outcomes.append(Trial(peer, seed, Path(folder), server.url).run())
                print(peer.name, outcomes[-1], file=sys.stderr, flush=True)
            rows.append(row(peer, outcomes))
            print(rows[-1], end="", flush=True)
    if not names:
        PAGE.write_text(replaced(PAGE.read_text(), "peers", HEAD + "".join(rows)))


if __name__ == "__main__":
    main()
