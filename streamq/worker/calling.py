"""Calling a handler: what is told before a call, and what becomes of what it raises."""

from collections.abc import Callable
from typing import Any

from streamq.records.encoding import Item
from streamq.worker.part_watch import PartWatch
from streamq.worker.tracebacks import text_that_can_be_encoded


class Timeout(Exception):
    """The call of a record took longer than the time limit."""


def telling_the_watch(
    call: Callable[[Any], Any], items: list[Item], watch: PartWatch
) -> Callable[[Any], Any]:
    """Return the call, which first tells the watch which record it is: its time is limited."""
    tell = watch.tell

    def told(value: Any) -> Any:
        tell(len(items))
        return call(value)

    return told


def error_that_ends_one_part(error: BaseException) -> Exception:
    """Return an error that ends only the part, instead of one that would end the process."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(
        f"the handler raised {type(error).__name__}: {text_that_can_be_encoded(error)}"
    )
