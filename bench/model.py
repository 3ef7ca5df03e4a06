"""The limits of the design: measured costs of calls, and what follows for fleets and clusters.

    python bench/model.py             measures, then writes docs/scaling.md
    python bench/model.py --again     writes it from what was measured last

The model is arithmetic on measured costs of single calls; one case of it is checked against a real
pool. A server works on one core, and counts as full at 70 % of it.
"""

import argparse
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import svg
from contest import CONTESTANTS, Run
from redis import Redis
from report import DOCS, table

from streamq import Client, Connection, Protocol
from streamq.model import Policy
from streamq.protocol.replies import Terms, Tokens
from streamq.servers.local import LocalServer

RESULTS = Path(__file__).parent / "results"
FULL_US = 0.7e6
PAYLOAD = b"x" * 100
OFFERS = ("parts job",)
BATCH = 512
#: The assumed memory of a primary in bytes, and the connections that a server accepts.
MEMORY = 16 * 2**30
CLIENTS = 10_000
Costs = dict[str, float]


class Meter:
    """Measures calls on one server; each figure is the median of some looks."""

    def __init__(self, url: str) -> None:
        self.protocol = Protocol(Connection(url))
        self.redis: Any = Redis.from_url(url)
        self.client = Client(url)
        self.queue = f"q{secrets.token_hex(4)}"

    def cpu_us(self) -> float:
        """Return the server's CPU time so far."""
        cpu = self.redis.info("cpu")
        return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"]) * 1e6

    def memory(self) -> int:
        """Return the bytes that the server uses."""
        return int(self.redis.info("memory")["used_memory"])

    def each(self, times: int, call: Callable[[int], object], looks: int = 5) -> float:
        """Return the server microseconds of one call."""
        seen = []
        for _ in range(looks):
            before = self.cpu_us()
            for number in range(times):
                call(number)
            seen.append((self.cpu_us() - before) / times)
        return statistics.median(seen)

    def lease(self, batch: int, times: int) -> float:
        """Return the server microseconds of a lease: claimed with a batch, finished, ended."""
        payloads = [PAYLOAD] * (batch * times * 5)
        made = self.client.submit(payloads, handler="job", queue=self.queue, limit=1)

        def one(_: int) -> None:
            holder = secrets.token_hex(8)
            grant = self.protocol.claim(made.id, holder, Terms(batch), OFFERS)
            results = [value for part in grant.parts for value in (part.number, b"\x91\xc0")]
            self.protocol.finish(made.id, holder, 1, results, len(grant.parts), Terms(0))

        return self.each(times, one)

    def tokens(self) -> Costs:
        """Measure what the queue's slot does for a lease, and for a process that waits."""
        push = self.each(
            1_000, lambda _: self.protocol.mint(self.queue, "r", Tokens(1, "job:50", 0))
        )
        take = self.each(1_000, lambda _: self.protocol.take(self.queue, ("job",), 1.0))
        wait = self.wait()
        beat = self.each(500, lambda _: self.protocol.beat(self.queue, "w", 20_000))
        tick = self.each(500, lambda _: self.protocol.tick(self.queue))
        ping = self.each(1_000, lambda _: self.redis.ping())
        return {
            "push": push,
            "take": take,
            "wait": wait,
            "ping": ping,
            "beat": beat,
            "tick": tick,
        }

    def wait(self) -> float:
        """Measure what a wait without a token costs, beyond what the server does at rest."""
        before, begun = self.cpu_us(), time.perf_counter()
        time.sleep(2)
        rest = (self.cpu_us() - before) / (time.perf_counter() - begun)
        before, begun = self.cpu_us(), time.perf_counter()
        for _ in range(50):
            self.protocol.take("empty", ("job",), 0.05)
        spent = self.cpu_us() - before - rest * (time.perf_counter() - begun)
        return max(0.0, spent / 50)

    def requests(self) -> Costs:
        """Measure what a request of one part costs, opened and ended, and its memory."""
        before = self.memory()
        for _ in range(2_000):
            name = secrets.token_hex(8)
            self.protocol.mint("other", name, Tokens(), register="again")
            self.protocol.open(name, "d", Policy(handler="job", queue="other"))
        size = (self.memory() - before) / 2_000
        whole = self.each(
            200, lambda _: self.client.submit([PAYLOAD], handler="job", queue="third")
        )
        return {"request_bytes": size, "submit": whole}

    def parts(self) -> Costs:
        """Measure what appending a part costs, and its memory while it waits and when done."""
        before, cpu = self.memory(), self.cpu_us()
        made = self.client.submit([PAYLOAD] * 100_000, handler="job", queue="fourth", limit=1)
        append, size = (self.cpu_us() - cpu) / 1e5, (self.memory() - before) / 1e5
        holder, call, terms = "h", 0, Terms(BATCH)
        grant = self.protocol.claim(made.id, holder, terms, OFFERS)
        while grant.parts:
            results = [value for part in grant.parts for value in (part.number, PAYLOAD)]
            call += 1
            grant = self.protocol.finish(made.id, holder, call, results, len(grant.parts), terms)
        kept = (self.memory() - before) / 1e5
        return {"append": append, "part_bytes": size, "result_bytes": kept}


