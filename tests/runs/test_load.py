"""``streamq load`` through its command: what is in the files reaches the handlers, once."""

import csv
import gzip
import os
import subprocess
from pathlib import Path

import pytest

from streamq import Client
from streamq.model import State
from tests.conftest import ANY_KIND, ONE_KIND
from tests.runs.loads import Load, lines_of, total_of
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

pytestmark = pytest.mark.commands


class TestRoundTrip:
    @ANY_KIND
    @pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
    @pytest.mark.parametrize("last", [True, False])
    def test_lines_come_back_byte_for_byte(
        self, fleet: Fleet, load: Load, client: Client, tmp_path: Path, ending: bytes, last: bool
    ) -> None:
        data = ending.join(b"line %d \xff\0" % n for n in range(5_000)) + (ending if last else b"")
        (tmp_path / "in.txt").write_bytes(data)
        fleet.ready("-p", "2")

        done = load(tmp_path / "in.txt", "--handler", "echo", "--bytes", "4KiB")

        request = client.get(done.stdout.strip())
        status = request.wait(30)
        assert (status.state, status.records.total, status.records.done) == (State.DONE, 5000, 5000)
        assert lines_of(request) == data

    @ONE_KIND
    def test_only_the_id_is_on_stdout(self, load: Load, tmp_path: Path) -> None:
        (tmp_path / "in.txt").write_bytes(b"a\nb\n")

        done = load(tmp_path / "in.txt", "--handler", "echo", "--id", "only-this", "--lines", "1")

        assert (done.returncode, done.stdout) == (0, "only-this\n")
        assert "2 parts" in done.stderr

    @ONE_KIND
    def test_rows_of_csv_come_as_fields_by_the_header(
        self, fleet: Fleet, load: Load, client: Client, tmp_path: Path
    ) -> None:
        rows = [[f"thing {n}", str(n), 'say "hi",\nthen go'] for n in range(200)]
        with (tmp_path / "in.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["item", "count", "note"], *rows])
        fleet.ready()

        done = load(tmp_path / "in.csv", "--handler", "priced", "--lines", "7")

        request = client.get(done.stdout.strip())
        assert request.wait(20).records.done == 200
        found = [item for _, items in request.results() for item in items]
        assert found == [{f"thing {n}": 3 * n} for n in range(200)]

    @ONE_KIND
    def test_json_lines_compressed_and_several_files(
        self, fleet: Fleet, load: Load, client: Client, tmp_path: Path
    ) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        for index in range(3):
            text = "".join(f'{{"item": "a", "count": {n}}}\n\n' for n in range(50))
            (folder / f"in{index}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        fleet.ready()

        done = load(folder, "--handler", "priced", "--bytes", "256KiB")

        request = client.get(done.stdout.strip())
        assert request.wait(20).records.failed == 0
        found = [item for _, items in request.results() for item in items if item is not None]
        assert found == [{"a": 3 * n} for n in range(50)] * 3

    @ONE_KIND
    def test_whole_files_are_parts(
        self, fleet: Fleet, load: Load, client: Client, tmp_path: Path
    ) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        for index in range(5):
            (folder / f"{index}.bin").write_bytes(os.urandom(1000))
        fleet.ready()

        done = load(folder, "--format", "file", "--handler", "echo")

        request = client.get(done.stdout.strip())
        request.wait(20)
        contents = [(folder / f"{index}.bin").read_bytes() for index in range(5)]
        assert [result for _, result in request.results()] == contents


#: The text of a CSV, how it is to be read, and what its only item is then called.
CSVS = [
    ("item;count\n'a;\nb';2\n", ("--delimiter", ";", "--quote", "'"), "a;\nb"),
    ("a|2\n", ("--delimiter", "|", "--header", "item|count"), "a"),
    ('item,count\n"a\\",b",2\n', ("--escape", "\\"), 'a",b'),
    ('item\tcount\n5" a\t2\n', ("--delimiter", r"\t", "--quote", ""), '5" a'),
    ("\ufeffitem,count\r\na,2\r\n", (), "a"),
]


class TestDialects:
    @ONE_KIND
    def test_is_read_as_it_is_written(
        self, fleet: Fleet, load: Load, client: Client, tmp_path: Path
    ) -> None:
        fleet.ready()
        for text, words, item in CSVS:
            (tmp_path / "in.csv").write_bytes(text.encode())
            done = load(tmp_path / "in.csv", "--handler", "priced", *words)
            assert done.returncode == 0, done.stderr

            request = client.get(done.stdout.strip())
            request.wait(20)
            assert request.errors() == []
            assert [result for _, result in request.results()] == [{item: 6}]

    @ONE_KIND
    def test_rows_without_names_come_as_lists(
        self, fleet: Fleet, load: Load, client: Client, tmp_path: Path
    ) -> None:
        (tmp_path / "in.csv").write_text("a,2\nb\n")
        fleet.ready()

        lists = load(tmp_path / "in.csv", "--handler", "fields", "--no-header", "--lines", 10)
        structs = load(tmp_path / "in.csv", "--handler", "priced", "--no-header")

        request = client.get(lists.stdout.strip())
        request.wait(20)
        assert [result for _, result in request.results()] == [[["a", "2"], ["b"]]]
        request = client.get(structs.stdout.strip())
        assert request.wait(20).records.failed == 2
        assert "have no names" in request.errors()[0].message

    @ONE_KIND
    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (("--delimiter", "ab"), "--delimiter 'ab' is not one character"),
            (("--quote", "\u00a7"), "is not one character of ASCII"),
            (("--quote", ","), "are the same character"),
            (("--header", "a,a"), "comes twice"),
        ],
    )
    def test_dialect_that_cannot_be_is_refused(
        self, load: Load, tmp_path: Path, words: tuple[str, ...], says: str
    ) -> None:
        (tmp_path / "in.csv").write_text("a,b\n1,2\n")

        done = load(tmp_path / "in.csv", "--handler", "priced", *words)

        assert done.returncode == 2
        assert says in done.stderr


