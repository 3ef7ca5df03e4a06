"""Tables in memory: rows out of them, and tables out of rows and of what handlers return.

pyarrow, which the extra ``arrow`` installs, is imported when the first table is seen. polars and
pandas are imported only for a handler that asks for them.
"""

import importlib
import importlib.util
import inspect
import io
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from streamq.app import table_kind_of_handler
from streamq.errors import DecodeError, InvalidValue
from streamq.model import Spec

#: Formats of files that hold tables, and not text.
TABLE_FORMATS = ("parquet", "arrow")

_ANYTHING = (Any, dict, inspect.Parameter.empty)


class _Unreadable:
    """A row that cannot be a dict, such as one with a time in the year 20,000."""

    def __init__(self, why: str) -> None:
        self.why = why


def check_pyarrow_installed(name: str) -> None:
    """Raise InvalidValue if pyarrow is not there to read or write a file."""
    if importlib.util.find_spec("pyarrow") is None:
        raise InvalidValue(f"{name}: tables take pip install 'streamq[arrow]'")


def pyarrow(part: str = "") -> Any:
    """Return pyarrow, or a module of it.

    Raises:
        InvalidValue: it is not installed.
    """
    try:
        return importlib.import_module(f"pyarrow.{part}" if part else "pyarrow")
    except ImportError:
        raise InvalidValue("tables take pip install 'streamq[arrow]'") from None


def rows_of_table(table: Any) -> list[Any]:
    """Return the rows of a table as dicts. A row without values in Python says so when it is used.

    So does every row where two columns have the same name.
    """
    names = table.column_names
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        why = f"two columns have the name {double!r}: take a pyarrow.Table instead"
        return [_Unreadable(why) for _ in range(table.num_rows)]
    table = _with_plain_arrow_types(table)
    try:
        columns = [column.to_pylist() for column in table.columns]
    except Exception:  # noqa: BLE001  whatever one value leads to, its row says
        return [_table_row_of_columns(table, index) for index in range(table.num_rows)]
    if not columns:
        return [{} for _ in range(table.num_rows)]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _table_row_of_columns(table: Any, index: int) -> Any:
    try:
        return table.slice(index, 1).to_pylist()[0]
    except Exception as error:  # noqa: BLE001  whatever the value leads to
        return _Unreadable(str(error))


def _with_plain_arrow_types(table: Any) -> Any:
    """Return a table whose times have microseconds: Python has no nanoseconds."""
    pa = pyarrow()
    fields = [field.with_type(_plain_arrow_type(pa, field.type)) for field in table.schema]
    wanted = pa.schema(fields)
    return table if wanted.equals(table.schema) else table.cast(wanted, safe=False)


def _plain_arrow_type(pa: Any, kind: Any) -> Any:
    types = pa.types
    if getattr(kind, "unit", "") == "ns":
        if types.is_timestamp(kind):
            return pa.timestamp("us", kind.tz)
        return pa.duration("us") if types.is_duration(kind) else pa.time64("us")
    if types.is_float16(kind):
        return pa.float32()
    if types.is_struct(kind):
        return pa.struct([f.with_type(_plain_arrow_type(pa, f.type)) for f in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        make = pa.list_ if types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_plain_arrow_type(pa, kind.value_type)))
    return kind


def table_row_decoder(annotation: Any) -> Any:
    """Return the function that makes of a row what a handler is called with.

    As text or bytes a row is JSON; as a list or a tuple it has the values in the order of columns.
    """
    if annotation in (str, bytes):
        return lambda row: (
            _arrow_row_as_json(row) if annotation is bytes else _arrow_row_as_json(row).decode()
        )
    is_plain = _is_plain_type_of_arrow(annotation)
    is_list = annotation is list or typing.get_origin(annotation) in (list, tuple)

    def decode(row: Any) -> Any:
        if isinstance(row, _Unreadable):
            raise DecodeError(f"the row does not decode: {row.why}")
        if is_plain:
            return row
        return msgspec.convert(list(row.values()) if is_list else row, annotation, strict=False)

    return decode


def _is_plain_type_of_arrow(annotation: Any) -> bool:
    return annotation in _ANYTHING or annotation == dict[str, Any]


def plain_rows_of_table(table: Any, annotation: Any) -> list[Any] | None:
    """Return all rows as what a handler is called with; None where each is to be decoded alone."""
    rows = rows_of_table(table)
    if any(type(row) is _Unreadable for row in rows):
        return None
    if _is_plain_type_of_arrow(annotation):
        return rows
    if annotation in (str, bytes) or typing.get_origin(annotation) in (list, tuple):
        return None
    try:
        return msgspec.convert(rows, list[annotation], strict=False)
    except Exception:  # noqa: BLE001  whatever one row raises, that row says when it is alone
        return None


