"""Parquet and Arrow files: parts, rows, and tables for handlers. No server is needed."""

import datetime as dt
import decimal
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from streamq import Abandon, App, InvalidValue
from streamq.app import describe_handler
from streamq.model import Part, Spec
from streamq.queue.outcomes import PartDone, PartNotDone
from streamq.records.encoding import decode_item, decode_result
from streamq.records.inputs import BadInput, InputIdentity
from streamq.records.references import ReferenceReader
from streamq.records.sizes import MOST_RECORDS, PartSize, Step
from streamq.records.splitting import Chunk, Cursor
from streamq.records.table_files import table_chunks
from streamq.runs.options import describe_source
from streamq.worker.runner import Runner

AUTOMATIC = PartSize(is_automatic=True)
FORMS = ("parquet", "arrow")


def table(rows: int) -> pa.Table:
    return pa.table({"id": range(rows), "name": [f"n{each}" for each in range(rows)]})


def write(path: Path, value: pa.Table, group: int = 1_000) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(value, path, row_group_size=group)
    else:
        pyarrow.feather.write_feather(value, str(path), chunksize=group)
    return path


def chunks(path: Path, size: PartSize = AUTOMATIC, start: Cursor | None = None) -> list[Chunk]:
    form = path.suffix[1:]
    return list(table_chunks(InputIdentity.of(str(path)), form, start or Cursor(), size, None))


def run(
    path: Path,
    function: Callable[..., Any],
    *,
    is_map: bool = True,
    size: PartSize = AUTOMATIC,
) -> list[PartDone | PartNotDone]:
    """What the parts of a file come to."""
    spec = Spec(format=path.suffix[1:], files=(str(path),), by_reference=True, retries=0)
    handler = describe_handler(function, is_map=is_map, name="f")
    found = chunks(path, size)
    parts = [pair for each in found for pair in zip(each.payloads, each.abouts, strict=True)]
    with closing(ReferenceReader([str(path)])) as reader:
        runner = Runner(handler, spec, reader=reader)
        return [
            runner.run(Part(number, payload, about), None)
            for number, (payload, about) in enumerate(parts, 1)
        ]


def values(outcomes: list[PartDone | PartNotDone]) -> list[Any]:
    return [
        decode_item(item) for each in outcomes for item in decode_result(each.result or b"\x90")[0]
    ]


# Parts


@pytest.mark.parametrize("form", FORMS)
def test_a_part_is_a_row_group_and_names_its_first_row(tmp_path: Path, form: str) -> None:
    path = write(tmp_path / f"d.{form}", table(2_500))

    found = chunks(path)

    assert [about for each in found for about in each.abouts] == [
        b"1000 0 1",
        b"1000 0 1001",
        b"500 0 2001",
    ]
    assert sum(each.records for each in found) == 2_500
    assert all(each.input_size > each.records for each in found)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_part_are_counted_and_a_load_goes_on_anywhere(tmp_path: Path, form: str) -> None:
    path = write(tmp_path / f"d.{form}", table(2_500))
    size = PartSize(records=300)

    whole = chunks(path, size)
    payloads = [payload for each in whole for payload in each.payloads]

    assert [each.records for each in whole] == [1_000, 1_000, 500]
    assert len(payloads) == 4 + 4 + 2
    begun = 0
    for chunk in whole:
        begun += len(chunk.payloads)
        rest = chunks(path, size, chunk.end)
        assert [payload for each in rest for payload in each.payloads] == payloads[begun:]


