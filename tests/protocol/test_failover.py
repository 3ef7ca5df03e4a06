"""A failover of one slot and not of the other: what was acknowledged is found again and runs.

The rollback is simulated: the keys of one slot are put back as they were a moment before.
"""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from streamq import Client, Janitor, Protocol, Request, State
from streamq.protocol.keys import QueueKeys, token_list_of
from streamq.protocol.replies import Tokens
from streamq.queue.fleet import WorkerDetails
from tests.support.by_hand import RequestByHand
from tests.support.fleet import Fleet
from tests.support.simulated import Worker, indexes, make_due
from tests.support.waiting import wait_until


@contextmanager
def taken_back(redis: Any, keys: Iterable[str]) -> Generator[None]:
    """The slot of these keys forgets what is done in the block."""
    before = {key: redis.dump(key) for key in keys}
    yield
    for key, value in before.items():
        redis.delete(key)
        if value is not None:
            redis.restore(key, 0, value)


@contextmanager
def waits(request: Request) -> Generator[None]:
    """Somebody waits for the request in the block, and hears of its end after it."""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(request.wait, 20)
        yield
        assert waiting.result().state is State.DONE


@pytest.fixture
def queue_keys(queue: str) -> list[str]:
    keys = QueueKeys(queue, to=token_list_of("h", 50))
    return [keys.due, keys.open, keys.closed, keys.tokens]


@pytest.fixture
def request_keys(driver: RequestByHand) -> list[str]:
    return [key for name, key in driver.keys.all().items() if name != "events"]


@pytest.fixture
def submit(client: Client, queue: str, request_id: str) -> Callable[[], Request]:
    def submit() -> Request:
        return client.submit([b"a", b"b"], handler="h", queue=queue, id=request_id)

    return submit


