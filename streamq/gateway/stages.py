"""Parts of a flow's stages, for workers of a gateway: payloads, and outcomes of results.

A worker of a gateway runs maps and spreads. Joins and reduces read their inputs from the server by
themselves, so they are left to native workers.
"""

from typing import Any

import msgspec

from streamq.app import Abandon
from streamq.errors import ResultTooLarge
from streamq.flows.flow import MOST_CHILDREN
from streamq.flows.shape import Shape
from streamq.model import MAX_RESULT, Part, Spec
from streamq.protocol.replies import PassedPart
from streamq.queue.outcomes import PartDone
from streamq.records import about
from streamq.records import encoding as codec
from streamq.records.decoding import ITEMS, items_of_part


class NoSpread(Abandon):
    """A worker returned something else than a list of children for a part of a spread."""


#: What ``done`` raises.
BAD = (ResultTooLarge, NoSpread)


def is_stage_left_to_native_workers(spec: Spec) -> bool:
    """Return whether a part of the stage cannot be run by a worker of a gateway."""
    return bool(spec.stage) and Shape.read(spec.shape).kinds[spec.stage - 1] in ("join", "reduce")


def payload_of_stage(part: Part, spec: Spec) -> tuple[bytes, bool]:
    """Return the payload of a part for a worker, and whether it is JSON."""
    if spec.format != ITEMS:
        return part.payload, about.is_json_payload(part)
    values = items_of_part(part.payload)
    if len(values) == 1 and isinstance(values[0], str | bytes):
        value = values[0]
        return (value.encode(), False) if isinstance(value, str) else (value, False)
    if len(values) == 1 and isinstance(values[0], msgspec.msgpack.Ext):
        return bytes(values[0].data), True
    return msgspec.json.encode([codec.decode_item(value) for value in values]), True


def outcome_of_stage(part: Part, records: int, result: bytes, facts: str) -> PartDone:
    """Return the outcome of a part that a worker has finished; in a flow, with what it hands over.

    ``result`` is what the worker returned, encoded as the result of a plain request. ``facts`` is
    what the scripts know of the stage; "" for a plain request.

    Raises:
        ResultTooLarge: the result is larger than the server is given.
        NoSpread: the stage is a spread, and that is no list of at most 1,000 children.
    """
    if len(result) > MAX_RESULT:
        raise ResultTooLarge(f"the result has more than the {MAX_RESULT} bytes allowed")
    if not facts:
        return PartDone(result, records)
    kind, feeds, _, join, *_ = facts.split()
    origin = about.item_of_about(part)
    items, _ = codec.decode_result(result)
    if kind == "spread":
        payloads, keep = _stage_children_of_spread(codec.decode_item(items[0]))
        origins = [f"{origin}/{number}" for number in range(1, len(payloads) + 1)]
        if join != "0":
            payloads, origins = [keep, *payloads], [f"{origin}/0", *origins]
    else:
        is_dropped = items == [None] and feeds != "end"
        payloads, origins = ([], []) if is_dropped else ([result], [origin])
    labels = [about.about_of_child(part, 1, each) if feeds == "parts" else each for each in origins]
    size = sum(map(len, payloads))
    passed = PassedPart(part.number, origin, labels, payloads, len(payloads))
    return PartDone(b"" if kind == "spread" else result, records, passed, size)


def _stage_children_of_spread(returned: Any) -> tuple[list[bytes], bytes]:
    """Return the payloads of the children, and what is kept for their join."""
    keep = None
    if isinstance(returned, dict) and "children" in returned:
        returned, keep = returned["children"], returned.get("keep")
    if returned is None:
        returned = []
    if not isinstance(returned, list) or len(returned) > MOST_CHILDREN:
        what = f"{len(returned):,} children" if isinstance(returned, list) else "no list"
        raise NoSpread(
            f"the result of a spread is {what}: return a JSON list of at most {MOST_CHILDREN:,} "
            'children, or {"children": [...], "keep": ...}'
        )
    payloads = [codec.encode_result([codec.encode_item(child)]) for child in returned]
    if sum(map(len, payloads)) > 4 * MAX_RESULT:
        raise ResultTooLarge(f"the children have more than the {4 * MAX_RESULT} bytes allowed")
    return payloads, b"" if keep is None else codec.encode_result([codec.encode_item(keep)])
