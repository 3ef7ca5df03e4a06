"""What idle workers cost the server, and whether they slow down others.

    python bench/idle.py [--quick]

Real pools, started by their command on an embedded server and one queue:

* Three idle pools with different handlers: one handler is asked for again and again, and each try
  is submitted and waited for; compared with its pool alone.
* A pool that is busy with small parts of level 50, beside two idle processes of another app: how
  long a request of level 0 and one part waits for its handler.
* Idle processes: how many commands they send, and how long the server is busy with them, both
  without what the server does at rest.
* A polite stop of an idle pool.

Without a pool it measures what a take costs the server, with few handlers and with many: once from
all lists of the handlers, and once from those in use, when each handler uses one.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from streamq import App, Client, Protocol
from streamq.protocol.keys import QueueKeys, token_list_of
from streamq.servers.local import LocalServer

PROCESSES = 8
LEVELS = tuple(range(100))

one, two, three = App(), App(), App()


@one.handler
def first(_: bytes) -> int:
    """Return when the handler began, in nanoseconds."""
    return time.monotonic_ns()


@one.handler
def busy(_: bytes) -> None:
    """Keep a slot busy for 2 ms."""
    time.sleep(0.002)


@two.handler
def second(_: bytes) -> int:
    """Return when the handler began; for another app."""
    return time.monotonic_ns()


@three.handler
def third(_: bytes) -> int:
    """Return when the handler began; for a third app."""
    return time.monotonic_ns()


class Pools:
    """Pools on one server."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._all: list[subprocess.Popen[str]] = []

    def start(self, app: str, processes: int = 1) -> None:
        """Start a pool, and wait until it is ready."""
        here = Path(__file__)
        command = [sys.executable, "-m", "streamq.cli", "worker", f"{here.name}:{app}"]
        command += ["-p", str(processes), "--url", self._url]
        pool = subprocess.Popen(command, cwd=here.parent, stderr=subprocess.PIPE, text=True)
        self._all.append(pool)
        assert pool.stderr
        while " ready: " not in pool.stderr.readline():
            if pool.poll() is not None:
                raise SystemExit("a pool does not start")

    def stop(self) -> float:
        """End all pools. Return the seconds that the last one started took to end."""
        seconds = 0.0
        while self._all:
            begun = time.monotonic()
            pool = self._all.pop(0)
            pool.send_signal(signal.SIGTERM)
            pool.communicate()
            seconds = time.monotonic() - begun
        return seconds


def try_often(client: Client, times: int) -> list[float]:
    """Return the milliseconds from the submission of one part to its end, for each try."""
    took = []
    for _ in range(times):
        begun = time.monotonic()
        request = client.submit([b"x"], handler="first")
        request.wait(60)
        took.append((time.monotonic() - begun) * 1e3)
        request.purge()
    return took


def try_amid_work(client: Client, times: int) -> list[float]:
    """Return the milliseconds from submission to handler at level 0, with all slots kept busy."""
    background = client.submit([b"x"] * 200_000, handler="busy", level=50, limit=100)
    waits = []
    for _ in range(times):
        begun = time.monotonic_ns()
        request = client.submit([b"x"], handler="first", level=0)
        request.wait(60)
        ((_, started),) = request.results()
        waits.append((started - begun) / 1e6)
        request.purge()
        time.sleep(0.03)
    background.cancel()
    return waits


def cost(redis: Any, seconds: float) -> tuple[float, float, float]:
    """Return commands, microseconds of CPU and microseconds in commands, each per second."""

    def read() -> tuple[int, float, float]:
        cpu = redis.info("cpu")
        used = cpu["used_cpu_sys"] + cpu["used_cpu_user"]
        spent = [
            each["usec"]
            for name, each in redis.info("commandstats").items()
            if not name.startswith("cmdstat_info")
        ]
        return redis.info("stats")["total_commands_processed"], used * 1e6, sum(spent)

    commands, used_us, spent_us = read()
    begun = time.monotonic()
    time.sleep(seconds)
    after, after_us, after_spent_us = read()
    took = time.monotonic() - begun
    return (
        (after - commands - 3) / took,
        (after_us - used_us) / took,
        (after_spent_us - spent_us) / took,
    )


