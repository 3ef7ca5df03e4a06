"""Failures of a request in groups: by the error and the pattern of its message.

Digits, quoted words, addresses and paths become holes, so that "no answer from part 17" and "no
answer from part 18" are one group. Only a sample of the failures is read.
"""

import re
from collections.abc import Iterable, Iterator

import msgspec

from streamq.errors import UNREADABLE
from streamq.model import Failure
from streamq.protocol import glances
from streamq.protocol.protocol import Protocol
from streamq.queue.flow_status import places_of_flow_stages

#: How many failed parts are read.
SAMPLE = 500
#: The number of stretches of the input by which the page shows where failures are.
STRETCHES = 60
#: A range of so many parts is read by their numbers; of a larger one all failures are looked at.
SHORT_RANGE, _ROUND = 20_000, 1_000
#: How many failures of a group are shown, and how many groups.
MOST_SHOWN, MOST_GROUPS = 3, 100
_MESSAGE_CHARS = 500
_HOLES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE), "<url>"),
    (re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+"), "<mail>"),
    (re.compile(r"(?<![\w<])/(?:[\w.@-]+/)*[\w.@-]+"), "<path>"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b(?:0x[0-9a-f]+|[0-9a-f]*\d[0-9a-f]{7,})\b", re.IGNORECASE), "<hex>"),
    (re.compile(r"'[^'\n]{1,80}'|\"[^\"\n]{1,80}\"|`[^`\n]{1,80}`"), "<text>"),
    (re.compile(r"[-+]?\d+(?:[.,:]\d+)*"), "<n>"),
)


class FailureGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Failures with the same error and the same pattern of their messages."""

    error: str
    pattern: str
    #: How many failures of the sample are in the group, and about how many of all.
    count: int
    about: int
    first_part: int
    last_part: int
    #: How many of them lie in each stretch of the input.
    where: list[int]
    #: The file most of them come from, and how many do; "" where parts have no files.
    source: str
    source_count: int
    samples: list[Failure]
    #: Of a flow: the number of the stage; 0 for a request that is none.
    stage: int = 0


class FailureGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The failures of a request."""

    #: Parts that failed, and how many of them were read.
    parts: int
    sample: int
    groups: list[FailureGroup]


def pattern_of_failures(message: str) -> str:
    """Return the message with holes in place of what differs from one failure to the next."""
    shown = message[:_MESSAGE_CHARS]
    for found, hole in _HOLES:
        shown = found.sub(hole, shown)
    return shown


def read_failures_of_part(text: bytes, number: int) -> list[Failure]:
    """Return what is kept of a part that failed: one failure, or one for each record."""
    try:
        found = msgspec.json.decode(text, type=list[Failure])
    except UNREADABLE as error:
        return [Failure(error="Damaged", message=f"it cannot be read: {error}", part=number)]
    return [msgspec.structs.replace(each, part=number) for each in found]


def read_failure_groups(protocol: Protocol, request_id: str, *, traces: bool) -> FailureGroups:
    """Read a sample of the failures, and group them. ``traces``: tell tracebacks, too.

    Of a flow, each stage has its own groups.
    """
    places = places_of_flow_stages(protocol.inspect(request_id))
    found = [
        _failure_groups(protocol, place, SAMPLE // len(places), traces=traces) for place in places
    ]
    if len(places) == 1:
        return found[0]
    groups = [
        msgspec.structs.replace(group, stage=number)
        for number, of_stage in enumerate(found, 1)
        for group in of_stage.groups
    ]
    groups.sort(key=lambda each: -each.about)
    return FailureGroups(
        parts=sum(each.parts for each in found),
        sample=sum(each.sample for each in found),
        groups=groups[:MOST_GROUPS],
    )


def _failure_groups(protocol: Protocol, place: str, most: int, *, traces: bool) -> FailureGroups:
    total_parts = protocol.inspect(place).count("total")
    parts, found = glances.glance_at_failures(protocol, place, most)
    by_kind: dict[tuple[str, str], list[Failure]] = {}
    for number, text in found:
        for failure in read_failures_of_part(text, number):
            by_kind.setdefault((failure.error, pattern_of_failures(failure.message)), []).append(
                failure
            )
    scale = parts / len(found) if found else 1.0
    groups = [
        _group_of_failures(kind, some, scale, total_parts, traces=traces)
        for kind, some in by_kind.items()
    ]
    groups.sort(key=lambda each: (-each.count, each.error, each.pattern))
    return FailureGroups(parts=parts, sample=len(found), groups=groups[:MOST_GROUPS])


def _group_of_failures(
    kind: tuple[str, str], some: list[Failure], scale: float, total_parts: int, *, traces: bool
) -> FailureGroup:
    where = [0] * STRETCHES
    sources: dict[str, int] = {}
    for failure in some:
        place = (failure.part - 1) * STRETCHES // max(1, total_parts)
        where[min(STRETCHES - 1, place)] += 1
        sources[failure.source] = sources.get(failure.source, 0) + 1
    source = max(sources, key=lambda name: (bool(name), sources[name]))
    return FailureGroup(
        error=kind[0],
        pattern=kind[1],
        count=len(some),
        about=round(len(some) * scale),
        first_part=min(each.part for each in some),
        last_part=max(each.part for each in some),
        where=where,
        source=source,
        source_count=sources[source],
        samples=[_shortened_failure(each, traces=traces) for each in some[:MOST_SHOWN]],
    )


def _shortened_failure(failure: Failure, *, traces: bool) -> Failure:
    message = failure.message[:_MESSAGE_CHARS]
    trace = failure.traceback if traces else ""
    return msgspec.structs.replace(failure, message=message, traceback=trace)


def failures_in_range(
    protocol: Protocol, place: str, first: int, last: int
) -> Iterator[tuple[int, bytes]]:
    """Yield what is kept of failed parts from the first to the last number.

    A short range costs no more than its numbers, however many parts have failed elsewhere.
    """
    if last - first >= SHORT_RANGE:
        yield from (each for each in protocol.failures(place) if first <= each[0] <= last)
        return
    for start in range(first, last + 1, _ROUND):
        numbers = range(start, min(start + _ROUND, last + 1))
        for number, text in zip(numbers, protocol.failures_of(place, numbers), strict=True):
            if text is not None:
                yield number, text


def parts_of_failure_group(
    failures: Iterable[tuple[int, bytes]], error: str, pattern: str
) -> Iterator[int]:
    """Yield the numbers of the parts with a failure of this group."""
    for number, text in failures:
        for failure in read_failures_of_part(text, number):
            if failure.error == error and pattern_of_failures(failure.message) == pattern:
                yield number
                break
