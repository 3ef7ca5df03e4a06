"""A request of five parts, a worker in the test's own thread, a janitor, and a submission."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from streamq import (
    Client,
    Janitor,
    Protocol,
    Request,
)
from tests.queue.submitting import Submit
from tests.support.simulated import Worker, make_due


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


@pytest.fixture
def janitor(protocol: Protocol, queue: str) -> Janitor:
    return Janitor(protocol, queue)


@pytest.fixture
def sweep(protocol: Protocol, queue: str, janitor: Janitor) -> Callable[[], int]:
    """A sweep that finds every open request due."""

    def sweep() -> int:
        make_due(protocol, queue)
        return janitor.sweep()

    return sweep
