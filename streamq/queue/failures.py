"""Reads the failures of a request from the server; of a flow, those of all its stages."""

from typing import Any

import msgspec

from streamq.errors import UNREADABLE
from streamq.model import Failure, Part
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import part_of_field
from streamq.protocol.snapshot import Snapshot
from streamq.queue.flow_status import name_of_flow_stage, places_of_flow_stages
from streamq.records.about import AboutPlace, item_of_about

#: How many parts are located in one call: the server reads each of them with its payload.
_LOCATED = 50


def read_failures(text: bytes) -> list[Failure]:
    """Return the failures of a part; one that says so where they cannot be read."""
    try:
        return msgspec.json.decode(text, type=list[Failure])
    except UNREADABLE as error:
        return [Failure(error="Damaged", message=f"what is kept of it cannot be read: {error}")]


def flow_failures(protocol: Protocol, found: Snapshot) -> list[Failure]:
    """Return what was given up in each stage of a flow, first stage first.

    ``part`` is the number of the input, and ``item`` says which child of it. A part of a reduce
    has 1, as its result has; one of a tree is called by what arrived, such as ``1001-2000``.
    """
    return [
        failure
        for place in places_of_flow_stages(found)
        for failure in _stage_failures(protocol, place)
    ]


def _stage_failures(protocol: Protocol, place: str) -> list[Failure]:
    stage = protocol.inspect(place)
    spec, name = stage.spec, name_of_flow_stage(stage)
    failed = sorted(protocol.failures(place))
    told = []
    for first in range(0, len(failed), _LOCATED):
        some = failed[first : first + _LOCATED]
        abouts = protocol.locate(place, [number for number, _ in some])
        for (number, text), about in zip(some, abouts, strict=True):
            item = item_of_about(Part(number, b"", about))
            where = AboutPlace.of(about, spec)
            for failure in read_failures(text):
                # A worker knows the line of each record; a janitor says nothing of where it was.
                source: dict[str, Any] = {}
                if where and not failure.source:
                    source = {"source": where.source, "line": where.line}
                told.append(
                    msgspec.structs.replace(
                        failure, part=_input_of_failed_record(item), item=item, stage=name, **source
                    )
                )
    return told


def _input_of_failed_record(item: str) -> int:
    return 1 if "-" in item else part_of_field(item)
