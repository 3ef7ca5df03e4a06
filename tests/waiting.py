"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout: float = 5.0) -> T:
    """The first true value of the condition, or a failed test when the time is over."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still {value!r} after {timeout} s"
        time.sleep(0.005)
    return value
