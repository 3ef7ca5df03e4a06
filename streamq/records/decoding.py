"""Decodes the records of a part: its bytes become the values that a handler is called with.

Records come without their line ending. Which ending each had is kept with the result
where it is not a plain newline, so that raw output can put it back.
"""

import csv
import inspect
import typing
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, repeat
from typing import Any

import msgspec

from streamq.app import Handler, handler_is_iterator, table_kind_of_handler
from streamq.errors import DecodeError, InvalidValue
from streamq.model import Part, Spec
from streamq.records import about, arrow_tables
from streamq.records.about import NEWLINE, NOTHING, RETURN
from streamq.records.arrow_tables import TABLE_FORMATS
from streamq.records.boundaries import (
    blank_lines,
    empty_rows,
    fields_of_csv_row,
    names_of_csv_header,
    records_between_boundaries,
)
from streamq.records.encoding import decode_item, decode_result, holds_several_items
from streamq.records.inputs import MARK

#: Formats whose records are lines or rows of a file.
TEXT_FORMATS = ("lines", "jsonl", "csv")

#: The format of parts of later stages of a flow: what handlers of the stage before returned.
ITEMS = "items"

_RAW = (bytes, str)
_NOTHING = (inspect.Parameter.empty, Any)

Decode = Callable[[bytes, bool], Any]


def items_of_part(payload: bytes) -> list[Any]:
    """Return what handlers of the stage before returned: the records of a part of a later stage.

    Raises:
        Damaged: it is no result of a handler.
    """
    return decode_result(payload)[0]


def records_in(part: Part, spec: Spec) -> list[bytes]:
    """Return the records of a part, each with its line ending."""
    if spec.format == ITEMS:
        return items_of_part(part.payload)
    if spec.format in TABLE_FORMATS:
        return arrow_tables.rows_of_table(part.payload)
    return (
        records_between_boundaries(part.payload, spec)
        if spec.format in TEXT_FORMATS
        else [part.payload]
    )


def plain_values(payload: bytes, annotation: Any, spec: Spec) -> tuple[list[Any], bytes] | None:
    """Return all values of a part at once, and the letter of their line ending ("" for newlines).

    Return None where records have to be decoded one by one.
    """
    if spec.format == "csv":
        return _plain_rows(payload, annotation, spec)
    if spec.format == "jsonl":
        objects = _plain_json_lines(payload, annotation)
        return None if objects is None else (objects, b"")
    if spec.format in TABLE_FORMATS:
        rows = arrow_tables.plain_rows_of_table(payload, annotation)
        return None if rows is None else (rows, b"")
    if spec.format != "lines" or annotation not in (bytes, str, *_NOTHING):
        return None
    return _plain_lines(payload, is_text=annotation is not bytes)


def _plain_lines(payload: bytes, *, is_text: bool) -> tuple[list[Any], bytes] | None:
    """Return the lines of a part, which all end alike; None where they do not, or are no text."""
    if not payload.endswith(b"\n"):
        return None
    ending, letter = "\n", b""
    # Searching for a carriage return is cheap; counting all of them costs as much as splitting.
    if b"\r" in payload:
        returns = payload.count(b"\r")
        if not payload.count(b"\n") == returns == payload.count(b"\r\n"):
            return None
        ending, letter = "\r\n", RETURN
    values: list[Any]
    if not is_text:
        values = payload.split(ending.encode())
    else:
        try:
            values = payload.decode().split(ending)
        except UnicodeDecodeError:
            return None
    values.pop()
    return values, letter


def _plain_rows(payload: bytes, annotation: Any, spec: Spec) -> tuple[list[Any], bytes] | None:
    """Return the rows of a part without quotes, escapes and empty rows; None where one is odd."""
    marks = [mark.encode() for mark in (spec.quote, spec.escape) if mark]
    if any(mark in payload for mark in marks) or annotation in _RAW:
        return None
    found = _plain_lines(payload, is_text=True)
    if found is None or "" in found[0] or max(map(len, found[0])) >= csv.field_size_limit():
        return None
    lines, letter = found
    delimiter, names = spec.delimiter, names_of_csv_header(spec)
    rows: list[Any] = [line.split(delimiter) for line in lines]
    is_list = annotation is list or typing.get_origin(annotation) in (list, tuple)
    if is_list or not names:
        wanted = annotation if is_list else list[str]
    else:
        if set(map(len, rows)) != {len(names)}:
            return None
        # This takes a little more than half of the time of a comprehension.
        rows = list(map(dict, map(zip, repeat(names), rows)))
        wanted = dict[str, str] if annotation in (*_NOTHING, dict) else annotation
    if wanted in (list[str], dict[str, str]):
        return rows, letter
    try:
        return msgspec.convert(rows, list[wanted], strict=False), letter  # type: ignore[valid-type]
    except Exception:  # noqa: BLE001  whatever one row raises, that row says when it is decoded alone
        return None