def measure() -> Costs:
    """Measure every cost, on one embedded server."""
    with LocalServer.start(port=0) as server:
        meter = Meter(server.url)
        few, many = meter.lease(1, 300), meter.lease(BATCH, 30)
        part = (many - few) / (BATCH - 1)
        costs = {"lease": few - part, "part": part, **meter.tokens()}
        costs |= meter.requests() | meter.parts() | connections(server.url)
        costs |= {"checked_us": check(server.url), "load": os.getloadavg()[0]}
    return costs


def connections(url: str) -> Costs:
    """Count the connections of a pool: of its parent, and of each process."""
    redis: Any = Redis.from_url(url)
    counts = []
    for processes in (1, 3):
        before = redis.info("clients")["connected_clients"]
        run = Run(CONTESTANTS["streamq"], url)
        with run.workers(processes):
            run.act("latency", 5)
            counts.append(redis.info("clients")["connected_clients"] - before)
        run.close()
    each = (counts[1] - counts[0]) / 2
    return {"process_connections": each, "pool_connections": counts[0] - each}


def check(url: str) -> float:
    """Return the server microseconds of a part that outlasts the quantum, in a real pool."""
    run = Run(CONTESTANTS["streamq"]._replace(command=_SLOW), url)
    run.redis.flushall()
    with Client(url) as client, run.workers(1):
        client.submit([b"0.002"] * 20, handler="nap", limit=1).wait(30)
        request = client.submit([b"0.002"] * 500, handler="nap", limit=1)
        before = run.server_cpu_s()
        while request.status().parts.done < 450:
            time.sleep(0.25)
        done = request.status().parts.done
        spent = run.server_cpu_s() - before
        request.wait(30)
    run.close()
    return spent / done * 1e6


_SLOW = [*CONTESTANTS["streamq"].command[:1], "slow_.py"]


# What follows from the costs


def turns_us(costs: Costs) -> float:
    """Return what the queue's slot does for one lease: a token is pushed, and taken."""
    return costs["push"] + costs["take"]


def leases_per_s(slots: float, part_ms: float, quantum_ms: float) -> float:
    """Return the leases that busy slots take in a second: one for each quantum, or longer part."""
    return slots / max(part_ms, quantum_ms) * 1e3


def most_slots(costs: Costs, part_ms: float, quantum_ms: float, queues: int = 1) -> float:
    """Return at how many busy slots the queues are full, with each queue on its own node."""
    # Each process costs a heartbeat and a tick every 5 s.
    upkeep = (costs["beat"] + costs["tick"]) / 5
    one = leases_per_s(1, part_ms, quantum_ms) * turns_us(costs) + upkeep
    return queues * FULL_US / one


def part_us(costs: Costs, part_ms: float, quantum_ms: float) -> float:
    """Return the server time of a part in its request's slot, with its share of a lease."""
    batch = max(1.0, min(BATCH, quantum_ms / part_ms))
    return costs["append"] + costs["part"] + costs["lease"] / batch


def most_parts(costs: Costs, primaries: int, part_ms: float, quantum_ms: float = 50) -> float:
    """Return the parts a second that so many primaries carry, with requests on all of them."""
    return primaries * FULL_US / part_us(costs, part_ms, quantum_ms)


def write(costs: Costs) -> None:
    """Write ``docs/scaling.md`` and its plot."""
    moments = [0.01, 0.1, 1, 10, 100, 1_000, 10_000, 60_000]
    series = [
        (
            f"quantum {quantum} ms, {queues} queue{'s' if queues > 1 else ''}",
            [(ms, most_slots(costs, ms, quantum, queues)) for ms in moments],
        )
        for quantum, queues in ((50, 1), (500, 1), (50, 8), (500, 8))
    ]
    plot = svg.lines(
        "Busy slots at which the token lists are full", series, ("a part takes, ms", "slots")
    )
    (DOCS / "scaling-slots.svg").write_text(plot)
    text = (Path(__file__).parent / "scaling.template.md").read_text()
    for name, block in _blocks(costs).items():
        text = text.replace(f"<<{name}>>", block)
    (DOCS / "scaling.md").write_text(text)


