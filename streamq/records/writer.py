"""Turns results into lines of an output (raw, JSON lines, CSV), or into tables for Parquet."""

import csv
import io
import logging
from contextlib import suppress
from typing import Any

import msgspec

from streamq.errors import damaged_if_unreadable
from streamq.records import arrow_tables
from streamq.records import encoding as codec
from streamq.records.about import ENDINGS
from streamq.records.encoding import Item
from streamq.records.parquet import table_frame

log = logging.getLogger(__name__)

#: Forms of rows, and what stands between their cells.
_DELIMITERS = {"csv": ",", "tsv": "\t"}


class Writer:
    """Turns the items of results into lines of a format."""

    def __init__(
        self,
        form: str,
        header: list[str],
        *,
        is_open: bool = False,
        preamble: bytes = b"",
        has_keys: bool = False,
    ) -> None:
        """``preamble``: goes before the first line that a handler returned as bytes or text.

        ``has_keys``: each line begins with the numbers of its part and of its record there.
        """
        self._form = form
        #: What stands between the cells of a row; "" where lines are no rows.
        self._delimiter = _DELIMITERS.get(form, "")
        self._has_keys = has_keys
        self.header = header
        self.is_open = is_open
        #: How many bytes of header or preamble were written.
        self.head = 0
        #: Whether an item of the last result wrote no line.
        self.has_skipped = False
        self._preamble = preamble if form == "raw" else b""
        #: Whether the last result began with a value, and with no line that a handler made.
        self.is_value = False
        self._left_out: set[str] = set()
        #: How many results hold bytes that could not be written as UTF-8.
        self.garbled = 0

    def lines(self, result: bytes, part: int = 0) -> bytes:
        """Return the lines of one part's result. An item that is None writes no line.

        ``part`` is the part's number, for lines with keys.
        """
        self.has_skipped = False
        with damaged_if_unreadable("a result"):
            was_open, self.is_open = self.is_open, False
            lines = self._keyed(result, part) if self._has_keys else self._lines(result)
        if not lines:
            self.is_open = was_open
            return lines
        return self._before(was_open=was_open) + lines

    def before(self, *, is_value: bool) -> bytes:
        """Return what has to stand before lines that were made elsewhere; ``is_value`` of those."""
        was_open, self.is_open, self.is_value = self.is_open, False, is_value
        return self._before(was_open=was_open)

    def _before(self, *, was_open: bool) -> bytes:
        """Return the end of a line that is open, or what goes before the first line, or nothing."""
        if was_open:
            return b"\n"
        preamble = self.preamble()
        if not preamble or self.is_value:
            return b""
        preamble += b"" if preamble.endswith(b"\n") else b"\n"
        self.head = len(preamble)
        return preamble

    def preamble(self) -> bytes:
        """Return the preamble the first time, and nothing after that."""
        preamble, self._preamble = self._preamble, b""
        return preamble

    def warn(self) -> None:
        """Log how many results hold bytes that could not be written as UTF-8."""
        if self.garbled:
            log.warning(
                "%d of the results hold bytes that are not UTF-8: there the output has U+FFFD "
                "instead; --output-format raw writes bytes as they are",
                self.garbled,
            )
        self.garbled = 0

    def _lines(self, result: bytes) -> bytes:
        found = codec.decode_unchecked(result)
        self.is_value = False
        if self._form == "raw" and (whole := _written_plain_lines(found)) is not None:
            return whole
        items, endings = codec.checked_items(found)
        if len(items) == 1 and codec.is_verbatim(items[0]):
            return bytes(items[0].data)
        if self._form == "parquet":
            return self._frames(items)
        if any(map(codec.holds_several_items, items)):
            items, endings = _written_items_of_lines(items, endings)
        kept = [item for item in items if item is not None]
        self.has_skipped = len(kept) < len(items)
        if self._form == "raw":
            self.is_value = bool(kept) and isinstance(kept[0], msgspec.msgpack.Ext)
            lines = b"".join(
                _written_raw_line(item) + (ENDINGS[endings[index]] if endings else b"\n")
                for index, item in enumerate(items)
                if item is not None
            )
            self.is_open = not lines.endswith(b"\n")
            return lines
        if self._delimiter:
            return b"".join(self._row(item) for item in kept)
        return b"\n".join([*map(self._json, kept), b""])

    def _frames(self, items: list[Item]) -> bytes:
        """Return items as tables. Those that are no tables are rows of one."""
        frames: list[bytes] = []
        rows: list[Any] = []
        for item in items:
            if codec.is_table(item):
                frames += [_written_framed_rows(rows)] if rows else []
                rows = []
                frames.append(table_frame(arrow_tables.unpack_table(bytes(item.data))))
            else:
                rows += [
                    self._readable(codec.decode_item(each))
                    for each in codec.spread_item(item)
                    if each is not None
                ]
        frames += [_written_framed_rows(rows)] if rows else []
        return b"".join(frames)

    def _keyed(self, result: bytes, part: int) -> bytes:
        """Return the lines of a result, each with the numbers of its part and its record."""
        items, _ = codec.decode_result(result)
        self.has_skipped = None in items
        return b"".join(self._keyed_line(item, part, n) for n, item in enumerate(items, 1))

    def _keyed_line(self, item: Item, part: int, record: int) -> bytes:
        if item is None:
            return b""
        if codec.holds_several_items(item):
            lines = (self._keyed_line(each, part, record) for each in codec.spread_item(item))
            return b"".join(lines)
        if self._delimiter:
            return self._row(item, {"part": part, "record": record})
        if codec.is_verbatim(item):
            item = bytes(item.data)
        return b'{"part":%d,"record":%d,"result":%b}\n' % (part, record, self._json(item))

    def line(self, item: Item, ending: bytes, part: int, record: int) -> bytes:
        """Return the line of one item alone; its line ending is a letter of ``about``, or ""."""
        if self._has_keys or item is None:
            return self._keyed_line(item, part, record)
        if codec.holds_several_items(item):
            found = codec.spread_item(item)
            return b"".join(self.line(each, ending, part, record) for each in found)
        if codec.is_verbatim(item):
            return bytes(item.data)
        if self._delimiter:
            return self._row(item)
        if self._form == "raw":
            return _written_raw_line(item) + (ENDINGS[ending[0]] if ending else b"\n")
        return bytes(self._json(item)) + b"\n"

    def _json(self, item: Item) -> Any:
        """Return an item as JSON, in a type that can be joined with bytes."""
        if isinstance(item, msgspec.msgpack.Ext):
            return item.data
        return msgspec.json.encode(self._readable(item))

    def _readable(self, value: object) -> object:
        """Return bytes as text, with U+FFFD for what is not UTF-8; any other value as it is."""
        if not isinstance(value, bytes):
            return value
        try:
            return value.decode()
        except UnicodeDecodeError:
            self.garbled += 1
            return value.decode("utf-8", "replace")

    def _cell(self, value: object) -> object:
        value = self._readable(value)
        return (
            value
            if value is None or isinstance(value, str | int | float)
            else _written_csv_text(value)
        )

    def _row(self, item: Item, keys: dict[str, int] | None = None) -> bytes:
        value = codec.decode_item(item)
        fields = value if isinstance(value, dict) else {"result": value}
        if keys:
            fields = keys | fields | keys
        head = b""
        if not self.header:
            self.header = list(fields)
            head = self._line(self.header)
            self.head = len(head)
        for name in fields.keys() - self._left_out - set(self.header):
            self._left_out.add(name)
            log.warning(
                "a %s has the columns of its first result: %s of a later one is left out",
                self._form.upper(),
                name,
            )
        return head + self._line([self._cell(fields.get(name)) for name in self.header])

    def _line(self, cells: list[Any]) -> bytes:
        text = io.StringIO(newline="")
        # With this terminator the writer quotes every cell that holds \r or \n.
        csv.writer(text, delimiter=self._delimiter, lineterminator="\r\n").writerow(cells)
        return text.getvalue().removesuffix("\r\n").encode() + b"\n"


