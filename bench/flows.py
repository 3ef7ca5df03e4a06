"""What flows cost: handing parts over against finishing them, bytes, throughput, first result.

    python bench/flows.py [--rounds 5] [--before CHECKOUT] [--json]
    python bench/flows.py --memory MINUTES [--slow SECONDS]
    python bench/flows.py --peers

One embedded server. Server time is what the server's scripts took, per part, the median of rounds
in which all kinds take turns. ``--before`` names another checkout with a ``.venv``, whose plain
requests are measured beside ours. Run it on a quiet machine; it prints the load it started with.

``--memory`` has a fast stage before a slow one (4 slots, 0.25 s a part: 16 MB a second), with
results of 1 MB, for so many minutes, and prints what the server and the worker hold. ``--peers``
runs one job as a flow and on others that can do it (``bench/flow_peers.py``); ``make peers``
installs them.
"""

import argparse
import json
import math
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flow_peers
from plain import PARTS, RESULT, Drain

from streamq import Client, Connection, Protocol, Request
from streamq.flows.flow import Flow, Stage
from streamq.model import Part, StageStatus
from streamq.protocol.replies import Grant, PassedPart, Terms
from streamq.queue.flow_policy import flow_policy
from streamq.records import about
from streamq.servers.local import LocalServer

CHILDREN = 10
#: Fewer children than this are spread in one call, as workers do.
MOST_AT_ONCE = 64
#: Each stage has a window that is never full: what it costs is measured, and it holds nothing up.
WINDOW = "1000000000 parts"
NAMES = ("one", "two", "three")
APP = """
from streamq import App
app = App()
"""
FLOW = """
maps = app.flow("maps").map(one).map(two).map(three)
"""
HANDLER = """
@app.map
def {name}(value: bytes) -> bytes:
    return value
"""


class FlowDrain(Drain):
    """Drains stages of flows, too."""

    def load_flow(self, kinds: Sequence[str], parts: int) -> tuple[str, tuple[str, ...]]:
        """Return a flow of so many parts, and what the scripts know of each of its stages."""
        stages = [
            Stage(
                kind=kind,  # type: ignore[arg-type]
                handler="bench",
                limit=1,
                window=WINDOW if at and kind == "map" else None,
            )
            for at, kind in enumerate(kinds)
        ]
        flow = Flow("bench", stages)
        plan = flow_policy(flow, {"queue": "q"}).flow
        assert plan
        return self.load(parts, flow=flow), tuple(stage.policy.spec.facts for stage in plan.stages)

    def pass_all(self, place: str, batch: int, facts: str) -> int:
        """Run all parts of a stage."""

        def pass_on(grant: Grant, holder: str, call: int) -> Grant:
            passed = [_passed(part, facts) for part in grant.parts]
            count = len(passed)
            return self.protocol.pass_on(place, holder, call, passed, count, Terms(batch), 0, facts)

        return self.drain(place, batch, pass_on)


def _passed(part: Part, facts: str) -> PassedPart:
    kind, feeds, _, join, *_ = facts.split()
    origin = about.item_of_about(part)
    if kind != "spread":
        label = about.about_of_child(part, 1, origin) if feeds == "parts" else origin
        return PassedPart(part.number, origin, [label], [RESULT], 1)
    labels = [about.about_of_child(part, 1, f"{origin}/{n}") for n in range(1, CHILDREN + 1)]
    payloads = [RESULT] * CHILDREN
    if join != "0":
        labels, payloads = [f"{origin}/0", *labels], [b"", *payloads]
    return PassedPart(part.number, origin, labels, payloads, CHILDREN)