def _blocks(costs: Costs) -> dict[str, str]:
    expected = turns_us(costs) + costs["lease"] + costs["part"]
    return {
        "costs": _cost_table(costs),
        "expected": f"{expected:.0f}",
        "checked": f"{costs['checked_us']:.0f}",
        "times": f"{costs['checked_us'] / expected:.1f}",
        "load": f"{costs['load']:.1f}",
        "turns": f"{turns_us(costs):.0f}",
        "leases": f"{FULL_US / turns_us(costs):,.0f}",
        "per_slot": f"{leases_per_s(1, 1, 50):.0f}",
        "slots_50": f"{most_slots(costs, 1, 50):,.0f}",
        "slots_500": f"{most_slots(costs, 1, 500):,.0f}",
        "slots_1000": f"{most_slots(costs, 1_000, 50):,.0f}",
        "request_rate": f"{FULL_US / part_us(costs, 0.01, 50):,.0f}",
        "processes": f"{_processes(costs):,.0f}",
        "waiting": f"{costs['wait']:.0f}",
        "idle": f"{FULL_US / (costs['wait'] / 10 + costs['ping'] / 2):,.0f}",
        "queues": _queue_table(costs),
        "clusters": _cluster_table(costs),
    }


def _processes(costs: Costs) -> float:
    """Return for how many processes, in pools of four, a server's connections are enough."""
    return 4 * CLIENTS / (4 * costs["process_connections"] + costs["pool_connections"])


def _cost_table(costs: Costs) -> str:
    lines = (
        ("a token pushed", "queue", "push", "µs"),
        ("a token taken, best of a hundred lists", "queue", "take", "µs"),
        ("a wait of a process that ends without a token", "queue", "wait", "µs"),
        ("a process asks whether the server is there", "queue", "ping", "µs"),
        ("a pool's heartbeat", "queue", "beat", "µs"),
        ("a look for what is due", "queue", "tick", "µs"),
        ("a lease: claimed, finished, ended", "request", "lease", "µs"),
        ("a part of a batch in it, with its result", "request", "part", "µs"),
        ("a part appended", "request", "append", "µs"),
        ("a request of one part submitted", "both", "submit", "µs"),
        ("an open request", "both", "request_bytes", "bytes"),
        ("a waiting part of 100 bytes", "request", "part_bytes", "bytes"),
        (
            "a finished part with a result of 100 bytes, not collected",
            "request",
            "result_bytes",
            "bytes",
        ),
        ("connections of a process", "each node", "process_connections", ""),
        ("connections of a pool's parent", "each node", "pool_connections", ""),
    )
    rows = [
        [what, where, f"{_figure(costs[name])} {unit}".strip()] for what, where, name, unit in lines
    ]
    return table(("", "slot", "costs"), rows)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _queue_table(costs: Costs) -> str:
    rows = [
        [
            f"{part_ms:,g} ms",
            *(
                f"{most_slots(costs, part_ms, quantum, queues):,.0f}"
                for quantum, queues in ((50, 1), (500, 1), (50, 8), (50, 64))
            ),
        ]
        for part_ms in (0.01, 1, 50, 1_000, 60_000)
    ]
    head = ("a part takes", "1 queue", "1 queue, quantum 500 ms", "8 queues", "64 queues")
    return table(head, rows)


def _cluster_table(costs: Costs) -> str:
    rows = []
    for primaries in (3, 30, 300):
        memory = primaries * MEMORY
        rows.append(
            [
                str(primaries),
                *(f"{most_parts(costs, primaries, ms):,.0f}" for ms in (0.1, 10, 1_000)),
                f"{memory / costs['part_bytes'] / 1e6:,.0f} M",
                f"{memory / costs['request_bytes'] / 1e6:,.0f} M",
                f"{most_slots(costs, 1_000, 50, primaries):,.0f}",
                f"{_processes(costs):,.0f}",
            ]
        )
    head = (
        "primaries",
        "parts/s of 0.1 ms",
        "of 10 ms",
        "of 1 s",
        "waiting parts",
        "or open requests",
        "busy slots, parts of 1 s, a queue each",
        "processes",
    )
    return table(head, rows)


def main() -> None:
    """Measure unless told otherwise, then write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="measure nothing")
    args = parser.parse_args()
    kept = RESULTS / "costs.json"
    if not args.again:
        RESULTS.mkdir(exist_ok=True)
        kept.write_text(json.dumps(measure(), indent=1))
    write(json.loads(kept.read_text()))


if __name__ == "__main__":
    main()
