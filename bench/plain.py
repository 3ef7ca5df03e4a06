"""What a plain request costs the server: claim and finish in batches of 1, 16 and 256.

    python bench/plain.py [ROUNDS]

It prints the microseconds that scripts take for each part and the commands that they call for it,
as JSON. ``flows.py`` runs it in another checkout, too, so it uses only what every version has.
"""

import json
import secrets
import statistics
import sys
from collections.abc import Callable
from typing import Any

from streamq import Client, Connection, Protocol
from streamq.protocol.replies import Grant, Terms
from streamq.servers.local import LocalServer

HANDLERS = ("parts bench",)
PAYLOAD, RESULT = b"x" * 100, b"y" * 100
#: So many parts of each batch size.
PARTS = {1: 3_000, 16: 16_000, 256: 40_000}


class Drain:
    """Drains requests through the scripts, as one slot would."""

    def __init__(self, client: Client, protocol: Protocol) -> None:
        self.client = client
        self.protocol = protocol
        self.redis: Any = protocol.connection.redis

    def load(self, parts: int, **options: Any) -> str:
        """Return a request of so many parts."""
        queue = f"q{secrets.token_hex(4)}"
        return self.client.submit((PAYLOAD for _ in range(parts)), queue=queue, **options).id

    def finish_all(self, request_id: str, batch: int) -> int:
        """Run all parts of a plain request."""

        def finish(grant: Grant, holder: str, call: int) -> Grant:
            results: list[bytes | int] = []
            for part in grant.parts:
                results += (part.number, RESULT)
            count = len(grant.parts)
            return self.protocol.finish(request_id, holder, call, results, count, Terms(batch))

        return self.drain(request_id, batch, finish)

    def drain(self, place: str, batch: int, finish: Callable[[Grant, str, int], Grant]) -> int:
        """Run all parts under one lease. Returns how many."""
        holder, done, call = secrets.token_hex(8), 0, 0
        grant = self.protocol.claim(place, holder, Terms(batch), HANDLERS)
        while grant.parts:
            done, call = done + len(grant.parts), call + 1_000
            grant = finish(grant, holder, call)
        return done

    def timed(self, run: Callable[[], int], units: int) -> float:
        """Return the microseconds of scripts that a run takes, for each of so many units."""
        before = self._script_us()
        run()
        return (self._script_us() - before) / units

    def forget(self, request_id: str) -> None:
        """Remove a request."""
        request = self.client.get(request_id)
        if request.status().state.is_live:
            request.cancel()
        request.purge()

    def measure_plain(self, batch: int) -> float:
        """Return what a part of a plain request costs."""
        request_id = self.load(PARTS[batch], handler="bench", limit=1)
        cost = self.timed(lambda: self.finish_all(request_id, batch), PARTS[batch])
        self.forget(request_id)
        return cost

    def count_plain(self, batch: int) -> float:
        """Return how many commands a part of a plain request costs: no load changes that."""
        request_id = self.load(PARTS[batch], handler="bench", limit=1)
        before = self._commands()
        self.finish_all(request_id, batch)
        # Without the INFO that asked.
        count = (self._commands() - before - 1) / PARTS[batch]
        self.forget(request_id)
        return count

    def _script_us(self) -> float:
        found = self.redis.info("commandstats")
        return float(found.get("cmdstat_evalsha", {"usec": 0})["usec"])

    def _commands(self) -> float:
        """Return how many commands ran, those that scripts called among them."""
        return float(sum(each["calls"] for each in self.redis.info("commandstats").values()))


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with LocalServer.start() as server, Client(server.url) as client:
        drain = Drain(client, Protocol(Connection(server.url)))
        found = {
            f"finish, by {batch}": statistics.median(
                drain.measure_plain(batch) for _ in range(rounds)
            )
            for batch in PARTS
        }
        found |= {f"commands a part, by {batch}": drain.count_plain(batch) for batch in PARTS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
