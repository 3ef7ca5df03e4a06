"""A server whose settings may be changed."""

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from streamq import (
    Connection,
)
from streamq.servers.local import LocalServer


@pytest.fixture(scope="module")
def server() -> Generator[LocalServer]:
    """A server on a port, whose settings these tests may change."""
    with LocalServer.start(port=0) as server:
        yield server


@pytest.fixture
def admin(server: LocalServer) -> Iterator[Any]:
    connection = Connection(server.url)
    yield connection.redis
    connection.close()
