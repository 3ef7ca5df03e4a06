"""What a gateway costs, beside a native pool and beside a bare loop, in one run.

    python bench/gateway.py [--quick] [--only drain latency calls waiting]

On an embedded server:

* drain: a node worker over HTTP with batches of 200 empties a request, as do a native pool of one
  process, and the same node worker at a bare loop (``bench/bare_gateway.py``): the same messages
  with LPOP and INCRBY behind them, and nothing that a queue has to do besides.
* latency: from the submission of one part to its handler, through a native pool and through the
  gateway to a node worker.
* calls: CPU of the gateway for each call of one part (a result in, the next part out), by binding.
* waiting: workers that wait, connected for real: memory and CPU of the gateway for each, and what
  the server does for all of them.
"""

import argparse
import asyncio
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from contest import cpu_s
from websockets.asyncio.client import connect
from websockets.sync.client import connect as connect_now

from streamq import App, Client
from streamq.servers.local import LocalServer

HERE = Path(__file__).parent
PAYLOAD = b"x" * 100
BATCH = 200
#: Calls of one part are made by so many workers at once.
CALLERS = (1, 8)
PATIENCE_S = 120

app = App()


@app.handler
def job(_: bytes) -> None:
    """Do nothing."""


@app.handler
def first_line(_: bytes) -> str:
    """Return when the handler began, in nanoseconds."""
    return str(time.monotonic_ns())


# Processes


