"""How a part's cost changes with processes, requests, waiting parts, limits, levels and nodes.

Every figure is of a real pool, started by its command. CPU time is what is compared: it is
steadier than wall time where several programs share two cores.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from contest import CONTESTANTS, HERE, PEERS, Run, cpu_s

from streamq import Client
from streamq.servers.local import LocalServer
from streamq.servers.local_cluster import LocalCluster

PAYLOAD = b"x" * 100
PARTS = 100_000
ROUNDS = 2

Submit = Callable[[Client], int]


def drain(run: Run, url: str, submit: Submit, processes: int = 1, share: float = 1.0) -> Any:
    """Measure what a part costs while this share of the submitted parts is run."""
    run.forget()
    with Client(url) as client:
        total = int(submit(client) * share)
    with run.workers(processes) as pids:
        first = run.await_count(total // 10)
        begun, nodes = time.perf_counter(), run.node_cpus_s()
        client_s = sum(cpu_s(pid) for pid in pids)
        # When its last part begins, the last batch is not finished yet.
        jobs = run.await_count(total) - first
        seconds = time.perf_counter() - begun
        spent = sum(cpu_s(pid) for pid in pids) - client_s
        shares = [after - before for after, before in zip(run.node_cpus_s(), nodes, strict=True)]
    return {
        "per_s": jobs / seconds,
        "client_us": spent / jobs * 1e6,
        "server_us": sum(shares) / jobs * 1e6,
        "node_shares": [each / (sum(shares) or 1.0) for each in shares],
    }


def one_request(parts: int = PARTS, **options: Any) -> Submit:
    """Return a function that submits one request of so many parts."""

    def submit(client: Client) -> int:
        client.submit([PAYLOAD] * parts, handler="job", **{"limit": 64} | options)
        return parts

    return submit


def beside(others: int) -> Submit:
    """Return a function that submits one request to run, and others that wait at a worse level."""

    def submit(client: Client) -> int:
        for _ in range(others):
            client.submit([PAYLOAD], handler="job", level=90)
        return one_request(level=10)(client)

    return submit


def spread(requests: int, parts: int = PARTS, levels: int = 1) -> Submit:
    """Return a function that submits so many requests, which take turns, on so many levels."""

    def submit(client: Client) -> int:
        each = parts // requests
        for number in range(requests):
            client.submit([PAYLOAD] * each, handler="job", limit=64, level=10 + number % levels)
        return each * requests

    return submit


#: The cases on one server: the submission, the processes, and the share that is run.
CASES: dict[str, tuple[Submit, int, float]] = {
    "1 process": (one_request(2 * PARTS), 1, 1.0),
    "2 processes": (one_request(2 * PARTS), 2, 1.0),
    "4 processes": (one_request(2 * PARTS), 4, 1.0),
    "alone": (beside(0), 1, 1.0),
    "beside 100 requests": (beside(100), 1, 1.0),
    "beside 10,000 requests": (beside(10_000), 1, 0.9),
    "spread over 100 requests": (spread(100), 1, 1.0),
    "spread over 10,000 requests": (spread(10_000), 1, 0.2),
    "of a million waiting": (one_request(1_000_000), 1, 0.1),
    "limit that cannot bind": (one_request(limit=1_000_000), 1, 1.0),
    "limit of 2": (one_request(limit=2), 1, 1.0),
    "limit of 1": (one_request(limit=1), 1, 1.0),
    "100 requests, one level": (spread(100, levels=1), 1, 1.0),
    "100 requests, 80 levels": (spread(100, levels=80), 1, 1.0),
}
#: More rounds for cases that differ by a few per cent.
_ROUNDS_CLOSE = 9
_CLOSE = ("limit that cannot bind", "limit of 2", "limit of 1")
_SLOW = ("of a million waiting", "beside 10,000 requests", "spread over 10,000 requests")


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each figure's median, and the costs in each round."""
    found: dict[str, Any] = {
        name: statistics.median(each[name] for each in rounds)
        for name in ("per_s", "client_us", "server_us")
    }
    found["node_shares"] = rounds[0]["node_shares"]
    found["costs_us"] = [each["client_us"] + each["server_us"] for each in rounds]
    return found


def on_one_server(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every case, interleaved: a round of all of them, then the next."""
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    with LocalServer.start(port=0) as server:
        run = Run(CONTESTANTS["streamq"], server.url)
        for number in range(_ROUNDS_CLOSE):
            for name, (submit, processes, share) in CASES.items():
                if number >= (1 if name in _SLOW else ROUNDS) and name not in _CLOSE:
                    continue
                seen[name].append(drain(run, server.url, submit, processes, share))
                say(f"{name}: {seen[name][-1]['per_s']:,.0f}/s")
        run.close()
    return {name: medians(rounds) for name, rounds in seen.items()}


def on_clusters(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the same parts, in 300 requests, on clusters of one and three primaries."""
    found = {}
    for primaries in (1, 3):
        with LocalCluster.start(primaries=primaries, replicas=0) as cluster:
            nodes = [f"redis://127.0.0.1:{node.port}" for node in cluster.nodes]
            run = Run(CONTESTANTS["streamq"], cluster.url, nodes)
            rounds = [drain(run, cluster.url, spread(300, 60_000)) for _ in range(ROUNDS)]
            run.close()
        name = f"{primaries} primar{'y' if primaries == 1 else 'ies'}"
        found[name] = medians(rounds)
        say(f"cluster of {name}: {found[name]['per_s']:,.0f}/s")
    return found


def start_up() -> dict[str, float]:
    """Measure the seconds until the help is printed, and until a pool is ready; medians of five."""
    command = [sys.executable, "-m", "streamq.cli"]
    helps, pools = [], []
    with LocalServer.start() as server:
        environment = os.environ | {
            "STREAMQ_URL": server.url,
            "BENCH_URL": "",
            "BENCH_TALLY": str(HERE),
            "PYTHONPATH": str(PEERS),
        }
        for _ in range(5):
            begun = time.perf_counter()
            subprocess.run([*command, "--help"], stdout=subprocess.DEVNULL, check=True)
            helps.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            with subprocess.Popen(
                [*command, "worker", "streamq_.py:app"],
                cwd=PEERS,
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            ) as pool:
                assert pool.stderr
                while "ready" not in (line := pool.stderr.readline()):
                    assert line, "the pool ended before it was ready"
                pools.append(time.perf_counter() - begun)
                pool.terminate()
    return {"help_s": statistics.median(helps), "worker_s": statistics.median(pools)}


def measure(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything."""
    return {
        "start_up": start_up(),
        "server": on_one_server(say),
        "cluster": on_clusters(say),
    }