class TestQueueSlot:
    """The request is there, and nobody knows of it."""

    @pytest.fixture
    def lost(
        self,
        driver: RequestByHand,
        queue_keys: list[str],
        submit: Callable[[], Request],
        protocol: Protocol,
        queue: str,
    ) -> Request:
        with taken_back(driver.redis, queue_keys):
            request = submit()
        assert indexes(protocol, queue, request.id) == set()
        return request

    def assert_runs(self, protocol: Protocol, queue: str, request: Request) -> None:
        assert indexes(protocol, queue, request.id) == {"open", "due"}
        Worker(protocol, queue).drain()
        assert request.status().state is State.DONE

    def test_submitting_the_same_again_registers_it(
        self, lost: Request, submit: Callable[[], Request], protocol: Protocol, queue: str
    ) -> None:
        submit()

        self.assert_runs(protocol, queue, lost)

    def test_who_begins_to_wait_for_it_registers_it(
        self, lost: Request, protocol: Protocol, queue: str
    ) -> None:
        with pytest.raises(TimeoutError):
            lost.wait(timeout=0)

        self.assert_runs(protocol, queue, lost)

    def test_who_waits_for_it_registers_it(
        self,
        driver: RequestByHand,
        queue_keys: list[str],
        submit: Callable[[], Request],
        protocol: Protocol,
        queue: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("streamq.queue.request.REGISTER_EVERY_S", 0.1)
        monkeypatch.setattr("streamq.queue.request.LOOK_EVERY_S", 0.05)
        with waits(submit()):
            for _ in range(2):  # the first time it may just have begun to wait
                for key in queue_keys:
                    driver.redis.delete(key)
                wait_until(lambda: indexes(protocol, queue, driver.id) == {"open", "due"})
            Worker(protocol, queue).drain()

    def test_who_asks_for_it_by_its_id_registers_it(
        self, lost: Request, client: Client, protocol: Protocol, queue: str
    ) -> None:
        client.get(lost.id)

        self.assert_runs(protocol, queue, lost)

    def test_one_that_has_ended_is_not_registered(
        self, client: Client, submit: Callable[[], Request], protocol: Protocol, queue: str
    ) -> None:
        request = submit()
        Worker(protocol, queue).drain()
        assert indexes(protocol, queue, request.id) == {"closed"}

        submit()
        request.wait()
        client.get(request.id)

        assert indexes(protocol, queue, request.id) == {"closed"}


class TestRequestSlot:
    """The request lives again, and stands among those that have ended."""

    @pytest.fixture
    def revived(
        self,
        driver: RequestByHand,
        request_keys: list[str],
        submit: Callable[[], Request],
        protocol: Protocol,
        queue: str,
    ) -> Request:
        request = submit()
        holder, _ = driver.claim()
        with taken_back(driver.redis, request_keys):
            driver.finish(holder, [1], 1)
            driver.finish(holder, [2])
            make_due(protocol, queue)
            Janitor(protocol, queue).sweep()
        assert indexes(protocol, queue, request.id) == {"closed"}
        assert request.status().state is State.OPEN
        driver.expire(holder)
        return request

    def test_is_looked_at_within_minutes_and_runs(
        self, driver: RequestByHand, revived: Request, protocol: Protocol, queue: str
    ) -> None:
        closed = QueueKeys(queue).closed
        in_ms = driver.redis.zscore(closed, revived.id) - driver.now_ms()
        assert in_ms <= 300_000
        driver.redis.zincrby(closed, -in_ms - 1, revived.id)

        Janitor(protocol, queue).sweep()

        assert indexes(protocol, queue, revived.id) == {"open", "due"}
        Worker(protocol, queue).drain()
        assert revived.status().state is State.DONE

    def test_who_waits_for_it_registers_it_at_once(
        self, revived: Request, protocol: Protocol, queue: str
    ) -> None:
        with pytest.raises(TimeoutError):
            revived.wait(timeout=0)

        assert indexes(protocol, queue, revived.id) == {"open", "due"}


class TestForgottenEndOfALease:
    """The new primary knows a lease whose end was not replicated, and nobody renews it.

    The first crash that the part is charged with would give it up.
    """

    def test_is_charged_to_nobody_while_the_pool_lives(
        self, driver: RequestByHand, request_keys: list[str], client: Client, fleet: Fleet
    ) -> None:
        pool = fleet.ready("-p", "1", "-c", "1", "--lease", "4s")
        request = client.submit([1.5], handler="nap", queue=fleet.queue, id=driver.id, poison=1)
        wait_until(lambda: fleet.notes("S"), 15)
        with taken_back(driver.redis, request_keys):
            assert request.wait(15).state is State.DONE
        (holder,) = driver.leases()
        driver.expire(holder)

        status = request.wait(30)

        assert (status.parts.done, status.parts.failed) == (1, 0)
        assert len(fleet.notes("E")) == 2
        assert "reaped 1 parts" in fleet.errors(pool)

    @pytest.mark.parametrize(
        ("pool", "silent_ms", "tries"),
        [
            ("0123456789abcdef", 5_000, {}),
            ("0123456789abcdef", 15_000, {1: "0 1 1 0 0"}),
            ("fedcba9876543210", 0, {1: "0 1 1 0 0"}),
            ("", 0, {1: "0 1 1 0 0"}),
        ],
        ids=["lives", "silent since before the deadline", "started again", "former version"],
    )
    def test_who_was_heard_after_the_deadline_lives(
        self, driver: RequestByHand, queue: str, pool: str, silent_ms: int, tries: dict[int, str]
    ) -> None:
        """A worker that is started again may have the name that it had before."""
        driver.load(1)
        holder, _ = driver.claim(holder="0123456789abcdef.0000000000000000-0-1")
        driver.pass_deadline(holder, 10_000)
        driver.suspect(10_000)
        details = msgspec.json.encode(WorkerDetails(name="host.1", pool=pool))
        driver.protocol.beat(queue, "host.1", 60_000, details)
        driver.redis.zincrby(QueueKeys(queue).workers, -silent_ms, "host.1")
        driver.protocol.mint(queue, driver.id, Tokens(), register="again")
        make_due(driver.protocol, queue)

        Janitor(driver.protocol, queue).sweep()

        assert (driver.leases(), driver.retry(), driver.tries()) == ({}, {1: 1}, tries)

    def test_part_that_ends_its_whole_pool_is_charged(self, client: Client, fleet: Fleet) -> None:
        victim = fleet.ready("-p", "1", "-c", "1", "--lease", "1s")
        request = client.submit([30.0], handler="nap", queue=fleet.queue, poison=1)
        wait_until(lambda: fleet.notes("S"), 15)

        victim.kill()
        fleet.ready("-p", "1", "-c", "1", "--lease", "1s")

        status = request.wait(25)
        assert (status.parts.done, status.parts.failed) == (0, 1)
        assert [failure.error for failure in request.errors()] == ["Poison"]


def test_request_whose_registration_is_forgotten_keeps_its_tokens_when_others_end(
    driver: RequestByHand, client: Client, protocol: Protocol, queue: str
) -> None:
    """Its slot has it, the queue's slot does not: tokens that go with another's are replaced."""
    client.submit([b"a", b"b"], handler="h", queue=queue, id=driver.id, limit=2)
    for index in ("open", "due"):
        driver.redis.zrem(getattr(QueueKeys(queue), index), driver.id)
    other = client.submit([b"x"], handler="h", queue=queue)
    other.cancel()

    janitor = Janitor(protocol, queue)
    for _ in range(3):
        janitor.sweep()

    assert indexes(protocol, queue, driver.id) == {"open", "due"}
    assert sorted(Worker(protocol, queue).drain()) == [(driver.id, 1), (driver.id, 2)]
