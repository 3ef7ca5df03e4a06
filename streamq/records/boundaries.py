"""Finds the ends of records: lines, and rows of a CSV, whose quoted fields may hold newlines.

Loaders cut inputs there and workers cut parts there: both ask here. There is one exception. The
lines of a part that is plain text are split by ``decoding.plain_values``, all at once, because
asking for each line takes longer.
"""

import csv
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from streamq.errors import DecodeError
from streamq.model import Spec

#: Returns the data with newlines inside quoted fields replaced, cut off at the first quote that is
#: not closed. Positions stay the same, so splitting the result at ``\n`` gives the boundaries.
Mask = Callable[[bytes], bytes]

# The default limit of the module csv, 131,072 characters a field, is less than a part may have.
csv.field_size_limit(2**31 - 1)


def mask_of_boundaries(spec: Spec) -> Mask:
    """Return the mask that shows where the records of a request's parts end."""
    if spec.format != "csv" or not (spec.quote or spec.escape):
        return _mask_of_nothing
    return _csv_mask(spec.delimiter, spec.quote, spec.escape)


def _mask_of_nothing(data: bytes) -> bytes:
    return data


@lru_cache
def _csv_mask(delimiter: str, quote: str, escape: str) -> Mask:
    """Return a mask for CSV: a quote counts where a field begins (RFC 4180).

    Inside a quoted field, quotes are doubled or escaped.
    """
    special = [each.encode() for each in (quote, escape) if each]
    hidden = re.compile(
        _pattern_without_boundaries(*(re.escape(e.encode()) for e in (delimiter, quote, escape))),
        re.DOTALL,
    )

    def mask(data: bytes) -> bytes:
        if not any(each in data for each in special):
            return data
        open_at = len(data)

        def hide(match: re.Match[bytes]) -> bytes:
            nonlocal open_at
            if match.lastindex:
                open_at = match.start()
            return b"_" * len(match[0])

        return hidden.sub(hide, data)[:open_at]

    return mask


def _pattern_without_boundaries(delimiter: bytes, quote: bytes, escape: bytes) -> bytes:
    """Return a pattern for text without boundaries; its group matches if a quote is left open."""
    escaped = escape + rb"." if escape else b""
    if not quote:
        return escaped
    plain = rb"[^" + quote + escape + rb"]*+"
    inside = rb"(?:" + quote * 2 + (rb"|" + escaped if escape else b"") + rb")"
    end = quote + rb"|(" + (escape + rb"?" if escape else b"") + rb"\Z)"
    field = quote + plain + rb"(?:" + inside + plain + rb")*+(?:" + end + rb")"
    quoted = rb"(?<![^\r\n" + delimiter + rb"])" + field
    return escaped + rb"|" + quoted if escape else quoted


#: A blank line at the beginning, and one behind another line.
_BLANK = re.compile(rb"\A[ \t\r\v\f]*(?=\n)|\n[ \t\r\v\f]*(?=\n)")
#: A blank line begins in one of these ways. Searching for them is much cheaper than the pattern.
_BEFORE_BLANK = (b"\n\n", b"\n\r", b"\n ", b"\n\t", b"\n\v", b"\n\f")


#: An empty row at the beginning, and one behind another row; and what begins in these ways.
_EMPTY_ROW = re.compile(rb"(?:\A|(?<=\n))\r?\n")
_EMPTY_FIRST = (b"\n", b"\r\n")
_LONE_RETURN = re.compile(rb"\r(?!\n)")


def empty_rows(seen: bytes) -> int:
    """Return how many rows of masked data are empty: in a CSV those are no records."""
    if not seen.startswith(_EMPTY_FIRST) and b"\n\n" not in seen and b"\n\r\n" not in seen:
        return 0
    return len(_EMPTY_ROW.findall(seen))


def ended_by_newlines(data: bytes, seen: bytes, *, is_end: bool) -> tuple[bytes, bytes]:
    """Return data and masked data with newlines for carriage returns that end a row alone.

    So a CSV whose rows end in ``\\r``, as old Mac files have them, is read as others are. Without
    ``is_end`` a newline may still follow the last byte, which then stays as it is.
    """
    if b"\r" not in seen or seen.count(b"\r") == seen.count(b"\r\n"):
        return data, seen
    # Positions stay the same in both, so what the mask hides is the same.
    last = len(seen) - 1 if not is_end and len(seen) == len(data) else len(seen)
    both = []
    for text in (data, seen):
        mended = bytearray(text)
        for found in _LONE_RETURN.finditer(seen, 0, len(seen)):
            if found.start() < last:
                mended[found.start()] = ord("\n")
        both.append(bytes(mended))
    return both[0], both[1]


def bytes_as_loaded(data: bytes, spec: Spec) -> bytes:
    """Return the bytes of a part as a file has them, as a loader would send them."""
    if spec.format != "csv" or b"\r" not in data:
        return data
    return ended_by_newlines(data, mask_of_boundaries(spec)(data), is_end=True)[0]


def blank_lines(data: bytes) -> int:
    """Return how many of the lines are blank: in JSON lines those are no records."""
    is_first = data[:1].isspace()
    if not is_first and not any(each in data for each in _BEFORE_BLANK):
        return 0
    lines = len(_BLANK.findall(data))
    rest = data[data.rfind(b"\n") + 1 :]
    return lines + (bool(rest) and not rest.strip())


def records_between_boundaries(data: bytes, spec: Spec) -> list[bytes]:
    """Return the records of a part, each with its line ending."""
    seen = mask_of_boundaries(spec)(data)
    if seen is data and b"\r" not in data:
        # Without a carriage return ``splitlines`` is right; at a lone one it would split, too.
        return data.splitlines(keepends=True)
    found, begin = [], 0
    for line in seen.split(b"\n")[:-1]:
        end = begin + len(line) + 1
        found.append(data[begin:end])
        begin = end
    return [*found, data[begin:]] if begin < len(data) else found


def fields_of_csv_row(row: bytes, spec: Spec) -> list[str]:
    """Return the fields of a row.

    Raises:
        DecodeError: the bytes are no row of a CSV.
    """
    try:
        reader = csv.reader(
            [row.decode()],
            delimiter=spec.delimiter,
            quotechar=spec.quote or None,
            escapechar=spec.escape or None,
            quoting=csv.QUOTE_MINIMAL if spec.quote else csv.QUOTE_NONE,
        )
        return next(reader, [])
    except csv.Error as error:
        raise DecodeError(f"the row cannot be read: {error}") from None


def csv_header_without_mark(spec: Spec) -> bytes:
    """Return the header of a CSV as a row, without its line ending and its byte order mark."""
    return spec.header.removeprefix("\ufeff").rstrip("\r\n").encode()


def names_of_csv_header(spec: Spec) -> Sequence[str]:
    """Return the names of a CSV's fields: those given for it, or its header's; none without."""
    if spec.names or not spec.header:
        return spec.names
    return fields_of_csv_row(csv_header_without_mark(spec), spec)
