"""``streamq load`` through its command: what is in the files reaches the handlers, once."""

import csv
import gzip
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streamq import Client, Protocol, Request
from streamq.errors import RequestEnded, StreamqError
from streamq.model import Policy, State
from streamq.protocol.replies import Terms
from streamq.records.encoding import decode_result
from streamq.servers.local import LocalServer
from tests.conftest import ANY_KIND, ONE_KIND
from tests.support.fleet import Fleet
from tests.support.secure import as_role
from tests.support.waiting import kill_on_the_way, wait_until

pytestmark = pytest.mark.commands
SAMPLES = Path(__file__).parents[2] / "samples"
Load = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(url: str, queue: str) -> tuple[list[str], dict[str, str]]:
    """The command's beginning, and its environment."""
    environment = os.environ | {"STREAMQ_URL": as_role(url, "load"), "STREAMQ_QUEUE": queue}
    return [sys.executable, "-m", "streamq.cli", "load"], environment


@pytest.fixture
def load(command: tuple[list[str], dict[str, str]]) -> Load:
    """Runs the command to its end."""

    def load(*words: Any, stdin: bytes = b"") -> "subprocess.CompletedProcess[str]":
        line = [*command[0], *map(str, words)]
        done = subprocess.run(line, env=command[1], capture_output=True, input=stdin, timeout=60)
        texts = done.stdout.decode(), done.stderr.decode()
        return subprocess.CompletedProcess(line, done.returncode, *texts)

    return load


