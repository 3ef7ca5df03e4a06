"""Count words with a fleet of worker processes, kill one on the way, and lose nothing.

    make demo

Everything is real: an embedded server, a request whose parts are submitted while earlier
ones already run, four worker processes that take tokens and leases, a kill -9, a janitor.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator

import msgspec

from streamq import Client, Connection, Janitor, Protocol, StreamqError
from streamq.model import Grant, Terms
from streamq.server import LocalServer

PARTS = 2_000
LINES_PER_PART = 100
WORKERS = 4
LIMIT = 3
LEASE_MS = 1_500
TERMS = Terms(most=8, lease_ms=LEASE_MS)
WORDS = (
    "the quick brown fox jumps over the lazy dog and then some more words follow".split()  # noqa: SIM905
)


def parts() -> Iterator[bytes]:
    """Text in parts of some lines, made as it is needed."""
    chance = random.Random(7)
    for _ in range(PARTS):
        yield "\n".join(
            " ".join(chance.choices(WORDS, k=12)) for _ in range(LINES_PER_PART)
        ).encode()


def count_words(text: bytes) -> bytes:
    """The handler: what this job does with one part."""
    return msgspec.json.encode(Counter(text.decode().split()))


def work(url: str) -> None:
    """A worker: token, claim, run, finish with results, and the next parts come along."""
    protocol = Protocol(Connection(url))
    leases = 0
    while True:
        token = protocol.take("default", block_s=1)
        if token is None:
            continue
        request_id, level = token
        leases += 1
        holder = f"{os.getpid()}-{leases}-{random.randbytes(6).hex()}"
        grant = protocol.claim(request_id, holder, TERMS, ["parts count_words"], level=level)
        protocol.push("default", request_id, grant.tokens)
        run(protocol, request_id, holder, grant)


def run(protocol: Protocol, request_id: str, holder: str, grant: Grant) -> None:
    """Run parts under one lease for as long as the server hands over more."""
    call = 0
    while grant.parts:
        results: list[bytes | int] = []
        for part in grant.parts:
            results += (part.number, count_words(part.payload))
        call += 1
        grant = protocol.finish(request_id, holder, call, results, len(grant.parts), TERMS)
        protocol.push("default", request_id, grant.tokens)


def with_a_kill(texts: Iterator[bytes], victim: int) -> Iterator[bytes]:
    """The same texts; on the way a worker dies as if its machine had."""
    for number, text in enumerate(texts, 1):
        if number == PARTS * 2 // 5:
            os.kill(victim, signal.SIGKILL)
            print(f"part {number} of {PARTS}: killed worker process {victim} with signal 9")
        yield text


def main() -> None:
    """Run the demonstration; exit 1 if anything was lost or counted twice."""
    spawn = multiprocessing.get_context("spawn")
    with LocalServer.start() as server, Client(server.url) as client:
        print(f"embedded server at {server.url}")
        workers = [
            spawn.Process(target=work, args=(server.url,), daemon=True) for _ in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        begun = time.monotonic()
        texts = with_a_kill(parts(), workers[0].pid or 0)
        print(f"submitting {PARTS} parts, at most {LIMIT} running at once on {WORKERS} workers")
        request = client.submit(texts, handler="count_words", limit=LIMIT)
        protocol = Protocol(Connection(server.url))
        janitor = Janitor(protocol, every_ms=500)
        while request.status().state.is_live:
            janitor.sweep()
            time.sleep(0.05)

        total: Counter[str] = Counter()
        for _, result in request.results():
            total.update(msgspec.json.decode(result, type=dict[str, int]))
        seconds = time.monotonic() - begun
        for worker in workers:
            worker.kill()
        protocol.connection.close()
        expected = Counter(word for text in parts() for word in text.decode().split())
        print(f"done in {seconds:.1f} s: {total.total():,} words, {len(total)} different")
        print(
            "what one process counts:", "the same, word for word" if total == expected else "OTHER!"
        )
        if total != expected:
            sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except StreamqError as error:
        sys.exit(f"demo: {error}")
