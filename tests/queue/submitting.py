"""What several tests of submissions need."""

from collections.abc import Callable, Iterable
from typing import Any

from streamq import (
    Connection,
    Protocol,
)
from tests.support.by_hand import RequestByHand
from tests.support.simulated import indexes

Submit = Callable[..., Any]


def numbered(count: int) -> list[bytes]:
    return [b"payload %d" % n for n in range(1, count + 1)]


def parts_in(driver: RequestByHand) -> list[tuple[bytes, bytes]]:
    """Entry ids and payloads of the parts that are in the server."""
    found = driver.redis.xrange(driver.keys.parts)
    return [(id_, payload) for id_, fields in found for payload in fields.values()]


def entries(payloads: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    return [(b"%d-0" % n, payload) for n, payload in enumerate(payloads, 1)]


def assert_is_gone(driver: RequestByHand) -> None:
    assert driver.existing_keys() == set()
    assert indexes(driver.protocol, driver.queue, driver.id) == set()


class Killed(BaseException):
    """The process is gone: nothing after it runs."""


class Mortal(Protocol):
    """Its process is killed at the n-th call, before or after that reached the server."""

    def __init__(self, connection: Connection, calls: int, *, is_done: bool) -> None:
        super().__init__(connection)
        do, left = self._do, [calls]

        def dying(call: Any) -> Any:
            left[0] -= 1
            if left[0] < 0 or (left[0] == 0 and not is_done):
                raise Killed
            reply = do(call)
            if left[0] == 0:
                raise Killed
            return reply

        self._do = dying