def lines_of(request: Request) -> bytes:
    """What a map on lines returned, put together with the endings the lines had."""
    out = b""
    for _, result in request.raw_results(timeout=20):
        items, endings = decode_result(result)
        for index, item in enumerate(items):
            ending = {"n": b"\n", "r": b"\r\n", "0": b""}[chr(endings[index]) if endings else "n"]
            assert isinstance(item, bytes)
            out += item + ending
    return out


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

        done = load(folder, "--handler", "priced")

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

        lists = load(tmp_path / "in.csv", "--handler", "fields", "--no-header")
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
            (("long.txt", "--handler", "echo"), 2, "long.txt: record 2, at byte 6"),
            (("open.csv", "--handler", "echo"), 2, "open.csv: record 2: a quote is not closed"),
            (("cut.gz", "--handler", "echo"), 2, "cut.gz: after record"),
            (("crc.gz", "--handler", "echo"), 2, "crc.gz: after record"),
            (("bomb.gz", "--handler", "echo"), 2, "more than 1000 times its size"),
            (("latin.csv", "--handler", "echo"), 2, "latin.csv: record 1: the header is not UTF-8"),
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

        done = load(tmp_path / name, *rest)

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
        assert "does not decode" in failure.message
        request = client.get(rows.stdout.strip())
        assert request.wait(20).records.done == 1
        many, bad = request.errors()
        assert (many.line, bad.line) == (2, 3)
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
    def test_file_that_changes_while_it_is_loaded_is_refused(
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


class TestGoingOn:
    def test_killed_at_random_moments_every_record_is_there_once(
        self,
        command: tuple[list[str], dict[str, str]],
        load: Load,
        client: Client,
        fleet: Fleet,
        tmp_path: Path,
        request_id: str,
    ) -> None:
        data = b"".join(b"%d\n" % n for n in range(30_000))
        (tmp_path / "in.txt").write_bytes(data)
        words = (tmp_path / "in.txt", "--handler", "echo", "--id", request_id, "--lines", "3")

        kills = kill_on_the_way(
            [*command[0], *map(str, words)],
            command[1],
            lambda: total_of(client, request_id),
            10_000,
        )

        done = load(*words)

        assert done.returncode == 0, done.stderr
        assert kills > 0
        fleet.ready("-p", "2")
        request = client.get(request_id)
        assert request.wait(60).records.total == 30_000
        assert lines_of(request) == data

    @ONE_KIND
    def test_same_again_changes_nothing_and_a_changed_input_is_refused(
        self, load: Load, client: Client, tmp_path: Path, request_id: str
    ) -> None:
        file = tmp_path / "in.txt"
        file.write_text("a\nb\n")
        words = (file, "--handler", "echo", "--id", request_id)
        load(*words)

        again = load(*words)
        file.write_text("a\nb\nc\n")
        changed = load(*words)
        other = load(*words, "--limit", "3")
        (tmp_path / "other.txt").write_text("a\nb\n")
        another = load(tmp_path / "other.txt", *words[1:], "--queue", "elsewhere")

        assert another.returncode == 1
        assert "other.txt" in another.stderr
        assert client.list("elsewhere") == []
        assert (again.returncode, again.stdout) == (0, f"{request_id}\n")
        assert changed.returncode == 1
        assert "had 4 bytes, and has 6" in changed.stderr
        assert other.returncode == 1
        assert client.get(request_id).status().records.total == 2

    @ONE_KIND
    def test_window_holds_the_load_back(
        self,
        command: tuple[list[str], dict[str, str]],
        client: Client,
        fleet: Fleet,
        tmp_path: Path,
        request_id: str,
    ) -> None:
        (tmp_path / "in.txt").write_bytes((b"x" * 99 + b"\n") * 100_000)
        words = [tmp_path / "in.txt", "--handler", "echo", "--id", request_id]
        running = subprocess.Popen(
            [*command[0], *map(str, words), "--window", "2MiB", "--bytes", "64KiB"], env=command[1]
        )
        wait_until(lambda: total_of(client, request_id) * 64 >= 2 * 1024, 30)
        fleet.ready("-p", "2")
        waiting = client.get(request_id).status().parts.waiting

        assert running.wait(60) == 0
        # The window, a call that began below it, and one that was on its way.
        assert waiting * 64 <= 4 * 1024
        assert client.get(request_id).wait(60).records.done == 100_000


class TestStdin:
    @ONE_KIND
    @pytest.mark.parametrize("pack", [bytes, gzip.compress])
    def test_is_loaded_as_a_file_is(
        self, fleet: Fleet, load: Load, client: Client, pack: Callable[[bytes], bytes]
    ) -> None:
        data = b"item,count\n" + b"".join(b"a,%d\n" % n for n in range(20_000))
        fleet.ready()

        done = load("-", "--handler", "priced", "--format", "csv", stdin=pack(data))

        request = client.get(done.stdout.strip())
        assert request.wait(20).records.done == 20_000
        found = [item for _, items in request.results() for item in items]
        assert found == [{"a": 3 * n} for n in range(20_000)]

    @ONE_KIND
    def test_what_came_is_not_kept_waiting_for_more(
        self,
        fleet: Fleet,
        client: Client,
        command: tuple[list[str], dict[str, str]],
        request_id: str,
    ) -> None:
        fleet.ready()
        line = [*command[0], "-", "--handler", "shout", "--lines", "1", "--id", request_id]
        loading = subprocess.Popen(line, env=command[1], stdin=subprocess.PIPE)
        assert loading.stdin

        loading.stdin.write(b"one\ntwo\n")
        loading.stdin.flush()
        wait_until(lambda: done_of(client, request_id) == 2, 20)
        loading.stdin.write(b"three\n")
        loading.stdin.close()

        assert loading.wait(20) == 0
        request = client.get(request_id)
        request.wait(20)
        assert [item for _, item in request.results()] == ["ONE", "TWO", "THREE"]

    @ONE_KIND
    def test_killed_and_given_the_same_again_it_goes_on(
        self,
        fleet: Fleet,
        load: Load,
        client: Client,
        command: tuple[list[str], dict[str, str]],
        request_id: str,
    ) -> None:
        data = b"".join(b"%d\n" % n for n in range(50_000))
        words = ["-", "--handler", "echo", "--lines", "10", "--id", request_id]
        loading = subprocess.Popen([*command[0], *words], env=command[1], stdin=subprocess.PIPE)
        assert loading.stdin
        loading.stdin.write(data[:100_000])
        loading.stdin.flush()
        wait_until(lambda: total_of(client, request_id) > 1_000, 20)
        loading.kill()
        loading.wait()
        loading.stdin.close()

        short = load(*words, stdin=data[:500])
        other = load(*words, stdin=data.replace(b"7", b"8"))
        same = load(*words, stdin=data)
        again = load(*words, stdin=data)
        longer = load(*words, stdin=data + b"more\n")

        assert (short.returncode, other.returncode, longer.returncode) == (1, 1, 1)
        assert "ends after 500 bytes" in short.stderr
        assert "are not what they were" in other.stderr
        assert "and has more" in longer.stderr
        assert (same.returncode, again.returncode) == (0, 0), same.stderr + again.stderr
        fleet.ready("-p", "2")
        request = client.get(request_id)
        assert request.wait(30).records.total == 50_000
        assert lines_of(request) == data

    @ONE_KIND
    def test_closed_is_said(self, command: tuple[list[str], dict[str, str]]) -> None:
        line = " ".join([*command[0], "- --handler echo <&-"])

        done = subprocess.run(["sh", "-c", line], env=command[1], capture_output=True, text=True)

        assert (done.returncode, done.stdout) == (2, "")
        assert "standard input is closed" in done.stderr

    @ONE_KIND
    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
    )
    def test_stopped_it_says_how_to_go_on(
        self,
        client: Client,
        command: tuple[list[str], dict[str, str]],
        request_id: str,
        number: int,
        code: int,
    ) -> None:
        line = [*command[0], "-", "--handler", "shout", "--lines", "1", "--id", request_id]
        pipe = subprocess.PIPE
        loading = subprocess.Popen(line, env=command[1], stdin=pipe, stderr=pipe, text=True)
        assert loading.stdin
        loading.stdin.write("one\n")
        loading.stdin.flush()
        wait_until(lambda: total_of(client, request_id) == 1, 30)

        loading.send_signal(number)

        assert loading.wait(20) == code
        _, errors = loading.communicate()
        assert errors == f"stopped; the same command goes on with --id {request_id}\n"

    @ONE_KIND
    def test_goes_alone(self, load: Load, tmp_path: Path) -> None:
        (tmp_path / "in.txt").write_text("a\n")

        done = load("-", tmp_path / "in.txt", "--handler", "echo")

        assert done.returncode == 2
        assert "goes alone" in done.stderr


