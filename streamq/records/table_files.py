"""Files that hold tables: Parquet and Arrow. Their parts are rows of one row group, by reference.

A loader reads only how many rows each group has. Workers read the rows. (An Arrow file has record
batches; here they are called groups, too.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streamq.app import Abandon
from streamq.errors import StreamqError
from streamq.model import CHUNK_PARTS
from streamq.records import about
from streamq.records.arrow_tables import pyarrow
from streamq.records.inputs import BadInput, InputIdentity
from streamq.records.remote import Object, RemoteRangeFile, is_remote
from streamq.records.sizes import MOST_RECORDS, PartSize, Step
from streamq.records.splitting import Chunk, Cursor

_NAMES = {"parquet": "Parquet", "arrow": "Arrow"}
_ENCRYPTED = b"PARE"
_STREAM = b"\xff\xff\xff\xff"
_OLD_FEATHER = b"FEA1"


class TableReference(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a part that is rows of a table in a file."""

    group: int
    #: The first row in the group, from 0, and how many.
    first: int
    rows: int
    #: Of the file when it was loaded: its size, and a version that changes with its content.
    size: int
    version: str


class RowGroups(NamedTuple):
    """How many rows each group of a file has, and about how many bytes."""

    rows: list[int]
    sizes: list[int]


class TableFile:
    """An open file that holds a table. Keeps the group that was read last: the next part is often
    of the same.
    """

    def __init__(self, name: str, file: Any, form: str) -> None:
        """Read what the file says of itself.

        Raises:
            BadInput: the file holds no such table, is cut short or is encrypted.
        """
        self._name = name
        self._form = form
        self.file = file
        self._last: tuple[Any, Any] | None = None
        try:
            head = _first_bytes(file)
            self._refuse(head)
            if form == "parquet":
                self._reader = pyarrow("parquet").ParquetFile(
                    file, pre_buffer=isinstance(file, RemoteRangeFile)
                )
            else:
                self._reader = pyarrow("ipc").open_file(file)
        except StreamqError:
            raise
        except Exception as error:  # noqa: BLE001  pyarrow's errors are of many kinds
            raise BadInput(
                f"{name}: it is no {_NAMES[form]} file: {_first_line_of_pyarrow(error)}"
            ) from None

    def _refuse(self, head: bytes) -> None:
        if self._form == "parquet" and head == _ENCRYPTED:
            raise BadInput(f"{self._name}: it is encrypted, and there is no key to read it with")
        if self._form == "arrow" and head == _STREAM:
            raise BadInput(
                f"{self._name}: it is an Arrow stream, of which nobody can read a part: write it "
                "as an Arrow file, or as Parquet"
            )
        if self._form == "arrow" and head == _OLD_FEATHER:
            raise BadInput(f"{self._name}: it is Feather of version 1: write it as version 2")

    @property
    def schema(self) -> Any:
        """The names and types of the columns."""
        return self._reader.schema_arrow if self._form == "parquet" else self._reader.schema

    def groups(self) -> RowGroups:
        """Return how many rows and bytes each group has.

        Raises:
            BadInput: the file is damaged.
        """
        try:
            if self._form == "parquet":
                meta = self._reader.metadata
                found = [meta.row_group(index) for index in range(meta.num_row_groups)]
                return RowGroups([g.num_rows for g in found], [g.total_byte_size for g in found])
            return self._batches()
        except StreamqError:
            raise
        except Exception as error:  # noqa: BLE001  pyarrow's errors are of many kinds
            raise BadInput(
                f"{self._name}: it is damaged: {_first_line_of_pyarrow(error)}"
            ) from None

    def _batches(self) -> RowGroups:
        ipc = pyarrow("ipc")
        # The rows of a batch are counted by its first column alone.
        options = ipc.IpcReadOptions(included_fields=[0])
        counts = self._reader if not len(self._reader.schema) else None
        counts = counts or ipc.open_file(self.file, options=options)
        rows = [counts.get_batch(index).num_rows for index in range(counts.num_record_batches)]
        self.file.seek(0, 2)
        size = self.file.tell() // max(1, sum(rows))
        return RowGroups(rows, [count * size for count in rows])

    def read(self, reference: TableReference, columns: Sequence[str] | None) -> Any:
        """Return some rows of a group as a table; with ``columns``, only those of these names.

        Raises:
            Abandon: the rows cannot be read.
        """
        key = reference.group, tuple(columns or ())
        if self._last is None or self._last[0] != key:
            self._last = None
            self._last = key, self._group(reference.group, columns)
        table = self._last[1]
        if reference.first == 0 and reference.rows == table.num_rows:
            self._last = None  # all of it was asked for
            return table
        return table.slice(reference.first, reference.rows)

    def _group(self, group: int, columns: Sequence[str] | None) -> Any:
        names = set(self.schema.names)
        wanted = [name for name in columns or () if name in names] or None
        try:
            if self._form == "parquet":
                return self._reader.read_row_group(group, columns=wanted, use_threads=False)
            table = pyarrow().Table.from_batches([self._reader.get_batch(group)])
            return table.select(wanted) if wanted else table
        except StreamqError:
            raise
        except Exception as error:  # noqa: BLE001  pyarrow's errors are of many kinds
            raise Abandon(
                f"{self._name}: row group {group + 1}: {_first_line_of_pyarrow(error)}"
            ) from None

    def close(self) -> None:
        """Close the file."""
        self._last = None
        with suppress(Exception):
            self._reader.close()
        self.file.close()