def show(what: str, waits: list[float]) -> None:
    """Print a line of figures."""
    told = f"p50 {statistics.median(waits):.2f} ms, worst {max(waits):.2f} ms"
    print(f"{what}: {told} ({len(waits)} tries)", flush=True)


def measure_others(client: Client, pools: Pools, times: int) -> None:
    """Measure whether idle pools slow down others."""
    pools.start("one")
    try_often(client, 10)
    alone = try_often(client, times)
    pools.start("two")
    pools.start("three")
    try_often(client, 10)
    among = try_often(client, times)
    pools.stop()
    show("one pool alone", alone)
    show("among idle pools with other handlers", among)
    print(f"  times as long: {statistics.median(among) / statistics.median(alone):.2f}")
    pools.start("one")
    pools.start("two", 2)
    show("level 0 beside a busy worker", try_amid_work(client, times // 5))
    pools.stop()


def measure_cost(redis: Any, pools: Pools, seconds: float) -> None:
    """Measure what one more idle process costs, by comparing two pools of different size."""
    found = {}
    for processes in (1, 1 + PROCESSES):
        pools.start("two", processes)
        cost(redis, 3)
        found[processes] = cost(redis, seconds)
        stopped_s = pools.stop()
    few, many = found.values()
    commands, used_us, spent_us = (
        (more - less) / PROCESSES for more, less in zip(many, few, strict=True)
    )
    # What the server does besides commands changes from one window to the other: as much as 1 ms.
    print(
        f"an idle process: {commands:.2f} commands a second, {spent_us:.0f} µs in them; "
        f"{used_us:.0f} µs of the server's CPU a second, which is rough"
    )
    print(f"an idle pool of {1 + PROCESSES} processes ends in {stopped_s:.2f} s")


def measure_takes(protocol: Protocol, times: int) -> None:
    """Measure what a take costs, by the number of handlers: with a token there, and in vain."""
    redis, queue = protocol.connection.redis, "takes"
    print("a take, of all lists / of those in use:")
    for many in (1, 10, 25, 100):
        handlers = tuple(f"handler{number:03d}" for number in range(many))
        used = frozenset(token_list_of(name, 50) for name in handlers)
        tokens = QueueKeys(queue, to=token_list_of(handlers[-1], 50)).tokens
        take_used = partial(protocol.take_used, levels=LEVELS, used=used)
        found: list[float] = []
        for take in (protocol.take, take_used):
            redis.lpush(tokens, *["r"] * times)
            spent = each(redis, times, partial(take, queue, handlers, 1.0))
            found += [*spent, each(redis, 100, partial(take, queue, handlers, 0.001))[0]]
        all_us, all_bytes, all_wait_us, some_us, some_bytes, some_wait_us = found
        print(
            f"{many:4d} handlers: {all_us:5.0f} / {some_us:3.0f} µs, {all_bytes:7,.0f} /"
            f" {some_bytes:6,.0f} bytes; in vain: {all_wait_us:6.0f} / {some_wait_us:4.0f} µs",
            flush=True,
        )


def each(redis: Any, times: int, call: Callable[[], object]) -> tuple[float, float]:
    """Return the microseconds of the server, and the bytes sent to it, per call."""

    def read() -> tuple[float, float]:
        cpu = redis.info("cpu")
        used_us = (cpu["used_cpu_sys"] + cpu["used_cpu_user"]) * 1e6
        return used_us, float(redis.info("stats")["total_net_input_bytes"])

    used_us, sent = read()
    for _ in range(times):
        call()
    after_us, after = read()
    return (after_us - used_us) / times, (after - sent) / times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    times, seconds = (50, 12.0) if args.quick else (100, 40.0)
    steps: list[Callable[[Client, Pools], None]] = [
        lambda client, pools: measure_others(client, pools, times),
        lambda client, _: measure_takes(client._protocol, 10 * times),
        lambda client, pools: measure_cost(client._protocol.connection.redis, pools, seconds),
    ]
    with LocalServer.start() as server, Client(server.url) as client:
        pools = Pools(server.url)
        try:
            for step in steps:
                step(client, pools)
        finally:
            pools.stop()
    print(f"load average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
