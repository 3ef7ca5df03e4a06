"""Encodes what handlers return as results of parts, and decodes results again.

A result is kept as a MessagePack array with one item for each record: nil, bytes or text as the
handler returned them, JSON (extension 1) for anything else, or bytes that are to be written exactly
as they are (extension 3). Several items that are all bytes (extension 4) or all text (extension 5)
and have no newline in them are kept as lines instead. A table is an Arrow stream (extension 7). The
values that a generator yields are an array of items (extension 8). A last item (extension 2) tells
how the records' lines ended, if not all ended with a plain newline. So a collector can write
results to a file without decoding each item.

Instead of items, extension 6 says where the lines of a part are: in a spool (``records/spool.py``).
"""

import json
from collections.abc import Sequence
from typing import Any, TypeGuard

import msgspec

from streamq.errors import Damaged, damaged_if_unreadable
from streamq.records import arrow_tables
from streamq.records.about import ENDING_LETTERS

#: Marks in the results of a flow, as ``lua/lib/handover.lua`` writes them: an item that dropped
#: out, and one that failed. Both are read as a result without items.
NOTHING, FAILED = b"\xdc\0\0", b"\xdd\0\0\0\0"

Item = None | bytes | str | msgspec.msgpack.Ext

_JSON = 1
_ENDINGS = 2
_VERBATIM = 3
_BYTES_LINES = 4
_TEXT_LINES = 5
_SPOOLED = 6
_TABLE = 7
_MANY = 8
_TABLE_NAMES = frozenset(("Table", "RecordBatch", "DataFrame"))
_encode_json = msgspec.json.Encoder().encode
_encode_items = msgspec.msgpack.Encoder().encode
_decode_items = msgspec.msgpack.Decoder(list).decode
_ITEM_TYPES = frozenset((type(None), bytes, str, msgspec.msgpack.Ext))


class Verbatim(bytes):
    """Lines that a handler made itself: they are written as they are, with nothing added."""


class Many(list[Item]):
    """What a handler yielded for one record, as it is kept: each item is a line of its own."""


def encode_item(value: Any) -> Item:
    """Return what a handler returned in the form in which it is kept.

    Raises:
        msgspec.EncodeError: the value holds a NaN or an infinity.
    """
    if value is None or type(value) is bytes:
        return value
    if type(value) is str:
        if not value.isascii():
            value.encode()  # raises for a lone surrogate here, where the part can still fail for it
        return value
    if type(value) is Verbatim:
        return msgspec.msgpack.Ext(_VERBATIM, value)
    if type(value) is Many:
        return msgspec.msgpack.Ext(_MANY, _encode_items(value))
    if type(value).__name__ in _TABLE_NAMES and (table := arrow_tables.table_of(value)) is not None:
        return msgspec.msgpack.Ext(_TABLE, arrow_tables.pack_table(table))
    text = _encode_json(value)
    if b"null" in text:
        _refuse_nan(value)
    return msgspec.msgpack.Ext(_JSON, text)


def _refuse_nan(value: Any) -> None:
    """Raise EncodeError for a NaN or an infinity: JSON has none, and msgspec would write null."""
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=lambda _: None)
        json.dumps(plain, allow_nan=False)
    except ValueError:
        raise msgspec.EncodeError(
            "a NaN or an infinity is no number in JSON: return None or text instead"
        ) from None


def is_verbatim(item: Item) -> TypeGuard[msgspec.msgpack.Ext]:
    """Return whether the item is to be written as it is."""
    return isinstance(item, msgspec.msgpack.Ext) and item.code == _VERBATIM


def is_table(item: Item) -> TypeGuard[msgspec.msgpack.Ext]:
    """Return whether the item is a table."""
    return isinstance(item, msgspec.msgpack.Ext) and item.code == _TABLE


def holds_several_items(item: Item) -> bool:
    """Return whether the item stands for several lines: it is a table, or what was yielded."""
    return isinstance(item, msgspec.msgpack.Ext) and item.code in (_TABLE, _MANY)


def spread_item(item: Item) -> list[Item]:
    """Return the items that an item stands for: rows of a table, or values that were yielded.

    Raises:
        Damaged: the item is nothing that ``encode_item`` makes.
    """
    if not isinstance(item, msgspec.msgpack.Ext) or item.code not in (_TABLE, _MANY):
        return [item]
    with damaged_if_unreadable("a result"):
        if item.code == _MANY:
            kept: list[Any] = _decode_items(item.data)
            return [each for inner in kept if inner is not None for each in spread_item(inner)]
        rows = arrow_tables.rows_of_table(arrow_tables.unpack_table(bytes(item.data)))
        return [
            msgspec.msgpack.Ext(_JSON, arrow_tables.table_row_as_json(row) or b"null")
            for row in rows
        ]


def decode_item(item: Item) -> Any:
    """Return what a handler returned; a type that JSON does not have comes as JSON has it.

    Of a table, and of a generator, that is a list.

    Raises:
        Damaged: the item is nothing that ``encode_item`` makes.
    """
    if is_verbatim(item):
        return bytes(item.data)
    if holds_several_items(item):
        return list(map(decode_item, spread_item(item)))
    if isinstance(item, msgspec.msgpack.Ext):
        with damaged_if_unreadable("a result"):
            return msgspec.json.decode(item.data)
    return item


