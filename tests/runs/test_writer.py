"""The writer of an output: headers, and what comes before the first line."""

import pytest

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
