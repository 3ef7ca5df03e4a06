"""Gateways: as commands that listen, and as desks in the test's own process."""

import secrets
from collections.abc import Callable, Iterator

import pytest

from streamq import Protocol
from streamq.gateway.desk import Desk
from streamq.gateway.ticket import TicketSigner
from streamq.queue.lease_keeper import LeaseKeeper
from tests.gateway.common import Gate

SECRET = b"of all gateways"


@pytest.fixture
def serve(url: str, queue: str) -> Iterator[Callable[..., Gate]]:
    """Start gateways of the test's queue."""
    started: list[Gate] = []

    def serve(*words: str, hasty: str = "") -> Gate:
        started.append(Gate(url, queue, *words, hasty=hasty))
        return started[-1]

    yield serve
    for gate in started:
        gate.end()


@pytest.fixture
def gate(serve: Callable[..., Gate]) -> Gate:
    return serve()


@pytest.fixture
def keeper(protocol: Protocol, queue: str) -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper(
        protocol,
        queue,
        secrets.token_hex(8),
        slots=0,
        lease_ms=20_000,
        beat_ms=5_000,
        audit_ms=5_000,
        levels=range(100),
    )
    keeper.start()
    yield keeper
    keeper.stop()


@pytest.fixture
def desks(protocol: Protocol, queue: str, keeper: LeaseKeeper) -> Iterator[Callable[[], Desk]]:
    """Make desks of gateways that share a secret."""
    made: list[Desk] = []

    def desk() -> Desk:
        made.append(
            Desk(protocol, {queue: keeper}, TicketSigner(SECRET), f"g{secrets.token_hex(4)}")
        )
        return made[-1]

    yield desk
    for each in made:
        each.close()
