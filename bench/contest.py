"""The contestants, and how one of them is measured: processes, clocks, CPU time and memory."""

import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from redis import Redis

HERE = Path(__file__).parent
PEERS = HERE / "peers"
ROOT = HERE.parent
_NEW = [str(ROOT / ".venv-bench/new/bin/python")]
_OLD = [str(ROOT / ".venv-bench/old/bin/python")]
_TICK = os.sysconf("SC_CLK_TCK")
_TALLY = "<qqq"


class Contestant(NamedTuple):
    """One way to run jobs: its adapter, and sizes that take it a few seconds."""

    name: str
    command: list[str]
    jobs: int
    batch: int = 5_000
    latencies: int = 150
    #: One command starts all processes, rather than one command each.
    is_pool: bool = False
    has_latency: bool = True
    #: A batch takes this contestant long, so it is measured in the first round only.
    has_slow_batch: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the packages that the contestant needs are installed."""
        return Path(self.command[0]).exists() or self.command[0] == "node"


CONTESTANTS = {
    each.name: each
    for each in (
        Contestant("streamq", [sys.executable, "streamq_.py"], 200_000, is_pool=True),
        Contestant("bare loop", [sys.executable, "raw_.py"], 200_000, batch=0, has_latency=False),
        Contestant("BullMQ (node)", ["node", "bullmq_node.js"], 20_000),
        Contestant("BullMQ (Python)", [*_NEW, "bullmq_.py"], 2_500),
        Contestant("dramatiq", [*_NEW, "dramatiq_.py"], 3_000, has_slow_batch=True),
        Contestant("huey", [*_NEW, "huey_.py"], 3_000),
        Contestant("SAQ", [*_OLD, "saq_.py"], 2_500),
        Contestant("taskiq", [*_NEW, "taskiq_.py"], 2_500, batch=0),
        Contestant("arq", [*_OLD, "arq_.py"], 2_500, batch=0, latencies=10),
        Contestant("streaq", [*_NEW, "streaq_.py"], 1_500, has_slow_batch=True),
        Contestant("Celery", [*_NEW, "celery_.py"], 1_200, has_slow_batch=True),
        Contestant("RQ", [*_NEW, "rq_.py"], 400, has_slow_batch=True),
    )
}


class Failed(Exception):
    """A contestant did not do what it was asked; the message has the end of its log."""


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of all its descendants, so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICK + sum(cpu_s(int(child)) for child in children)


class Run:
    """A contestant on a server, with a folder for its logs and counts."""

    def __init__(self, who: Contestant, url: str, nodes: Sequence[str] = ()) -> None:
        self.who = who
        self.nodes = [Redis.from_url(node) for node in nodes or [url]]
        self.redis = self.nodes[0]
        self._folder = Path(tempfile.mkdtemp(prefix="bench-"))
        (self._folder / "tally").mkdir()
        self._log = (self._folder / "log").open("wb")
        self._environment = os.environ | {
            "BENCH_URL": url,
            "BENCH_TALLY": str(self._folder / "tally"),
            "PYTHONPATH": str(PEERS),
        }

    def act(self, action: str, number: int) -> Any:
        """Run an action of the adapter, and return what it printed."""
        done = subprocess.run(
            [*self.who.command, action, str(number)],
            cwd=PEERS,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            timeout=180,
            check=False,
        )
        if done.returncode:
            raise Failed(f"{self.who.name} {action}: {self.said()}")
        return json.loads(done.stdout.splitlines()[-1])

    @contextmanager
    def workers(self, processes: int, **environment: str) -> Iterator[list[int]]:
        """Start worker processes; they are killed at the end of the block."""
        copies = 1 if self.who.is_pool else processes
        environment = {"BENCH_PROCESSES": str(processes), "BENCH_SLOTS": "2"} | environment
        running = [
            subprocess.Popen(
                [*self.who.command, "work"],
                cwd=PEERS,
                env=self._environment | environment,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )
            for _ in range(copies)
        ]
        try:
            yield [each.pid for each in running]
        finally:
            for each in running:
                # Some take seconds to end politely, and nothing of them is needed any more.
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()

    def counted(self) -> int:
        """Return how many jobs have begun, in all processes."""
        total = 0
        for path in (self._folder / "tally").iterdir():
            content = path.read_bytes()
            if len(content) == struct.calcsize(_TALLY):
                total += struct.unpack(_TALLY, content)[0]
        return total

    def await_count(self, wanted: int, timeout: float = 120.0) -> int:
        """Wait until so many jobs have begun."""
        deadline = time.monotonic() + timeout
        while (count := self.counted()) < wanted:
            if time.monotonic() > deadline:
                raise Failed(f"{self.who.name}: {count} of {wanted} jobs. {self.said()}")
            time.sleep(0.001)
        return count

    def forget(self) -> None:
        """Empty the server and the counts."""
        for node in self.nodes:
            node.flushall()
        for path in (self._folder / "tally").iterdir():
            path.unlink()

    def said(self) -> str:
        """Return the end of the contestant's log."""
        return (self._folder / "log").read_text(errors="replace")[-1500:]

    def server_cpu_s(self) -> float:
        """Return the server's CPU seconds so far."""
        return sum(self.node_cpus_s())

    def node_cpus_s(self) -> list[float]:
        """Return the CPU seconds of each node so far."""
        found: list[Any] = [node.info("cpu") for node in self.nodes]
        return [float(cpu["used_cpu_user"] + cpu["used_cpu_sys"]) for cpu in found]

    def close(self) -> None:
        """Remove everything that the contestant has written."""
        for node in self.nodes:
            node.close()
        self._log.close()
        subprocess.run(["rm", "-rf", str(self._folder)], check=False)


