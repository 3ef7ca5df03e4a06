"""The outcome of a part, as a holder reports it to the server: done, or not done and why."""

import msgspec

from streamq.model import Failure
from streamq.protocol.replies import FailKind, PassedPart

#: What ``fail`` answers when the part failed for good. The request may have ended with the part.
GIVEN_UP = ("failed", "ended", "done")
#: Said instead of outcomes: those that the server has are to be forgotten.
FORGET = b"-"


class PartDone(msgspec.Struct):
    """A part that succeeded: its encoded result, and how many records it had."""

    result: bytes
    records: int
    #: Of a stage of a flow: what it hands over to the next.
    passed: PassedPart | None = None
    #: Of a spread: how many bytes its children have.
    children_size: int = 0
    #: How many bytes the result has where it was put into a spool; 0 where it was not.
    spooled: int = 0

    @property
    def size(self) -> int:
        """How many bytes its result has, wherever that is."""
        return self.spooled or len(self.result)


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
    #: Whether only a stop ended it before its last record. The others keep their outcomes.
    is_stopped: bool = False

    @property
    def size(self) -> int:
        """How many bytes its result has."""
        return len(self.result)


def words_of_time_limit(timeout_ms: int) -> str:
    """Say that something took longer than its time limit."""
    return f"it took longer than {timeout_ms / 1e3:g} s"


def outcome_at_time_limit(part: int, attempt: int, timeout_ms: int, record: int = 0) -> Failure:
    """Return the failure of a part, or a record of it, that took longer than its time limit."""
    message = words_of_time_limit(timeout_ms)
    return Failure(error="Timeout", message=message, part=part, record=record, attempts=attempt)
