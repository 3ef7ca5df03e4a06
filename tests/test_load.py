"""``streamq load`` through its command: what is in the files reaches the handlers, once."""

import csv
import gzip
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamq import Client, Request
from streamq.codec import decode_result
from streamq.errors import StreamqError
from streamq.model import State
from streamq.server import LocalServer
from tests.fleet import Fleet
from tests.waiting import kill_on_the_way

ONE_KIND = pytest.mark.parametrize("kind", ["valkey"], indirect=True)
Load = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(url: str, queue: str) -> tuple[list[str], dict[str, str]]:
    """The command's beginning, and its environment."""
    environment = os.environ | {"STREAMQ_URL": url, "STREAMQ_QUEUE": queue}
    return [sys.executable, "-m", "streamq.cli", "load"], environment


@pytest.fixture
def load(command: tuple[list[str], dict[str, str]]) -> Load:
    """Runs the command to its end."""

    def load(*words: Any) -> "subprocess.CompletedProcess[str]":
        line = [*command[0], *map(str, words)]
        return subprocess.run(line, env=command[1], capture_output=True, text=True, timeout=60)

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
            (("long.txt", "--handler", "echo"), 2, "long.txt: record 2, at byte 6"),
            (("open.csv", "--handler", "echo"), 2, "open.csv: record 2: a quote is not closed"),
            (("cut.gz", "--handler", "echo"), 2, "cut.gz: after record"),
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
        name, *rest = words

        done = load(tmp_path / name, *rest)

        assert done.returncode == code
        assert says in done.stderr
        assert "Traceback" not in done.stderr
        assert client.list(queue) == []

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
        data = b"".join(b"%d\n" % n for n in range(60_000))
        (tmp_path / "in.txt").write_bytes(data)
        words = (tmp_path / "in.txt", "--handler", "echo", "--id", request_id, "--lines", "3")

        def how_far() -> int:
            try:
                return client.get(request_id).status().parts.total
            except StreamqError:
                return 0

        kills = kill_on_the_way([*command[0], *map(str, words)], command[1], how_far, 20_000)

        done = load(*words)

        assert done.returncode == 0, done.stderr
        assert kills > 0
        fleet.ready("-p", "2")
        request = client.get(request_id)
        assert request.wait(60).records.total == 60_000
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
        time.sleep(3)
        waiting = client.get(request_id).status().parts.waiting

        fleet.ready("-p", "2")

        assert running.wait(30) == 0
        assert waiting * 64 < 4 * 1024
        assert client.get(request_id).wait(30).records.done == 100_000


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
