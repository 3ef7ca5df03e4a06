"""A Parquet output: tables one behind the other, and the Parquet that is made of them."""

import datetime as dt
import decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamq.errors import Damaged, InvalidValue
from streamq.model import Spec
from streamq.records.encoding import (
    Verbatim,
    decode_item,
    decode_result,
    encode_item,
    encode_result,
)
from streamq.records.outputs import check_output_keys, check_output_name, form_by_output_name
from streamq.records.parquet import column_types_of_input, convert_to_parquet
from streamq.records.writer import Writer


def result(*values: Any, endings: bytes = b"") -> bytes:
    return encode_result([encode_item(value) for value in values], endings)


def frames(*values: Any) -> bytes:
    """What is written of a result."""
    return Writer("parquet", []).lines(result(*values))


def made(path: Path, *written: bytes, sealed: int = 0, types: Any = None) -> pa.Table:
    """The Parquet that is made of what was written; the file has it from then on."""
    with path.open("ab") as file:
        file.write(b"".join(written))
    with path.open("rb") as file:
        data = b"".join(convert_to_parquet(file, sealed, path.stat().st_size, types or {}))
    path.write_bytes(data)
    return pq.read_table(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


def test_rows_have_all_columns_in_the_order_in_which_they_came(path: Path) -> None:
    table = made(
        path,
        frames({"a": 1, "b": None}, None, {"b": "x", "c": [1]}),
        frames({"a": 2.5, "d": {"e": True}}),
        frames(None),
    )

    assert table.to_pylist() == [
        {"a": 1.0, "b": None, "c": None, "d": None},
        {"a": None, "b": "x", "c": [1], "d": None},
        {"a": 2.5, "b": None, "c": None, "d": {"e": True}},
    ]
    assert table.column_names == ["a", "b", "c", "d"]


def test_values_without_a_common_type_are_text(path: Path) -> None:
    table = made(path, frames({"a": 1}, {"a": "x"}), frames({"a": [2]}), frames({"a": True}))

    assert table.column("a").to_pylist() == ["1", "x", "[2]", "true"]


def test_structs_of_other_fields_are_joined(path: Path) -> None:
    table = made(
        path, frames({"a": {"x": 1}}), frames({"a": {"y": "z"}}), frames({"a": {"x": 0.5}})
    )

    assert table.column("a").to_pylist() == [
        {"x": 1.0, "y": None},
        {"x": None, "y": "z"},
        {"x": 0.5, "y": None},
    ]


def test_what_is_no_row_is_in_one_column(path: Path) -> None:
    assert made(path, frames(b"a", 1, "b", b"\xff")).to_pylist() == [
        {"result": "a"},
        {"result": "1"},
        {"result": "b"},
        {"result": "�"},
    ]


def test_tables_keep_their_types(path: Path) -> None:
    price = pa.array([decimal.Decimal("1.50")], pa.decimal128(9, 2))
    table = pa.table({"price": price, "at": pa.array([5], pa.timestamp("ns", "UTC"))})
    words = pl.DataFrame({"word": ["a"]}, schema={"word": pl.Categorical})

    found = made(
        path, frames(table), frames(table.to_batches()[0]), frames(words), frames(table.to_pandas())
    )

    assert found.num_rows == 4
    assert found.schema.field("price").type == pa.decimal128(9, 2)
    assert found.schema.field("at").type == pa.timestamp("ns", "UTC")
    assert found.column("word").to_pylist() == [None, None, "a", None]


def test_text_is_again_what_it_was_in_the_input_if_all_of_it_can_be(path: Path) -> None:
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, 600)
    types = {
        "at": pa.timestamp("us"),
        "day": pa.date32(),
        "price": pa.decimal128(9, 2),
        "odd": pa.date32(),
        "gone": pa.date32(),
    }
    row = {
        "at": moment,
        "day": moment.date(),
        "price": decimal.Decimal("1.50"),
        "odd": "2026-01-02",
    }

    table = made(path, frames(row), frames(row | {"odd": "soon", "at": None}), types=types)

    assert [field.type for field in table.schema] == [*list(types.values())[:3], pa.string()]
    assert table.to_pylist()[0] == row


def test_types_of_the_input_are_those_that_json_lacks(path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "at": pa.array([1], pa.timestamp("us"))}), path)

    assert column_types_of_input(Spec(format="parquet", files=(str(path),))) == {
        "at": pa.timestamp("us")
    }
    assert column_types_of_input(Spec(format="parquet", files=("gone.parquet",))) == {}
    assert column_types_of_input(Spec(format="csv", files=(str(path),))) == {}


def test_more_rows_come_behind_parquet_that_was_made_before(path: Path) -> None:
    made(path, frames({"a": 1}))
    sealed = path.stat().st_size

    table = made(path, frames({"a": 2, "b": "x"}), sealed=sealed)

    assert table.to_pylist() == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]


def test_without_rows_it_is_empty(path: Path) -> None:
    assert made(path).num_rows == 0
    assert made(path, sealed=path.stat().st_size).num_rows == 0


def test_many_rows_are_in_few_groups(path: Path) -> None:
    made(path, *[frames(*({"n": n} for n in range(100))) for _ in range(50)])

    assert pq.ParquetFile(path).metadata.num_row_groups == 1


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_what_was_not_written_so_is_no_table(path: Path, cut: int) -> None:
    for damaged in (frames({"a": 1})[:-cut], b"line\n" * 20):
        path.unlink(missing_ok=True)
        with pytest.raises(Damaged, match="does not hold the tables"):
            made(path, damaged)


def test_what_is_spooled_is_written_as_it_is() -> None:
    spooled = frames({"a": 1})

    assert frames(Verbatim(spooled)) == spooled


class TestTablesAsLines:
    TABLE = pa.table({"a": [1, 2], "b": [dt.date(2026, 1, 2), None]})

    def test_a_row_is_a_line(self) -> None:
        lines = b'{"a":1,"b":"2026-01-02"}\n{"a":2,"b":null}\n'

        assert Writer("jsonl", []).lines(result(self.TABLE)) == lines
        assert Writer("raw", []).lines(result(self.TABLE)) == lines
        assert Writer("raw", []).lines(result("x", self.TABLE, endings=b"nr")) == (
            b"x\n" + lines.replace(b"\n", b"\r\n")
        )
        assert Writer("csv", []).lines(result(self.TABLE)) == b"a,b\n1,2026-01-02\n2,\n"
        keyed = Writer("jsonl", [], has_keys=True).lines(result(self.TABLE), 7)
        assert keyed.count(b'{"part":7,"record":1,"result":{"a":') == 2

    def test_a_reader_of_results_gets_a_list_of_rows(self) -> None:
        ((item,), _) = decode_result(result(self.TABLE))

        assert decode_item(item) == [{"a": 1, "b": "2026-01-02"}, {"a": 2, "b": None}]


def test_names_and_forms_agree() -> None:
    assert form_by_output_name("a.parquet") == "parquet"
    check_output_name("a.parquet")
    check_output_name("a.parquet", "parquet")
    for name, form in (("a.parquet.gz", ""), ("a.parquet", "jsonl"), ("a.jsonl", "parquet")):
        with pytest.raises(InvalidValue, match=r"Parquet|parquet"):
            check_output_name(name, form)
    with pytest.raises(InvalidValue, match="lines that can be told apart"):
        check_output_keys("parquet", "keys")
