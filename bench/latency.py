"""How long a pool takes to start, and one part waits on it: from ``submit`` to its handler.

    python bench/latency.py [--times 300] [--processes 1]

A real pool, started by its command on an embedded server; requests of one part, one after
another. Both ends read the same monotonic clock of the machine. A pool has started when it
says that it is ready.

Twice: the submitter leaves the server alone until the handler has begun, as one does that
goes on with something else; or it asks at once for the end, and its questions stand in the
way of the worker's.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from streamq import App, Client
from streamq.server import LocalServer

STARTS = 5
ALONE_S = 0.01

app = App()


@app.handler
def first_line(_: bytes) -> int:
    """When the handler began, in nanoseconds."""
    return time.monotonic_ns()


def measure(client: Client, times: int, *, asks_at_once: bool) -> list[float]:
    """Milliseconds of each try, sorted."""
    waits = []
    for _ in range(times):
        begun = time.monotonic_ns()
        request = client.submit([b"x" * 100], handler="first_line")
        if not asks_at_once:
            time.sleep(ALONE_S)
        request.wait(30)
        ((_, started),) = request.results()
        waits.append((started - begun) / 1e6)
        request.purge()
    return sorted(waits)


def start(url: str, processes: int) -> "tuple[subprocess.Popen[str], float]":
    """A pool that is ready, and how many seconds that took."""
    here = Path(__file__)
    command = [sys.executable, "-m", "streamq.cli", "worker", f"{here.name}:app"]
    command += ["-p", str(processes), "--url", url]
    begun = time.monotonic()
    pool = subprocess.Popen(command, cwd=here.parent, stderr=subprocess.PIPE, text=True)
    assert pool.stderr
    while " ready: " not in pool.stderr.readline():
        if pool.poll() is not None:
            raise SystemExit("the pool does not start")
    return pool, time.monotonic() - begun


def stop(pool: "subprocess.Popen[str]") -> None:
    """Let a pool end."""
    pool.send_signal(signal.SIGTERM)
    pool.communicate()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    starts = []
    with LocalServer.start() as server, Client(server.url) as client:
        for _ in range(STARTS):
            pool, seconds = start(server.url, args.processes)
            starts.append(seconds)
            stop(pool)
        pool, _ = start(server.url, args.processes)
        try:
            measure(client, 20, asks_at_once=True)
            waits = {
                asks_at_once: measure(client, args.times, asks_at_once=asks_at_once)
                for asks_at_once in (False, True)
            }
        finally:
            stop(pool)
    print(f"load average {os.getloadavg()[0]:.2f}, {args.times} tries of each kind")
    print(f"start to ready: median {statistics.median(starts):.2f} s of {STARTS}")
    for asks_at_once, found in waits.items():
        p99 = found[int(len(found) * 0.99)]
        how = ", which asks for the end at once" if asks_at_once else ""
        print(f"submit{how} to handler: p50 {statistics.median(found):.2f} ms, p99 {p99:.2f} ms")


if __name__ == "__main__":
    main()
