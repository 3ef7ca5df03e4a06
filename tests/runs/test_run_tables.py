"""``streamq run`` on tables: Parquet and Arrow files."""

import json
import subprocess
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamq.records.inputs import open_input
from tests.runs.running import EMBEDDED, Begin, Streamq, descendants
from tests.support.waiting import is_alive, wait_until

pytestmark = [pytest.mark.commands, EMBEDDED]

CODE = """
import os
import pathlib
import time
import pyarrow as pa
import pyarrow.compute as pc
def twice(part: pa.Table) -> pa.Table:
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
    return part.append_column("twice", pc.multiply(part["id"], 2))
def row(row: dict) -> dict:
    if row["id"] == 1_777 and not pathlib.Path("mended").exists():
        raise ValueError("not this one")
    return {"id": row["id"], "name": row["name"]}
def table(part: pa.Table) -> int:
    return part.num_rows
def wide(part: pa.Table) -> str:
    return "x" * 5_000_000
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two good files and one that is cut off, in a folder."""
    (tmp_path / "tables.py").write_text(CODE)
    place = tmp_path / "in"
    place.mkdir()
    for index, name in enumerate(("a.parquet", "c.parquet")):
        ids = range(2_000 * index, 2_000 * index + 2_000)
        table = pa.table({"id": ids, "name": [f"n{each}" for each in ids]})
        pq.write_table(table, place / name, row_group_size=500)
    (place / "b.parquet").write_bytes((place / "a.parquet").read_bytes()[:900])
    return place


def test_rows_of_all_good_files_are_written_and_failures_name_file_and_row(
    streamq: Streamq, folder: Path, tmp_path: Path
) -> None:
    done = streamq("run", "in", "--map", "tables.py:row", "-o", "out.jsonl", "--retries", 0)

    assert done.returncode == 1, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [each["id"] for each in lines] == [each for each in range(4_000) if each != 1_777]
    errors = (tmp_path / "out.errors.jsonl").read_bytes().splitlines()
    row, file = sorted(map(json.loads, errors), key=lambda each: bool(each["error"] == "BadInput"))
    assert (row["error"], row["source"], row["line"]) == (
        "ValueError",
        str(folder / "a.parquet"),
        1_778,
    )
    assert json.loads(row["input"]) == {"id": 1_777, "name": "n1777"}
    assert file["message"].startswith(f"{folder / 'b.parquet'}: it is no Parquet file")


@pytest.mark.long
def test_function_that_takes_a_table_is_called_with_row_groups_and_programs_with_json(
    streamq: Streamq, folder: Path, tmp_path: Path
) -> None:
    (folder / "b.parquet").unlink()

    for function, lines in (("table", 8), ("wide", 8)):
        done = streamq("run", "in", "--map", f"tables.py:{function}", "-o", f"{function}.txt")
        assert done.returncode == 0, done.stderr
        assert len((tmp_path / f"{function}.txt").read_bytes().splitlines()) == lines
    done = streamq("run", "in", "--exec", "head -n 1", "-o", "first.jsonl", "--lines", 250)

    assert done.returncode == 0, done.stderr
    first = (tmp_path / "first.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["id"] for line in first] == list(range(0, 4_000, 250))
    assert (tmp_path / "table.txt").read_bytes() == b"500\n" * 8


def _is_over(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))


def expected(folder: Path) -> pa.Table:
    table = pa.concat_tables([pq.read_table(folder / name) for name in ("a.parquet", "c.parquet")])
    return table.append_column("twice", pa.array([2 * each for each in range(4_000)]))


def test_killed_it_goes_on_to_the_same_parquet(
    streamq: Streamq, begin: Begin, folder: Path, tmp_path: Path
) -> None:
    (folder / "b.parquet").unlink()
    words = ("in", "--map", "tables.py:twice", "-o", "out.parquet", "-p", "2", "--lines", "50")
    running = begin(*words, PAUSE_S="0.02")
    output = tmp_path / "out.parquet"
    wait_until(lambda: output.exists() and output.stat().st_size > 10_000, 60)
    pids = [running.pid, *descendants(running.pid)]
    running.kill()
    running.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 15)
    with pytest.raises(pa.ArrowInvalid):
        pq.read_table(output)

    done = streamq("run", *words)

    assert done.returncode == 0, done.stderr
    assert "going on with run" in done.stderr
    assert pq.read_table(output).equals(expected(folder))
    left = {each.name for each in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"in", "job.py", "out.parquet", "tables.py"}


@pytest.mark.long
def test_of_a_row_handler_failed_rows_come_last_after_a_retry(
    streamq: Streamq, folder: Path, tmp_path: Path
) -> None:
    (folder / "b.parquet").unlink()
    words = ("in", "--map", "tables.py:row", "-o", "out.parquet", "--manifest")

    assert streamq("run", *words, "--retries", 0).returncode == 1
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 3_999
    (tmp_path / "mended").touch()
    done = streamq("run", "--retry-failed", "last")

    assert done.returncode == 0, done.stderr
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.slice(3_999).to_pylist() == [{"id": 1_777, "name": "n1777"}]
    assert found.sort_by("id").equals(expected(folder).drop_columns(["twice"]))
    assert streamq("verify", "out.parquet").returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl.gz", "out.jsonl.zst"])
def test_killed_at_any_moment_all_rows_are_there_once(
    streamq: Streamq, begin: Begin, folder: Path, tmp_path: Path, name: str
) -> None:
    """The run is killed again and again, later each time, until it is done."""
    (folder / "b.parquet").unlink()
    words = ("in", "--map", "tables.py:twice", "-o", name, "-p", "2", "--lines", "50")
    for kill in range(12):
        running = begin(*words, PAUSE_S="0.01")
        with suppress(subprocess.TimeoutExpired):
            running.wait(1.5 + 0.13 * kill)
        pids = [running.pid, *descendants(running.pid)] if running.poll() is None else []
        running.kill()
        _, said = running.communicate()
        wait_until(partial(_is_over, pids), 15)
        if running.returncode == 0:
            break
        assert running.returncode == -9, said
    if running.returncode:
        assert streamq("run", *words).returncode == 0
    if name == "out.parquet":
        assert pq.read_table(tmp_path / name).equals(expected(folder))
    else:
        with closing(open_input(str(tmp_path / name))) as source:
            data = b"".join(iter(lambda: source.read(2**20), b""))
        rows = [json.loads(line) for line in data.splitlines()]
        assert rows == expected(folder).to_pylist()
