"""How much of the server's memory requests, parts and results take.

    python bench/memory.py

It starts an embedded server of its own; nothing here depends on the machine's speed.
"""

from collections.abc import Callable

from streamq import Client
from streamq.protocol.replies import Terms
from streamq.servers.local import LocalServer

SIZES = (10, 100, 1_000, 10_000, 100_000)
#: Bytes of all payloads together, for each size.
BYTES = 20_000_000
REQUESTS = 1_000
SNOOZED = 20_000


def main() -> None:
    """Measure, and print two tables."""
    with LocalServer.start() as server, Client(server.url) as client:

        def used() -> int:
            return int(client._protocol.connection.redis.info("memory")["used_memory"])

        def grown(act: Callable[[], None], number: int) -> float:
            before = used()
            act()
            return (used() - before) / number

        client.submit([b"x"], handler="h")  # so that the scripts and the queue's keys exist already
        print("bytes of payload or result | bytes of memory for a waiting part | for a result")
        for size in SIZES:
            count = min(BYTES // size, 200_000)
            waiting = grown(
                lambda size=size, count=count: _submit(client, size, count),  # type: ignore[misc]
                count,
            )
            stored = grown(lambda: _finish(client), count) + waiting
            print(f"{size:>9,} | {waiting:>12,.0f} | {stored:>12,.0f}")
        _submit(client, 1, SNOOZED)
        each = grown(lambda: _snooze(client), SNOOZED)
        print(f"a part that is put off, more than one that waits: {each:,.0f} bytes")
        each = grown(lambda: _open_many(client), REQUESTS)
        print(f"an open request with one part: {each:,.0f} bytes")


def _submit(client: Client, size: int, count: int) -> None:
    client.submit((b"x" * size for _ in range(count)), handler="h", id=f"m{size}", limit=1)


def _finish(client: Client) -> None:
    """Give every part of the newest request a result as large as itself."""
    request = max(client.list(), key=lambda status: status.created_ms)
    protocol, terms = client._protocol, Terms(most=100)
    grant = protocol.claim(request.id, "memory-0-1", terms, ["parts h 3"])
    call = 0
    while grant.parts:
        call += 1
        results = [value for part in grant.parts for value in (part.number, part.payload)]
        grant = protocol.finish(request.id, "memory-0-1", call, results, len(grant.parts), terms)


def _snooze(client: Client) -> None:
    """Put off every part of the newest request."""
    request = max(client.list(), key=lambda status: status.created_ms)
    protocol, call = client._protocol, 0
    grant = protocol.claim(request.id, "memory-0-2", Terms(SNOOZED), ["parts h 3"])
    while grant.parts:
        for part in grant.parts:
            call += 1
            protocol.fail(
                request.id, "memory-0-2", call, part.number, [], kind="snooze", delay_ms=600_000
            )
        call += 1
        grant = protocol.finish(request.id, "memory-0-2", call, [], 0, Terms(SNOOZED))


def _open_many(client: Client) -> None:
    for number in range(REQUESTS):
        client.submit([b"x" * 100], handler="h", id=f"one{number}")


if __name__ == "__main__":
    main()
