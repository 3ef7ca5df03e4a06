"""How long a part of level 0 waits on a pool that is full of level 90.

    python bench/priority.py [--tries 50] [--crowd 100000]

A real pool of four slots, busy with parts of 10 ms, a hundred thousand of them waiting;
from ``submit`` to the handler's first line.
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

app = App()


@app.handler
def crowd(_: bytes) -> None:
    """Work for 10 ms."""
    time.sleep(0.01)


@app.handler
def urgent(_: bytes) -> int:
    """Return when the handler began, in nanoseconds."""
    return time.monotonic_ns()


def measure(client: Client, tries: int) -> list[float]:
    """Return the milliseconds of each try, sorted."""
    waits = []
    for _ in range(tries):
        begun = time.monotonic_ns()
        request = client.submit([b"x"], handler="urgent", level=0)
        request.wait(30)
        ((_, started),) = request.results()
        waits.append((started - begun) / 1e6)
    return sorted(waits)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--crowd", type=int, default=100_000)
    args = parser.parse_args()
    here = Path(__file__)
    with LocalServer.start() as server, Client(server.url) as client:
        command = [sys.executable, "-m", "streamq.cli", "worker", f"{here.name}:app", "-c", "4"]
        environment = os.environ | {"STREAMQ_URL": server.url, "STREAMQ_LOG_LEVEL": "warning"}
        pool = subprocess.Popen(command, env=environment, cwd=here.parent)
        try:
            many = client.submit([b"x"] * args.crowd, handler="crowd", level=90, limit=4)
            while many.status().parts.done < 100:
                time.sleep(0.05)
            waits = measure(client, args.tries)
        finally:
            pool.send_signal(signal.SIGTERM)
            pool.wait()
    p99 = waits[min(len(waits) - 1, int(len(waits) * 0.99))]
    print(f"load average {os.getloadavg()[0]:.2f}, {args.tries} tries, {args.crowd:,} waiting")
    print(f"level 0 among level 90: p50 {statistics.median(waits):.1f} ms, p99 {p99:.1f} ms")


if __name__ == "__main__":
    main()
