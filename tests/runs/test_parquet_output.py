"""A Parquet output through collectors that die at any step, and after retries."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamq.records.output import OutputError
from streamq.records.outputs import FileOutput
from streamq.runs.collect import Collector
from tests.conftest import ONE_KIND
from tests.runs.test_in_place import BAD, Parts
from tests.support.by_hand import RequestByHand

pytestmark = ONE_KIND
OUT = ("out.parquet", "parquet")


class _Crash(BaseException):
    pass


@pytest.fixture
def parts(driver: RequestByHand, tmp_path: Path) -> Parts:
    folder = tmp_path / "files"
    folder.mkdir()
    return Parts(driver, folder)


def rows(parts: Parts) -> list[Any]:
    found: list[Any] = pq.read_table(parts.folder / "out.parquet").to_pylist()
    return found


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("step", ["draft", "_store", "replace"])
def test_a_collector_that_dies_while_parquet_is_made_leaves_all_to_the_next(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, step: str, is_after: bool
) -> None:
    parts.load(2, 2)
    parts.run({1: [{"n": 1}, None], 2: [{"n": 3}, {"n": 4}]})
    dying: Any = Collector if step == "_store" else FileOutput
    do, seal = getattr(dying, step), Collector._seal

    def die(*args: Any, **options: Any) -> None:
        if is_after:
            do(*args, **options)
        raise _Crash

    def sealing(self: Collector, spec: Any) -> None:
        monkeypatch.setattr(dying, step, die)
        seal(self, spec)

    monkeypatch.setattr(Collector, "_seal", sealing)
    with pytest.raises(_Crash):
        parts.collector(*OUT).run(is_ordered=True, follow=False, force=False)
    monkeypatch.undo()

    parts.collect(*OUT)

    assert rows(parts) == [{"n": 1}, {"n": 3}, {"n": 4}]
    assert parts.beside() == []
    before = (parts.folder / "out.parquet").read_bytes()
    assert parts.collect(*OUT) == before


def test_frames_that_were_not_committed_are_cut_and_come_again(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.load(3, 1)
    parts.run({1: [{"n": 1}], 2: [{"n": 2}]})
    store = Collector._store

    def dying(self: Collector, done: Any, forget: list[str]) -> None:
        if forget:
            raise _Crash
        store(self, done, forget)

    monkeypatch.setattr(Collector, "_store", dying)
    with pytest.raises(_Crash):
        parts.collector(*OUT).run(is_ordered=True, follow=False, force=False)
    monkeypatch.undo()
    assert (parts.folder / "out.parquet").stat().st_size > 0
    parts.run({3: [{"n": 3}]})

    parts.collect(*OUT)

    assert rows(parts) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert sorted(each.name for each in parts.folder.iterdir()) == ["out.parquet"]


def test_rows_of_retried_parts_come_last(parts: Parts) -> None:
    parts.load(3, 1)
    parts.run({1: [{"n": 1}], 2: [BAD], 3: [pa.table({"n": [3, 4]})]})
    parts.collect(*OUT)
    assert rows(parts) == [{"n": 1}, {"n": 3}, {"n": 4}]

    parts.run({2: [{"n": 2, "late": True}]}, retry=True)
    parts.collect(*OUT)

    assert rows(parts) == [
        {"n": 1, "late": None},
        {"n": 3, "late": None},
        {"n": 4, "late": None},
        {"n": 2, "late": True},
    ]
    assert parts.beside() == []


def test_a_full_disk_says_so_and_the_next_collector_goes_on(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.load(1, 1)
    parts.run({1: [{"n": 1}]})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("streamq.records.drafts.write_draft", full)
    with pytest.raises(OutputError, match="No space left on device"):
        parts.collector(*OUT).run(is_ordered=True, follow=False, force=False)
    monkeypatch.undo()

    parts.collect(*OUT)

    assert rows(parts) == [{"n": 1}]


def test_a_request_without_results_gives_a_table_without_rows(parts: Parts) -> None:
    parts.load(1, 1)
    parts.run({1: [None]})

    parts.collect(*OUT)

    assert rows(parts) == []
