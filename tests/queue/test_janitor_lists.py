"""Sweeping a queue whose lists of tokens are long, or of another type."""

from collections.abc import Callable

import pytest

from streamq import Client, Janitor, Protocol, State
from streamq.protocol.keys import QueueKeys, token_list_of
from streamq.protocol.replies import Tokens
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker, make_due, tokens

#: Tokens of others in the list: so few that they are counted at each look, and so many that not.
LONG = pytest.mark.parametrize("others", [10, 100_000])


def bury(protocol: Protocol, queue: str, others: int) -> None:
    """Let many tokens of others be in the list."""
    tokens = QueueKeys(queue, to=token_list_of("h", 50)).tokens
    for _ in range(0, others, 10_000):
        protocol.connection.redis.lpush(tokens, *["other"] * min(others, 10_000))


def own(protocol: Protocol, driver: RequestByHand) -> int:
    """Tokens of the request."""
    return tokens(protocol, driver.queue).count(driver.id)


@LONG
def test_delayed_request_has_its_tokens_when_it_may_start(
    protocol: Protocol, queue: str, driver: RequestByHand, others: int
) -> None:
    bury(protocol, queue, others)
    protocol.mint(queue, driver.id, Tokens(), register="yes")
    driver.load(5, delay_ms=3_600_000, limit=3)
    driver.set_meta(hold_ms=1)

    Worker(protocol, queue).sweep()

    assert own(protocol, driver) == 3
    for _ in range(5):
        Worker(protocol, queue).sweep()
    assert own(protocol, driver) == 3, "looks do not add to what is there"


@LONG
def test_request_with_a_rate_has_its_tokens_when_the_rate_allows(
    protocol: Protocol, queue: str, driver: RequestByHand, others: int
) -> None:
    bury(protocol, queue, others)
    protocol.mint(queue, driver.id, Tokens(), register="yes")
    driver.load(9, rate_ms=60_000.0, limit=2)
    driver.set_meta(out=0)
    for _ in range(3):
        driver.set_meta(rate_at_ms=0)
        Worker(protocol, queue).sweep()
        assert own(protocol, driver) == 2
        for _ in range(2):
            protocol.connection.redis.lrem(
                QueueKeys(queue, to=token_list_of("h", 50)).tokens, 1, driver.id
            )
            _, grant = driver.claim(level=50)
        assert grant.word == "held"
        for name in driver.leases():
            driver.finish(name, driver.held(name))


@LONG
def test_request_whose_worker_died_has_a_token_for_what_it_held(
    protocol: Protocol, queue: str, driver: RequestByHand, others: int
) -> None:
    bury(protocol, queue, others)
    protocol.mint(queue, driver.id, Tokens(), register="yes")
    driver.load(1)
    holder, _ = driver.claim(level=50)
    driver.set_meta(out=0)
    driver.expire(holder)

    Worker(protocol, queue).sweep()

    assert own(protocol, driver) == 1


def test_tokens_of_an_ended_request_go_though_nobody_has_its_handler(
    protocol: Protocol, queue: str, client: Client
) -> None:
    request = client.submit([b"x"] * 20, handler="h", queue=queue)
    Worker(protocol, queue).sweep()
    assert tokens(protocol, queue) == [request.id] * 8

    request.cancel()
    Worker(protocol, queue).sweep()

    assert tokens(protocol, queue) == []


def test_tokens_of_ended_requests_go_also_where_the_list_is_long(
    protocol: Protocol, queue: str, client: Client, sweep: Callable[[], int]
) -> None:
    requests = [client.submit([b"x"] * 20, handler="h", queue=queue) for _ in range(40)]
    live = client.submit([b"x"], handler="h", queue=queue)
    sweep()
    # Left by requests that were closed before.
    bury(protocol, queue, 10_000)
    for request in requests:
        request.cancel()

    for _ in range(4):
        sweep()

    assert tokens(protocol, queue) == [live.id]


def test_list_of_another_type_is_passed_over(
    protocol: Protocol, queue: str, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    request = client.submit([b"x"] * 20, handler="h", queue=queue)
    make_due(protocol, queue)
    janitor = Janitor(protocol, queue)
    janitor.sweep()
    key = QueueKeys(queue, to=token_list_of("h", 50)).tokens
    protocol.connection.redis.unlink(key)
    protocol.connection.redis.set(key, "no list")
    request.cancel()
    make_due(protocol, queue)

    janitor.sweep()
    janitor.sweep()

    assert caplog.text.count("is passed over") == 1
    assert janitor.closed[State.CANCELLED] == 1