def _first_bytes(file: Any) -> bytes:
    head: bytes = file.read(4)
    file.seek(0)
    return head


def _first_line_of_pyarrow(error: Exception) -> str:
    """Return the first line of pyarrow's message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def open_table(name: str, form: str) -> TableFile:
    """Open a file that holds a table, or an object behind a URL.

    Raises:
        BadInput: it is not there, or holds no such table.
    """
    if is_remote(name):
        found = InputIdentity.of(name)
        return TableFile(name, RemoteRangeFile(name, Object(found.size, found.digest)), form)
    try:
        file = Path(name).open("rb")  # noqa: SIM115  the TableFile closes it
    except OSError as error:
        raise BadInput(f"{name}: {error.strerror or error}") from None
    try:
        return TableFile(name, file, form)
    except BaseException:
        file.close()
        raise


def table_chunks(
    then: InputIdentity,
    form: str,
    start: Cursor,
    size: PartSize,
    steer: Callable[[], Step] | None,
) -> Iterator[Chunk]:
    """Yield the rest of a file in chunks of parts, from the cursor on.

    A part has all rows of a group, or so many as ``size`` or ``steer`` say, and never of two.

    Raises:
        BadInput: the file cannot be read.
    """
    with closing(open_table(then.name, form)) as table:
        groups = table.groups()
    cursor, begin = start, 0
    for group, (rows, size_bytes) in enumerate(zip(*groups, strict=True)):
        while begin <= cursor.offset < begin + rows:
            most = size.records or _rows_in(size, rows, size_bytes)
            step = steer() if steer else Step(most, CHUNK_PARTS)
            chunk = _rows_chunk(then, group, begin, rows, cursor, step)
            chunk.input_size = size_bytes * chunk.records // rows
            yield chunk
            cursor = chunk.end
        begin += rows


def _rows_in(size: PartSize, rows: int, size_bytes: int) -> int:
    """Return how many rows of a group make a part: all, unless the user said a number of bytes."""
    if size.is_automatic is True:
        return MOST_RECORDS
    return max(1, size.bytes * rows // max(1, size_bytes))


def _rows_chunk(
    then: InputIdentity, group: int, begin: int, rows: int, cursor: Cursor, step: Step
) -> Chunk:
    """Return the next parts of a group, which begins at that row of the file."""
    payloads: list[bytes] = []
    abouts: list[bytes] = []
    first = cursor.offset - begin
    while first < rows and len(payloads) < min(step.parts, CHUNK_PARTS):
        count = min(step.records, rows - first)
        reference = TableReference(group, first, count, then.size, then.version)
        payloads.append(msgspec.json.encode(reference))
        abouts.append(about.about_of_lines(count, cursor.file, begin + first + 1))
        first += count
    at = begin + first
    records, size = at - cursor.offset, sum(map(len, payloads))
    end = Cursor(cursor.file, at, at + 1, blank=cursor.blank)
    return Chunk(payloads, abouts, records, size, end)