def enqueue(run: Run) -> dict[str, float]:
    """Put jobs into the empty server: rate, cost of both sides, memory of each waiting job."""
    jobs = run.who.jobs
    run.forget()
    # Scripts, groups and indexes are made once, and are no memory of a job.
    run.act("enqueue", 1)
    memory: Any = run.redis.info("memory")
    before, server = memory["used_memory"], run.server_cpu_s()
    found = run.act("enqueue", jobs)
    memory = run.redis.info("memory")
    return {
        "enqueue_per_s": jobs / found["s"],
        "enqueue_client_us": found["cpu_s"] / jobs * 1e6,
        "enqueue_server_us": (run.server_cpu_s() - server) / jobs * 1e6,
        "bytes": (memory["used_memory"] - before) / jobs,
    }


def drain(run: Run, processes: int) -> dict[str, float]:
    """Run the waiting jobs. The start of the processes and the first tenth are not counted."""
    # Three more: those that warmed up the adapter.
    total = run.who.jobs + 3
    with run.workers(processes) as pids:
        first = run.await_count(run.who.jobs // 10)
        begun, server = time.perf_counter(), run.server_cpu_s()
        client = sum(cpu_s(pid) for pid in pids)
        run.await_count(total)
        jobs, seconds = total - first, time.perf_counter() - begun
        spent = sum(cpu_s(pid) for pid in pids) - client
        server = run.server_cpu_s() - server
    return {
        f"drain{processes}_per_s": jobs / seconds,
        f"drain{processes}_client_us": spent / jobs * 1e6,
        f"drain{processes}_server_us": server / jobs * 1e6,
    }


def wait_and_idle(run: Run, idle_s: float) -> dict[str, float]:
    """Return how long one job waits for an idle worker, and what that worker costs meanwhile."""
    run.forget()
    with run.workers(1, BENCH_SLOTS="1") as pids:
        waits = sorted(run.act("latency", run.who.latencies)["ms"])
        server, client = run.server_cpu_s(), sum(cpu_s(pid) for pid in pids)
        time.sleep(idle_s)
        return {
            "latency_p50_ms": statistics.median(waits),
            "latency_p99_ms": waits[min(len(waits) - 1, int(len(waits) * 0.99))],
            "idle_server_ms_per_s": (run.server_cpu_s() - server) / idle_s * 1e3,
            "idle_client_ms_per_s": (sum(cpu_s(pid) for pid in pids) - client) / idle_s * 1e3,
        }


def batch(run: Run, jobs: int) -> dict[str, float]:
    """Measure a batch with one callback at its end, from the first call to the callback."""
    run.forget()
    with run.workers(1, BENCH_RESULTS="1"):
        run.act("latency", 0)
        return {"batch_per_s": jobs / run.act("batch", jobs)["s"]}


def measure(
    who: Contestant, url: str, *, is_first: bool = True, is_quick: bool = False
) -> dict[str, float]:
    """Measure every figure of one contestant, once."""
    if is_quick:
        who = who._replace(
            jobs=who.jobs // 4, latencies=min(50, who.latencies), batch=who.batch and 1_000
        )
    run = Run(who, url)
    try:
        found = enqueue(run) | drain(run, 1)
        if who.has_latency:
            found |= enqueue(run) | drain(run, 2)
            found |= wait_and_idle(run, 1.0 if is_quick else 2.0)
        if who.batch and (is_first or not who.has_slow_batch):
            found |= batch(run, who.batch)
        return found
    finally:
        run.redis.flushall()
        run.close()
