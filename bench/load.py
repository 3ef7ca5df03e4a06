"""How fast files are loaded, and what memory that takes: no worker, one embedded server.

    python bench/load.py [--lines 1000000] [--repeats 5]

Each load is a process of its own, so that its CPU time and its largest memory are its own;
its start is not counted. MB are a million bytes. Run it on a quiet machine.
"""

import argparse
import json
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from streamq import Connection, Protocol
from streamq.model import MAX_PART, Policy, Spec
from streamq.queue.loading import forget_request
from streamq.records.sizes import PartSize
from streamq.runs.load import Load
from streamq.servers.local import LocalServer

LINE = b"%012d " + b"x" * 86 + b"\n"


def make(path: Path, lines: int) -> Path:
    """Return a file of lines of 100 bytes."""
    with path.open("wb") as file:
        for first in range(0, lines, 10_000):
            file.write(b"".join(LINE % n for n in range(first, min(lines, first + 10_000))))
    return path


def load(url: str, path: str, size: PartSize) -> dict[str, float]:
    """Load the file and purge it. Return what that took of this process and of the server."""
    connection = Connection(url)
    connection.check()
    protocol = Protocol(connection)
    policy = Policy(handler="none", spec=Spec(format="lines", files=(path,)))
    request_id = secrets.token_hex(8)
    server, client, begun = server_cpu(connection), time.process_time(), time.perf_counter()
    parts = Load(protocol, request_id, policy, size).run()
    took = {
        "wall_s": time.perf_counter() - begun,
        "client_s": time.process_time() - client,
        "server_s": server_cpu(connection) - server,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "parts": parts,
    }
    protocol.cancel(request_id)
    forget_request(protocol, policy.queue, request_id)
    return took


def server_cpu(connection: Connection) -> float:
    """Return the CPU seconds of the server so far."""
    cpu = connection.redis.info("cpu")
    return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])


def measure(url: str, path: Path, size: PartSize, repeats: int) -> list[dict[str, float]]:
    """Repeat the same load, each time in a process of its own."""
    words = [str(path), str(size.bytes), str(size.records)]
    command = [sys.executable, __file__, "--child", url, *words]
    return [json.loads(subprocess.check_output(command)) for _ in range(repeats)]


def spread(values: list[float], digits: int = 0) -> str:
    """Return median, lowest and highest."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} - {high:,.{digits}f})"


def report(name: str, found: list[dict[str, float]], size: int) -> None:
    """Print a line of the table."""
    print(
        f"{name:<28}"
        f"{spread([size / 1e6 / each['wall_s'] for each in found]):>22}"
        f"{spread([each['parts'] / each['wall_s'] for each in found]):>32}"
        f"{spread([each['wall_s'] for each in found], 2):>22}"
        f"{spread([each['client_s'] for each in found], 2):>22}"
        f"{spread([each['server_s'] for each in found], 2):>22}"
        f"{spread([each['rss_mib'] for each in found]):>16}"
    )


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--child"]:
        url, name, part_bytes, records = sys.argv[2:]
        print(json.dumps(load(url, name, PartSize(int(part_bytes), int(records), MAX_PART))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    asked: Any = parser.parse_args()
    sizes = {
        "--bytes 1MiB": PartSize(2**20, 0, MAX_PART),
        "--bytes 256KiB": PartSize(2**18, 0, MAX_PART),
        "--lines 100": PartSize(records=100, most=MAX_PART),
        "--lines 1": PartSize(records=1, most=MAX_PART),
    }
    print(f"load average {Path('/proc/loadavg').read_text().split()[0]}; median (lowest - highest)")
    heads = (
        ("MB/s", 22),
        ("parts/s", 32),
        ("wall s", 22),
        ("client CPU s", 22),
        ("server CPU s", 22),
    )
    print(" " * 28 + "".join(f"{head:>{width}}" for head, width in heads) + f"{'peak MiB':>16}")
    with tempfile.TemporaryDirectory() as folder, LocalServer.start() as server:
        path = make(Path(folder) / "in.txt", asked.lines)
        for name, size in sizes.items():
            found = measure(server.url, path, size, asked.repeats)
            report(name, found, path.stat().st_size)
        larger = make(Path(folder) / "larger.txt", 5 * asked.lines)
        for name in ("--bytes 256KiB", "--lines 100"):
            found = measure(server.url, larger, sizes[name], 1)
            report(f"{name}, 5 x the lines", found, larger.stat().st_size)


if __name__ == "__main__":
    main()
