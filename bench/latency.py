"""How long a pool takes to start, and how long one part waits from ``submit`` to its handler.

    python bench/latency.py [--times 600] [--processes 1]

A real pool, started by its command on an embedded server; requests of one part, one after another.
Both ends read the same monotonic clock of the machine. A pool has started when it says that it is
ready.

It is measured twice. First the submitter leaves the server alone until the handler has begun, as a
program does that goes on with other work. Then it asks at once for the end, and its questions
compete with those of the worker.

The host of a virtual machine runs other machines, too, and counts for how long ("steal"). Tries are
made in blocks of twenty. Those of blocks without steal are shown apart, beside all of them.
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
from streamq.servers.local import LocalServer

STARTS = 5
ALONE_S = 0.01
BLOCK = 20

app = App()


@app.handler
def first_line(_: bytes) -> int:
    """Return when the handler began, in nanoseconds."""
    return time.monotonic_ns()


def measure(client: Client, times: int, *, asks_at_once: bool) -> list[float]:
    """Return the milliseconds of each try."""
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
    return waits


def stolen() -> int:
    """Return the ticks that the host took from this machine so far; 0 where nobody counts them."""
    stat = Path("/proc/stat")
    return int(stat.read_text().split(maxsplit=9)[8]) if stat.exists() else 0


def measure_blocks(client: Client, times: int, *, asks_at_once: bool) -> dict[str, list[float]]:
    """Return the milliseconds of all tries, and of those in blocks without steal."""
    everything: list[float] = []
    calm: list[float] = []
    for _ in range(max(1, times // BLOCK)):
        before = stolen()
        waits = measure(client, BLOCK, asks_at_once=asks_at_once)
        everything += waits
        if stolen() == before:
            calm += waits
    return {"all": everything, "with nothing stolen": calm}


def start(url: str, processes: int) -> "tuple[subprocess.Popen[str], float]":
    """Start a pool. Return it when it is ready, and the seconds that took."""
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
    """End a pool."""
    pool.send_signal(signal.SIGTERM)
    pool.communicate()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=600)
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
            found = {
                asks_at_once: measure_blocks(client, args.times, asks_at_once=asks_at_once)
                for asks_at_once in (False, True)
            }
        finally:
            stop(pool)
    print(f"load average {os.getloadavg()[0]:.2f}")
    print(f"start to ready: median {statistics.median(starts):.2f} s of {STARTS}")
    for asks_at_once, kinds in found.items():
        print(f"submit{', which asks for the end at once' if asks_at_once else ''} to handler:")
        for kind, waits in kinds.items():
            show(kind, waits)


def show(kind: str, waits: list[float]) -> None:
    """Print a line of figures."""
    if not waits:
        print(f"  {kind}: no tries")
        return
    p99 = sorted(waits)[int(len(waits) * 0.99)]
    told = f"p50 {statistics.median(waits):.2f} ms, p99 {p99:.2f} ms"
    print(f"  {kind}: {told} ({len(waits)} tries)")


if __name__ == "__main__":
    main()
