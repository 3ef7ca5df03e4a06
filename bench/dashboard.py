"""What the dashboard costs: the server, the gateway and a browser.

    python bench/dashboard.py [--parts 10000000] [--requests 10000] [--readers 200] [--only pages]

In short pieces: fill a server with ``--only fill --url URL``, then measure it with ``--url URL``.

It makes one request of ten million parts, a few thousand of them done and failed, and ten thousand
other open requests, on an embedded server. Then it measures, with a real gateway:

* How long each page takes in Chromium, from the click on a link of another site to its content; the
  first time, when the gateway knows nothing yet, and again. And the heap of each page.
* What each topic costs the server while one reader watches it: commands a second, and how long the
  server is busy with them. What it does at rest is taken off.
* The same for many readers of four topics, and what the gateway takes for each: CPU and memory.
* How long a slot takes to remember a lease for the timeline.
"""

import argparse
import http.client
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from streamq import Client, Connection, Protocol
from streamq.dashboard.feed import LINGER_S
from streamq.model import Failure, Policy, Spec
from streamq.protocol.keys import RequestKeys
from streamq.protocol.replies import Terms
from streamq.queue.told import ToldSpan
from streamq.servers.local import LocalServer
from streamq.worker.spans import WORDS, Spans

LARGE = "ten-million"
SECONDS = 8.0
#: Adds parts of one byte to a stream; a request needs nothing else of them.
ADD = """
for n = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  redis.call('XADD', KEYS[1], n .. '-0', '1', 'x')
end
"""
TOPICS = (
    ("q:default", "overview"),
    ("t:default?", "table of requests"),
    ("v:default", "levels"),
    ("w:default", "workers"),
    ("x:default", "timeline"),
    ("l:default", "log"),
    ("h:default", "health"),
    (f"r:{LARGE}", "a request"),
    (f"m:{LARGE}", "its map"),
    (f"f:{LARGE}", "its failures"),
)
PAGES = (
    ("/", "main .tiles"),
    ("/q/default/requests", "main tbody tr"),
    ("/q/default/requests?sort=waiting&page=3", "main tbody tr"),
    (f"/r/{LARGE}", "main sq-map canvas"),
    (f"/r/{LARGE}/failures", "main .group"),
    ("/q/default/levels", "main .column"),
    ("/q/default/workers", "main h1"),
    ("/q/default/timeline", "main h1"),
    ("/q/default/health", "main .finding"),
    ("/q/default/log", "main h1"),
)
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync")


class Cost(NamedTuple):
    """What a server did in a second: commands, and ms that it was busy with them."""

    commands: float
    busy_ms: float


def fill(url: str, parts: int, requests: int) -> None:
    """Make the requests."""
    with closing(Connection(url)) as connection, closing(Client(url)) as client:
        protocol, redis = Protocol(connection), connection.redis
        keys = RequestKeys(LARGE)
        spec = Spec(retries=0)
        protocol.open(LARGE, "d", Policy(handler="h", limit=400, level=10, spec=spec))
        for first in range(1, parts + 1, 100_000):
            redis.eval(ADD, 1, keys.parts, first, min(parts, first + 99_999))
        counts = {"total": parts, "records": parts, "bytes": parts, "cursor": "c"}
        redis.hset(keys.meta, mapping=counts)
        redis.set(keys.left, parts + 1)
        protocol.seal(LARGE, parts, "c")
        for number in range(120):
            _work(protocol, f"p.q-{number}-1", is_held=number >= 100)
        for number in range(requests):
            level = 20 + number % 60
            client.submit([1, 2, 3], handler=f"h{number % 40}", id=f"r{number:05}", level=level)


