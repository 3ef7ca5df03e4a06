"""One job on streamq and on others that can do it: 10,000 items, three stages, one sum at the end.

``flows.py --peers`` runs it. Each has one process that works, which runs before the clock does and
has done a small flow, and each step of an item is a job of its own. The clock begins with the
submission and ends when the submitter has the sum.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from contest import cpu_s
from redis import Redis

from streamq.servers.local import LocalServer

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "bench/peers"
_NEW = str(ROOT / ".venv-bench/new/bin/python")
ITEMS = 10_000
FIRST = 20


class Peer(NamedTuple):
    """One that can do the job, and how it is started."""

    name: str
    command: list[str]
    has_server: bool = True


ALL = (
    Peer("streamq, a flow with a reduce", [sys.executable, "flow_streamq.py"]),
    Peer("Celery, chains in a chord", [_NEW, "flow_celery.py"]),
    Peer("BullMQ on node, a flow", ["node", "flow_bullmq.js"]),
    Peer("Dask, futures (kept nowhere)", [_NEW, "flow_dask.py"], has_server=False),
)


class Most:
    """The most memory that processes and a server hold at any moment (bytes)."""

    def __init__(self, redis: Any, pids: list[int]) -> None:
        self.server = self.workers = self.submitter = 0
        self._redis = redis
        self.pids = pids
        self.submitter_pid = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.server = max(self.server, self._redis.info("memory")["used_memory"])
            self.workers = max(self.workers, sum(map(resident, self.pids)))
            if self.submitter_pid:
                self.submitter = max(self.submitter, resident(self.submitter_pid))


def resident(pid: int) -> int:
    """Return the bytes that a process and those that it started hold in memory."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [each for task in tasks for each in (task / "children").read_text().split()]
    except OSError:  # it has ended meanwhile
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident(int(each)) for each in children)


@contextmanager
def _working(peer: Peer, environment: dict[str, str], log: Any) -> Iterator[int]:
    worker = subprocess.Popen(
        [*peer.command, "work"], cwd=PEERS, env=environment, stdout=log, stderr=log
    )
    try:
        yield worker.pid
    finally:
        worker.kill()
        worker.wait()


def measure(peer: Peer) -> dict[str, float]:
    """Return what the job takes a peer."""
    with tempfile.TemporaryFile() as log, LocalServer.start() as server:
        redis: Any = Redis.from_url(server.url)
        redis.config_set("port", port := _free_port())
        url = f"redis://127.0.0.1:{port}/0"
        environment = os.environ | {
            "BENCH_URL": url,
            "BENCH_PORT": str(_free_port()),
            "PYTHONPATH": f"{PEERS}:{ROOT}" if peer.command[0] == sys.executable else str(PEERS),
        }
        with _working(peer, environment, log) as pid:
            _flow(peer, environment, log, FIRST, None)
            if peer.has_server:
                redis.flushall()
            before = redis.info("memory")["used_memory"]
            most, cpu = Most(redis, [pid]), cpu_s(pid)
            server_cpu = _server_cpu(redis)
            found = _flow(peer, environment, log, ITEMS, most)
            most.close()
            return {
                "s": found["s"],
                "cpu_s": cpu_s(pid) - cpu + found["cpu_s"] + _server_cpu(redis) - server_cpu,
                "server": most.server - before,
                "worker": most.workers,
                "submitter": most.submitter,
            }


def _flow(peer: Peer, environment: Any, log: Any, n: int, most: Most | None) -> dict[str, float]:
    begun = os.times()
    running = subprocess.Popen(
        [*peer.command, "flow", str(n)], cwd=PEERS, env=environment, stdout=subprocess.PIPE,
        stderr=log,
    )  # fmt: skip
    if most:
        most.submitter_pid = running.pid
    out, _ = running.communicate(timeout=300)
    if running.returncode or not out:
        log.seek(0)
        raise SystemExit(f"{peer.name}: {log.read()[-1500:].decode(errors='replace')}")
    found = json.loads(out.splitlines()[-1])
    assert found["sum"] == sum((i + 1) * 2 + 3 for i in range(n)), f"{peer.name}: {found}"
    ended = os.times()
    spent = ended.children_user + ended.children_system
    return {"s": found["s"], "cpu_s": spent - begun.children_user - begun.children_system}


def _server_cpu(redis: Any) -> float:
    cpu = redis.info("cpu")
    return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run() -> None:
    """Measure each and print a table."""
    load = os.getloadavg()[0]
    print(
        f"load average {load:.2f}; {ITEMS:,} items, three stages, one sum; one process that works"
    )
    print(f"{'':34}{'s':>8}{'CPU s':>8}{'server MB':>11}{'worker MB':>11}{'submitter MB':>14}")
    for peer in ALL:
        if not Path(peer.command[0]).exists() and peer.command[0] != "node":
            print(f"{peer.name:34}  is not installed: make peers")
            continue
        found = measure(peer)
        server = f"{found['server'] / 1e6:11.1f}" if peer.has_server else f"{'-':>11}"
        print(
            f"{peer.name:34}{found['s']:8.2f}{found['cpu_s']:8.1f}{server}"
            f"{found['worker'] / 1e6:11.0f}{found['submitter'] / 1e6:14.0f}",
            flush=True,
        )


if __name__ == "__main__":
    run()
