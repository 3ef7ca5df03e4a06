"""Recognises files that hold no lines: archives, tables of other programs, one large JSON value."""

import re
from pathlib import Path

import msgspec

from streamq.records.packing import name_without_compression

#: How many bytes of a file's beginning are looked at.
HEAD = 4096

_TABLE = "is not read yet: write it as CSV or JSON lines first"
_ARCHIVE = "unpack it first, and give the files in it"
_BY_SUFFIX = {
    ".parquet": "it is Parquet: say --format parquet",
    ".arrow": "it is an Arrow file: say --format arrow",
    ".arrows": "it is an Arrow stream, which is not read: write it as an Arrow file, or as Parquet",
    ".ipc": "it is an Arrow file: say --format arrow",
    ".feather": "it is an Arrow file: say --format arrow",
    ".xlsx": "it is a workbook: save it as CSV first",
    ".xls": "it is a workbook: save it as CSV first",
    ".zip": f"it is a zip archive: {_ARCHIVE}",
    ".tar": f"it is a tar archive: {_ARCHIVE}",
    ".tgz": f"it is a tar archive: {_ARCHIVE}",
}
_BY_BYTES = (
    (re.compile(rb"PK\x03\x04|PK\x05\x06"), _BY_SUFFIX[".zip"]),
    (re.compile(rb"PAR1[\x00-\x08\x0e-\x1f]"), _BY_SUFFIX[".parquet"]),
    (re.compile(rb"ARROW1\x00\x00|FEA1[\x00-\x08]"), _BY_SUFFIX[".arrow"]),
    (re.compile(rb"Obj\x01"), f"Avro {_TABLE}"),
    (re.compile(rb"SQLite format 3\x00"), f"a database {_TABLE}"),
    (re.compile(rb".{257}ustar[\x00 ]", re.DOTALL), _BY_SUFFIX[".tar"]),
)
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def strangeness_of(name: str, head: bytes, form: str) -> str:
    """Return why a file cannot be read in this format, and what to do about it; "" if it can.

    ``head`` is how its content begins, decompressed.
    """
    for pattern, why in _BY_BYTES:
        if pattern.match(head):
            return _BY_SUFFIX.get(_suffix_before_compression(name), why)
    if head.startswith(_UTF_16) and (form != "lines" or b"\0" in head):
        return "it begins with the byte order mark of UTF-16: say --encoding utf-16"
    if _suffix_before_compression(name) in _BY_SUFFIX and head:
        return _BY_SUFFIX[_suffix_before_compression(name)]
    if form == "jsonl" or _suffix_before_compression(name) == ".json":
        return _strangeness_of_json(head, is_lines=form == "jsonl")
    return ""


def _strangeness_of_json(head: bytes, *, is_lines: bool) -> str:
    """Return that a file is one JSON value in several lines, or one array, and not JSON lines."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text.startswith((b"[", b"{")):
        return ""
    line, newline, rest = text.partition(b"\n")
    line = line.strip()
    is_broken = bool(newline) and (line in (b"[", b"{", b"[{") or line.endswith(b","))
    is_array = text.startswith(b"[")
    if is_broken and not _is_json(line):
        pass
    elif is_lines or not is_array or (newline and rest.strip()):
        return ""
    if is_array:
        return "it is a JSON array, and JSON lines are wanted: jq -c '.[]' makes them of it"
    return "its first line is no whole JSON value: jq -c . makes JSON lines of it"


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return True


def _suffix_before_compression(name: str) -> str:
    """Return the suffix of a name, without one that says how the file is compressed."""
    return name_without_compression(Path(name)).suffix.lower()
