"""Measures streamq, its peers and the bare loop on one server, and writes the report.

    python bench/run.py [--quick]          every piece, then docs/performance.md
    python bench/run.py PIECE...           round-1, round-2, round-3, scaling, report

A round runs every contestant, one after the other on the same server, so that a change of the
machine's speed affects all of them. A piece keeps its figures as JSON under bench/results, and
``report`` reads them there.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import contest
import report
import scaling
from redis import Redis

from streamq.servers.local import LocalServer

RESULTS = Path(__file__).parent / "results"
PIECES = ("round-1", "round-2", "round-3", "scaling", "report")


def say(text: str) -> None:
    """Print progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Return where and when the figures were measured."""
    models = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": ", ".join(sorted(models)) or platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
    }


def versions(redis: Any) -> dict[str, str]:
    """Return the versions of the server, the driver, and every peer."""
    info = redis.info("server")
    name = info.get("server_name", "redis")
    found = {
        "server": f"{name} {info.get('valkey_version', info['redis_version'])}",
        "streamq": version("streamq"),
        "redis-py": version("redis"),
    }
    for path in sorted(contest.PEERS.glob("constraints*.txt")):
        pins = dict(line.split("==") for line in path.read_text().split() if "==" in line)
        for peer in ("arq", "bullmq", "celery", "dramatiq", "huey", "rq", "saq", "streaq"):
            if peer in pins:
                found[peer] = pins[peer]
        if "taskiq" in pins:
            found["taskiq"] = f"{pins['taskiq']} with taskiq-redis {pins['taskiq-redis']}"
    node = json.loads((contest.PEERS / "package.json").read_text())["dependencies"]
    found["bullmq (node)"] = node["bullmq"]
    if shutil.which("node"):
        found["node"] = subprocess.run(
            ["node", "--version"], capture_output=True, text=True, check=True
        ).stdout.strip()
    return found


def benchmark(port: int) -> dict[str, float]:
    """Return commands a second of the server's own benchmark, in pipelines of 100, if installed."""
    program = shutil.which("valkey-benchmark") or shutil.which("redis-benchmark")
    if not program:
        return {}
    command = [program, "-p", str(port), "-n", "200000", "-P", "100", "-c", "2", "--csv"]
    found = {}
    for name, words in {
        "SET": ["SET", "k", "x" * 100],
        "XADD": ["XADD", "s", "*", "p", "x" * 100],
    }.items():
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=True)
        found[name] = float(done.stdout.splitlines()[-1].split('","')[1])
    return found


def one_round(*, is_first: bool = True, is_quick: bool = False) -> dict[str, Any]:
    """Measure every contestant once, on one server."""
    found: dict[str, Any] = {"machine": machine(), "contestants": {}, "failed": {}}
    with LocalServer.start(port=0) as server, Redis.from_url(server.url) as redis:
        found["versions"] = versions(redis)
        for who in contest.CONTESTANTS.values():
            if not who.is_there:
                found["failed"][who.name] = "not installed: make peers"
                continue
            begun = time.monotonic()
            try:
                measured = contest.measure(who, server.url, is_first=is_first, is_quick=is_quick)
                found["contestants"][who.name] = measured
                rate = measured["drain1_per_s"]
                say(f"{who.name}: {rate:,.0f} jobs/s ({time.monotonic() - begun:.0f} s)")
            except (contest.Failed, subprocess.SubprocessError, OSError) as error:
                found["failed"][who.name] = str(error)
                say(f"{who.name}: FAILED: {error}")
        found["benchmark"] = benchmark(int(server.url.rpartition(":")[2]))
        redis.flushall()
    found["machine"]["load_after"] = os.getloadavg()
    return found


def run(piece: str) -> None:
    """Measure one piece and store its figures."""
    RESULTS.mkdir(exist_ok=True)
    if piece == "report":
        report.write(report.read(RESULTS))
        return
    say(f"{piece}, load average {os.getloadavg()[0]:.2f}")
    if piece == "scaling":
        found = {"machine": machine(), **scaling.measure(say)}
    else:
        found = one_round(is_first=piece == "round-1", is_quick=piece == "quick")
    (RESULTS / f"{piece}.json").write_text(json.dumps(found, indent=1))


def main() -> None:
    """Run the pieces that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pieces", nargs="*", choices=[[], *PIECES, "quick"], metavar="PIECE")
    parser.add_argument("--quick", action="store_true", help="one short round, printed only")
    args = parser.parse_args()
    if args.quick:
        run("quick")
        print(report.quick(json.loads((RESULTS / "quick.json").read_text())))
        return
    for piece in args.pieces or PIECES:
        run(piece)


if __name__ == "__main__":
    main()
