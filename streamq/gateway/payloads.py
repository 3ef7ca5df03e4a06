"""Payloads and results in the forms that JSON can carry, and back."""

import binascii
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from streamq.errors import InvalidValue
from streamq.gateway import stages
from streamq.gateway.messages import As, PartTold, Value
from streamq.model import Part, Spec
from streamq.records import about
from streamq.records import encoding as codec
from streamq.records.decoding import ITEMS

_FORMS = ("json", "text", "base64", "lines")
_NO_RESULT = codec.encode_result([None])


def parts_with_payloads_told(parts: Sequence[Part], spec: Spec, form: As) -> list[PartTold]:
    """Return parts as a worker is told of them."""
    # Cached, because parts of one batch often have the same ``about``, and reading it is most of
    # what a call costs.
    known: dict[bytes, _AboutPayload] = {}
    said = []
    for part in parts:
        mine = known.get(part.about)
        if mine is None:
            mine = known[part.about] = _AboutPayload.of(part, spec)
        data, is_json = part.payload, mine.is_json
        if spec.format == ITEMS:
            data, is_json = stages.payload_of_stage(part, spec)
        value = None
        if is_json or form not in ("auto", "text") or not data.isascii():
            value = _payload_form_of(data, form, is_json=is_json)
        said.append(
            PartTold(
                number=part.number,
                records=mine.records,
                attempt=part.attempt,
                alone=part.is_suspect,
                json=value.json if value else UNSET,
                text=value.text if value else data.decode("ascii"),
                base64=value.base64 if value else UNSET,
                source=mine.source,
                line=mine.line,
            )
        )
    return said


class _AboutPayload(msgspec.Struct, frozen=True):
    """The ``about`` of a part, read."""

    records: int | UnsetType
    is_json: bool
    source: str
    line: int

    @classmethod
    def of(cls, part: Part, spec: Spec) -> "_AboutPayload":
        """Read it."""
        place = about.AboutPlace.of(part.about, spec)
        records = UNSET if part.records is None else part.records
        source, line = (place.source, place.line) if place else ("", 0)
        return cls(records, about.is_json_payload(part), source, line)


def _payload_form_of(data: bytes, form: As, *, is_json: bool) -> Value:
    if form == "json" or (form == "auto" and is_json):
        try:
            msgspec.json.decode(data)
        except (ValueError, RecursionError):
            pass  # it is no JSON after all: shown as text or base64
        else:
            return Value(json=msgspec.Raw(data))
    return _payload_form_of_bytes(data, is_text=form != "base64")


def _payload_form_of_bytes(data: bytes, *, is_text: bool = True) -> Value:
    if is_text:
        try:
            return Value(text=data.decode())
        except UnicodeDecodeError:
            pass
    return Value(base64=b64encode(data).decode())


def encoded_result_payload(value: Value | None) -> bytes:
    """Return the result of a part as the server keeps it.

    Raises:
        InvalidValue: the value has no form, or several, or its base64 is none.
    """
    return _NO_RESULT if value is None else codec.encode_result([_item_of_payload_value(value)])


def _item_of_payload_value(value: Value) -> codec.Item:
    form = _only_payload_form(value)
    if form == "lines":
        return codec.encode_item(codec.Verbatim(str(value.lines).encode()))
    if form == "json":
        found = _payload_item_from_json(value.json)
        try:
            return codec.encode_item(found)
        except msgspec.MsgspecError as error:
            raise InvalidValue(f"a result cannot be kept: {error}") from None
    return codec.encode_item(value.text if form == "text" else _bytes_of_payload_value(value))


def submitted_payload(raw: msgspec.Raw, number: int) -> Any:
    """Return a part of a submission: bytes for ``{"text"}`` and ``{"base64"}``, else its value.

    Raises:
        InvalidValue: it is neither.
    """
    value = _payload_item_from_json(raw)
    is_plain = isinstance(value, dict) and len(value) == 1 and {"text", "base64"} & value.keys()
    if not is_plain:
        return value
    try:
        return _bytes_of_payload_value(msgspec.convert(value, Value))
    except (msgspec.ValidationError, InvalidValue) as error:
        raise InvalidValue(f"part {number}: {error}") from None


def shown_result_payload(item: codec.Item) -> Value | None:
    """Return an item of a result as a reader is told of it."""
    if item is None:
        return None
    if isinstance(item, str):
        return Value(text=item)
    if codec.is_verbatim(item):
        data = bytes(item.data)
        try:
            return Value(lines=data.decode())
        except UnicodeDecodeError:
            return _payload_form_of_bytes(data)
    if isinstance(item, bytes):
        return _payload_form_of_bytes(item)
    return Value(json=msgspec.Raw(msgspec.json.encode(codec.decode_item(item))))


def _only_payload_form(value: Value) -> str:
    given = [form for form in _FORMS if getattr(value, form) is not UNSET]
    if len(given) != 1:
        raise InvalidValue(f"a result has one of {', '.join(_FORMS)}, not {given or 'none'}")
    return given[0]


def _bytes_of_payload_value(value: Value) -> bytes:
    if isinstance(value.text, str):
        return value.text.encode()
    try:
        return b64decode(str(value.base64), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidValue(f"that is no base64: {error}") from None


def _payload_item_from_json(raw: Any) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"that is no JSON: {error}") from None
