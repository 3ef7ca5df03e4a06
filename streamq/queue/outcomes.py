"""What running a part comes to, as a holder reports it to the server."""

import msgspec

from streamq.model import Failure
from streamq.protocol.replies import FailKind

#: What ``fail`` answers when the part failed for good. The request may have ended with the part.
GIVEN_UP = ("failed", "ended", "done")


class PartDone(msgspec.Struct):
    """A part that succeeded: its encoded result, and how many records it had."""

    result: bytes
    records: int


class PartNotDone(msgspec.Struct):
    """A part that did not succeed: what ``fail`` is told."""

    kind: FailKind
    delay_ms: int
    failures: list[Failure]
    #: How many records are done and how many failed; -1 when all of the part failed.
    records: tuple[int, int]
    #: What the records that succeeded yield, if the part is given up.
    result: bytes = b""
    #: What the next attempt is told of the records that have an outcome.
    partial: bytes = b""


def timed_out(part: int, attempt: int, timeout_ms: int) -> Failure:
    """Return the failure of a part that took longer than its time limit."""
    message = f"it took longer than {timeout_ms / 1e3:g} s"
    return Failure(error="Timeout", message=message, part=part, attempts=attempt)
