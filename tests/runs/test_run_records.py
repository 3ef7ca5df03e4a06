"""Records and names that ``streamq run`` has trouble with, and byte order marks."""

import gzip
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

    def test_record_that_took_too_long_is_told_with_its_line(
        self, streamq: Streamq, tmp_path: Path
    ) -> None:
        """Its part has no other record, so nobody runs it once more, who would know its line."""
        (tmp_path / "in.txt").write_text("line 1\nline 0\nline 2\n")
        words = ("in.txt", "--map", "job:stuck_thrice", "-o", "out.txt", "--lines", 1)

        found = self.run(streamq, *words, "--timeout", "1s")

        assert "  in.txt:2: Timeout: it took longer than 1 s" in found["said"]
        (failure,) = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
        place = (failure["source"], failure["line"], failure["input"])
        assert place == ("in.txt", 2, "line 0")

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

    def test_columns_of_one_name_are_refused_and_can_be_named(
        self, streamq: Streamq, tmp_path: Path
    ) -> None:
        (tmp_path / "in.csv").write_text("a,b,a\n1,2,3\n")
        words = ("in.csv", "--map", "job:rowed", "-o", "out.jsonl")

        refused = streamq("run", *words)
        named = streamq("run", *words, "--header", "a,b,c", "--skip-rows", 1)

        assert refused.returncode == 2
        assert "in.csv: columns 1 and 3 of the header have the name 'a'" in refused.stderr
        assert "--header a,b,c" in refused.stderr
        assert named.returncode == 0, named.stderr
        values = json.loads((tmp_path / "out.jsonl").read_text())
        assert values == {"a": "1", "b": "2", "c": "3"}

    def test_csv_of_old_macs_with_empty_lines_in_another_encoding(
        self, streamq: Streamq, tmp_path: Path
    ) -> None:
        text = 'a,b\r\r1,"x\ry"\r\r2,\xe9\r\r3\r'
        (tmp_path / "in.csv").write_bytes(text.encode("latin-1"))
        words = ("in.csv", "--map", "job:rowed", "-o", "out.jsonl", "--encoding", "latin1")

        done = streamq("run", *words)

        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert rows == [{"a": "1", "b": "x\ry"}, {"a": "2", "b": "\xe9"}]
        failure = json.loads((tmp_path / "out.errors.jsonl").read_text())
        assert (failure["line"], failure["source"]) == (7, "in.csv")
        assert "3 records" in done.stderr
        assert "3 blank lines" in done.stderr

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("in.parquet", b"PAR1\x15\x00", "it is no Parquet file"),
            ("in.txt", b"PK\x03\x04" + bytes(30), "it is a zip archive: unpack it first"),
            ("in.arrow", b"ARROW1\0\0", "it is no Arrow file"),
            ("in.jsonl", b'[\n  {"a": 1},\n  {"a": 2}\n]\n', "it is a JSON array"),
            ("in.json", b'[{"a": 1}, {"a": 2}]', "it is a JSON array"),
            ("in.csv", "a,b\n1,2\n".encode("utf-16"), "--encoding utf-16"),
        ],
    )
    def test_file_that_has_no_records_is_refused(
        self, streamq: Streamq, tmp_path: Path, name: str, content: bytes, says: str
    ) -> None:
        (tmp_path / name).write_bytes(content)

        done = streamq("run", name, "--map", "job:rowed", "-o", "out.txt")

        assert done.returncode == 2
        assert name in done.stderr
        assert says in done.stderr
        assert not (tmp_path / "out.txt").exists()

    def test_bad_file_among_many_is_one_failure(self, streamq: Streamq, tmp_path: Path) -> None:
        folder = tmp_path / "files"
        folder.mkdir()
        for number in range(9):
            (folder / f"{number}.txt").write_text(f"file {number}\n")
        packed = gzip.compress(b"".join(b"line %d\n" % n for n in range(99_999)))
        (folder / "4.txt").write_bytes(packed[:-50])
        (folder / "0.txt").write_bytes(b"PK\x03\x04" + bytes(30))
        words = ("files", "--map", "job:same", "-o", "out.txt")

        done = streamq("run", *words)
        strict = streamq("run", *words, "--strict", "--force")

        assert done.returncode == 1, done.stderr
        failures = [
            json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()
        ]
        assert [(each["source"], each["error"]) for each in failures] == [
            ("files/0.txt", "BadInput"),
            ("files/4.txt", "BadInput"),
        ]
        assert "it is a zip archive" in failures[0]["message"]
        assert "cut off" in failures[1]["message"]
        assert failures[1]["line"] > 1
        assert strict.returncode == 2
        assert "files/0.txt" in strict.stderr

    def test_failures_have_their_records_and_are_shown(
        self, streamq: Streamq, tmp_path: Path
    ) -> None:
        lines = [f"line {n}" for n in range(50)]
        lines[17] += "\xe9" * 50_000 + "7"
        (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in lines))

        done = streamq(
            *("run", "in.txt", "--map", "job:picky", "-o", "out.txt", "--lines", 8, "--retries", 0)
        )

        assert done.returncode == 1
        found = [
            json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()
        ]
        assert [each["line"] for each in found] == [8, 18, 28, 38, 48]
        assert [each["input"] for each in found if not each.get("input_is_cut")] == [
            f"line {n}" for n in (7, 27, 37, 47)
        ]
        assert found[1]["input_is_cut"]
        assert lines[17].startswith(found[1]["input"])
        assert len(found[1]["input"].encode()) > 2**16 - 4
        assert "5 failures in" in done.stderr
        assert "5 ValueError" in done.stderr
        assert "in.txt:8: ValueError: seven" in done.stderr
        assert "in.txt:28: ValueError: seven" in done.stderr
        assert "in.txt:38: ValueError: seven" not in done.stderr

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