@contextmanager
def started(command: list[str], ready: str, **variables: str) -> Iterator[tuple[int, str]]:
    """Run a program; yields its pid and the line in which it says that it is ready."""
    process = subprocess.Popen(
        command, cwd=HERE, env=os.environ | variables, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    try:
        line = ""
        while ready and ready not in line:
            line = process.stderr.readline()
            if not line:
                raise SystemExit(f"{command} does not start")
        # What it says later would fill the pipe.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process.pid, line
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextmanager
def gateway(url: str) -> Iterator[tuple[int, int, int]]:
    """Start a gateway; yields its pid and its ports for HTTP and gRPC."""
    command = [sys.executable, "-m", "streamq.cli", "serve", "--url", url]
    command += ["--listen", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=HERE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        ports: dict[bool, int] = {}
        while len(ports) < 2:
            line = process.stderr.readline()
            if not line:
                raise SystemExit("the gateway does not start")
            if "serving at" in line:
                is_grpc = "(gRPC)" in line
                ports[is_grpc] = int(line.replace("(gRPC)", "").strip().rpartition(":")[2])
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield process.pid, ports[False], ports[True]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@contextmanager
def native_pool(url: str, ready: str = " ready: ") -> Iterator[int]:
    """Start a pool of one process with two slots, and wait until it says that it is ready."""
    command = [sys.executable, "-m", "streamq.cli", "worker", "gateway.py:app", "-p", "1"]
    with started([*command, "-c", "2", "--url", url], ready) as (pid, _):
        yield pid


@contextmanager
def node_worker(port: int, most: int, slots: int = 2) -> Iterator[int]:
    """Start a worker in Node."""
    with started(
        ["node", "gateway_worker.mjs"],
        "",
        STREAMQ_GATEWAY=f"http://127.0.0.1:{port}",
        BENCH_MOST=str(most),
        BENCH_SLOTS=str(slots),
    ) as (pid, _):
        yield pid


# Drain


def drained(done: Callable[[], int], parts: int, pids: dict[str, int]) -> dict[str, float]:
    """Return parts per second after the first tenth, and microseconds of CPU for each part."""
    first, begun, before = 0, 0.0, dict.fromkeys(pids, 0.0)
    deadline = time.monotonic() + PATIENCE_S
    while (count := done()) < parts:
        if not first and count >= parts // 10:
            first, begun = count, time.perf_counter()
            before = {name: cpu_s(pid) for name, pid in pids.items()}
        if time.monotonic() > deadline:
            raise SystemExit(f"{count} of {parts} parts in {PATIENCE_S} s")
        time.sleep(0.02)
    seconds, ran = time.perf_counter() - begun, parts - first
    spent = {f"{name} µs": (cpu_s(pid) - before[name]) / ran * 1e6 for name, pid in pids.items()}
    return {"parts/s": ran / seconds, **spent}


@contextmanager
def waiting_parts(client: Client, parts: int) -> Iterator[Callable[[], int]]:
    """Have so many parts wait before anybody works; yields what counts those that are done."""
    request = client.submit([PAYLOAD] * parts, handler="job", limit=64)
    yield lambda: request.status().parts.done
    request.purge()


def measure_drain(server: LocalServer, client: Client, parts: int, rounds: int) -> None:
    """Compare the native pool, the node worker at a gateway, and the same at the bare loop."""
    redis: Any = client._protocol.connection.redis
    found: dict[str, list[dict[str, float]]] = {}

    def note(name: str, figures: dict[str, float]) -> None:
        found.setdefault(name, []).append(figures)
        told = ", ".join(f"{figure:,.1f} {unit}" for unit, figure in figures.items())
        print(f"  {name}: {told}", flush=True)

    print(f"drain of {parts:,} parts of 100 bytes, {rounds} rounds in turn:")
    for _ in range(rounds):
        with waiting_parts(client, parts) as done, native_pool(server.url, "") as pid:
            note("native pool", drained(done, parts, {"worker": pid}))
        with (
            waiting_parts(client, parts) as done,
            gateway(server.url) as (pid, port, _),
            node_worker(port, BATCH) as node,
        ):
            note("node at the gateway", drained(done, parts, {"gateway": pid, "node": node}))
        for begin in range(0, parts, 10_000):
            redis.rpush("bare", *[PAYLOAD] * min(10_000, parts - begin))
        redis.set("bare:done", 0)
        with (
            started([sys.executable, "bare_gateway.py"], "port ", BENCH_URL=server.url) as (
                pid,
                line,
            ),
            node_worker(int(line.split()[-1]), BATCH) as node,
        ):
            note(
                "node at the bare loop",
                drained(lambda: int(redis.get("bare:done")), parts, {"gateway": pid, "node": node}),
            )
    best = {name: [each["parts/s"] for each in figures] for name, figures in found.items()}
    native = statistics.median(best["native pool"])
    for name, rates in best.items():
        rate = statistics.median(rates)
        print(f"  median {name}: {rate:,.0f} parts/s, {rate / native:.2f} of the native pool")


# Latency


def waits_of(client: Client, times: int) -> list[float]:
    """Return the milliseconds from the submission of one part to its handler."""
    waits = []
    for _ in range(times):
        begun = time.monotonic_ns()
        request = client.submit([PAYLOAD], handler="first_line")
        time.sleep(0.01)
        request.wait(30)
        ((_, started_ns),) = request.results()
        waits.append((int(started_ns) - begun) / 1e6)
        request.purge()
    return waits


def measure_latency(server: LocalServer, client: Client, times: int) -> None:
    """Compare one part through a native pool, and through the gateway to a node worker."""
    found: dict[str, list[float]] = {"native pool": [], "node at the gateway": []}
    for _ in range(3):  # in turn, because the machine is not the same all the time
        with native_pool(server.url):
            waits_of(client, 20)
            found["native pool"] += waits_of(client, times // 3)
        with gateway(server.url) as (_, port, _), node_worker(port, 1):
            waits_of(client, 20)
            found["node at the gateway"] += waits_of(client, times // 3)
    print("latency of one part, from submit to its handler:")
    for name, waits in found.items():
        p99 = sorted(waits)[int(len(waits) * 0.99)]
        p50 = statistics.median(waits)
        print(f"  {name}: p50 {p50:.2f} ms, p99 {p99:.2f} ms ({len(waits)} tries)")
    native, other = (statistics.median(waits) for waits in found.values())
    print(f"  the gateway adds {other - native:.2f} ms to the p50")


# Calls

ASK = {"queue": "default", "handlers": ["job"], "most": 1, "quantum_ms": 60_000, "wait_s": 5}
Caller = Callable[[int, Callable[[], bool]], int]


def call_http(port: int, goes_on: Callable[[], bool]) -> int:
    """Take, report and take the next on one connection. Returns the number of calls."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def said(path: str, body: Any) -> Any:
        link.request("POST", path, json.dumps(body))
        return json.loads(link.getresponse().read())

    granted, calls = said("/v1/take", ASK), 0
    while goes_on():
        done = [{"part": part["number"]} for part in granted["parts"]]
        report = {"ticket": granted["ticket"], "done": done, "next": ASK}
        granted, calls = said("/v1/report", report), calls + 1
    said("/v1/leave", {"tickets": [granted["ticket"]]})
    return calls


def call_websocket(port: int, goes_on: Callable[[], bool]) -> int:
    """Do the same on a WebSocket."""
    hello = {name: ASK[name] for name in ("queue", "handlers", "most", "quantum_ms")}
    with connect_now(f"ws://127.0.0.1:{port}/v1/work", compression=None) as link:
        link.send(json.dumps({"seq": 1, "hello": hello}))
        granted: Any = None
        while not granted:
            granted = json.loads(link.recv()).get("grant")
        calls = 0
        while goes_on():
            done = [{"part": part["number"]} for part in granted["parts"]]
            report = {"ticket": granted["ticket"], "done": done, "next": {"most": 1}}
            link.send(json.dumps({"seq": calls + 2, "report": report}))
            granted, calls = json.loads(link.recv())["grant"], calls + 1
        link.send('{"bye": {}}')
    return calls


def call_grpc(port: int, goes_on: Callable[[], bool]) -> int:
    """Do the same on a stream of gRPC."""
    import queue

    import grpc

    pb: Any = import_module("streamq.gateway.streamq_pb2")
    says: queue.Queue[Any] = queue.Queue()
    hello = pb.Hello(queue="default", handlers=[pb.Offer(name="job")], slots=1, most=1)
    hello.quantum_ms = 60_000
    says.put(pb.FromWorker(seq=1, hello=hello))
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        session = channel.stream_stream(
            "/streamq.v1.Work/Session",
            pb.FromWorker.SerializeToString,
            pb.ToWorker.FromString,
        )
        hears = session(iter(says.get, None))
        granted = next(each.grant for each in hears if each.HasField("grant"))
        calls = 0
        while goes_on():
            done = [pb.Result(part=part.number) for part in granted.parts]
            report = pb.ReportMessage(ticket=granted.ticket, done=done, next=pb.Ask(who=hello))
            says.put(pb.FromWorker(seq=calls + 2, report=report))
            granted, calls = next(hears).grant, calls + 1
        says.put(pb.FromWorker(seq=calls + 2, bye=pb.Bye()))
        says.put(None)
    return calls


def measure_calls(server: LocalServer, client: Client, seconds: float) -> None:
    """Measure the gateway's CPU for each call, by binding and number of callers."""
    print("a call of one part (a result in, the next part out), at the gateway:")
    bindings: dict[str, tuple[Caller, bool]] = {
        "HTTP": (call_http, False),
        "WebSocket": (call_websocket, False),
        "gRPC": (call_grpc, True),
    }
    for name, (caller, is_grpc) in bindings.items():
        for callers in CALLERS:
            request = client.submit([PAYLOAD] * 60_000, handler="job", limit=64)
            with gateway(server.url) as (pid, http_port, grpc_port):
                spent, took, calls = _calls(
                    pid, caller, grpc_port if is_grpc else http_port, callers, seconds
                )
            request.cancel()
            request.purge()
            print(
                f"  {name}, {callers} at once: {spent / calls * 1e6:,.0f} µs of CPU a call, "
                f"{calls / took:,.0f} calls/s",
                flush=True,
            )


def _calls(
    pid: int, caller: Caller, port: int, callers: int, seconds: float
) -> tuple[float, float, int]:
    """Return the gateway's CPU seconds, the time, and the number of calls of so many callers."""
    with ThreadPoolExecutor(callers) as threads:

        def work(until: float) -> int:
            return sum(
                each.result()
                for each in [
                    threads.submit(caller, port, lambda: time.monotonic() < until)
                    for _ in range(callers)
                ]
            )

        work(time.monotonic() + 0.5)
        before, begun = cpu_s(pid), time.perf_counter()
        calls = work(time.monotonic() + seconds)
        return cpu_s(pid) - before, time.perf_counter() - begun, calls


# Waiting


class Waiting:
    """Workers that wait, each on a connection of its own."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self.http_port = http_port
        self.grpc_port = grpc_port
        self._held: list[Any] = []

    async def http(self, count: int) -> None:
        """Have so many calls wait."""
        body = json.dumps(ASK | {"wait_s": 50}).encode()
        head = f"POST /v1/take HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"

        async def one() -> None:
            self._held.append(await asyncio.open_connection("127.0.0.1", self.http_port))
            self._held[-1][1].write(head.encode() + body)

        await self._all(one, count)

    async def websocket(self, count: int) -> None:
        """Have so many streams wait; each beats as the gateway asks."""
        hello = json.dumps({"seq": 1, "hello": {"queue": "default", "handlers": ["job"]}})

        async def one() -> None:
            url = f"ws://127.0.0.1:{self.http_port}/v1/work"
            link = await connect(url, compression=None, ping_interval=None, open_timeout=60)
            await link.send(hello)
            await link.recv()
            self._held.append(asyncio.create_task(self._beat(link)))

        await self._all(one, count)

    async def _beat(self, link: Any) -> None:
        async with link:
            while True:
                await asyncio.sleep(3)
                await link.send('{"beat": {"tickets": []}}')
                await link.recv()

    async def grpc(self, count: int) -> None:
        """Have so many streams of gRPC wait, each on a connection of its own."""
        import grpc.aio

        pb: Any = import_module("streamq.gateway.streamq_pb2")
        hello = pb.FromWorker(seq=1, hello=pb.Hello(handlers=[pb.Offer(name="job")], slots=1))
        options = [("grpc.use_local_subchannel_pool", 1)]

        async def one() -> None:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}", options)
            stream = channel.stream_stream(
                "/streamq.v1.Work/Session", pb.FromWorker.SerializeToString, pb.ToWorker.FromString
            )()
            await stream.write(hello)
            await stream.read()
            self._held.append((channel, asyncio.create_task(beat(stream))))

        async def beat(stream: Any) -> None:
            while True:
                await asyncio.sleep(3)
                await stream.write(pb.FromWorker(seq=2, beat=pb.BeatMessage()))
                await stream.read()

        await self._all(one, count)

    async def _all(self, one: Callable[[], Any], count: int) -> None:
        for begin in range(0, count, 50):
            await asyncio.gather(*(one() for _ in range(min(50, count - begin))))


def memory_kb(pid: int) -> int:
    """Return the memory that a process has to itself."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def commands(redis: Any) -> tuple[int, float]:
    """Return how many commands the server was sent, and the microseconds that they took."""
    stats = redis.info("commandstats")
    spent = sum(each["usec"] for name, each in stats.items() if "info" not in name)
    return redis.info("stats")["total_commands_processed"], spent


def measure_waiting(server: LocalServer, client: Client, count: int, seconds: float) -> None:
    """Measure what workers that wait cost the gateway and the server."""
    redis: Any = client._protocol.connection.redis
    print(f"workers that wait, {count:,} at one gateway:")

    async def measure(kind: str, number: int, few: int = 10) -> None:
        with gateway(server.url) as (pid, http_port, grpc_port):
            waiting = Waiting(http_port, grpc_port)
            connect_more = getattr(waiting, kind.lower())
            await connect_more(few)
            await asyncio.sleep(2)
            before = memory_kb(pid)
            if number > few:
                await connect_more(number - few)
                await asyncio.sleep(4)
            kb = (memory_kb(pid) - before) / max(1, number - few)
            (sent, spent), cpu, begun = commands(redis), cpu_s(pid), time.monotonic()
            await asyncio.sleep(seconds)
            (sent_after, spent_after), took = commands(redis), time.monotonic() - begun
            used = (cpu_s(pid) - cpu) / took
            told = f"  {kind}, {number:,}: "
            if number > few:
                told += f"{kb:.1f} kB each, "
            print(
                f"{told}{used:.1%} of a core, the server had {(sent_after - sent) / took:.1f} "
                f"commands a second of {(spent_after - spent) / took:.0f} µs",
                flush=True,
            )
            os.kill(pid, signal.SIGKILL)

    for kind in ("HTTP", "WebSocket", "gRPC"):
        for number in (10, count):
            asyncio.run(measure(kind, number))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", choices=("drain", "latency", "calls", "waiting"))
    args = parser.parse_args()
    quick = args.quick
    steps: dict[str, Callable[[LocalServer, Client], None]] = {
        "drain": lambda server, client: measure_drain(
            server, client, 100_000 if quick else 300_000, 1 if quick else 3
        ),
        "latency": lambda server, client: measure_latency(server, client, 90 if quick else 300),
        "calls": lambda server, client: measure_calls(server, client, 2.0 if quick else 5.0),
        "waiting": lambda server, client: measure_waiting(
            server, client, 200 if quick else 2_000, 3.0 if quick else 10.0
        ),
    }
    with ExitStack() as stack:
        server = stack.enter_context(LocalServer.start())
        client = stack.enter_context(Client(server.url))
        for name, step in steps.items():
            if not args.only or name in args.only:
                step(server, client)
    print(f"load average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