def test_a_size_in_bytes_is_a_share_of_the_group(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", table(10_000), 10_000)

    parts = [about for each in chunks(path, PartSize(bytes=20_000)) for about in each.abouts]

    assert 5 < len(parts) < 20


def test_parts_are_as_large_as_the_time_of_rows_allows(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", table(100), 60)
    steps = iter([Step(1, 2), Step(10, 3), *[Step(MOST_RECORDS, 64)] * 9])

    found = list(
        table_chunks(
            InputIdentity.of(str(path)), "parquet", Cursor(), AUTOMATIC, lambda: next(steps)
        )
    )

    counts = [int(about.split()[0]) for each in found for about in each.abouts]
    assert counts == [1, 1, 10, 10, 10, 28, 40]


# Rows


def test_rows_have_the_values_that_python_has_for_them(tmp_path: Path) -> None:
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, 678901)
    value = pa.table(
        {
            "none": pa.array([None, 1], pa.int32()),
            "word": pa.array(["a", "a"]).dictionary_encode(),
            "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
            "ns": pa.array([moment, None], pa.timestamp("ns")),
            "utc": pa.array([moment, None], pa.timestamp("ms", "UTC")),
            "day": pa.array([moment.date(), None], pa.date32()),
            "raw": pa.array([b"\xff", None]),
            "tags": pa.array([["x", None], []]),
            "deep": pa.array(
                [{"a": 1, "at": [moment]}, None],
                pa.struct([("a", pa.int8()), ("at", pa.list_(pa.timestamp("ns")))]),
            ),
            "took": pa.array([dt.timedelta(seconds=1), None], pa.duration("ns")),
        }
    )
    path = tmp_path / "d.parquet"
    pq.write_table(value, path)
    seen: list[dict[str, Any]] = []

    run(path, lambda row: seen.append(row))

    first, second = seen
    assert first == {
        "none": None,
        "word": "a",
        "price": decimal.Decimal("1.50"),
        "ns": moment,
        "utc": moment.replace(microsecond=678000, tzinfo=dt.UTC),
        "day": moment.date(),
        "raw": b"\xff",
        "tags": ["x", None],
        "deep": {"a": 1, "at": [moment]},
        "took": dt.timedelta(seconds=1),
    }
    assert type(first["ns"]) is dt.datetime
    assert second == dict.fromkeys(first) | {"none": 1, "word": "a", "tags": []}


class Row(msgspec.Struct):
    id: int
    name: str


def typed(row: Row) -> str:
    return f"{row.id}-{row.name}"


def as_json(row: str) -> str:
    return row


def as_tuple(row: tuple[int, str]) -> str:
    return row[1]


@pytest.mark.parametrize(
    ("function", "first"),
    [(typed, "0-n0"), (as_json, '{"id":0,"name":"n0"}'), (as_tuple, "n0")],
)
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_of_the_type_that_a_handler_asks_for(
    tmp_path: Path, function: Callable[..., Any], first: str, form: str
) -> None:
    path = write(tmp_path / f"d.{form}", table(30), 20)

    found = values(run(path, function))

    assert (found[0], len(found)) == (first, 30)


def test_a_struct_reads_only_its_columns(tmp_path: Path) -> None:
    value = table(10).append_column("large", pa.array(["x" * 1_000] * 10))
    path = write(tmp_path / "d.parquet", value)
    (chunk,) = chunks(path)

    with closing(ReferenceReader([str(path)])) as reader:
        found = reader.read_table(str(path), chunk.payloads[0], "parquet", ["id", "absent"])

    assert found.column_names == ["id"]


def test_one_bad_row_fails_alone_and_names_file_and_row(tmp_path: Path) -> None:
    # The year 11,970 has no datetime.
    stamps = pa.array([0, 10_000 * 365 * 86_400, 7], pa.timestamp("s"))
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"at": stamps}), path)

    (outcome,) = run(path, lambda row: row["at"].year)

    assert isinstance(outcome, PartNotDone)
    (failure,) = outcome.failures
    assert (failure.error, failure.record, failure.line) == ("DecodeError", 2, 2)
    assert failure.source == str(path)
    assert values([outcome]) == [1970, None, 1970]


def test_a_row_that_is_not_what_the_handler_asks_for_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"id": [1, None], "name": ["a", "b"]}), path)

    (outcome,) = run(path, typed)

    assert isinstance(outcome, PartNotDone)
    assert [(each.error, each.line) for each in outcome.failures] == [("DecodeError", 2)]


def test_columns_of_one_name_are_no_dict_but_a_table(tmp_path: Path) -> None:
    value = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    path = write(tmp_path / "d.arrow", value.rename_columns(["a", "b"]))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, value.schema) as out:
        out.write_table(value)

    (outcome,) = run(path, lambda row: row)

    assert isinstance(outcome, PartNotDone)
    assert "two columns have the name 'a'" in outcome.failures[0].message
    assert values(run(path, of_table, is_map=False)) == [1]


# Tables