def _plain_json_lines(payload: bytes, annotation: Any) -> list[Any] | None:
    """Return the objects of a part of JSON lines, each a line; None where a line is anything else.

    No object has a closing brace, a newline and an opening brace in a row: between two braces it
    has a comma, and in a string no newline. So where lines begin and end with braces, no object has
    a newline; and if there are as many objects as lines, each line is one.
    """
    lines = payload.count(b"\n")
    is_plain = payload[:1] == b"{" and payload[-2:] == b"}\n" and annotation not in _RAW
    if not is_plain or payload.count(b"}\n{") != lines - 1:
        return None
    try:
        found: list[Any] = _objects_decoder(annotation).decode_lines(payload)
    except Exception:  # noqa: BLE001  whatever one line raises, that line says when it is decoded alone
        return None
    return found if len(found) == lines else None


@lru_cache(maxsize=16)
def _objects_decoder(annotation: Any) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(Any if annotation in _NOTHING else annotation)


def without_line_ending(record: bytes) -> bytes:
    """Return the record without its line ending."""
    if record.endswith(b"\r\n"):
        return record[:-2]
    return record[:-1] if record.endswith(b"\n") else record


def line_endings(records: list[bytes]) -> bytes:
    """Return a letter for each record's line ending; nothing where all are plain newlines."""
    letters = b"".join(
        RETURN if record.endswith(b"\r\n") else NEWLINE if record.endswith(b"\n") else NOTHING
        for record in records
    )
    return b"" if letters == NEWLINE * len(letters) else letters


def is_blank_record(record: bytes, spec: Spec) -> bool:
    """Return whether a line is blank, in JSON lines, or empty, in a CSV: then it is no record."""
    if spec.format == "csv":
        return not record.strip(b"\r\n")
    return spec.format == "jsonl" and not record.strip()


def holds_blanks(payload: bytes, spec: Spec) -> bool:
    """Return whether a line of a payload, whose records are its lines, is no record."""
    if spec.format == "csv":
        return empty_rows(payload) > 0
    return spec.format == "jsonl" and blank_lines(payload) > 0


def lines_before(part: Part, index: int, spec: Spec) -> int:
    """Return how many lines of a part stand before the record of that index.

    A row of a CSV may have several lines.
    """
    if spec.format != "csv" or not about.about_has_other_lines(part):
        return index
    return _line_numbers(part.payload, spec.delimiter, spec.quote, spec.escape)[index]


@lru_cache(maxsize=1)
def _line_numbers(payload: bytes, delimiter: str, quote: str, escape: str) -> list[int]:
    """Return how many lines stand before each row. Kept for a part many of whose rows fail."""
    spec = Spec(format="csv", delimiter=delimiter, quote=quote, escape=escape)
    counts = (row.count(b"\n") for row in records_between_boundaries(payload, spec))
    return list(accumulate(counts, initial=0))


def decoder_for(handler: Handler, spec: Spec) -> Decode:
    """Return the function that makes a value for the handler: of a record (map) or of a part.

    That function takes the bytes, and whether they are JSON made by ``submit``.
    """
    if spec.format == ITEMS:
        return _item_decoder(handler)
    if spec.format in TABLE_FORMATS:
        return _table_decoder(handler)
    if handler.is_map:
        return _record_decoder(handler.annotation, spec)
    return _part_decoder(handler.annotation, spec)


def _item_decoder(handler: Handler) -> Decode:
    """Return the function that makes a value of an item; of all items, for a whole part."""
    if handler_is_iterator(handler.annotation):
        return _refuse_iterator
    if handler.is_map:
        of_item = item_decoder(handler.annotation)
        return lambda item, _: of_item(item)
    if typing.get_origin(handler.annotation) is list:
        (element,) = typing.get_args(handler.annotation)
        of_element = item_decoder(element)
        return lambda payload, _: [of_element(item) for item in items_of_part(payload)]
    of_item = item_decoder(handler.annotation)

    def decode_one(payload: bytes, _: bool) -> Any:
        items = items_of_part(payload)
        if len(items) != 1:
            raise DecodeError(
                f"the part has {len(items)} values, and the handler takes one: annotate its "
                "parameter list[...], make it a map, or load with --lines 1"
            )
        return of_item(items[0])

    return decode_one


def _refuse_iterator(*_: object) -> Any:
    raise DecodeError("the handler takes an iterator, so only a reduce can call it")


def item_decoder(annotation: Any) -> Callable[[Any], Any]:
    """Return the function that makes a value of what a handler returned."""
    if annotation in _NOTHING:
        return decode_item
    from_json = msgspec.json.Decoder(annotation).decode

    def decode(item: Any) -> Any:
        if holds_several_items(item):
            return msgspec.convert(decode_item(item), annotation)
        data = item.data if isinstance(item, msgspec.msgpack.Ext) else item
        if annotation is bytes:
            return data.encode() if isinstance(data, str) else bytes(data)
        if annotation is str and not isinstance(item, msgspec.msgpack.Ext):
            return data if isinstance(data, str) else bytes(data).decode()
        return from_json(data.encode() if isinstance(data, str) else data)

    return decode


