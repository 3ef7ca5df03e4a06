"""A canary: the first parts run, the others when the request is released."""

import pytest

from streamq import Client, InvalidValue, Protocol, Request, State
from streamq.admin.doctor import Doctor
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker, refuse


@pytest.fixture
def canary(client: Client, queue: str) -> Request:
    """Ten parts, of which three are the canary."""
    return client.submit([b"x"] * 10, handler="h", queue=queue, limit=2, canary=3)


def test_only_the_first_run_until_it_is_released(canary: Request, worker: Worker) -> None:
    assert [number for _, number in worker.drain()] == [1, 2, 3]
    status = canary.status()
    assert (status.state, status.canary, status.waits_for_release) == (State.OPEN, 3, True)

    canary.release()

    assert canary.status().canary is None
    assert [number for _, number in worker.drain()] == [4, 5, 6, 7, 8, 9, 10]
    assert canary.wait(5).state is State.DONE


def test_it_waits_only_when_all_of_them_have_ended(canary: Request, driver: RequestByHand) -> None:
    one = RequestByHand(driver.protocol, driver.queue, canary.id)
    holder, grant = one.claim(most=9)
    assert [part.number for part in grant.parts] == [1, 2, 3]
    one.finish(holder, [1, 2])

    assert not canary.status().waits_for_release


def test_cancel_ends_it_and_the_rest_never_runs(canary: Request, worker: Worker) -> None:
    worker.drain()

    assert canary.cancel() == 7
    assert worker.drain() == []
    assert len(list(canary.results())) == 3


def test_failed_ones_are_retried_within_the_canary(
    canary: Request, protocol: Protocol, queue: str, worker: Worker
) -> None:
    Worker(protocol, queue, refuse).drain()
    assert canary.status().parts.failed == 3

    assert canary.retry() == 3

    assert sorted(number for _, number in worker.drain()) == [1, 2, 3]
    assert canary.status().waits_for_release


def test_one_that_has_no_more_parts_ends_by_itself(
    client: Client, queue: str, worker: Worker
) -> None:
    request = client.submit([b"x"] * 3, handler="h", queue=queue, canary=3)
    worker.drain()

    assert request.wait(5).state is State.DONE


def test_doctor_misses_no_token_of_one_that_waits(
    canary: Request, protocol: Protocol, queue: str, worker: Worker
) -> None:
    worker.drain()

    told = list(Doctor(protocol, protocol.prefix).examine([queue]))
    assert not [each for each in told if each.check == "token"]


def test_workers_of_earlier_versions_leave_it_alone(canary: Request, protocol: Protocol) -> None:
    meta = protocol.keys(canary.id).meta

    assert protocol.connection.redis.hget(meta, "protocol") == b"2"


@pytest.mark.parametrize("canary", [-1, 1.5, "many"])
def test_bad_one_is_refused(client: Client, queue: str, canary: int) -> None:
    with pytest.raises(InvalidValue, match="canary"):
        client.submit([b"x"], handler="h", queue=queue, canary=canary)