def _written_items_of_lines(items: list[Item], endings: bytes) -> tuple[list[Item], bytes]:
    """Return a line's item for each that stands for several, and how each line ends."""
    found = list(map(codec.spread_item, items))
    letters = b"".join(endings[index : index + 1] * len(each) for index, each in enumerate(found))
    return [item for each in found for item in each], letters


def _written_framed_rows(rows: list[Any]) -> bytes:
    return table_frame(arrow_tables.table_from_rows(rows))


def _written_plain_lines(items: list[Any]) -> bytes | None:
    """Return items that are all bytes, or all text, as lines; None where they are not.

    ``join`` raises ``TypeError`` unless all items are bytes (or all text), which is how we find
    out. A last item that says how lines ended is neither, so it fails too.
    """
    if not items:
        return b""
    if (lines := codec.as_lines(items)) is not None:
        return lines
    with suppress(TypeError):
        return b"\n".join([*items, b""])
    with suppress(TypeError):
        return "\n".join([*items, ""]).encode()
    return None


def _written_raw_line(item: Item) -> bytes:
    if isinstance(item, msgspec.msgpack.Ext):
        return bytes(item.data)
    return item.encode() if isinstance(item, str) else item or b""


def _written_csv_text(value: object) -> str:
    return msgspec.json.encode(value).decode()
