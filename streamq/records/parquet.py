"""A Parquet output. Parquet has its index at the end, so nobody can go on with half a file.

So while results come the file holds *frames*: tables, each with its length before it. They are
added, committed and cut as lines are. When all results are there, Parquet is made of them, in a
draft that takes the place of the file in one step. After a retry more frames come behind the
Parquet, and Parquet is made of both.
"""

import io
import logging
import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, BinaryIO

from streamq.errors import Damaged, InvalidValue, StreamqError
from streamq.model import Spec
from streamq.records import arrow_tables
from streamq.records.arrow_tables import TABLE_FORMATS, pyarrow
from streamq.records.table_files import open_table

log = logging.getLogger(__name__)

_HEAD = struct.Struct("<4sQ")
_MAGIC = b"SQT1"
#: The most rows of a row group, and about the most bytes.
_ROWS = 2**20
_BYTES = 2**27


def table_frame(table: Any) -> bytes:
    """Return a table as it is kept until all results are there."""
    data = arrow_tables.pack_table(table)
    return _HEAD.pack(_MAGIC, len(data)) + data


def column_types_of_input(spec: Spec) -> dict[str, Any]:
    """Return the types of columns of the input that JSON has no values for: times and decimals."""
    if spec.format not in TABLE_FORMATS or spec.stage:
        return {}
    try:
        with closing(open_table(spec.files[0], spec.format)) as table:
            schema = table.schema
    except StreamqError:
        return {}
    types = pyarrow().types
    kinds = (types.is_timestamp, types.is_date, types.is_time, types.is_decimal)
    return {f.name: f.type for f in schema if any(is_one(f.type) for is_one in kinds)}


def convert_to_parquet(
    file: BinaryIO, sealed: int, end: int, types: Mapping[str, Any]
) -> Iterator[bytes]:
    """Yield the Parquet that is made of a file: of its Parquet, so many bytes, and its frames.

    ``types``: what text in a column of that name is to be, if all of it can be.

    Raises:
        Damaged: the file does not hold what was written.
    """
    pa, parquet = pyarrow(), pyarrow("parquet")
    try:
        schema = _schema_of_tables(file, sealed, end, types)
        sink = _ParquetSink()
        with parquet.ParquetWriter(sink, schema) as writer:
            for table in _row_groups(_tables_of_file(file, sealed, end)):
                writer.write_table(_table_with_schema(table, schema), row_group_size=_ROWS)
                yield sink.taken()
        yield sink.taken()
    except pa.ArrowException as error:
        raise Damaged(f"no Parquet can be made of the results: {error}") from None


class _ParquetSink(io.RawIOBase):
    """Keeps what a writer writes until it is taken."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._blocks.append(bytes(data))
        self._size += len(self._blocks[-1])
        return len(self._blocks[-1])

    def tell(self) -> int:
        return self._size

    def taken(self) -> bytes:
        """Return what was written since the last time."""
        blocks, self._blocks = self._blocks, []
        return b"".join(blocks)


def _tables_of_file(file: BinaryIO, sealed: int, end: int) -> Iterator[Any]:
    """Yield all tables of a file."""
    if sealed:
        with closing(_parquet_before_frames(file, sealed)) as before:
            for index in range(before.metadata.num_row_groups):
                yield before.read_row_group(index)
    for offset, length in _places_of_frames(file, sealed, end):
        file.seek(offset)
        yield arrow_tables.unpack_table(file.read(length))


def _parquet_before_frames(file: BinaryIO, sealed: int) -> Any:
    """Return the Parquet with which a file begins."""
    mapped = mmap.mmap(file.fileno(), sealed, access=mmap.ACCESS_READ)
    source = pyarrow().BufferReader(pyarrow().py_buffer(mapped))
    return pyarrow("parquet").ParquetFile(source)


def _places_of_frames(file: BinaryIO, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where the tables of frames are, and how long."""
    at = begin
    while at < end:
        file.seek(at)
        head = file.read(_HEAD.size)
        magic, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0)
        at += _HEAD.size
        if magic != _MAGIC or at + length > end:
            raise Damaged("the output does not hold the tables that were written to it")
        yield at, length
        at += length