class TestPatterns:
    @ONE_KIND
    def test_patterns_and_folders_in_the_order_of_names(
        self, load: Load, client: Client, fleet: Fleet, tmp_path: Path
    ) -> None:
        for name in ("b/2.txt", "b/10.txt", "a/3.txt", "a/.hidden", "a/deep/4.txt", "[5].txt"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{name}\n")
        fleet.ready()

        done = load(
            tmp_path / "b" / "*.txt", tmp_path / "a", tmp_path / "[5].txt", "--handler", "echo"
        )

        assert done.returncode == 0, done.stderr
        request = client.get(done.stdout.strip())
        request.wait(20)
        assert lines_of(request).decode().split() == [
            *("b/10.txt", "b/2.txt", "a/3.txt", "a/deep/4.txt", "[5].txt")
        ]

    @ONE_KIND
    def test_what_matches_nothing_is_refused(self, load: Load, tmp_path: Path) -> None:
        none = load(tmp_path / "*.txt", "--handler", "echo")
        empty = load(tmp_path, "--handler", "echo")

        assert (none.returncode, empty.returncode) == (2, 2)
        assert "*.txt matches no file" in none.stderr
        assert "is an empty folder" in empty.stderr


class TestFailures:
    @ONE_KIND
    def test_failure_names_file_and_line_and_the_others_are_done(
        self, fleet: Fleet, load: Load, client: Client, tmp_path: Path
    ) -> None:
        rows = "item,count\n" + "".join(f"a,{n}\n" for n in range(10)) + "b\n" + "c,x\n" + "d,1\n"
        (tmp_path / "in.csv").write_text(rows)
        fleet.ready()

        done = load(tmp_path / "in.csv", "--handler", "priced")

        request = client.get(done.stdout.strip())
        status = request.wait(20)
        assert (status.records.done, status.records.failed) == (11, 2)
        places = [(Path(failure.source).name, failure.line) for failure in request.errors()]
        assert places == [("in.csv", 12), ("in.csv", 13)]
        assert "1 fields, the header 2" in request.errors()[0].message

    @ONE_KIND
    @pytest.mark.parametrize(
        ("words", "code", "says"),
        [
            (("nowhere.txt", "--handler", "echo"), 2, "nowhere.txt: No such file"),
            (("in.txt", "--handler", "a b"), 2, "handler 'a b'"),
            (("in.txt", "--handler", "echo", "--format", "xml"), 2, "none of auto, lines"),
            (("in.txt", "--handler", "echo", "--bytes", "2MiB"), 2, "more than a part may have"),
            (("in.txt", "--handler", "echo", "--level", "100"), 2, "0 to 99"),
            (("open.csv", "--handler", "echo", "--delimiter", ";;"), 2, "--delimiter"),
            (("long.txt", "--handler", "echo"), 2, "long.txt: line 2, at byte 6"),
            (("open.csv", "--handler", "echo"), 2, "open.csv: line 2: a quote is not closed"),
            (("cut.gz", "--handler", "echo"), 2, "cut.gz: after line"),
            (("crc.gz", "--handler", "echo"), 2, "crc.gz: after line"),
            (("bomb.gz", "--handler", "echo"), 2, "more than 1000 times its size"),
            (("latin.csv", "--handler", "echo"), 2, "latin.csv: line 1: the header is not UTF-8"),
            (("/proc/self/mem", "--handler", "echo"), 2, "/proc/self/mem: Input/output error"),
            (("/dev/null", "--handler", "echo"), 2, "/dev/null is no regular file"),
            (("whole.bin", "--handler", "echo", "--format", "file"), 2, "whole.bin is larger than"),
        ],
    )
    def test_bad_input_is_named_and_nothing_is_left(
        self,
        load: Load,
        client: Client,
        queue: str,
        tmp_path: Path,
        words: tuple[str, ...],
        code: int,
        says: str,
    ) -> None:
        (tmp_path / "in.txt").write_text("a\n")
        (tmp_path / "long.txt").write_bytes(b"short\n" + b"x" * 2**21 + b"\n")
        (tmp_path / "open.csv").write_text('a,b\n1,"2\n')
        packed = gzip.compress(b"".join(b"line %d\n" % n for n in range(99_999)))
        (tmp_path / "cut.gz").write_bytes(packed[:-50])
        (tmp_path / "crc.gz").write_bytes(packed[:-6] + b"oops" + packed[-2:])
        if words[0] == "bomb.gz":
            (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"\n" * 120_000_000))
        (tmp_path / "latin.csv").write_bytes(b"caf\xe9,b\n1,2\n")
        (tmp_path / "whole.bin").write_bytes(b"x" * (2**20 + 1))
        name, *rest = words

        done = load(tmp_path / name, *rest, "--strict")

        assert done.returncode == code
        assert says in done.stderr
        assert "Traceback" not in done.stderr
        assert client.list(queue) == []

    @ONE_KIND
    def test_text_that_is_no_utf8_fails_with_its_place(
        self, fleet: Fleet, load: Load, client: Client, tmp_path: Path
    ) -> None:
        (tmp_path / "in.txt").write_bytes(b"good\nbad \xff\nnul \0\r\n")
        (tmp_path / "in.csv").write_bytes(b"item,count\na,1,2\nb,\xe9\nc,3\n")
        fleet.ready()

        text = load(tmp_path / "in.txt", "--handler", "shout")
        rows = load(tmp_path / "in.csv", "--handler", "priced")

        request = client.get(text.stdout.strip())
        assert request.wait(20).records.done == 2
        (failure,) = request.errors()
        assert (Path(failure.source).name, failure.line) == ("in.txt", 2)
        assert "is not UTF-8: invalid start byte 0xff; files" in failure.message
        request = client.get(rows.stdout.strip())
        assert request.wait(20).records.done == 1
        many, bad = request.errors()
        assert (many.line, bad.line) == (2, 3)
        assert "--encoding" in bad.message
        assert "3 fields, the header 2" in many.message

    @ONE_KIND
    def test_gzip_of_several_members_is_read_to_its_end(
        self, fleet: Fleet, load: Load, client: Client, tmp_path: Path
    ) -> None:
        (tmp_path / "in.gz").write_bytes(gzip.compress(b"a\nb") + gzip.compress(b"c\nd\n"))
        fleet.ready()

        done = load(tmp_path / "in.gz", "--handler", "echo")

        request = client.get(done.stdout.strip())
        request.wait(20)
        assert lines_of(request) == b"a\nbc\nd\n"

    @ONE_KIND
    def test_handler_that_no_worker_has_is_warned_of(
        self, fleet: Fleet, load: Load, client: Client, tmp_path: Path
    ) -> None:
        (tmp_path / "in.txt").write_text("a\n")
        alone = load(tmp_path / "in.txt", "--handler", "ecko")
        fleet.ready()

        beside = load(tmp_path / "in.txt", "--handler", "ecko")

        assert (alone.returncode, beside.returncode) == (0, 0)
        assert "warning" not in alone.stderr
        assert "has a handler 'ecko'" in beside.stderr
        assert client.get(beside.stdout.strip()).status().state is State.OPEN

    @ONE_KIND
    @pytest.mark.parametrize("change", ["grows", "shrinks", "is replaced"])
    def test_file_that_changes_while_it_is_loaded_is_refused_unless_it_grows(
        self,
        command: tuple[list[str], dict[str, str]],
        client: Client,
        fleet: Fleet,
        queue: str,
        tmp_path: Path,
        request_id: str,
        change: str,
    ) -> None:
        file = tmp_path / "in.txt"
        data = b"".join(b"%099d\n" % n for n in range(60_000))
        file.write_bytes(data)
        words = [*command[0], str(file), "--handler", "echo", "--id", request_id]
        running = subprocess.Popen(
            [*words, "--window", "1MiB"], env=command[1], stderr=subprocess.PIPE, text=True
        )
        # Nobody works yet, so it waits for room.
        wait_until(lambda: total_of(client, request_id) > 3, 30)
        if change == "grows":
            with file.open("ab") as more:
                more.write(b"more\n")
        elif change == "shrinks":
            os.truncate(file, len(data) - 100)
        else:
            (tmp_path / "new").write_bytes(data[::-1])
            (tmp_path / "new").replace(file)

        fleet.ready("-p", "2")

        _, errors = running.communicate(timeout=60)
        if change == "grows":
            assert running.returncode == 0, errors
            assert f"{file} has 5 bytes more by now, which are not read" in errors
            assert client.get(request_id).status().records.total == 60_000
            return
        assert running.returncode == 2
        assert f"the input changed while it was loaded: {file} ha" in errors
        assert client.list(queue) == []

    @ONE_KIND
    def test_request_that_fails_while_it_is_loaded_stays_to_be_looked_at(
        self,
        command: tuple[list[str], dict[str, str]],
        client: Client,
        fleet: Fleet,
        tmp_path: Path,
        request_id: str,
    ) -> None:
        (tmp_path / "in.txt").write_bytes(b"no number\n" * 500_000)
        words = [tmp_path / "in.txt", "--handler", "doubled", "--id", request_id]
        words += ["--max-failures", "3", "--window", "1MiB"]
        line = [*command[0], *map(str, words)]
        running = subprocess.Popen(line, env=command[1], stderr=subprocess.PIPE, text=True)
        wait_until(lambda: total_of(client, request_id) > 3, 30)
        fleet.ready()

        _, errors = running.communicate(timeout=60)

        assert running.returncode == 1
        assert f"request {request_id} is failed" in errors
        assert client.get(request_id).status().state is State.FAILED
        assert len(client.get(request_id).errors()) > 3

    @ONE_KIND
    def test_empty_file_is_done_at_once(self, load: Load, client: Client, tmp_path: Path) -> None:
        (tmp_path / "in.txt").touch()

        done = load(tmp_path / "in.txt", "--handler", "echo")

        status = client.get(done.stdout.strip()).status()
        assert (status.state, status.parts.total) == (State.DONE, 0)