def of_table(part: pa.Table) -> int:
    assert isinstance(part, pa.Table)
    return int(part.num_rows)


def of_batch(part: pa.RecordBatch) -> int:
    assert isinstance(part, pa.RecordBatch)
    return int(part.num_rows)


def of_polars(part: pl.DataFrame) -> int:
    assert isinstance(part, pl.DataFrame)
    return len(part)


def of_pandas(part: pd.DataFrame) -> int:
    assert isinstance(part, pd.DataFrame)
    return len(part)


def of_list(part: list[Row]) -> int:
    assert isinstance(part[0], Row)
    return len(part)


def of_bytes(part: bytes) -> int:
    return len([msgspec.json.decode(line) for line in part.splitlines()])


def of_anything(part: Any) -> int:
    return of_table(part)


TABLES = [of_table, of_batch, of_polars, of_pandas, of_list, of_bytes, of_anything]


@pytest.mark.parametrize("function", TABLES)
@pytest.mark.parametrize("form", FORMS)
def test_a_handler_of_parts_is_called_with_a_table(
    tmp_path: Path, function: Callable[..., Any], form: str
) -> None:
    path = write(tmp_path / f"d.{form}", table(30), 20)

    assert values(run(path, function, is_map=False)) == [20, 10]
    assert values(run(path, function, is_map=False, size=PartSize(records=15))) == [15, 5, 10]


def test_a_map_of_tables_is_refused() -> None:
    app = App()
    with pytest.raises(InvalidValue, match=r"takes a pyarrow.Table, which is a whole part"):
        app.map(of_table)


def test_a_handler_that_takes_no_rows_is_told_so(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", table(3))

    def number(part: int) -> int:
        return part

    with pytest.raises(InvalidValue, match=r"annotate its parameter pyarrow.Table"):
        run(path, number, is_map=False)


# Files


def encrypted(path: Path) -> None:
    import pyarrow.parquet.encryption as pe

    class Keys(pe.KmsClient):  # type: ignore[misc]
        def wrap_key(self, key: bytes, name: str) -> bytes:
            return bytes(key)

        def unwrap_key(self, key: bytes, name: str) -> bytes:
            return bytes(key)

    factory = pe.CryptoFactory(lambda _: Keys())
    properties = factory.file_encryption_properties(
        pe.KmsConnectionConfig(),
        pe.EncryptionConfiguration(footer_key="k", uniform_encryption=True),
    )
    pq.ParquetWriter(path, table(1).schema, encryption_properties=properties).close()


def cut(path: Path) -> None:
    write(path, table(1_000))
    os.truncate(path, path.stat().st_size // 2)


def stream(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table(3).schema) as out:
        out.write_table(table(3))


@pytest.mark.parametrize(
    ("name", "make", "says"),
    [
        ("d.parquet", lambda path: path.write_text("a,b\n1,2\n"), "it is no Parquet file"),
        ("d.parquet", lambda path: path.write_bytes(b""), "it is no Parquet file"),
        ("d.parquet", cut, "it is no Parquet file"),
        ("d.parquet", encrypted, "it is encrypted"),
        ("d.arrow", cut, "it is no Arrow file"),
        ("d.arrow", stream, "it is an Arrow stream"),
        ("d.arrow", lambda path: path.write_bytes(b"FEA1" * 9), "it is Feather of version 1"),
    ],
)
def test_what_is_no_table_says_so(
    tmp_path: Path, name: str, make: Callable[[Path], Any], says: str
) -> None:
    path = tmp_path / name
    make(path)

    with pytest.raises(BadInput, match=says) as caught:
        chunks(path)

    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("form", FORMS)
def test_a_table_without_rows_has_no_parts(tmp_path: Path, form: str) -> None:
    assert chunks(write(tmp_path / f"d.{form}", table(0))) == []


def test_damage_within_a_group_fails_its_part_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", table(2_000))
    state, data = path.stat(), bytearray(path.read_bytes())
    data[40:400] = b"\xff" * 360
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))

    first, second = run(path, of_table, is_map=False)

    assert isinstance(first, PartNotDone)
    assert first.failures[0].error == "Unreadable"
    assert "row group 1: " in first.failures[0].message
    assert values([second]) == [1_000]


