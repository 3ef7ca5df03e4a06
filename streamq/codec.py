"""Records in, results out: between a part's bytes and a handler's values.

A result is kept as a MessagePack array with one item for each record: nil, bytes or text
as the handler returned them, JSON (extension 1) for anything else, or what is to be
written exactly as it is (extension 3). A last item (extension 2) says how the records'
lines ended, where not with a plain newline. So whoever writes results to a file passes
them on without decoding them.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import msgspec

from streamq.errors import Damaged, reading

Item = None | bytes | str | msgspec.msgpack.Ext

_JSON = 1
_ENDINGS = 2
_VERBATIM = 3
_encode_json = msgspec.json.Encoder().encode
_encode_items = msgspec.msgpack.Encoder().encode
_decode_items = msgspec.msgpack.Decoder(list).decode
_ITEM_TYPES = frozenset((type(None), bytes, str, msgspec.msgpack.Ext))


class Verbatim(bytes):
    """Lines that a handler made itself: they are written as they are, with nothing added."""


def encode_item(value: Any) -> Item:
    """What a handler returned, ready to be kept."""
    if value is None or type(value) is bytes:
        return value
    if type(value) is str:
        if not value.isascii():
            value.encode()  # half a character cannot be kept: better said here than later
        return value
    if type(value) is Verbatim:
        return msgspec.msgpack.Ext(_VERBATIM, value)
    return msgspec.msgpack.Ext(_JSON, _encode_json(value))


def is_verbatim(item: Item) -> TypeGuard[msgspec.msgpack.Ext]:
    """Whether the item is to be written as it is."""
    return isinstance(item, msgspec.msgpack.Ext) and item.code == _VERBATIM


def decode_item(item: Item) -> Any:
    """What a handler returned, with types that JSON does not have as JSON has them.

    Raises:
        Damaged: nobody can have returned that.
    """
    if is_verbatim(item):
        return bytes(item.data)
    if isinstance(item, msgspec.msgpack.Ext):
        with reading("a result"):
            return msgspec.json.decode(item.data)
    return item


def size_of(item: Item) -> int:
    """Bytes of an item, about."""
    if isinstance(item, msgspec.msgpack.Ext):
        return memoryview(item.data).nbytes
    return 0 if item is None else len(item)


def encode_result(items: Sequence[Item], endings: bytes = b"") -> bytes:
    """The result of a part, and how its records' lines ended where that is not plain."""
    if endings:
        return _encode_items([*items, msgspec.msgpack.Ext(_ENDINGS, endings)])
    return _encode_items(items)


def decode_result(result: bytes) -> tuple[list[Item], bytes]:
    """The items of a part's result, and how its records' lines ended ("" for newlines).

    Raises:
        Damaged: it is no result.
    """
    return checked(unchecked(result))


def unchecked(result: bytes) -> list[Any]:
    """Whatever a result holds, for who finds out by itself whether it can be used.

    Raises:
        Damaged: it cannot even be decoded.
    """
    with reading("a result"):
        found: list[Any] = _decode_items(result)
        return found


def checked(items: list[Any]) -> tuple[list[Item], bytes]:
    """The same as items of a result, and how its records' lines ended.

    Raises:
        Damaged: it is no result.
    """
    if not _ITEM_TYPES.issuperset(map(type, items)):
        raise Damaged("a result holds what no handler can return")
    if items and isinstance(items[-1], msgspec.msgpack.Ext) and items[-1].code == _ENDINGS:
        endings = bytes(items.pop().data)
        if len(endings) != len(items) or endings.strip(b"nr0"):
            raise Damaged("a result does not say how its lines end")
        return items, endings
    return items, b""