def measure_round(drain: FlowDrain, batch: int, found: dict[str, list[float]]) -> None:
    """Measure everything once with batches of one size."""
    parts, is_largest = PARTS[batch], batch == max(PARTS)

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    note(f"finish, by {batch}", drain.measure_plain(batch))
    maps, facts = drain.load_flow(("map", "map"), parts)
    note(
        f"pass_on to a map, by {batch}",
        drain.timed(lambda: drain.pass_all(maps, batch, facts[0]), parts),
    )
    if is_largest:
        stream = drain.protocol.keys(f"{maps}/2").parts
        note("bytes, a waiting part", drain.redis.memory_usage(stream, samples=0) / parts)
    note(
        f"pass_on of the last stage, by {batch}",
        drain.timed(lambda: drain.pass_all(f"{maps}/2", batch, facts[1]), parts),
    )
    drain.forget(maps)
    few = max(100, parts // CHILDREN)
    many = few * CHILDREN
    joined, facts = drain.load_flow(("spread", "map", "join"), few)
    at_once = min(batch, MOST_AT_ONCE)
    note(
        f"spread by {CHILDREN}, a child, by {batch}",
        drain.timed(lambda: drain.pass_all(joined, at_once, facts[0]), many),
    )
    note(
        f"pass_on into a join of {CHILDREN}, by {batch}",
        drain.timed(lambda: drain.pass_all(f"{joined}/2", batch, facts[1]), many),
    )
    if is_largest:
        keys = drain.protocol.keys(f"{joined}/3")
        note("bytes, a child in an inbox", drain.redis.memory_usage(keys.got, samples=0) / many)
        note("bytes, a group", drain.redis.memory_usage(keys.groups, samples=0) / few)
    drain.forget(joined)


def measure_pool(server: LocalServer, client: Client, items: int) -> dict[str, float]:
    """Return items a second of three empty maps with one process, and the time to a result (ms)."""
    flow = Flow("maps", [Stage(kind="map", handler=name) for name in NAMES])
    queue = f"q{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / "empty.py"
        app.write_text(APP + "".join(HANDLER.format(name=name) for name in NAMES) + FLOW)
        program = str(Path(sys.executable).with_name("streamq"))
        worker = subprocess.Popen(
            [program, "worker", f"{app}:app", "-p", "1", "-c", "4", "--queue", queue],
            env={**os.environ, "STREAMQ_URL": server.url},
            stderr=subprocess.DEVNULL,
        )
        try:
            client.submit([b"warm"] * 100, flow=flow, queue=queue).wait(60)
            found = measure_items(client, flow, queue, items)
            found |= measure_lines(server, client, program, app, queue, items)
            return found | measure_first(client, flow, queue)
        finally:
            worker.terminate()
            worker.wait()


def measure_items(client: Client, flow: Flow, queue: str, items: int) -> dict[str, float]:
    """Return items a second where each is a part of its own."""
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        client.submit((b"x" * 20 for _ in range(items)), flow=flow, queue=queue).wait(600)
        rates.append(items / (time.perf_counter() - began))
    return {"items/s, three empty maps, one process, a part each": statistics.median(rates)}


def measure_lines(
    server: LocalServer, client: Client, program: str, app: Path, queue: str, items: int
) -> dict[str, float]:
    """Return items a second where they are lines of a file, many in a part."""
    file = app.with_name("lines.txt")
    file.write_text(("x" * 20 + "\n") * items)
    loading = [program, "load", str(file), "--flow", f"{app}:maps", "--queue", queue]
    rates = []
    for number in range(3):
        request_id = f"lines-{number}"
        began = time.perf_counter()
        subprocess.run(
            [*loading, "--id", request_id],
            env={**os.environ, "STREAMQ_URL": server.url},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        client.get(request_id).wait(600)
        rates.append(items / (time.perf_counter() - began))
    return {"items/s, three empty maps, one process, lines of a file": statistics.median(rates)}


def measure_first(client: Client, flow: Flow, queue: str) -> dict[str, float]:
    """Return how long an idle fleet takes from the submission to the result of three stages."""
    took = []
    for _ in range(200):
        began = time.perf_counter()
        client.submit([b"x"], flow=flow, queue=queue).wait(60)
        took.append((time.perf_counter() - began) * 1e3)
        time.sleep(0.01)
    took.sort()
    name = "ms from the submission to the result of three stages, idle fleet"
    return {f"{name}, p50": took[100], f"{name}, p95": took[190]}


SLOW = """
import time
from streamq import App
app = App()

@app.map
def fast(value: bytes) -> bytes:
    return b"x" * 1_000_000

@app.map
def slow(value: bytes) -> int:
    time.sleep({slow_s})
    return len(value)
"""
#: Slots of the slow stage.
SLOTS = 4


def measure_memory(minutes: float, slow_s: float) -> None:
    """Print each minute the most memory that a flow of a fast and a slow stage has held."""
    stages = [Stage(kind="map", handler="fast"), Stage(kind="map", handler="slow", limit=SLOTS)]
    with tempfile.TemporaryDirectory() as folder, LocalServer.start() as server:
        app = Path(folder) / "slow.py"
        app.write_text(SLOW.format(slow_s=slow_s))
        program = str(Path(sys.executable).with_name("streamq"))
        worker = subprocess.Popen(
            [program, "worker", f"{app}:app", "-p", "1", "-c", str(SLOTS + 2)],
            env={**os.environ, "STREAMQ_URL": server.url},
            stderr=subprocess.DEVNULL,
        )
        try:
            with Client(server.url) as client:
                count = round(minutes * 60 * SLOTS / slow_s * 1.1) + 200
                request = client.submit((b"%d" % n for n in range(count)), flow=Flow("m", stages))
                _print_memory(client, request, worker.pid, minutes)
                request.cancel()
        finally:
            worker.terminate()
            worker.wait()


def _print_memory(client: Client, request: Request, pid: int, minutes: float) -> None:
    redis: Any = Connection(client.protocol.connection.where).redis
    print("results of 1 MB, the default window of 64 MiB; the most of each minute, in MB")
    print(f"{'minute':>6}{'server':>10}{'worker':>10}{'done':>10}")
    begun = time.monotonic()
    for minute in range(1, math.ceil(minutes) + 1):
        server = worker = 0
        while (now := time.monotonic() - begun) < min(minute, minutes) * 60:
            server = max(server, redis.info("memory")["used_memory"])
            worker = max(worker, flow_peers.resident(pid))
            time.sleep(min(0.5, 60 - now % 60))
        done = _stages(request)[1].parts.done
        print(f"{minute:6}{server / 1e6:10.0f}{worker / 1e6:10.0f}{done:10,}", flush=True)


def _stages(request: Request) -> list[StageStatus]:
    stages = request.status().stages
    assert isinstance(stages, list)
    return stages


def plain_of(checkout: Path, rounds: int) -> dict[str, float]:
    """Return what a plain request costs in another checkout, by batch."""
    program = Path(__file__).with_name("plain.py")
    command = [str(checkout / ".venv/bin/python"), str(program), str(rounds)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, check=True, text=True)
    return {f"{name}, {checkout.name}": cost for name, cost in json.loads(done.stdout).items()}


def run(rounds: int, items: int, checkout: Path | None) -> dict[str, float]:
    """Measure every figure: the medians of the rounds."""
    found: dict[str, list[float]] = {}
    with LocalServer.start() as server, Client(server.url) as client:
        drain = FlowDrain(client, Protocol(Connection(server.url)))
        for _ in range(rounds):
            for batch in PARTS:
                measure_round(drain, batch, found)
        counted = {f"commands a part, by {batch}": drain.count_plain(batch) for batch in PARTS}
        pool = measure_pool(server, client, items) if items else {}
    figures = {name: statistics.median(values) for name, values in found.items()}
    return figures | counted | pool | (plain_of(checkout, rounds) if checkout else {})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--items", type=int, default=100_000, help="through a pool; 0: none")
    parser.add_argument("--before", type=Path, help="another checkout with a .venv")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memory", type=float, metavar="MINUTES", help="only how much it holds")
    parser.add_argument("--slow", type=float, default=0.25, metavar="S", help="of the slow stage")
    parser.add_argument("--peers", action="store_true", help="only one job beside the peers")
    args = parser.parse_args()
    if args.memory:
        measure_memory(args.memory, args.slow)
        return
    if args.peers:
        flow_peers.run()
        return
    load = os.getloadavg()[0]
    found: dict[str, Any] = run(args.rounds, args.items, args.before)
    if args.json:
        print(json.dumps({"load_average": load, **found}, indent=2))
        return
    print(
        f"load average {load:.2f}, median of {args.rounds} rounds; times of scripts in us a part\n"
    )
    for name, value in found.items():
        print(f"{name:70}{value:12,.2f}")


if __name__ == "__main__":
    main()
