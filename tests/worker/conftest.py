"""Submitting to the queue of the pools of a test."""

from typing import Any

import pytest

from streamq import Client, Request


@pytest.fixture
def submit(client: Client, queue: str) -> Any:
    """Submit to the test's own queue."""

    def submit(payloads: Any, handler: str, **options: Any) -> Request:
        return client.submit(payloads, handler=handler, queue=queue, **options)

    return submit
