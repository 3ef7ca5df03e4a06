"""The writer of an output: headers, and what comes before the first line."""

import pytest

from streamq.records.arrow_tables import unpack_table
from streamq.records.encoding import encode_item, encode_result
from streamq.records.writer import Writer


def result(value: object) -> bytes:
    return encode_result([encode_item(value)])


@pytest.mark.parametrize("header", [b"a,b", b"a,b\n", b"a,b\r\n"])
def test_header_of_the_input_is_a_line_of_its_own(header: bytes) -> None:
    writer = Writer("raw", [], preamble=header)

    assert writer.lines(result(None)) == b""
    first = writer.lines(result(b"1,2"))

    assert first == header.rstrip(b"\n") + b"\n1,2\n"
    assert writer.lines(result(b"3,4")) == b"3,4\n"
    assert writer.preamble() == b"", "it was written"


def test_header_is_only_for_lines() -> None:
    assert Writer("raw", [], preamble=b"a,b").lines(result({"n": 1})) == b'{"n":1}\n'
    assert Writer("jsonl", [], preamble=b"a,b").preamble() == b""
    assert Writer("raw", [], preamble=b"a,b").preamble() == b"a,b"


def test_tsv_has_tabs_between_cells_and_quotes_what_holds_one() -> None:
    writer = Writer("tsv", [])

    lines = writer.lines(result({"a": "1", "b": "2,5"})) + writer.lines(
        result({"a": "x\ty", "b": 3})
    )

    assert lines == b'a\tb\n1\t2,5\n"x\ty"\t3\n'
    assert writer.line(encode_item("text"), b"", 1, 1) == b"\t\n"


def test_lines_with_keys_have_the_numbers_of_part_and_record() -> None:
    writer = Writer("jsonl", [], has_keys=True)
    items = [encode_item(value) for value in ("a", None, {"n": 3})]

    lines = writer.lines(encode_result(items), 7)

    assert lines == (
        b'{"part":7,"record":1,"result":"a"}\n{"part":7,"record":3,"result":{"n":3}}\n'
    )
    assert writer.has_skipped


@pytest.mark.parametrize(("letter", "ending"), [(b"", b"\n"), (b"n", b"\n"), (b"r", b"\r\n")])
def test_line_alone_ends_as_the_one_of_the_input_did(letter: bytes, ending: bytes) -> None:
    assert Writer("raw", []).line(b"a", letter, 1, 1) == b"a" + ending


def test_value_is_told_of_the_last_lines_only() -> None:
    """Whoever keeps the lines elsewhere tells whether a header of the input belongs before them."""
    writer = Writer("raw", [])

    told = []
    for value in ({"n": 1}, b"text", {"n": 2}):
        writer.lines(result(value))
        told.append(writer.is_value)

    assert told == [True, False, True]


def test_rows_for_a_table_are_a_frame() -> None:
    rows = [{"n": 1}, {"n": 2}]

    frame = Writer("parquet", []).lines(encode_result([encode_item(row) for row in rows]))

    size = len(frame) - 12
    assert frame[:12] == b"SQT1" + size.to_bytes(8, "little")
    assert unpack_table(frame[12:]).to_pylist() == rows