class TestRequests:
    @ONE_KIND
    def test_sample_runs_as_its_readme_says(
        self, command: tuple[list[str], dict[str, str]], client: Client, url: str, tmp_path: Path
    ) -> None:
        for file in SAMPLES.iterdir():
            if file.is_file():
                shutil.copy(file, tmp_path)
        readme = (SAMPLES / "README.md").read_text()
        (script,) = re.findall(r"```\n(streamq load requests.*?)```", readme, re.DOTALL)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

        done = subprocess.run(
            ["bash", "-ec", script],
            env=command[1] | {"PATH": path, "STREAMQ_URL": as_role(url, "run")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )

        assert done.returncode == 0, done.stderr
        words = (SAMPLES / "requests").read_text()
        lines = [line.split(":") for line in words.splitlines() if line and line[0] != "#"]
        assert done.stdout.split() == [word.upper() for _, *parts in lines for word in parts]
        ids = (tmp_path / "ids").read_text().split()
        assert [client.get(each).status().limit for each in ids] == [int(n) for n, *_ in lines]

    @ONE_KIND
    def test_same_again_makes_no_request_twice(
        self, load: Load, client: Client, queue: str, tmp_path: Path, request_id: str
    ) -> None:
        file = tmp_path / "in"
        file.write_bytes(b"# one\n1:a:b\r\n\n20:c::d: ")
        words = (file, "--handler", "echo", "--format", "requests", "--id", request_id)

        done = load(*words)
        again = load(*words)
        file.write_bytes(b"1:a:b\n20:c:d\n3:e\n")
        longer = load(*words)
        file.write_bytes(b"1:a:b\n21:c:d\n")
        other = load(*words)

        ids = [f"{request_id}-1", f"{request_id}-2"]
        assert done.stdout.split() == again.stdout.split() == ids
        assert longer.stdout.split() == [*ids, f"{request_id}-3"]
        assert other.returncode == 1
        assert "in: line 2: request" in other.stderr
        found = {status.id: (status.limit, status.parts.total) for status in client.list(queue)}
        assert found == dict(zip([*ids, f"{request_id}-3"], [(1, 2), (20, 2), (3, 1)], strict=True))

    def test_many_at_once_go_on_where_a_load_stood(
        self,
        load: Load,
        client: Client,
        protocol: Protocol,
        queue: str,
        tmp_path: Path,
        request_id: str,
    ) -> None:
        file, words = tmp_path / "in", ("--handler", "echo", "--format", "requests")
        lines = [b"%d:a%d:b\n" % (n, n) for n in range(1, 301)]
        file.write_bytes(b"\xef\xbb\xbf" + b"".join(lines[:100]))
        assert load(file, *words, "--id", request_id).returncode == 0
        file.write_bytes(b"".join(lines))

        done = load(file, *words, "--id", request_id)

        ids = [f"{request_id}-{n}" for n in range(1, 301)]
        assert done.stdout.split() == ids, done.stderr
        found = {each.id: (each.limit, each.parts.total) for each in client.list(queue)}
        assert found == {each: (n, 2) for n, each in enumerate(ids, 1)}
        assert protocol.unknown([*ids, f"{request_id}-301"]) == {f"{request_id}-301"}

    @ONE_KIND
    def test_many_lines_without_a_request_are_passed_over(
        self, load: Load, tmp_path: Path, request_id: str
    ) -> None:
        file = tmp_path / "in"
        file.write_bytes(b"# a comment\n" * 1_200 + b"1:a\n")

        done = load(file, "--handler", "echo", "--format", "requests", "--id", request_id)

        assert done.stdout.split() == [f"{request_id}-1"], done.stderr

    @ONE_KIND
    @pytest.mark.parametrize("line", [b"a:b", b"0:a", b"-1:a", b"3", b"3: :", b"1.5:a"])
    def test_bad_line_is_named_and_nothing_is_submitted(
        self, load: Load, client: Client, queue: str, tmp_path: Path, line: bytes
    ) -> None:
        (tmp_path / "in").write_bytes(b"1:a\n\n" + line + b"\n")

        done = load(tmp_path / "in", "--handler", "echo", "--format", "requests")

        assert (done.returncode, done.stdout) == (2, "")
        assert "in: line 3: " in done.stderr
        assert client.list(queue) == []


def total_of(client: Client, request_id: str) -> int:
    """Parts so far, 0 while the request is not there."""
    try:
        return client.get(request_id).status().parts.total
    except StreamqError:
        return 0


def done_of(client: Client, request_id: str) -> int:
    """Parts done, 0 while the request is not there."""
    try:
        return client.get(request_id).status().parts.done
    except StreamqError:
        return 0


def test_full_server_keeps_what_it_has_and_the_same_command_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_bytes(b"x" * 999 + b"\n")
    source.write_bytes(source.read_bytes() * 20_000)
    words = [sys.executable, "-m", "streamq.cli", "load", str(source), "--handler", "h"]
    with LocalServer.start() as server, Client(server.url) as client:
        redis = client._protocol.connection.redis
        redis.config_set("maxmemory", redis.info("memory")["used_memory"] + 8 * 2**20)

        def load() -> "subprocess.CompletedProcess[bytes]":
            env = os.environ | {"STREAMQ_URL": server.url}
            return subprocess.run([*words, "--id", "big"], env=env, capture_output=True)

        full = load()
        kept = client.get("big").status().records.total
        redis.config_set("maxmemory", 0)
        again = load()

        assert b"out of memory" in full.stderr
        assert 0 < kept < 20_000
        assert again.returncode == 0, again.stderr
        assert client.get("big").status().records.total == 20_000


class TestAppendingAhead:
    """Parts are sent before those before them are answered: whatever breaks, each is there once."""

    @ONE_KIND
    @pytest.mark.parametrize("trouble", ["SCRIPT FLUSH", "CLIENT KILL TYPE normal", ""])
    def test_every_part_is_there_once(
        self, protocol: Protocol, queue: str, request_id: str, trouble: str
    ) -> None:
        protocol.open(request_id, "digest", Policy(handler="echo", queue=queue))
        with closing(protocol.appending(request_id)) as appending:
            for first in range(1, 100, 10):
                entries = [word for n in range(10) for word in (b"%d" % (first + n), b"1")]
                appending.send(first, f"{first}", 10, entries)
                if trouble and first % 30 == 1:
                    protocol.connection.redis.execute_command(*trouble.split())
            appending.wait()

        protocol.seal(request_id, 100, "91")
        grant = protocol.claim(request_id, "holder", Terms(200), ["parts echo 3"])
        assert [part.payload for part in grant.parts] == [b"%d" % n for n in range(1, 101)]

    @ONE_KIND
    def test_refusal_is_what_append_says(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        protocol.open(request_id, "digest", Policy(handler="echo", queue=queue))
        with closing(protocol.appending(request_id)) as appending:
            appending.send(1, "1", 1, [b"a", b"1"])
            protocol.cancel(request_id)
            appending.send(2, "2", 1, [b"b", b"1"])

            with pytest.raises(RequestEnded):
                appending.wait()
