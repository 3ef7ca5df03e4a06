"""Files cut into pieces."""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec

from streamq.model import Spec
from streamq.records.inputs import open_input
from streamq.records.sizes import PartSize
from streamq.records.splitting import Cursor, split_input

SIZE, START, COMMON = PartSize(), Cursor(), Spec()


class Piece(NamedTuple):
    payload: bytes
    records: int
    #: Of its first record.
    record: int


def pieces(
    path: Path,
    form: str = "lines",
    size: PartSize = SIZE,
    start: Cursor = START,
    spec: Spec = COMMON,
) -> list[Piece]:
    spec = msgspec.structs.replace(spec, format=form)
    found = []
    with closing(open_input(str(path))) as source:
        source.seek(start.offset)
        for chunk in split_input(source, spec, size, start):
            for payload, about in zip(chunk.payloads, chunk.abouts, strict=True):
                records, _, record, *_ = map(int, about.split())
                found.append(Piece(payload, records, record))
    return found


def after(found: list[Piece], index: int) -> Cursor:
    """Where a load stands after a piece."""
    offset = sum(len(piece.payload) for piece in found[: index + 1])
    return Cursor(0, offset, found[index].record + found[index].records)
