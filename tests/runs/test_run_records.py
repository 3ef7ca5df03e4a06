"""Records and names that ``streamq run`` has trouble with, and byte order marks."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runs.running import COMMAND, Streamq

pytestmark = pytest.mark.commands


class TestRecords:
    """Every record of an input is accounted for, and what cannot be is said."""

    def run(self, streamq: Streamq, *words: Any) -> Any:
        """A run's summary; what was done and what failed are all there was."""
        done = streamq("run", *words, "--json", "--retries", 0, "-p", 1)
        assert done.stdout, done.stderr
        summary = json.loads(done.stdout)
        records = summary["records"]
        assert records["done"] + records["failed"] == records["total"]
        return summary | {"said": done.stderr, "code": done.returncode}

    def test_blank_lines_of_json_are_no_records(self, streamq: Streamq, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_bytes(b'\n \r\n{"a":1}\n\t\n\nno\n{"a":2}\n\n  ')

        found = self.run(streamq, "in.jsonl", "--map", "job:typed", "-o", "out.jsonl")

        assert found["records"] == {"total": 3, "done": 2, "failed": 1}
        assert (tmp_path / "out.jsonl").read_text() == '{"a":1}\n{"a":2}\n'
        (failure,) = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
        assert (failure["source"], failure["line"]) == ("in.jsonl", 6)

    def test_json_lines_may_begin_with_a_mark(self, streamq: Streamq, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"a":1}\n{"a":2}\n')

        found = self.run(streamq, "in.jsonl", "--map", "job:typed", "-o", "out.jsonl")

        assert found["records"] == {"total": 2, "done": 2, "failed": 0}
        assert (tmp_path / "out.jsonl").read_text() == '{"a":1}\n{"a":2}\n'

    def test_numbers_that_json_does_not_have_fail(self, streamq: Streamq, tmp_path: Path) -> None:
        (tmp_path / "in.txt").write_text("1\nnan\n-inf\n2\n")

        found = self.run(streamq, "in.txt", "--map", "job:endless", "-o", "out.jsonl")

        assert found["records"] == {"total": 4, "done": 2, "failed": 2}
        assert (tmp_path / "out.jsonl").read_text() == '{"value":1.0}\n{"value":2.0}\n'
        first, second = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
        assert (first["line"], second["line"]) == (2, 3)
        assert "a NaN or an infinity is no number in JSON" in first["message"]

    @pytest.mark.parametrize("form", ["jsonl", "csv"])
    def test_bytes_that_are_no_text_are_told(
        self, streamq: Streamq, source: Path, tmp_path: Path, form: str
    ) -> None:
        found = self.run(streamq, "in.txt", "--map", "job:broken", "-o", f"out.{form}")

        assert found["records"] == {"total": 3_001, "done": 3_001, "failed": 0}
        assert "300 of the results hold bytes that are not UTF-8" in found["said"]
        assert (tmp_path / f"out.{form}").read_text().count("\ufffd") == 300

    def test_values_have_no_header_of_a_csv_before_them(
        self, streamq: Streamq, tmp_path: Path
    ) -> None:
        (tmp_path / "in.csv").write_text("a,b\n1,2\n")
        (tmp_path / "none.csv").write_text("a,b\n")

        self.run(streamq, "in.csv", "--map", "job:rowed", "-o", "values.txt")
        self.run(streamq, "in.csv", "--map", "job:same", "-o", "rows.txt")
        self.run(streamq, "none.csv", "--map", "job:same", "-o", "none.txt")
        piped = streamq("run", "in.csv", "--map", "job:rowed", "-o", "-")

        assert (tmp_path / "values.txt").read_text() == piped.stdout == '{"a":"1","b":"2"}\n'
        assert (tmp_path / "rows.txt").read_text() == "a,b\n1,2\n"
        assert (tmp_path / "none.txt").read_text() == "a,b\n"

    def test_columns_of_one_name_are_both_there(self, streamq: Streamq, tmp_path: Path) -> None:
        (tmp_path / "in.csv").write_text("a,b,a,a_2\n1,2,3,4\n")

        found = self.run(streamq, "in.csv", "--map", "job:rowed", "-o", "out.jsonl")

        values = json.loads((tmp_path / "out.jsonl").read_text())
        assert values == {"a": "1", "b": "2", "a_3": "3", "a_2": "4"}
        assert "the column 'a' more than once: column 3 is 'a_3'" in found["said"]

    @pytest.mark.parametrize("command", ["run", "load"])
    def test_carriage_returns_alone_end_no_row(
        self, streamq: Streamq, tmp_path: Path, command: str
    ) -> None:
        (tmp_path / "in.csv").write_bytes(b"a,b\r1,2\r3,4\r")
        how = ("--map", "job:rowed", "-o", "o") if command == "run" else ("--handler", "x")

        done = streamq(command, "in.csv", *how)

        assert done.returncode == 2
        assert "in.csv: record 1: there is a carriage return without a newline" in done.stderr
        assert not (tmp_path / "o").exists()

    @pytest.mark.parametrize("command", ["run", "load"])
    @pytest.mark.parametrize("is_folder", [False, True])
    def test_name_that_is_no_text_is_refused(
        self, streamq: Streamq, tmp_path: Path, command: str, is_folder: bool
    ) -> None:
        (tmp_path / "folder").mkdir()
        name = os.fsdecode(b"caf\xe9.txt")
        (tmp_path / "folder" / name).write_text("a\n")
        (tmp_path / "folder" / "fine.txt").write_text("a\n")
        how = ("--map", "job:same", "-o", "o") if command == "run" else ("--handler", "x")

        done = streamq(command, "folder" if is_folder else f"folder/{name}", *how)

        assert done.returncode == 2
        assert r"the file name b'folder/caf\xe9.txt' is not UTF-8" in done.stderr
        assert "Traceback" not in done.stderr

    def test_output_whose_name_is_no_text_is_refused(
        self, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        done = streamq("run", "in.txt", "--map", "job:same", "-o", os.fsdecode(b"caf\xe9.txt"))

        assert done.returncode == 2
        assert "is not UTF-8" in done.stderr


class TestMarks:
    """A byte order mark before a file's text is no part of it."""

    @pytest.mark.parametrize("marked", ["a", "b", "ab"])
    def test_header_is_the_same_with_one_and_without(
        self, streamq: Streamq, tmp_path: Path, marked: str
    ) -> None:
        for name in "ab":
            mark = b"\xef\xbb\xbf" if name in marked else b""
            (tmp_path / f"{name}.csv").write_bytes(mark + b'"x\ny",z\n%s,1\n' % name.encode())

        done = streamq("run", "a.csv", "b.csv", "--map", "job:rowed", "-o", "out.jsonl")

        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert found == [{"x\ny": "a", "z": "1"}, {"x\ny": "b", "z": "1"}]

    @pytest.mark.parametrize("by", [(), ("--by-reference",)])
    @pytest.mark.parametrize(
        ("text", "options", "records"),
        [
            (b"one\ntwo\n", (), ["one", "two"]),
            (b"one", (), ["one"]),
            (b"", (), []),
            (b"1,2\n", ("--format", "csv", "--no-header"), [["1", "2"]]),
            (b"[1]\n", ("--format", "jsonl"), [[1]]),
        ],
    )
    def test_first_record_is_without_it(
        self,
        streamq: Streamq,
        tmp_path: Path,
        text: bytes,
        options: tuple[str, ...],
        records: list[Any],
        by: tuple[str, ...],
    ) -> None:
        for name in ("a.txt", "b.txt"):
            (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text)

        done = streamq(
            "run", "a.txt", "b.txt", "--map", "job:rowed", "-o", "out.jsonl", *options, *by
        )

        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert found == records * 2

    def test_standard_input_may_have_one(self, streamq: Streamq, tmp_path: Path) -> None:
        (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
        line = f"{shlex.join(COMMAND)} run - --map job:rowed -o out.txt < in.txt"

        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, timeout=60)

        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out.txt").read_bytes() == b"one\ntwo\n"