def _arrow_row_as_json(row: Any) -> bytes:
    if isinstance(row, _Unreadable):
        raise DecodeError(f"the row does not decode: {row.why}")
    return msgspec.json.encode(row)


def table_as_json_lines(table: Any) -> bytes:
    """Return the rows of a table as JSON lines."""
    return b"".join(_arrow_row_as_json(row) + b"\n" for row in rows_of_table(table))


def table_row_as_json(row: Any) -> bytes:
    """Return a row as JSON; nothing for one that Python has no values for."""
    return b"" if isinstance(row, _Unreadable) else msgspec.json.encode(row)


def table_columns_of_rows(annotation: Any) -> list[str] | None:
    """Return the only columns that a handler of such rows can see; None: all of them."""
    if typing.get_origin(annotation) is list:
        (annotation,) = typing.get_args(annotation)
    is_struct = isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)
    if not is_struct or annotation.__struct_config__.forbid_unknown_fields:
        return None
    if annotation.__struct_config__.array_like:
        return None
    return [field.encode_name for field in msgspec.structs.fields(annotation)] or None


# Tables for handlers


def table_as_kind(table: Any, kind: str) -> Any:
    """Return a table as the type of table that a handler takes; "" is a ``pyarrow.Table``."""
    if kind == "pyarrow.RecordBatch":
        batches = table.combine_chunks().to_batches()
        if len(batches) == 1:
            return batches[0]
        return pyarrow().RecordBatch.from_pylist(table.to_pylist(), schema=table.schema)
    if kind == "polars.DataFrame":
        return _table_library("polars").from_arrow(table)
    if kind == "pandas.DataFrame":
        _table_library("pandas")
        return table.to_pandas()
    return table


def _table_library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InvalidValue(f"the handler takes a table of {name}: pip install {name}") from None


def table_from_csv(payload: bytes, names: Sequence[str], spec: Spec) -> Any:
    """Return rows of a CSV as a table. All columns are text, as for handlers of rows.

    Raises:
        DecodeError: a row has more or fewer fields than the header.
    """
    pa, csv = pyarrow(), pyarrow("csv")
    if not payload.strip(b"\r\n"):
        return pa.table({name: pa.array([], pa.string()) for name in names})
    read = csv.ReadOptions(
        column_names=list(names) or None,
        autogenerate_column_names=not names,
        block_size=max(2**20, 2 * len(payload)),
        use_threads=False,
    )
    parse = csv.ParseOptions(
        delimiter=spec.delimiter,
        quote_char=spec.quote or False,
        escape_char=spec.escape or False,
        newlines_in_values=True,
    )
    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
    )
    try:
        table = csv.read_csv(io.BytesIO(payload), read, parse, convert)
    except pa.ArrowException as error:
        raise DecodeError(f"the part is no table: {error}") from None
    return table.cast(pa.schema([pa.field(name, pa.string()) for name in table.column_names]))


def table_from_rows(rows: Sequence[Any]) -> Any:
    """Return a table of rows. A value that is no dict is in the column ``result``.

    A column whose values have no common type is text: JSON of what is no text.
    """
    dicts = [row if isinstance(row, dict) else {"result": row} for row in rows]
    names = dict.fromkeys(name for row in dicts for name in row)
    pa = pyarrow()
    columns = {str(name): _arrow_column(pa, [row.get(name) for row in dicts]) for name in names}
    return pa.table(columns)


def _arrow_column(pa: Any, values: list[Any]) -> Any:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        return pa.array(list(map(table_cell_as_text, values)), pa.string())


def table_cell_as_text(value: Any) -> str | None:
    """Return text as it is, and any other value as JSON."""
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def table_of(value: Any) -> Any:
    """Return what a handler returned as a ``pyarrow.Table``; None if it is no table."""
    kind, pa = table_kind_of_handler(type(value)), None
    if not kind:
        return None
    pa = pyarrow()
    if kind == "pyarrow.RecordBatch":
        value = pa.Table.from_batches([value])
    elif kind == "polars.DataFrame":
        value = value.to_arrow(compat_level=_table_library("polars").CompatLevel.oldest())
    elif kind == "pandas.DataFrame":
        value = pa.Table.from_pandas(value, preserve_index=False)
    return value.replace_schema_metadata(None)


def pack_table(table: Any) -> bytes:
    """Return a table as an Arrow stream."""
    pa, ipc = pyarrow(), pyarrow("ipc")
    sink = pa.BufferOutputStream()
    options = ipc.IpcWriteOptions(compression="lz4")
    with ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def unpack_table(data: bytes) -> Any:
    """Return the table of an Arrow stream."""
    return pyarrow("ipc").open_stream(data).read_all()


def joined_tables(tables: Iterable[Any]) -> Any:
    """Return tables of one schema, one behind the other."""
    return pyarrow().concat_tables(list(tables))
