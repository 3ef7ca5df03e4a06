"""Tells the server that the parts of a lease have arrived, or that the worker's stream broke.

A lease begins short. If the gateway dies before its answer with the parts is out, nobody knows of
the lease, and the parts are free again after a few seconds. When the answer is out the courier
renews the lease to its whole length. From then on only the worker renews it.

A connection that is reset just behind an answer has probably lost it. Then the lease is left short.
A worker that has its parts renews the lease by beating; if no worker has them, they are free again
soon and nobody is charged with a crash.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress

from streamq.errors import ServerError, StreamqError
from streamq.gateway.ticket import Ticket
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Tokens
from streamq.queue.lease_keeper import LeaseKeeper

log = logging.getLogger(__name__)

#: How long a lease lasts until its parts have reached the worker, and after the worker's stream
#: broke. Within this time the worker may come back, at any gateway.
FIRST_LEASE_MS = 4_000
FUSE_MS = 4_000
#: How long the courier gathers leases before it renews them in one call.
GATHER_S = 0.05
#: After an error the courier tries again: how often, and the pause before each try.
TRIES = 5
REST_S = 0.5

#: Of each request: its holders, and the part that each runs.
_Share = dict[str, dict[str, int | None]]
#: Whether the connection of an answer was reset since.
WasLost = Callable[[], bool]
InThread = Callable[[Callable[[], None]], Awaitable[None]]


class Courier:
    """Renews leases once, many in a call. It belongs to the event loop."""

    def __init__(
        self, protocol: Protocol, keepers: dict[str, LeaseKeeper], in_thread: InThread
    ) -> None:
        self._protocol = protocol
        self._keepers = keepers
        self._in_thread = in_thread
        self._delivered: list[tuple[Ticket, WasLost]] = []
        self._sending: set[asyncio.Task[None]] = set()

    def delivered(self, ticket: Ticket, was_lost: WasLost) -> None:
        """Note that the answer with the parts of a new lease is out."""
        self._delivered.append((ticket, was_lost))
        if len(self._delivered) == 1:
            self._start(self._confirm())

    def broke(self, held: dict[str, tuple[Ticket, int | None]]) -> None:
        """Shorten the leases of a worker whose stream broke. Each comes with the part that ran."""
        tickets = [ticket for ticket, _ in held.values()]
        running = {ticket.holder: part for ticket, part in held.values()}
        if tickets:
            self._start(self._light(tickets, running))

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _confirm(self) -> None:
        await asyncio.sleep(GATHER_S)
        delivered, self._delivered = self._delivered, []
        tickets = [ticket for ticket, was_lost in delivered if not was_lost()]
        running = {ticket.holder: _only_part_of_report(ticket) for ticket in tickets}
        if tickets:
            await self._insist(lambda: self._renew(tickets, running, 0))

    async def _light(self, tickets: list[Ticket], running: dict[str, int | None]) -> None:
        def light() -> None:
            self._renew(tickets, running, FUSE_MS)
            for queue, request_id in {(each.queue, each.request_id) for each in tickets}:
                self._have_looked_at(queue, request_id)

        await self._insist(light)

    async def _insist(self, call: Callable[[], None]) -> None:
        for _ in range(TRIES):
            try:
                await self._in_thread(call)
                return
            except StreamqError as error:
                log.warning("leases could not be renewed: %s", error)
                await asyncio.sleep(REST_S)
            except RuntimeError:  # the threads have ended: the gateway stops
                return

    def _renew(self, tickets: list[Ticket], running: dict[str, int | None], lease_ms: int) -> None:
        """Renew leases, each to its length or all to ``lease_ms``."""
        shares: dict[tuple[int, str], _Share] = defaultdict(lambda: defaultdict(dict))
        for ticket in tickets:
            length_ms = min(lease_ms or ticket.lease_ms, ticket.lease_ms)
            node = self._protocol.node_of(ticket.request_id)
            shares[length_ms, node][ticket.request_id][ticket.holder] = running[ticket.holder]
        for (length_ms, _), requests in shares.items():
            for answer in self._protocol.renew_all(length_ms, list(requests.items())):
                if isinstance(answer, ServerError):
                    raise answer

    def _have_looked_at(self, queue: str, request_id: str) -> None:
        """Have a janitor look at the request when the leases have ended."""
        keeper = self._keepers[queue]
        look_ms = round(keeper.janitor.ahead_ms + time.monotonic() * 1e3) + FUSE_MS + 100
        with suppress(ServerError):
            self._protocol.push(queue, request_id, Tokens(look_ms=look_ms))
        keeper.expect(look_ms)


def _only_part_of_report(ticket: Ticket) -> int | None:
    """Return the part that runs under a new lease, if there is only one that it can be."""
    numbers = ticket.parts.numbers()
    return numbers[0] if len(numbers) == 1 else None
