"""A server with TLS and a user for each role."""

from collections.abc import Iterator

import pytest

from tests.support.secure import (
    SecureServer,
)


@pytest.fixture(scope="module")
def secure() -> Iterator[SecureServer]:
    server = SecureServer()
    yield server
    server.stop()
