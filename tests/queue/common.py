"""What several tests of the client need: parts finished by hand, a handler that fails."""

from collections.abc import Callable

from streamq.model import Part
from streamq.protocol.replies import Terms
from streamq.records.encoding import encode_result
from tests.support.by_hand import RequestByHand
from tests.support.simulated import refuse


def finish(driver: RequestByHand, holder: str, *numbers: int, most: int = 0) -> None:
    results = [value for n in numbers for value in (n, encode_result([b"r%d" % n]))]
    call = driver.call(holder)
    driver.protocol.finish(driver.id, holder, call, results, len(numbers), Terms(most))


def refusing(*numbers: int) -> Callable[[Part], bytes]:
    """A handler that fails for some parts."""

    def handle(part: Part) -> bytes:
        return refuse(part) if part.number in numbers else part.payload.upper()

    return handle
