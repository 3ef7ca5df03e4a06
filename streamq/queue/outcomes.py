"""What running a part comes to, as a holder reports it to the server."""

import msgspec

from streamq.model import Failure
from streamq.protocol.replies import FailKind


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
