"""The records that failed, as they were loaded: read from the parts that the server still has."""

import base64
from collections.abc import Iterator, Sequence

import msgspec

from streamq.app import Abandon
from streamq.errors import UNREADABLE
from streamq.model import Failure, Part, Spec
from streamq.protocol.protocol import Protocol
from streamq.records import about
from streamq.records.arrow_tables import TABLE_FORMATS, rows_of_table, table_row_as_json
from streamq.records.decoding import TEXT_FORMATS, records_in, without_line_ending
from streamq.records.references import ReferenceReader

#: The most bytes of its record that a failure has, and the most of all failures together.
MOST_INPUT = 2**16
MOST_INPUTS = 2**26
#: How many parts are read at once: each may have 1 MiB.
_PARTS = 8


def failures_with_inputs(
    protocol: Protocol,
    request_id: str,
    failures: Sequence[Failure],
    reader: ReferenceReader | None = None,
) -> Iterator[Failure]:
    """Yield the failures, each with the record it is about, or the part that failed as a whole.

    A part by reference has no bytes of its own: without a ``reader`` of the files its failures come
    as they are. So do those after the first 64 MiB of records.
    """
    spec = protocol.inspect(request_id).spec
    is_readable = spec.format in (*TEXT_FORMATS, *TABLE_FORMATS)
    can_read = not spec.by_reference or (reader and is_readable)
    parts = sorted({each.part for each in failures}) if can_read else []
    place, room = 0, MOST_INPUTS
    for first in range(0, len(parts), _PARTS):
        some = parts[first : first + _PARTS]
        found = dict(zip(some, protocol.entries_of(request_id, some), strict=True))
        while place < len(failures) and failures[place].part in found and room > 0:
            part = found[failures[place].part]
            part = _failed_part_with_its_bytes(part, spec, reader) if part and reader else part
            failure = _failure_with_input(failures[place], part, spec)
            room -= len(failure.input or failure.input_base64)
            yield failure
            place += 1
    yield from failures[place:]


def _failed_part_with_its_bytes(part: Part, spec: Spec, reader: ReferenceReader) -> Part | None:
    """Return a part with the bytes that it refers to; None where they cannot be read any more."""
    place = about.AboutPlace.of(part.about, spec)
    if place is None:
        return part
    try:
        if spec.format in TABLE_FORMATS:
            payload = reader.read_table(place.source, part.payload, spec.format)
        else:
            payload = reader.read(place.source, part.payload, spec)
    except (Abandon, OSError, *UNREADABLE):
        return None
    return msgspec.structs.replace(part, payload=payload)


def _failure_with_input(failure: Failure, part: Part | None, spec: Spec) -> Failure:
    if part is None:
        return failure
    data = part.payload
    if spec.format in TABLE_FORMATS:
        data = _row_of_failed_record(part, failure)
    elif failure.record and spec.format in TEXT_FORMATS and not failure.records:
        records = records_in(part, spec)[failure.record - 1 : failure.record]
        data = without_line_ending(records[0]) if records else b""
    text: str | None = None
    is_cut = len(data) > MOST_INPUT
    data = data[:MOST_INPUT]
    try:
        # A character that was cut in two is left out.
        text = (
            data.decode("utf-8", "ignore")
            if is_cut and _is_failed_input_text(data)
            else data.decode()
        )
    except UnicodeDecodeError:
        return msgspec.structs.replace(
            failure, input_base64=base64.b64encode(data).decode(), input_is_cut=is_cut
        )
    return msgspec.structs.replace(failure, input=text, input_is_cut=is_cut)


def _row_of_failed_record(part: Part, failure: Failure) -> bytes:
    """Return the row that failed, as JSON; nothing of a whole table."""
    if not failure.record or failure.records:
        return b""
    rows = rows_of_table(part.payload.slice(failure.record - 1, 1))  # type: ignore[attr-defined]
    return table_row_as_json(rows[0]) if rows else b""


def _is_failed_input_text(data: bytes) -> bool:
    """Return whether data that were cut off are UTF-8 but for the last character."""
    return any(_failed_input_decodes_as_text(data[: len(data) - cut]) for cut in range(4))


def _failed_input_decodes_as_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
