"""A request of five parts, and a worker in the test's own thread."""

from collections.abc import Iterable
from typing import Any

import pytest

from streamq import (
    Client,
    Protocol,
    Request,
)
from tests.queue.submitting import Submit
from tests.support.simulated import Worker


@pytest.fixture
def worker(protocol: Protocol, queue: str) -> Worker:
    return Worker(protocol, queue)


@pytest.fixture
def request_(client: Client, queue: str, request_id: str) -> Request:
    """A request of five parts, nothing of which has run."""
    payloads = [b"a", b"b", b"c", b"d", b"e"]
    return client.submit(payloads, handler="h", queue=queue, id=request_id, retries=3)


@pytest.fixture
def done(request_: Request, worker: Worker) -> Request:
    """The same, after its end, and closed by the janitor."""
    worker.drain()
    return request_


@pytest.fixture
def submit(client: Client, queue: str, request_id: str) -> Submit:
    """Submit payloads under the test's id to the test's queue."""

    def submit(payloads: Iterable[Any], **options: Any) -> Any:
        given = {"handler": "h", "queue": queue, "id": request_id, **options}
        return client.submit(payloads, **given)

    return submit
