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
import typing
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from streamq.errors import ServerError, StreamqError
from streamq.gateway.ticket import Ticket
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Renewed, Tokens
from streamq.queue.lease_keeper import LeaseKeeper

log = logging.getLogger(__name__)

T = TypeVar("T")

#: How long a lease lasts until its parts have reached the worker, and after the worker's stream
#: broke. Within this time the worker may come back, at any gateway.
FIRST_LEASE_MS = 4_000
FUSE_MS = 4_000
#: How long the courier gathers leases before it renews them in one call.
GATHER_S = 0.05
#: After an error the courier tries again: how often, and the pause before each try.
TRIES = 5
REST_S = 0.5

#: Whether the connection of an answer was reset since.
WasLost = Callable[[], bool]


class InThread(typing.Protocol):
    """Makes calls of the server beside the event loop."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]:
        """Make them."""


class Renewal(NamedTuple):
    """A lease to renew: how long it stands from now, its ticket, and the part that runs."""

    lease_ms: int
    ticket: Ticket
    running: int | None


class Answered(NamedTuple):
    """What the server said of the leases of one request: holders, and the part that each runs."""

    request_id: str
    running: dict[str, int | None]
    answer: Renewed | StreamqError


async def renew_for_courier(
    protocol: Protocol, in_thread: InThread, leases: Iterable[Renewal]
) -> list[Answered]:
    """Renew leases, those of each node in one call. A node that is away holds up no other's."""
    shares: dict[tuple[int, str], dict[str, dict[str, int | None]]] = {}
    for lease_ms, ticket, running in leases:
        requests = shares.setdefault((lease_ms, protocol.node_of(ticket.request_id)), {})
        requests.setdefault(ticket.request_id, {})[ticket.holder] = running

    def renew(lease_ms: int, requests: dict[str, dict[str, int | None]]) -> list[Answered]:
        answers: Sequence[Renewed | StreamqError]
        try:
            answers = protocol.renew_all(lease_ms, list(requests.items()))
        except ServerError as error:
            answers = [error] * len(requests)
        return [
            Answered(*each, answer) for each, answer in zip(requests.items(), answers, strict=True)
        ]

    found = await asyncio.gather(
        *(in_thread(partial(renew, lease_ms, share)) for (lease_ms, _), share in shares.items())
    )
    return [each for some in found for each in some]


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
        await self._insist(tickets, running, 0)

    async def _light(self, tickets: list[Ticket], running: dict[str, int | None]) -> None:
        await self._insist(tickets, running, FUSE_MS)

        def have_looked_at() -> None:
            for queue, request_id in {(each.queue, each.request_id) for each in tickets}:
                self._have_looked_at(queue, request_id)

        with suppress(RuntimeError):  # the threads have ended: the gateway stops
            await self._in_thread(have_looked_at)

    async def _insist(
        self, tickets: list[Ticket], running: dict[str, int | None], lease_ms: int
    ) -> None:
        """Renew leases, each to its length or all to ``lease_ms``."""
        for _ in range(TRIES):
            leases = [
                Renewal(min(lease_ms or each.lease_ms, each.lease_ms), each, running[each.holder])
                for each in tickets
            ]
            try:
                answers = await renew_for_courier(self._protocol, self._in_thread, leases)
            except RuntimeError:  # the threads have ended: the gateway stops
                return
            away = {each for each, _, answer in answers if isinstance(answer, ServerError)}
            tickets = [each for each in tickets if each.request_id in away]
            if not tickets:
                return
            log.warning("leases of %d requests could not be renewed", len(away))
            await asyncio.sleep(REST_S)

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
