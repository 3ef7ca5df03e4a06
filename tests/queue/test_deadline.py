"""The deadline of a request: it fails when it has not ended by then."""

import time

import pytest

from streamq import Client, InvalidValue, Protocol, Request, State
from streamq.protocol.keys import QueueKeys
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker, make_due


@pytest.fixture
def late(client: Client, protocol: Protocol, queue: str, request_id: str) -> RequestByHand:
    """A request of three parts, one of which is done, whose deadline has just passed."""
    client.submit(
        [b"x"] * 3, handler="h", queue=queue, id=request_id, deadline="1h", on_failure="h"
    )
    late = RequestByHand(protocol, queue, request_id)
    holder, _ = late.claim()
    late.finish(holder, [1])
    late.set_meta(deadline_ms=late.now_ms() - 1)
    return late


def test_look_ends_it_and_its_results_stay(
    late: RequestByHand, client: Client, worker: Worker
) -> None:
    ran = worker.sweep() and worker.drain()

    status = client.get(late.id).status()
    assert (status.state, status.reason, status.parts.done) == (State.FAILED, "deadline", 1)
    assert ran == [(f"{late.id}.failure", 1)]
    assert len(list(client.get(late.id).raw_results())) == 1


def test_a_look_is_registered_for_that_moment(
    client: Client, protocol: Protocol, queue: str, worker: Worker
) -> None:
    request = client.submit([b"x"], handler="h", queue=queue, delay="1h", deadline="3s")
    wanted = request.status().deadline_ms
    assert wanted is not None

    worker.sweep()

    assert protocol.connection.redis.zscore(QueueKeys(queue).due, request.id) == wanted


def test_one_that_has_ended_does_not_mind(late: RequestByHand, client: Client) -> None:
    holder, _ = late.claim(9)
    late.finish(holder, [2, 3])

    assert late.protocol.expire(late.id) is State.DONE
    assert late.protocol.audit(late.id).overdue_by == 0


def test_one_that_is_retried_has_none_any_more(
    late: RequestByHand, client: Client, protocol: Protocol, queue: str, worker: Worker
) -> None:
    worker.sweep()
    request = Request(protocol, late.id)

    request.retry()
    make_due(protocol, queue)
    worker.drain()

    status = request.status()
    assert (status.state, status.deadline_ms, status.reason) == (State.DONE, None, "")


@pytest.mark.parametrize("deadline", ["soon", -1, ""])
def test_bad_one_is_refused(client: Client, queue: str, deadline: str) -> None:
    with pytest.raises(InvalidValue, match="deadline"):
        client.submit([b"x"], handler="h", queue=queue, deadline=deadline)


@pytest.mark.parametrize("is_list", [True, False], ids=["in one call", "loaded"])
@pytest.mark.parametrize("wrong_by_s", [-86_400, 86_400], ids=["behind", "ahead"])
def test_duration_is_counted_by_the_clock_of_the_server(
    client: Client,
    queue: str,
    request_id: str,
    monkeypatch: pytest.MonkeyPatch,
    wrong_by_s: float,
    is_list: bool,
) -> None:
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + wrong_by_s)
    payloads = [b"x"] * 3

    request = client.submit(
        payloads if is_list else iter(payloads),
        handler="h",
        queue=queue,
        id=None if is_list else request_id,
        deadline="1h",
    )

    status = request.status()
    assert status.deadline_ms is not None
    assert status.deadline_ms - status.created_ms == 3_600_000