def _work(protocol: Protocol, holder: str, *, is_held: bool) -> None:
    """Finish a batch of the large request, and fail every fourth part; or hold it."""
    found = protocol.claim(LARGE, holder, Terms(400), ("parts h",))
    if is_held:
        return
    call = 0
    for part in found.parts[::4]:
        call += 1
        told = [Failure(error="KeyError", message=f"no column {part.number}")]
        protocol.fail(LARGE, holder, call, part.number, told, kind="abandon", records=(0, 1))
    done = [part.number for index, part in enumerate(found.parts) if index % 4]
    results = [value for number in done for value in (number, b"r")]
    created = int(protocol.inspect(LARGE).fields["created_ms"])
    protocol.finish(LARGE, holder, call + 1, results, len(done), Terms(0), created)


@contextmanager
def gateway(url: str, *more: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A gateway, and its port."""
    command = [sys.executable, "-m", "streamq.cli", "serve", "--url", url, *more]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    for line in process.stderr:
        if found := re.search(r"serving at http://[^:]+:(\d+)", line):
            break
    threading.Thread(target=lambda: list(process.stderr or ()), daemon=True).start()
    try:
        assert found
        yield process, int(found[1])
    finally:
        process.terminate()
        process.wait(30)


class Readers:
    """Readers of the feed: each has a connection, and all are read by one thread."""

    def __init__(self, port: int, topics: list[str], count: int) -> None:
        query = "&".join(f"topic={quote(topic)}" for topic in topics)
        self.bytes = 0
        self._over = threading.Event()
        self._streams = []
        for _ in range(count):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", f"/v1/live?{query}")
            connection.getresponse()
            self._streams.append(connection.sock)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        import selectors

        with selectors.DefaultSelector() as selector:
            for stream in self._streams:
                selector.register(stream, selectors.EVENT_READ)
            while not self._over.is_set():
                for key, _ in selector.select(0.2):
                    self.bytes += len(key.fileobj.recv(2**20))  # type: ignore[union-attr]

    def close(self) -> None:
        """Hang up."""
        self._over.set()
        self._thread.join()
        for stream in self._streams:
            stream.close()


def stats(connection: Connection) -> tuple[int, float]:
    """Commands that the server has done so far, and the ms that it was busy with them."""
    found = connection.redis.info("commandstats")
    own = ("cmdstat_info",)
    rows = [row for name, row in found.items() if name not in own]
    return sum(row["calls"] for row in rows), sum(row["usec"] for row in rows) / 1e3


def cost(connection: Connection, seconds: float = SECONDS) -> Cost:
    """Measure for some seconds."""
    before, begun = stats(connection), time.monotonic()
    time.sleep(seconds)
    after, took = stats(connection), time.monotonic() - begun
    return Cost((after[0] - before[0]) / took, (after[1] - before[1]) / took)


def rss_mb(pid: int) -> float:
    """Memory of a process."""
    text = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(text) * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pages(port: int) -> None:
    """Open each page twice in a browser."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        print(f"\n{'page':44}{'first':>10}{'again':>10}{'heap':>10}")
        for path, selector in PAGES:
            times, heap = [], 0.0
            for _ in range(2):
                page: Any = browser.new_page()
                page.goto(f"http://127.0.0.1:{port}{path}", wait_until="commit")
                ready = page.wait_for_function(
                    "s => document.querySelector(s) && performance.now()", arg=selector
                )
                times.append(float(ready.json_value()))
                page.wait_for_timeout(1_500)
                heap = page.evaluate("performance.memory.usedJSHeapSize") / 2**20
                page.close()
            print(f"{path:44}{times[0]:>7.0f} ms{times[1]:>7.0f} ms{heap:>7.1f} MB", flush=True)
        browser.close()


def read_all(port: int) -> None:
    """Wait until the gateway has read every request once."""
    begun = time.monotonic()
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/v1/live?once&topic=q:default")
        told = connection.getresponse().read()
        connection.close()
        if b'"unread":0,' in told:
            break
        time.sleep(1)
    print(f"every request was read once after {time.monotonic() - begun:.0f} s", flush=True)


def topics(connection: Connection, port: int, kinds: str) -> None:
    """Measure what one reader of each topic costs."""
    rest = _rest(connection)
    for topic, name in TOPICS:
        if topic[0] not in kinds:
            continue
        reader = Readers(port, [topic], 1)
        time.sleep(2)
        reader.bytes = 0
        found = cost(connection)
        commands, busy_ms = found.commands - rest.commands, found.busy_ms - rest.busy_ms
        kb = reader.bytes / SECONDS / 1e3
        reader.close()
        print(
            f"{name:20} {commands:>8.1f} commands/s {busy_ms:>7.2f} ms/s {kb:>8.1f} kB/s",
            flush=True,
        )
        time.sleep(LINGER_S + 1)


def readers(connection: Connection, pid: int, port: int, count: int) -> None:
    """Measure what one reader of four topics costs, and what many do."""
    rest = _rest(connection)
    watched = [topic for topic, _ in TOPICS if topic[0] in "qtrm"]
    for number in (1, count):
        before = rss_mb(pid)
        watching = Readers(port, watched, number)
        time.sleep(3)
        begun, cpu = time.monotonic(), cpu_s(pid)
        found = cost(connection)
        share = (cpu_s(pid) - cpu) / (time.monotonic() - begun)
        grown = rss_mb(pid) - before
        watching.close()
        print(
            f"{number} readers of {len(watched)} topics: {found.commands - rest.commands:.0f} "
            f"commands/s, {found.busy_ms - rest.busy_ms:.1f} ms/s; the gateway used "
            f"{share:.0%} of a core and grew by {grown:.1f} MB, {1e3 * grown / number:.0f} kB each",
            flush=True,
        )
        time.sleep(LINGER_S + 1)


def _rest(connection: Connection) -> Cost:
    time.sleep(LINGER_S + 2)  # what was watched before is read for a while more
    rest = cost(connection)
    print(f"\nat rest: {rest.commands:.0f} commands/s, {rest.busy_ms:.1f} ms/s", flush=True)
    return rest


def spans() -> None:
    """Measure what it costs a slot to remember a lease."""
    ring = Spans(memoryview(bytearray(WORDS * 8)).cast("q"))

    def remember() -> None:
        ring.add(0, ToldSpan("0", 1, 2, "nightly", 256, 1, 0))

    best = min(timeit.repeat(remember, number=100_000, repeat=5)) / 100_000
    print(f"\na slot remembers a lease in {1e6 * best:.2f} us", flush=True)


def measure(url: str, options: argparse.Namespace) -> None:
    """Measure a server that has the requests."""
    wanted = set(options.only or ("pages", "topics", "readers"))
    if "pages" in wanted:
        with gateway(url) as (_, port):
            pages(port)
    if not wanted & {"topics", "readers"}:
        return
    # One that changes nothing has no janitor, whose looks would be counted, too.
    serving = gateway(url, "--read-only")
    with serving as (process, port), closing(Connection(url)) as connection:
        read_all(port)
        if "readers" in wanted:
            readers(connection, process.pid, port, options.readers)
        if "topics" in wanted:
            topics(connection, port, options.topics)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--parts", type=int, default=10_000_000)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=200)
    pieces = ("fill", "pages", "topics", "readers", "spans")
    parser.add_argument("--only", nargs="*", choices=pieces, default=[])
    parser.add_argument("--url", default="", help="a server that was filled; else a new one")
    parser.add_argument("--topics", default="qtvwxlhrmf", help="first letters of topics")
    options = parser.parse_args()
    if not options.only or "spans" in options.only:
        spans()
    if options.only == ["spans"]:
        return
    server = None if options.url else LocalServer.start()
    url = options.url or (server.url if server else "")
    try:
        if server or "fill" in options.only:
            begun = time.monotonic()
            fill(url, options.parts, options.requests)
            print(f"made in {time.monotonic() - begun:.0f} s", flush=True)
        if options.only != ["fill"]:
            measure(url, options)
    finally:
        if server:
            server.stop()


if __name__ == "__main__":
    main()
