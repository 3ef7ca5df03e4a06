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

from streamq import Client, Connection, Janitor, Protocol, Request, StreamqError
from streamq.model import Grant, Terms
from streamq.server import LocalServer

PARTS = 2_000
LINES_PER_PART = 100
WORKERS = 4
LIMIT = 3
LEASE_MS = 1_500
TERMS = Terms(most=8, lease_ms=LEASE_MS)
WORDS = "the quick brown fox jumps over the lazy dog and then some more words follow".split()


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


def follow(request: Request, janitor: Janitor, workers: list[multiprocessing.Process]) -> None:
    """Show progress, and kill a worker when it is under way."""
    is_killed = False
    while (status := request.status()).state.is_live:
        janitor.sweep()
        done = status.parts.done
        if not is_killed and done > PARTS * 0.4 and workers[0].pid:
            os.kill(workers[0].pid, signal.SIGKILL)
            is_killed = True
            print(f"  {done:5}/{PARTS} parts: killed worker {workers[0].pid} with signal 9")
        time.sleep(0.1)


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
        request = client.submit(parts(), handler="count_words", limit=LIMIT)
        print(
            f"submitted {request.id}: {PARTS} parts, at most {LIMIT} running on {WORKERS} workers"
        )
        protocol = Protocol(Connection(server.url))
        follow(request, Janitor(protocol, every_ms=500), workers)

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
