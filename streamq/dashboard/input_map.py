"""The map of a request: its parts in input order, in 2,000 cells at most.

Every part up to the last one that was handed out is done, but for the exceptions, and only these
are read: parts in somebody's hands, and parts that failed.
"""

import msgspec

from streamq.protocol import glances
from streamq.protocol.protocol import Protocol

MOST_CELLS = 2_000
#: How many exceptions of a kind are read. If there are more, the map shows a sample of them.
MOST_EXCEPTIONS = 2_000


class Map(msgspec.Struct, frozen=True, kw_only=True):
    """Where along the input parts are done, run, wait for a retry, or failed."""

    #: How many parts there are, how many stand for one cell, and how many cells there are.
    total: int
    size: int
    cells: int
    #: Parts up to this one were handed out.
    delivered: int
    #: Cells with exceptions: the cell's number from 0, parts that run, in retry, and failed.
    marks: list[tuple[int, int, int, int]]
    #: How many parts are in somebody's hands and failed, and of how many of these are marks.
    in_hand: int
    failed: int
    seen_in_hand: int
    seen_failed: int


def read_map(protocol: Protocol, request_id: str) -> Map:
    """Read the map of a request."""
    snapshot = protocol.inspect(request_id)
    total, delivered = snapshot.count("total"), snapshot.count("delivered")
    size = max(1, -(-total // MOST_CELLS))
    in_hand, parts = glances.glance_at_parts_in_hand(protocol, request_id, MOST_EXCEPTIONS)
    failed, numbers = glances.glance_at_failed_numbers(protocol, request_id, MOST_EXCEPTIONS)
    marks: dict[int, list[int]] = {}
    for part in parts:
        kind = 1 if part.holder == glances.RETRYING else 0
        marks.setdefault((part.number - 1) // size, [0, 0, 0])[kind] += 1
    for number in numbers:
        marks.setdefault((number - 1) // size, [0, 0, 0])[2] += 1
    return Map(
        total=total,
        size=size,
        cells=-(-total // size),
        delivered=delivered,
        marks=[(cell, *counts) for cell, counts in sorted(marks.items())],  # type: ignore[misc]
        # Parts that were finished between the two readings are left out of the sample.
        in_hand=in_hand if len(parts) >= MOST_EXCEPTIONS else len(parts),
        failed=failed if len(numbers) >= MOST_EXCEPTIONS else len(numbers),
        seen_in_hand=len(parts),
        seen_failed=len(numbers),
    )
