"""The outcomes of a part's records, as the server keeps them for the part's next attempt.

It is a list with an entry for each record, in MessagePack. ``[0]``: it has no outcome and is to be
run. ``[1, item]``: it is done. ``[2, failure]``: it failed for good. ``[3]``: an earlier run of the
part delivered its result, or it is a blank line and no record. Earlier versions of streamq read
this list, so an entry may not come to mean anything else.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from streamq.errors import damaged_if_unreadable
from streamq.model import Failure
from streamq.records import encoding as codec
from streamq.records.encoding import Item

NONE, DONE, FAILED, DELIVERED = range(4)

#: The frame of a result has so many bytes at most, that of an item in it, and an item for nothing.
_FRAME, _ITEM_FRAME, _NOTHING = 32, 6, 1

#: One entry for each record.
Outcomes = list[list[Any]]

_encode = msgspec.msgpack.Encoder().encode


def outcomes_of_items(items: Sequence[Item], count: int) -> Outcomes:
    """Return the outcomes of a part of which the first records are done, and no others."""
    return [*([DONE, item] for item in items), *([NONE] for _ in range(count - len(items)))]


def outcomes_without_room(outcomes: Outcomes, most: int) -> list[int]:
    """Return the indexes of done records whose results have no room beside those before them.

    All results of a part may have ``most`` bytes together.
    """
    room = most - _FRAME - _NOTHING * len(outcomes)
    found = []
    for index, each in enumerate(outcomes):
        if each[0] == DONE and each[1] is not None:
            size = codec.size_of_results(each[1]) + _ITEM_FRAME
            if size > room:
                found.append(index)
            else:
                room -= size
    return found


def encode_kept_outcomes(outcomes: Outcomes) -> bytes:
    """Return outcomes as they are kept; nothing where no record has one."""
    return _encode(outcomes) if any(each[0] for each in outcomes) else b""


def encode_outcomes_of_rest(outcomes: Outcomes) -> bytes:
    """Return what a redrive is told of a part that is given up.

    Its good records have been delivered. The others are to be run.
    """
    return _encode([[NONE] if each[0] in (NONE, FAILED) else [DELIVERED] for each in outcomes])


def decode_kept_outcomes(partial: bytes, count: int) -> Outcomes:
    """Return what records came to in earlier attempts.

    Raises:
        Damaged: it is not of this part.
    """
    with damaged_if_unreadable("what earlier attempts left"):
        outcomes = msgspec.msgpack.decode(partial, type=list[list[Any]])
        for each in outcomes:
            if each[0] not in range(4) or len(each) != (2 if each[0] in (DONE, FAILED) else 1):
                raise ValueError("it says what no attempt does")
            if each[0] == FAILED:
                each[1] = msgspec.convert(each[1], Failure)
            elif each[0] == DONE:
                codec.decode_result(codec.encode_result(each[1:]))
        if len(outcomes) != count:
            raise ValueError(f"it is of {len(outcomes)} records, not of {count}")
    return outcomes
