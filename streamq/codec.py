"""Records in, results out: between a part's bytes and a handler's values.

A result is kept as a MessagePack array with one item for each record: nil, bytes or text
as the handler returned them, or JSON (extension 1) for anything else. So whoever writes
results to a file passes them on without decoding them.
"""

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from streamq.model import Part

Item = None | bytes | str | msgspec.msgpack.Ext

_JSON = 1
_encode_json = msgspec.json.Encoder().encode
_encode_items = msgspec.msgpack.Encoder().encode
_decode_items = msgspec.msgpack.Decoder().decode
#: What ``about`` ends in when the payload is JSON made from a value that was no bytes.
IS_JSON = b"j"


def encode_item(value: Any) -> Item:
    """What a handler returned, ready to be kept."""
    if value is None or type(value) is bytes or type(value) is str:
        return value
    return msgspec.msgpack.Ext(_JSON, _encode_json(value))


def decode_item(item: Item) -> Any:
    """What a handler returned, with types that JSON does not have as JSON has them."""
    if isinstance(item, msgspec.msgpack.Ext):
        return msgspec.json.decode(item.data)
    return item


def size_of(item: Item) -> int:
    """Bytes of an item, about."""
    if isinstance(item, msgspec.msgpack.Ext):
        return memoryview(item.data).nbytes
    return 0 if item is None else len(item)


def encode_result(items: Sequence[Item]) -> bytes:
    """The result of a part."""
    return _encode_items(items)


def decode_result(result: bytes) -> list[Item]:
    """The items of a part's result."""
    items: list[Item] = _decode_items(result)
    return items


def records_in(part: Part) -> list[bytes]:
    """The records of a part. What ``submit`` makes has one."""
    return [part.payload]


def decoder_for(annotation: Any, *, is_map: bool) -> Callable[[bytes, bool], Any]:
    """How one record (of a map) or one part becomes the value a handler asks for.

    The function is given the bytes, and whether they are JSON made by ``submit``.
    """
    if not is_map and typing.get_origin(annotation) is list:
        element = typing.get_args(annotation)[0]
        if element in (bytes, str):
            decode = decoder_for(element, is_map=True)
            return lambda record, is_json: [decode(record, is_json)]
    if annotation is bytes:
        return lambda record, _: record
    if annotation is str:
        from_json: Any = msgspec.json.Decoder(str).decode
        return lambda record, is_json: from_json(record) if is_json else record.decode()
    if annotation in (inspect.Parameter.empty, Any):
        return lambda record, is_json: msgspec.json.decode(record) if is_json else record
    decode_type = msgspec.json.Decoder(annotation).decode
    return lambda record, _: decode_type(record)
