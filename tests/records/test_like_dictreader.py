"""A CSV is split and decoded to the rows that ``csv.DictReader`` finds, with their real lines."""

import csv
import io
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streamq.app import App
from streamq.errors import DecodeError, InvalidValue
from streamq.model import Part, Spec
from streamq.records.about import AboutPlace
from streamq.records.decoding import (
    decoder_for,
    is_blank_record,
    lines_before,
    records_in,
    without_line_ending,
)
from streamq.records.inputs import BadInput, open_input
from streamq.records.names import Dialect
from streamq.records.sizes import PartSize, Step
from streamq.records.splitting import Cursor, beginning_of_csv, split_by_steps, split_input

#: What a CSV is made of: each line ending, quoted fields with newlines in them, empty rows.
PIECES = [
    "\n",
    "\r\n",
    "\r",
    "a",
    "b,c",
    '"x\ny"',
    '"x\r\ny"',
    '"x\ry"',
    '"q""q"',
    ",",
    "1,2",
    "\n",
]
Row = tuple[int, object]


def ours(path: Path, encoding: str, size: PartSize, steps: int) -> list[Row]:
    """Rows as the loader cuts them and a worker decodes them; None for one that is refused."""
    spec = Spec(format="csv", files=(str(path),), encoding=encoding)
    spec = Dialect().applied(spec)
    app = App()

    @app.map(name="h")
    def same(row: Any) -> Any:
        return row

    decode = decoder_for(app.handlers["h"], spec)
    rows: list[Row] = []
    with closing(open_input(str(path), encoding)) as source:
        begin = beginning_of_csv(source, spec, 2**20, has_header=True)
        source.seek(begin.size)
        start = Cursor(0, begin.size, begin.lines + 1)
        chunks = (
            split_by_steps(source, spec, size, start, lambda: Step(steps, 2))
            if steps
            else split_input(source, spec, size, start)
        )
        for chunk in chunks:
            for payload, about in zip(chunk.payloads, chunk.abouts, strict=True):
                part = Part(1, payload, about)
                place = AboutPlace.of(about, spec)
                assert place
                found = records_in(part, spec)
                kept = [
                    (n, each) for n, each in enumerate(found) if not is_blank_record(each, spec)
                ]
                assert len(kept) == place.records
                for index, record in kept:
                    line = place.line + lines_before(part, index, spec)
                    try:
                        rows.append((line, decode(without_line_ending(record), False)))
                    except DecodeError:
                        rows.append((line, None))
    return rows


def theirs(text: str) -> list[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    names = list(reader.fieldnames or [])
    rows: list[Row] = []
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return rows
        is_whole = None not in row and None not in row.values()
        rows.append((0, dict(row) if is_whole and len(row) == len(names) else None))


@pytest.mark.parametrize("encoding", ["", "latin-1", "utf-16"])
def test_rows_are_those_of_dictreader(tmp_path: Path, encoding: str) -> None:
    rnd, compared = random.Random(5), 0
    path = tmp_path / "in.csv"
    for _ in range(400):
        text = "x,y\n" + "".join(rnd.choice(PIECES) for _ in range(rnd.randrange(25)))
        text = text.replace("x,y\n", rnd.choice(["x,y\n", "x,y\r", "x,y\r\n", "\n\nx,y\n"]), 1)
        bare_text = text.lstrip("\n")
        path.write_bytes(text.encode(encoding or rnd.choice(["utf-8", "utf-8-sig"])))
        size = PartSize(records=rnd.choice([0, 1, 3]), bytes=rnd.choice([8, 64, 4096]))
        try:
            found = ours(path, encoding, size, rnd.choice([0, 1, 2, 50]))
        except (BadInput, InvalidValue):
            continue  # a quote is not closed: DictReader takes the rest for one field
        wanted = theirs(bare_text)
        assert [row for _, row in found] == [row for _, row in wanted], text
        lines = text.replace("\r\n", "\n").replace("\r", "\n")
        assert [line for line, _ in found] == _lines_of_rows(text), lines
        compared += 1
    assert compared > 200


def _lines_of_rows(text: str) -> list[int]:  # noqa: C901  it reads a character at a time
    """The first line of each row, by another way: outside quotes ``\\r`` ends one, too."""
    begins, line, is_quoted, at_field, row_begin, is_empty = [], 1, False, True, 1, True
    index = 0
    while index < len(text):
        char = text[index]
        is_pair = text[index : index + 2] == "\r\n"
        if is_quoted:
            if char == '"' and text[index + 1 : index + 2] == '"':
                index += 1
            elif char == '"':
                is_quoted = False
            elif char == "\n":
                line += 1
        elif char in "\r\n":
            if not is_empty:
                begins.append(row_begin)
            index += is_pair
            line += 1
            row_begin, is_empty, at_field = line, True, True
            index += 1
            continue
        else:
            is_quoted = char == '"' and at_field
            is_empty = False
        at_field = char == "," and not is_quoted
        index += 1
    if not is_empty:
        begins.append(row_begin)
    return begins[1:]
