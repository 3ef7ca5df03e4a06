"""Parts out of files: put together again they are the file, and no record is cut."""

import csv
import gzip
import io
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from streamq.model import Spec
from streamq.records.about import AboutPlace
from streamq.records.boundaries import blank_lines, fields_of_csv_row, records_between_boundaries
from streamq.records.decoding import is_blank_record
from streamq.records.inputs import BadInput, open_input
from streamq.records.sizes import PartSize
from streamq.records.splitting import split_input
from tests.records.pieces import START, after, pieces

ANY = settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)


@ANY
@given(
    lines=st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=60),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    is_ended=st.booleans(),
    limit=st.integers(1, 200),
)
def test_pieces_of_lines_are_the_file_again(
    file: Path, lines: list[bytes], ending: bytes, is_ended: bool, limit: int
) -> None:
    data = ending.join(lines) + (ending if is_ended and lines else b"")
    assume(data[:1] not in b"\x1f\xfd(B")
    file.write_bytes(data)

    found = pieces(file, size=PartSize(bytes=limit))

    assert b"".join(piece.payload for piece in found) == data
    assert all(piece.payload.endswith(b"\n") for piece in found[:-1])
    assert all(len(p.payload) <= limit or p.records == 1 for p in found)
    assert sum(piece.records for piece in found) == data.count(b"\n") + bool(
        data and not data.endswith(b"\n")
    )


DIALECTS = [
    (Spec(format="csv"), {"quoting": csv.QUOTE_ALL}),
    (Spec(format="csv"), {}),
    (Spec(format="csv", delimiter=";", quote="'"), {"delimiter": ";", "quotechar": "'"}),
    (Spec(format="csv", escape="\\"), {"escapechar": "\\", "doublequote": False}),
    (
        Spec(format="csv", quote="", escape="\\"),
        {"quoting": csv.QUOTE_NONE, "escapechar": "\\", "quotechar": None},
    ),
]


@ANY
@given(
    rows=st.lists(
        st.lists(st.text("ab\"'\n,;\r\\ ", max_size=8), min_size=2, max_size=3),
        min_size=1,
        max_size=30,
    ),
    limit=st.integers(1, 120),
    by_records=st.integers(0, 4),
    dialect=st.sampled_from(DIALECTS),
)
def test_pieces_of_csv_cut_no_row(
    file: Path,
    rows: list[list[str]],
    limit: int,
    by_records: int,
    dialect: tuple[Spec, dict[str, Any]],
) -> None:
    spec, options = dialect
    if options != DIALECTS[0][1]:
        # Python's own writer leaves them without quotes.
        rows = [[field.replace("\r", "") for field in row] for row in rows]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", **options).writerows(rows)
    file.write_text(text.getvalue(), newline="")

    found = pieces(file, "csv", PartSize(bytes=limit, records=by_records), spec=spec)

    assert b"".join(piece.payload for piece in found) == file.read_bytes()
    records = [
        record for piece in found for record in records_between_boundaries(piece.payload, spec)
    ]
    assert [fields_of_csv_row(record.removesuffix(b"\n"), spec) for record in records] == rows
    assert sum(piece.records for piece in found) == len(rows)


def test_quote_inside_a_field_is_a_character(file: Path) -> None:
    file.write_bytes(b'size,n\n5" pipe,3\n6" pipe,4\n"a ""b""\nc",5\n')

    found = pieces(file, "csv", PartSize(records=1))

    assert [piece.payload for piece in found] == [
        b"size,n\n",
        b'5" pipe,3\n',
        b'6" pipe,4\n',
        b'"a ""b""\nc",5\n',
    ]


@ANY
@given(
    lines=st.lists(
        st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=40
    ),
    n=st.integers(1, 7),
)
def test_load_goes_on_at_any_cursor(file: Path, lines: list[bytes], n: int) -> None:
    assume(lines[0][:1] not in b"\x1f\xfd(B")
    file.write_bytes(b"\n".join(lines))
    size = PartSize(records=n)
    whole = pieces(file, size=size)

    for index, piece in enumerate(whole):
        assert pieces(file, size=size, start=after(whole, index)) == whole[index + 1 :]
        assert piece.records <= n


@ANY
@given(
    pieces_=st.lists(st.sampled_from([b"\n", b"\r", b" ", b"\t", b"\v", b"\f", b"1"]), max_size=30)
)
def test_blank_lines_are_those_that_workers_pass_over(pieces_: list[bytes]) -> None:
    data, spec = b"".join(pieces_), Spec(format="jsonl")

    skipped = [
        each for each in records_between_boundaries(data, spec) if is_blank_record(each, spec)
    ]

    assert blank_lines(data) == len(skipped)


def test_lines_are_counted_beside_records_where_some_are_blank(file: Path) -> None:
    file.write_bytes(b"1\n\n2\n3\n4\n")
    spec = Spec(format="jsonl")
    with closing(open_input(str(file))) as source:
        chunks = list(split_input(source, spec, PartSize(records=3), START))

    abouts = [about for chunk in chunks for about in chunk.abouts]
    assert (abouts, sum(chunk.records for chunk in chunks)) == ([b"2 0 1 3", b"2 0 4"], 4)
    places = [AboutPlace.of(about, Spec(files=("in",))) for about in abouts]
    assert places == [AboutPlace("in", 1, 3, 2), AboutPlace("in", 4, 5, 2)]


def test_empty_file_has_no_piece(file: Path) -> None:
    file.write_bytes(b"")

    assert pieces(file) == []


@pytest.mark.parametrize(
    ("data", "form", "says"),
    [
        (
            b"short\n" + b"x" * 200 + b"\n",
            "lines",
            "line 2, at byte 6, is longer .* --by-reference",
        ),
        (b"x" * 200, "lines", "line 1"),
        (b'a,b\n1,"open\n2,3\n', "csv", "line 2: a quote is not closed"),
        (gzip.compress(b"line\n" * 5000, mtime=0)[:-20], "lines", "after line"),
        (gzip.compress(b"x" * 200, mtime=0), "lines", "line 1"),
    ],
)
def test_bad_input_is_named(file: Path, data: bytes, form: str, says: str) -> None:
    file.write_bytes(data)

    with pytest.raises(BadInput, match=says) as raised:
        pieces(file, form, PartSize(bytes=50, most=100))

    assert str(file) in str(raised.value)
