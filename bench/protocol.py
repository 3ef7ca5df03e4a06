"""What the protocol costs: server and client microseconds per part, and bytes per waiting part.

    python bench/protocol.py [--parts 100000] [--server redis-server] [--json]

One embedded server, one client, no handler: claim, then finish with a result that hands
over the next batch, until the request is done. Server time is the server's own CPU time,
client time this process's. Run it on a quiet machine; it prints the load it started with.
"""

import argparse
import json
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from streamq import Client, Connection, Protocol
from streamq.model import Policy
from streamq.protocol.replies import Terms
from streamq.servers.local import LocalServer

HANDLERS = ("parts bench",)
PAYLOAD = b"x" * 100
RESULT = b"y" * 100
ROUNDS = 3


class Meter:
    """Server CPU, client CPU and wall time between two moments, in microseconds per unit."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._before = self._now()

    def per(self, units: int) -> dict[str, float]:
        """Return the microseconds since the beginning, per unit."""
        names = ("server_us", "client_us", "wall_us")
        spent = zip(names, self._now(), self._before, strict=True)
        return {name: (after - before) / units * 1e6 for name, after, before in spent}

    def _now(self) -> tuple[float, float, float]:
        cpu = self._redis.info("cpu")
        server = cpu["used_cpu_user"] + cpu["used_cpu_sys"]
        return server, time.process_time(), time.perf_counter()


def submit(client: Client, parts: int) -> str:
    """Return a request of equal parts with room for one holder."""
    payloads = (PAYLOAD for _ in range(parts))
    return client.submit(payloads, handler="bench", limit=1, queue=f"q{secrets.token_hex(4)}").id


def drain(protocol: Protocol, request_id: str, batch: int, most: int) -> int:
    """Run parts of a request under one lease, in batches. Return how many."""
    terms = Terms(batch)
    holder = secrets.token_hex(8)
    grant = protocol.claim(request_id, holder, terms, HANDLERS)
    done = call = 0
    while grant.parts and done < most:
        results: list[bytes | int] = []
        for part in grant.parts:
            results += (part.number, RESULT)
        done += len(grant.parts)
        call += 1
        grant = protocol.finish(request_id, holder, call, results, len(grant.parts), terms)
    if grant.parts:
        protocol.release(request_id, holder, call + 1)
    return done


def measure_drain(client: Client, protocol: Protocol, parts: int, batch: int) -> dict[str, float]:
    """Return the cost per part of claim and finish in batches of one size."""
    request_id = submit(client, parts)
    meter = Meter(protocol.connection.redis)
    done = drain(protocol, request_id, batch, parts)
    assert done == parts
    cost = meter.per(parts)
    client.get(request_id).purge()
    return cost


def measure_append(client: Client, protocol: Protocol, parts: int) -> dict[str, float]:
    """Return cost and memory per part submitted."""
    redis = protocol.connection.redis
    before = redis.info("memory")["used_memory"]
    meter = Meter(redis)
    request_id = submit(client, parts)
    cost = meter.per(parts)
    cost["bytes"] = (redis.info("memory")["used_memory"] - before) / parts
    client.get(request_id).cancel()
    client.get(request_id).purge()
    return cost


def measure_claims(protocol: Protocol, request_id: str, times: int = 300) -> float:
    """Return the server microseconds of a claim and its release, the median of several looks."""
    redis = protocol.connection.redis
    seen = []
    for _ in range(5):
        meter = Meter(redis)
        for _ in range(times):
            holder = secrets.token_hex(8)
            protocol.claim(request_id, holder, Terms(1), HANDLERS)
            protocol.release(request_id, holder, 1)
        seen.append(meter.per(times)["server_us"])
    return statistics.median(seen)


def measure_scale(client: Client, protocol: Protocol, waiting: int) -> dict[str, float]:
    """Measure a claim beside few and many open requests, with few and many waiting parts."""
    few = submit(client, 100)
    found = {"few_requests_100_parts": measure_claims(protocol, few)}
    for _ in range(10_000):
        protocol.open(secrets.token_hex(8), "d", Policy(handler="bench"))
    found["10000_requests_100_parts"] = measure_claims(protocol, few)
    many = submit(client, waiting)
    found[f"10000_requests_{waiting}_parts"] = measure_claims(protocol, many)
    return found


def median_of(measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the median of several rounds, each figure by itself."""
    rounds = [measure() for _ in range(ROUNDS)]
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def run(parts: int, waiting: int, binary: str | None) -> dict[str, Any]:
    """Measure every figure."""
    program = binary and shutil.which(binary)
    with LocalServer.start(binary=program) as server, Client(server.url) as client:
        protocol = Protocol(Connection(server.url))
        info = protocol.connection.redis.info("server")
        load = os.getloadavg()[0]
        append = median_of(lambda: measure_append(client, protocol, parts))
        batches = {}
        for batch in (1, 16, 256):
            size = min(parts, 5_000 * batch)
            drained = partial(measure_drain, client, protocol, size, batch)
            batches[batch] = median_of(drained)
        for cost in (append, *batches.values()):
            cost["parts_per_s"] = 1e6 / cost["wall_us"]
        claims = measure_scale(client, protocol, waiting)
        protocol.connection.close()
    name = info.get("server_name", "redis")
    return {
        "server": f"{name} {info.get('valkey_version', info['redis_version'])}",
        "load_average": load,
        "append": append,
        "batches": batches,
        "claim_us": claims,
    }


def show(found: dict[str, Any]) -> None:
    """Print the figures as a table."""
    print(
        f"{found['server']}, load average {found['load_average']:.2f}, median of {ROUNDS} rounds\n"
    )
    print(f"{'':24}{'parts/s':>10}{'server us':>11}{'client us':>11}{'bytes':>8}")
    rows = [("append, 500 a call", found["append"])]
    rows += [(f"claim + finish, by {b}", cost) for b, cost in found["batches"].items()]
    for name, cost in rows:
        size = f"{cost['bytes']:8.0f}" if "bytes" in cost else ""
        print(
            f"{name:24}{cost['parts_per_s']:10,.0f}{cost['server_us']:11.1f}"
            f"{cost['client_us']:11.1f}{size}"
        )
    print("\nserver us of one claim and release:")
    for name, cost in found["claim_us"].items():
        print(f"  {name.replace('_', ' '):36}{cost:8.1f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=int, default=100_000)
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--server", help="another server program, such as redis-server")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = run(args.parts, args.waiting, args.server)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
