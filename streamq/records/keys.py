"""The key of a record: a field by which users find it again, such as an order's number."""

import hashlib
from typing import Any

import msgspec

from streamq.errors import DecodeError, InvalidValue
from streamq.model import Part, Spec
from streamq.records.boundaries import fields_of_csv_row, names_of_csv_header
from streamq.records.decoding import TEXT_FORMATS, is_blank_record, records_in, without_line_ending
from streamq.records.inputs import MARK

#: Stands for the record itself.
WHOLE = "."
#: The name of keys that a function makes.
MADE = "key"
_MOST_CHARS = 64
#: Of a key with more bytes a digest is kept.
_MOST_BYTES = 128


def key_name(name: str, what: str = "key") -> str:
    """Return the name of a field, if it can be one.

    Raises:
        InvalidValue: it cannot.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_CHARS or not name.isprintable():
        raise InvalidValue(f"{what} {name!r} is no name of a field: up to {_MOST_CHARS} characters")
    if "=" in name:
        raise InvalidValue(f"{what} {name!r} has a = in it, and find is asked with NAME=VALUE")
    return name


def stored_key(value: Any) -> str | None:
    """Return what a request keeps of a key; None for a value that is no text and no number."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, bool | int | float):
        text = msgspec.json.encode(value).decode()
    else:
        return None
    data = text.encode("utf-8", "surrogatepass")
    if not text or len(data) > _MOST_BYTES:
        return "#" + hashlib.blake2b(data, digest_size=16).hexdigest() if text else None
    return text


class KeyField:
    """Finds the value of one field in the records of parts."""

    def __init__(self, name: str, spec: Spec) -> None:
        self.name = name
        self._spec = spec
        self._columns = names_of_csv_header(spec) if spec.format == "csv" else ()

    def check(self) -> None:
        """Raise InvalidValue if the files are known to have no such field."""
        if self.name == WHOLE or self._spec.format != "csv":
            return
        if self.name not in self._columns:
            known = ", ".join(self._columns) or "none, since the CSV has no header"
            raise InvalidValue(
                f"there is no column {self.name!r} to find rows by; there is {known}"
            )

    def of_part(self, payload: bytes) -> list[str | None]:
        """Return the key of each record of a part; None for a record that has none."""
        spec, part = self._spec, Part(0, payload, b"")
        return [
            self._of_record(without_line_ending(record) if spec.format in TEXT_FORMATS else record)
            for record in records_in(part, spec)
            if not is_blank_record(record, spec)
        ]

    def _of_record(self, record: bytes) -> str | None:
        if self._spec.format == "csv":
            return self._of_row(record)
        record = record.removeprefix(MARK)
        is_text = self._spec.format == "lines"
        if is_text and self.name == WHOLE:
            return stored_key(record.decode("utf-8", "replace"))
        try:
            value = msgspec.json.decode(record)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            value = record.decode("utf-8", "replace")
        return stored_key(_field_of_record(value, self.name))

    def _of_row(self, row: bytes) -> str | None:
        if self.name == WHOLE:
            return stored_key(row.decode("utf-8", "replace"))
        try:
            fields = fields_of_csv_row(row, self._spec)
        except (DecodeError, UnicodeDecodeError):
            return None
        at = list(self._columns).index(self.name)
        return stored_key(fields[at]) if at < len(fields) else None


def _field_of_record(value: Any, name: str) -> Any:
    """Return a field of a value: by its name, or by names with dots between them; or all of it."""
    if name == WHOLE:
        return value
    if isinstance(value, dict) and name in value:
        return value[name]
    for each in name.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(each)
    return value