def _row_groups(tables: Iterable[Any]) -> Iterator[Any]:
    """Yield tables joined to what makes a row group; those of one schema only."""
    held: list[Any] = []
    rows = size = 0
    for table in tables:
        is_other = held and not table.schema.equals(held[0].schema)
        if held and (is_other or rows + table.num_rows > _ROWS or size > _BYTES):
            yield arrow_tables.joined_tables(held)
            held, rows, size = [], 0, 0
        held.append(table)
        rows, size = rows + table.num_rows, size + table.nbytes
    if held:
        yield arrow_tables.joined_tables(held)


def _schema_of_tables(file: BinaryIO, sealed: int, end: int, types: Mapping[str, Any]) -> Any:
    """Return the columns that all tables together have, in the order in which they came."""
    pa = pyarrow()
    found: dict[str, Any] = {}
    seen: set[bytes] = set()
    schemas = []
    if sealed:
        with closing(_parquet_before_frames(file, sealed)) as before:
            schemas.append(before.schema_arrow)
    for offset, _ in _places_of_frames(file, sealed, end):
        text = _schema_text(file, offset)
        if text not in seen:
            seen.add(text)
            schemas.append(pyarrow("ipc").read_schema(pa.py_buffer(text)))
    for field in (field for schema in schemas for field in schema):
        found[field.name] = _type_for_both(pa, found.get(field.name, field.type), field.type)
    is_text = (pa.string(), pa.large_string())
    hints = {name: types[name] for name, kind in found.items() if kind in is_text and name in types}
    if hints:
        found |= _types_that_text_has(_tables_of_file(file, sealed, end), hints)
    return pa.schema(list(found.items()))


def _schema_text(file: BinaryIO, offset: int) -> bytes:
    """Return the first message of an Arrow stream: its schema, as bytes."""
    file.seek(offset)
    head = file.read(8)
    return head + file.read(int.from_bytes(head[4:], "little"))


def _type_for_both(pa: Any, one: Any, other: Any) -> Any:
    """Return the type for values of two types: text where they have nothing in common."""
    one, other = (
        kind.value_type if pa.types.is_dictionary(kind) else kind for kind in (one, other)
    )
    if one.equals(other) or pa.types.is_null(other):
        return one
    try:
        pair = [pa.schema([("x", kind)]) for kind in (one, other)]
        return pa.unify_schemas(pair, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return pa.string()


def _types_that_text_has(tables: Iterable[Any], hints: dict[str, Any]) -> dict[str, Any]:
    """Return those of the types that all text in the columns of their names has."""
    pa, left = pyarrow(), dict(hints)
    for table in tables:
        for name in [name for name in left if name in table.column_names]:
            try:
                table.column(name).cast(left[name])
            except pa.ArrowException:
                del left[name]
        if not left:
            break
    return left


def _table_with_schema(table: Any, schema: Any) -> Any:
    """Return a table with the columns of a schema. Columns that it lacks are null."""
    pa = pyarrow()
    if len(set(table.column_names)) < table.num_columns:
        raise InvalidValue("a table among the results has two columns of one name")
    columns = [
        _column_of_type(pa, table.column(field.name), field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _column_of_type(pa: Any, column: Any, kind: Any) -> Any:
    if column.type.equals(kind):
        return column
    text = (pa.string(), pa.large_string(), pa.string_view())
    if kind in text[:2] and column.type not in text and not pa.types.is_dictionary(column.type):
        return pa.array(list(map(arrow_tables.table_cell_as_text, column.to_pylist())), kind)
    try:
        return column.cast(kind, safe=False)
    except pa.ArrowException:
        return pa.array(column.to_pylist(), kind)