def test_a_file_that_has_changed_or_is_not_allowed_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", table(2_000))
    found = [payload for each in chunks(path) for payload in each.payloads]
    with closing(ReferenceReader([str(path)])) as reader:
        assert reader.read_table(str(path), found[0], "parquet").num_rows == 1_000
        os.utime(path, ns=(1, 1))
        for each in (reader, ReferenceReader([str(path)])):
            with pytest.raises(Abandon, match="has changed since it was loaded"):
                each.read_table(str(path), found[1], "parquet")
    with pytest.raises(Abandon, match="--allow-read does not cover it"):
        ReferenceReader([]).read_table(str(path), found[0], "parquet")
    path.unlink()
    with pytest.raises(Abandon, match="cannot be read here"):
        ReferenceReader([str(path)]).read_table(str(path), found[0], "parquet")


def test_format_and_options_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", table(3))

    policy, size = describe_source([str(path)], handler="f")

    assert (policy.spec.format, policy.spec.by_reference) == ("parquet", True)
    assert size.is_automatic is True
    for suffix in ("arrow", "feather", "ipc"):
        other = path.with_suffix(f".{suffix}")
        other.write_bytes(b"")
        assert describe_source([str(other)], handler="f").policy.spec.format == "arrow"
    with pytest.raises(InvalidValue, match="is read from files"):
        describe_source(["-"], handler="f", format="parquet")
    with pytest.raises(InvalidValue, match="key is for text"):
        describe_source([str(path)], handler="f", key="id")


def test_without_the_extra_a_table_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "d.parquet", table(3))
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(InvalidValue, match=r"d.parquet: .*streamq\[arrow\]"):
        describe_source([str(path)], handler="f")


def test_nothing_is_imported_for_tables_that_are_not_there() -> None:
    code = (
        "import sys, streamq, streamq.worker.process, streamq.runs.run, streamq.cli.commands.run; "
        "print({'pyarrow', 'polars', 'pandas', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"


# Text


@pytest.mark.parametrize("function", [of_table, of_batch, of_polars, of_pandas])
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_part_of_text_is_a_table_too(function: Callable[..., Any], form: str) -> None:
    spec = Spec(format=form, header="id,name\n" if form == "csv" else "", retries=0)
    payload = b'1,"a\nb"\n02,\n' if form == "csv" else b'{"id":1}\n\n{"id":null,"name":"b"}\n'
    runner = Runner(describe_handler(function, is_map=False), spec)

    outcome = runner.run(Part(1, payload, b"2 0 2 3"), None)

    assert values([outcome]) == [2]


def test_columns_of_a_csv_are_text_as_it_stands_there() -> None:
    def columns(part: pa.Table) -> list[list[str]]:
        return [part.column_names, *(column.to_pylist() for column in part.columns)]

    for spec, payload in (
        (Spec(format="csv", header="id,name\n"), b'01,"a\n""b"""\n2,\n'),
        (
            Spec(format="csv", names=("id", "name"), delimiter=";", quote="'"),
            b"01;'a\n\"b\"'\n2;\n",
        ),
    ):
        outcome = Runner(describe_handler(columns, is_map=False), spec).run(
            Part(1, payload, b"2 0 2"), None
        )
        assert values([outcome]) == [[["id", "name"], ["01", "2"], ['a\n"b"', ""]]]


def test_a_row_of_a_csv_with_too_few_fields_fails_its_table() -> None:
    spec = Spec(format="csv", header="id,name\n")

    outcome = Runner(describe_handler(of_table, is_map=False), spec).run(
        Part(1, b"1,a\n2\n", b"2 0 2"), None
    )

    assert isinstance(outcome, PartNotDone)
    assert outcome.kind == "abandon"
    assert "the part is no table" in outcome.failures[0].message


def test_lines_are_no_table() -> None:
    with pytest.raises(InvalidValue, match="made of Parquet, Arrow, CSV or JSON lines"):
        Runner(describe_handler(of_table, is_map=False), Spec(format="lines"))


def test_numbers_of_rows_follow_each_other(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", table(3_000), 700)

    ends = [0, *(each.end.offset for each in chunks(path, PartSize(records=64)))]

    assert ends[-1] == 3_000
    assert all(before < after for before, after in pairwise(ends))