def _items_of_joined(item: msgspec.msgpack.Ext) -> list[Any]:
    """Return the items that ``_joined_items`` put together; any other item as it is."""
    if item.code == _BYTES_LINES:
        return bytes(item.data).split(b"\n")
    if item.code == _TEXT_LINES:
        with damaged_if_unreadable("a result"):
            return str(item.data, "utf-8").split("\n")
    return [item]


def size_of_results(item: Item) -> int:
    """Return about how many bytes an item has."""
    if isinstance(item, msgspec.msgpack.Ext):
        return memoryview(item.data).nbytes
    return 0 if item is None else len(item)


def encode_result(items: Sequence[Item], endings: bytes = b"") -> bytes:
    """Return the encoded result of a part; ``endings`` has a letter for each line ending."""
    if len(items) > 1 and (found := items_joined_as_lines(items)):
        lines, is_text = found
        items = [_lines_item(memoryview(lines)[:-1], is_text=is_text)]
    return _encode_items([*items, *_line_endings_item(endings)])


def encode_lines(blocks: Sequence[bytes], *, is_text: bool) -> bytes:
    """Return the encoded result of a part of several records, which ``joined`` put together."""
    return _encode_items([_lines_item(memoryview(b"".join(blocks))[:-1], is_text=is_text)])


def items_joined_as_lines(items: Sequence[Any]) -> tuple[bytes, bool] | None:
    """Return items as lines, each with a newline, and whether they are text.

    Return None unless all are bytes, or all are text, and none has a newline.
    """
    kind = type(items[0])
    try:
        if kind is bytes:
            lines = b"\n".join((*items, b""))
        elif kind is str:
            lines = "\n".join((*items, "")).encode()
        else:
            return None
    except TypeError:  # they are not all of one kind
        return None
    return (lines, kind is str) if lines.count(b"\n") == len(items) else None


def _lines_item(lines: bytes | memoryview, *, is_text: bool) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_TEXT_LINES if is_text else _BYTES_LINES, lines)


def _line_endings_item(endings: bytes) -> list[msgspec.msgpack.Ext]:
    return [msgspec.msgpack.Ext(_ENDINGS, endings)] if endings else []


def encode_spooled(where: bytes) -> bytes:
    """Return the result of a part whose lines are in a spool."""
    return _encode_items([msgspec.msgpack.Ext(_SPOOLED, where)])


def spooled_lines(result: bytes) -> bytes | None:
    """Return where the lines of a result are; None for one that holds its items itself."""
    if result[:1] != b"\x91" or result[1:2] not in (b"\xc7", b"\xc8", b"\xc9"):
        return None
    width = 1 << (result[1] - 0xC7)
    if result[2 + width : 3 + width] != b"\x06":
        return None
    items = decode_unchecked(result)
    is_one = len(items) == 1 and isinstance(items[0], msgspec.msgpack.Ext)
    return bytes(items[0].data) if is_one else None


def as_lines(items: list[Any]) -> bytes | None:
    """Return items of ``decode_unchecked`` as lines; None if they have to be decoded one by one."""
    if len(items) != 1 or not isinstance(items[0], msgspec.msgpack.Ext):
        return None
    item = items[0]
    return b"".join((item.data, b"\n")) if item.code in (_BYTES_LINES, _TEXT_LINES) else None


def decode_result(result: bytes) -> tuple[list[Item], bytes]:
    """Return the items of a result, and how its records' lines ended ("" for newlines).

    Raises:
        Damaged: the bytes are no result.
    """
    return checked_items(decode_unchecked(result))


def decode_unchecked(result: bytes) -> list[Any]:
    """Decode a result without checking the types of its items, which the caller does later.

    Raises:
        Damaged: the bytes cannot even be decoded.
    """
    with damaged_if_unreadable("a result"):
        found: list[Any] = _decode_items(result)
        return found


def checked_items(items: list[Any]) -> tuple[list[Item], bytes]:
    """Check what ``decode_unchecked`` returned. Return the items, and how the lines ended.

    Raises:
        Damaged: the items are no result.
    """
    if items and isinstance(items[0], msgspec.msgpack.Ext):
        if items[0].code == _SPOOLED:
            raise Damaged(
                "a result is in a file of the run that writes it, or of its workers, not in the "
                "server: streamq results -o FILE --spool DIR reads what workers keep"
            )
        items = _items_of_joined(items[0]) + items[1:]
    if not _ITEM_TYPES.issuperset(map(type, items)):
        raise Damaged("a result holds what no handler can return")
    if items and isinstance(items[-1], msgspec.msgpack.Ext) and items[-1].code == _ENDINGS:
        endings = bytes(items.pop().data)
        if len(endings) != len(items) or endings.strip(ENDING_LETTERS):
            raise Damaged("a result does not say how its lines end")
        return items, endings
    return items, b""
