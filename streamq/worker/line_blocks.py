"""Runs a large part of lines or objects block by block, and joins what each block yielded.

A part of many short lines is run a block at a time, so that the values of a block fit into the
cache of the processor. What a block yielded is joined into lines at once, if it can be.
"""

from collections.abc import Iterator
from typing import NamedTuple

from streamq.model import Spec
from streamq.records import encoding as codec
from streamq.records.encoding import Item
from streamq.worker import kept_outcomes
from streamq.worker.kept_outcomes import Outcomes

#: A part is run in blocks of about so many bytes.
BLOCK_BYTES = 2**16
#: Formats of records that end where a line ends, if there are no quotes and escapes.
_FORMATS = ("lines", "jsonl", "csv")


class LinesOfBlock(NamedTuple):
    """What the records of a block yielded: lines, of bytes or of text, each with a newline."""

    data: bytes
    is_text: bool

    def items(self) -> list[Item]:
        """Return what each record yielded."""
        lines = self.data[:-1]
        return [*lines.decode().split("\n")] if self.is_text else [*lines.split(b"\n")]


def can_be_cut_into_blocks(payload: bytes, spec: Spec) -> bool:
    """Return whether a part is large, and each newline in it ends a record."""
    if len(payload) <= BLOCK_BYTES or spec.format not in _FORMATS or payload[-1:] != b"\n":
        return False
    marks = [mark.encode() for mark in (spec.quote, spec.escape) if mark]
    marks = marks if spec.format == "csv" else []
    return b"\r" not in payload and not any(mark in payload for mark in marks)


def blocks_of(payload: bytes) -> Iterator[bytes]:
    """Yield a part that can be cut in blocks of whole lines."""
    begin = 0
    while begin < len(payload):
        end = payload.rfind(b"\n", begin, begin + BLOCK_BYTES) + 1
        end = end or payload.find(b"\n", begin) + 1
        yield payload[begin:end]
        begin = end


class LineBlocks:
    """What the records of a part have yielded so far. The slot adds to it; any thread may ask."""

    def __init__(self) -> None:
        self._blocks: list[LinesOfBlock | list[Item]] = []
        #: How many records are in complete blocks.
        self.count = 0
        #: How many blocks are complete, and what the block at hand has yielded: set in one step.
        self._state: tuple[int, list[Item]] = (0, [])

    @property
    def block(self) -> list[Item]:
        """What the block at hand has yielded: the runner adds to it."""
        return self._state[1]

    def end_block(self) -> None:
        """Note that the block at hand is complete, and begin the next."""
        items = self.block
        found = codec.items_joined_as_lines(items)
        self._blocks.append(LinesOfBlock(*found) if found else items)
        self.count += len(items)
        self._state = (len(self._blocks), [])

    def items(self) -> list[Item]:
        """Return what each record has yielded so far."""
        complete, items = self._state
        found: list[Item] = []
        for each in self._blocks[:complete]:
            found += each.items() if isinstance(each, LinesOfBlock) else each
        return found + items

    def outcomes(self, count: int) -> Outcomes:
        """Return the outcomes so far of a part of so many records."""
        return kept_outcomes.outcomes_of_items(self.items(), count)

    def lines(self) -> tuple[list[bytes], bool] | None:
        """Return all that was yielded as lines, and whether they are text.

        Return None where not all of it is lines of one kind.
        """
        found = [each for each in self._blocks if isinstance(each, LinesOfBlock)]
        kinds = {each.is_text for each in found}
        if len(found) < len(self._blocks) or len(kinds) != 1:
            return None
        return [each.data for each in found], kinds.pop()
