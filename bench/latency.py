"""How long one part waits on an idle pool: from ``submit`` to the handler's first line.

    python bench/latency.py [--times 300] [--processes 1]

A real pool, started by its command on an embedded server; requests of one part, one after
another. Both ends read the same monotonic clock of the machine.
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

app = App()


@app.handler
def first_line(_: bytes) -> int:
    """When the handler began, in nanoseconds."""
    return time.monotonic_ns()


def measure(client: Client, times: int) -> list[float]:
    """Milliseconds of each try, sorted."""
    waits = []
    for _ in range(times):
        begun = time.monotonic_ns()
        request = client.submit([b"x" * 100], handler="first_line")
        request.wait(30)
        ((_, started),) = request.results()
        waits.append((started - begun) / 1e6)
        request.purge()
    return sorted(waits)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    here = Path(__file__)
    with LocalServer.start() as server, Client(server.url) as client:
        command = [sys.executable, "-m", "streamq.cli", "worker", f"{here.name}:app"]
        command += ["-p", str(args.processes), "--log-level", "warning"]
        environment = os.environ | {"STREAMQ_URL": server.url}
        pool = subprocess.Popen(command, env=environment, cwd=here.parent)
        try:
            measure(client, 20)
            waits = measure(client, args.times)
        finally:
            pool.send_signal(signal.SIGTERM)
            pool.wait()
    p99 = waits[int(len(waits) * 0.99)]
    print(f"load average {os.getloadavg()[0]:.2f}, {args.times} tries")
    print(f"submit to handler: p50 {statistics.median(waits):.2f} ms, p99 {p99:.2f} ms")


if __name__ == "__main__":
    main()
