"""A sweep looks at many requests with one call, and closes those that have ended with another."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from streamq import Client, Janitor, Protocol, State
from streamq.driver.connection import Connection
from streamq.protocol.replies import Audit, Tokens
from streamq.queue import janitor as module
from tests.support.simulated import Worker, indexes, make_due, tokens


@pytest.fixture
def ended(client: Client, protocol: Protocol, queue: str) -> list[str]:
    """Ten requests that have ended and are not closed."""
    ids = [client.submit([b"x"], handler="h", queue=queue).id for _ in range(10)]
    worker = Worker(protocol, queue)
    while worker.step():
        pass
    make_due(protocol, queue)
    return ids


class Meanwhile(Protocol):
    """Something happens between the looks and what follows."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.one_by_one: list[str] = []

    def audit_all(
        self, ids: Sequence[str], is_away: Callable[[str], object] = lambda _: None
    ) -> dict[str, Audit]:
        found = super().audit_all(ids, is_away)
        self.happens()
        return found

    def audit(self, request_id: str, pushed: int = 0) -> Audit:
        self.one_by_one.append(request_id)
        return super().audit(request_id, pushed)

    def happens(self) -> None:
        """Do nothing."""


def test_those_that_have_ended_are_closed(protocol: Protocol, queue: str, ended: list[str]) -> None:
    janitor = Janitor(protocol, queue)
    janitor.sweep()

    assert all(indexes(protocol, queue, each) == {"closed"} for each in ended)
    assert janitor.closed == {State.DONE: 10}


def test_two_calls_are_enough(
    protocol: Protocol, queue: str, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if protocol.connection.is_cluster:
        pytest.skip("there it is a call to each node")
    sent: list[object] = []

    def count(name: str) -> None:
        send = getattr(Connection, name)

        def counted(self: Connection, *args: Any) -> Any:
            sent.append(args)
            return send(self, *args)

        monkeypatch.setattr(Connection, name, counted)

    count("call_all")
    count("call")
    Janitor(protocol, queue).sweep()

    assert len(sent) == 3, "tick, audits, closes"


def test_one_that_runs_again_meanwhile_stays_open(
    client: Client, protocol: Protocol, queue: str, ended: list[str]
) -> None:
    class Again(Meanwhile):
        def happens(self) -> None:
            client.get(ended[0]).purge()
            client.submit([b"new"], handler="h", queue=queue, id=ended[0])

    Janitor(Again(protocol.connection), queue).sweep()

    assert indexes(protocol, queue, ended[0]) == {"open", "due"}
    assert all(indexes(protocol, queue, each) == {"closed"} for each in ended[1:])
    Worker(protocol, queue).drain()
    assert client.get(ended[0]).status().state is State.DONE


def test_one_that_nobody_can_read_holds_up_no_other(
    protocol: Protocol, queue: str, ended: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    redis = protocol.connection.redis
    redis.delete(protocol.keys(ended[3]).meta)
    redis.set(protocol.keys(ended[3]).meta, "spoilt")

    with caplog.at_level(logging.WARNING):
        Janitor(protocol, queue).sweep()

    others = [each for each in ended if each != ended[3]]
    assert all(indexes(protocol, queue, each) == {"closed"} for each in others)
    assert "open" in indexes(protocol, queue, ended[3])
    assert f"request {ended[3]} is damaged" in caplog.text


def test_one_of_another_queue_is_taken_out_of_this_one(
    client: Client, protocol: Protocol, queue: str, ended: list[str]
) -> None:
    other = client.submit([b"x"], handler="h", queue=f"{queue}-other")
    Worker(protocol, f"{queue}-other").step()
    protocol.mint(queue, other.id, Tokens(), register="yes")

    make_due(protocol, queue)
    Janitor(protocol, queue).sweep()

    assert indexes(protocol, queue, other.id) == set()
    assert indexes(protocol, queue, ended[0]) == {"closed"}


def test_entries_of_others_are_reported(
    protocol: Protocol, queue: str, ended: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    protocol.connection.redis.hset(protocol.keys(ended[5]).meta, "strays", 2)

    with caplog.at_level(logging.WARNING):
        Janitor(protocol, queue).sweep()

    assert f"{ended[5]}: 2 entries of its stream were not ours" in caplog.text
    assert all(indexes(protocol, queue, each) == {"closed"} for each in ended)


def test_what_was_told_long_ago_is_asked_again(
    client: Client, protocol: Protocol, queue: str
) -> None:
    """Meanwhile workers took the tokens that were missing then."""
    ids = [client.submit([b"x"], handler="h", queue=queue).id for _ in range(3)]
    make_due(protocol, queue)

    class Slow(Meanwhile):
        def happens(self) -> None:
            worker = Worker(protocol, queue)
            assert all(worker.step() for _ in ids)
            time.sleep(module.BELIEVED_S)

    slow = Slow(protocol.connection)
    Janitor(slow, queue).sweep()

    assert sorted(slow.one_by_one) == sorted(ids)
    assert tokens(protocol, queue) == []