def _table_decoder(handler: Handler) -> Decode:
    """Return the function that makes a value of a row, or of a table for a whole part."""
    annotation = handler.annotation
    if handler.is_map:
        of_row = arrow_tables.table_row_decoder(annotation)
        return lambda row, _: of_row(row)
    kind = table_kind_of_handler(annotation)
    if kind or annotation in _NOTHING:
        return lambda table, _: arrow_tables.table_as_kind(table, kind)
    if annotation in _RAW:
        return lambda table, _: (
            arrow_tables.table_as_json_lines(table)
            if annotation is bytes
            else arrow_tables.table_as_json_lines(table).decode()
        )
    if annotation is not list and typing.get_origin(annotation) is not list:
        raise InvalidValue(
            f"handler {handler.name} is called with the rows of a table: annotate its parameter "
            "pyarrow.Table, polars.DataFrame, pandas.DataFrame or list[...], or make it a map"
        )
    (element,) = typing.get_args(annotation) or (Any,)
    of_element = arrow_tables.table_row_decoder(element)
    return lambda table, _: [of_element(row) for row in arrow_tables.rows_of_table(table)]


def _text_table_decoder(kind: str, spec: Spec) -> Decode:
    """Return the function that makes a table of a part of a CSV, or of JSON lines."""
    if spec.format == "csv":
        names = names_of_csv_header(spec)
        return lambda payload, _: arrow_tables.table_as_kind(
            arrow_tables.table_from_csv(payload, names, spec), kind
        )
    if spec.format != "jsonl":
        raise InvalidValue(
            f"the handler takes a {kind}, which is made of Parquet, Arrow, CSV or JSON lines"
        )
    rows = _part_decoder(list[dict[str, Any]], spec)
    return lambda payload, is_json: arrow_tables.table_as_kind(
        arrow_tables.table_from_rows(rows(payload, is_json)), kind
    )


def _part_decoder(annotation: Any, spec: Spec) -> Decode:
    if kind := table_kind_of_handler(annotation):
        return _text_table_decoder(kind, spec)
    if typing.get_origin(annotation) is not list:
        return _record_decoder(annotation, msgspec.structs.replace(spec, format=""))
    (element,) = typing.get_args(annotation)
    if spec.format not in TEXT_FORMATS and element not in _RAW:
        return _record_decoder(annotation, spec)
    decode = _record_decoder(element, spec)

    def decode_all(payload: bytes, is_json: bool) -> list[Any]:
        found = records_in(Part(0, payload, b""), spec)
        kept = [record for record in found if not is_blank_record(record, spec)]
        is_text = spec.format in TEXT_FORMATS
        return [
            decode(without_line_ending(record) if is_text else record, is_json) for record in kept
        ]

    return decode_all


def _record_decoder(annotation: Any, spec: Spec) -> Decode:
    if annotation is bytes:
        return lambda record, _: record
    if spec.format == "jsonl":
        return _json_decoder(annotation)
    if annotation is str:
        from_json: Any = msgspec.json.Decoder(str).decode
        return lambda record, is_json: from_json(record) if is_json else record.decode()
    if spec.format == "csv":
        return _row_decoder(annotation, spec)
    if annotation in _NOTHING:
        is_text = spec.format == "lines"
        return lambda record, is_json: (
            msgspec.json.decode(record) if is_json else record.decode() if is_text else record
        )
    decode = msgspec.json.Decoder(annotation).decode
    return lambda record, _: decode(record)


def _json_decoder(annotation: Any) -> Decode:
    """Return a decoder of JSON lines, to the type asked for or to text.

    A byte order mark is dropped.
    """
    if annotation is str:
        return lambda record, _: record.removeprefix(MARK).decode()
    decode = msgspec.json.Decoder(Any if annotation in _NOTHING else annotation).decode
    return lambda record, _: decode(record.removeprefix(MARK))


def _row_decoder(annotation: Any, spec: Spec) -> Decode:
    """Return a decoder of rows: to a dict by the header, to the type asked for, or to a list."""
    names = names_of_csv_header(spec)
    is_unnamed = annotation in _NOTHING and not names
    if is_unnamed or annotation is list or typing.get_origin(annotation) in (list, tuple):
        wanted = list[str] if is_unnamed else annotation
        return lambda record, _: msgspec.convert(
            fields_of_csv_row(record, spec), wanted, strict=False
        )
    if not names:
        raise InvalidValue(
            "the fields of a CSV without a header have no names: "
            "annotate the parameter list[str], or give the names with --header"
        )
    wanted = dict[str, str] if annotation in (*_NOTHING, dict) else annotation

    def decode(record: bytes, _: bool) -> Any:
        fields = fields_of_csv_row(record, spec)
        if len(fields) != len(names):
            raise DecodeError(f"the row has {len(fields)} fields, the header {len(names)}")
        return msgspec.convert(dict(zip(names, fields, strict=True)), wanted, strict=False)

    return decode
