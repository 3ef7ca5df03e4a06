"""``streamq run`` and ``streamq demo`` through their commands: the whole job at once."""

import bz2
import fcntl
import gzip
import hashlib
import json
import lzma
import os
import pty
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamq import Client
from streamq.servers.local import LocalServer
from tests.conftest import KINDS
from tests.support.secure import as_role
from tests.support.waiting import is_alive, wait_until

pytestmark = pytest.mark.commands
EMBEDDED = pytest.mark.skipif(KINDS[0].startswith("secure"), reason="is about the embedded server")
STOPS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
SAMPLES = Path(__file__).parents[2] / "samples"
Streamq = Callable[..., "subprocess.CompletedProcess[str]"]
Begin = Callable[..., "subprocess.Popen[str]"]
COMMAND = [sys.executable, "-m", "streamq.cli"]
CODE = """
import pathlib
import time
def same(line: bytes) -> bytes:
    return line
def slow(line: bytes) -> bytes:
    time.sleep(0.001)
    return line
def talks(line: bytes) -> bytes:
    if line == b"line 0":
        print("hello from a handler", flush=True)
    return line
def swollen(line: bytes) -> bytes:
    while int(line) == 0 and not pathlib.Path("go").exists():
        time.sleep(0.01)
    return line * 4
def stuck_thrice(line: bytes) -> bytes:
    if line == b"line 0":
        times = len(list(pathlib.Path().glob("stuck*"))) + 1
        if times <= 3:
            pathlib.Path(f"stuck{times}").touch()
            time.sleep(1000)
    return line
def rowed(row):
    return row
def broken(line: bytes) -> bytes:
    return line[:-1] + b"\\xff" if line.endswith(b"7") else line
def endless(line: str) -> float:
    return {"value": float(line)}
def typed(record: dict) -> dict:
    return record
def picky(line: str) -> str:
    if line.endswith("7"):
        raise ValueError("seven")
    return line.upper()
"""


@pytest.fixture
def environment(urls: Callable[[str], str]) -> dict[str, str]:
    """Without a server, so that one is embedded; with one where that is asked to be secure."""
    own = {k: v for k, v in os.environ.items() if not k.endswith(("_URL", "URL_FILE"))}
    if KINDS[0].startswith("secure"):
        own |= {"STREAMQ_URL": as_role(urls(KINDS[0]), "run")}
    return own


@pytest.fixture
def streamq(tmp_path: Path, environment: dict[str, str]) -> Streamq:
    (tmp_path / "code.py").unlink(missing_ok=True)
    (tmp_path / "job.py").write_text(CODE)

    def streamq(*words: Any, stdout: Any = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [*COMMAND, *map(str, words)],
            env=environment,
            cwd=tmp_path,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=100,
        )
        texts = [text.decode() if text is not None else "" for text in (done.stdout, done.stderr)]
        return subprocess.CompletedProcess(done.args, done.returncode, *texts)

    return streamq


@pytest.fixture
def begin(environment: dict[str, str], streamq: Streamq, tmp_path: Path) -> Iterator[Begin]:
    """Starts ``streamq run``, and goes on while it runs."""
    begun: list[subprocess.Popen[str]] = []

    def begin(*words: Any) -> "subprocess.Popen[str]":
        begun.append(
            subprocess.Popen(
                [*COMMAND, "run", *map(str, words)],
                env=environment,
                cwd=tmp_path,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return begun[-1]

    yield begin
    for each in begun:
        each.kill()
        if each.stderr and not each.stderr.closed:
            each.communicate()


def begin_slowly(
    begin: Begin, folder: Path, size: int, *options: str
) -> "tuple[subprocess.Popen[str], Path]":
    """A run whose output has grown beyond the size, with more to come; and that output."""
    words = ["in.txt", "--map", "job:slow", "-o", "out.txt", "-p", "2", "--lines", "10"]
    running = begin(*words, *options)
    output = folder / "out.txt"
    wait_until(lambda: output.exists() and output.stat().st_size > size, 60)
    return running, output


def run_left_in(folder: Path) -> str:
    """The id of the run that can be gone on with there."""
    (home,) = (folder / ".streamq").iterdir()
    return home.name


def go_on(streamq: Streamq, said: str, folder: Path) -> None:
    """Do as a run that was stopped said, to its end."""
    request_id = run_left_in(folder)
    assert f"go on with: streamq run --resume {request_id}" in said
    done = streamq("run", "--resume", request_id)
    assert done.returncode == 0, done.stderr


def descendants(pid: int) -> list[int]:
    """Ids of the processes below one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def processes_in(folder: Path) -> list[int]:
    """Ids of the processes whose current folder it is."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if link.readlink() == folder:
                found.append(int(link.parent.name))
    return found


def wait_for_the_end_of(pids: list[int]) -> None:
    """Nothing of a killed run is left after a moment."""
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 15)


def program(path: Path, text: str) -> None:
    """A shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_bytes(b"".join(b"line %d\r\n" % n for n in range(3_000)) + b"last")
    return path


@pytest.mark.parametrize("target", ["job:same", "job.py:same"])
def test_identity_gives_the_input_back_and_leaves_nothing(
    streamq: Streamq, source: Path, tmp_path: Path, target: str
) -> None:
    done = streamq("run", "in.txt", "--map", target, "-o", "out.txt", "-p", 2, "--lines", 100)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()
    assert not (tmp_path / ".streamq").exists()
    assert "3,001 records in 31 parts, 0 failed" in done.stderr


def test_too_many_failures_end_it_though_more_is_to_be_loaded(
    streamq: Streamq, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_bytes(b"line 7\n" * 2_000_000)
    words = ("--retries", 0, "--max-failures", 5, "--window", "1MiB", "--lines", 100)

    done = streamq("run", "in.txt", "--map", "job:picky", "-o", "out.txt", "-p", 1, *words)

    assert done.returncode == 1
    assert "failed in " in done.stderr
    assert "go on with" not in done.stderr
    assert "seven" in (tmp_path / "out.errors.jsonl").read_text()
    assert not (tmp_path / ".streamq").exists()


@pytest.mark.parametrize(
    ("output", "lines"), [("out.csv", "result\na\n\u00e4\n"), ("out.jsonl", '"a"\n"\u00e4"\n')]
)
def test_bytes_are_text_in_formats_of_text(
    streamq: Streamq, tmp_path: Path, output: str, lines: str
) -> None:
    (tmp_path / "in.txt").write_text("a\n\u00e4\n")

    done = streamq("run", "in.txt", "--map", "job:same", "-o", output)

    assert (done.returncode, (tmp_path / output).read_text()) == (0, lines)


def test_quoted_csv_comes_back_with_its_header(streamq: Streamq, tmp_path: Path) -> None:
    rows = b"".join(b'%d,"say ""hi"",\r\nthen go"\r\n' % n for n in range(500))
    (tmp_path / "in.csv").write_bytes(b"number,note\r\n" + rows)

    done = streamq("run", "in.csv", "--map", "job:same", "-o", "out", "--lines", 7)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in.csv").read_bytes()


def test_window_holds_what_is_not_collected_too(
    begin: Begin, streamq: Streamq, tmp_path: Path
) -> None:
    """The first part keeps all others from being written: the load waits, not the memory grows."""
    window = 4 * 2**20
    (tmp_path / "in.txt").write_bytes(b"".join(b"%099d\n" % n for n in range(200_000)))
    words = ["in.txt", "--map", "job:swollen", "-o", "out", "-p", "2", "--lines", "100"]
    with LocalServer.start() as server, Client(server.url) as client:
        running = begin(*words, "--window", window, "--url", server.url)
        (name,) = wait_until(lambda: list((tmp_path / ".streamq").glob("*/plan.json")), 60)
        request = client.get(wait_until(lambda: client.list(), 60)[0].id)

        totals: list[int] = []

        def is_at_rest() -> bool:
            """Everything but the first part is done, and nothing was loaded for fifty looks."""
            parts = request.status().parts
            totals.append(parts.total if parts.done == parts.total - 1 else -len(totals))
            return parts.done > 0 and len(set(totals[-50:])) == 1 and len(totals) > 50

        wait_until(is_at_rest, 60)
        stalled = request.status()
        (tmp_path / "go").touch()
        _, said = running.communicate(timeout=60)

    assert name.parent.name == stalled.id
    assert running.returncode == 0, said
    assert stalled.state == "loading"
    assert stalled.parts.done * 40_000 < 3 * window
    with (tmp_path / "out").open("rb") as out:
        assert sum(len(line) == 397 for line in out) == 200_000


def test_failures_are_written_beside_and_the_code_is_1(
    streamq: Streamq, source: Path, tmp_path: Path
) -> None:
    done = streamq(
        "run", "in.txt", "--map", "job:picky", "-o", "out.jsonl", "--retries", 0, "--json"
    )

    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["records"]["done"], summary["records"]["failed"]) == (2701, 300)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines[:2]] == ["LINE 0", "LINE 1"]
    failures = [
        json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()
    ]
    assert [(f["line"], f["error"]) for f in failures[:2]] == [
        (8, "ValueError"),
        (18, "ValueError"),
    ]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("run", "in.txt", "-o", "out.txt"), 2, "either --map"),
        (("run", "in.txt", "--map", "job:same", "--exec", "cat", "-o", "out.txt"), 2, "either"),
        (("run", "in.txt", "--map", "job:same", "--json"), 2, "-o FILE"),
        (("run", "in.txt", "--exec", "no-such-program -x"), 4, "no program 'no-such-program'"),
        (("run", "in.txt", "--exec", "tr 'a"), 2, "No closing quotation"),
        (("run", "in.txt", "--exec", "cat", "--output-format", "csv"), 2, "--map"),
        (("run", "none.txt", "--map", "job:same", "-o", "out.txt"), 2, "none.txt: No such file"),
        (("run", "in.txt", "--map", "job:nothing", "-o", "out.txt"), 4, "no 'nothing'"),
        (("run", "in.txt", "--map", "nowhere:f", "-o", "out.txt"), 4, "no module 'nowhere'"),
        (("run", "in.txt", "--map", "job:same", "-o", "no/out.txt"), 2, "there is no folder"),
        (("run", "in.txt", "--map", "job:same", "-o", "in.txt"), 2, "of the inputs"),
        (("run", "in.txt", "--map", "job:same", "-o", "."), 2, "is a folder"),
        (("run", "in.txt", "--map", "job:same", "-o", "in.txt", "--force"), 2, "of the inputs"),
        (("run", "", "--map", "job:same", "-o", "out.txt"), 2, "a file has no name"),
        (("run", "--resume", "other"), 2, "no run other was stopped"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(
    streamq: Streamq, source: Path, tmp_path: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    done = streamq(*words)

    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".streamq").exists()
    assert processes_in(tmp_path) == []


def test_killed_while_it_starts_it_leaves_no_process(
    begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
) -> None:
    words = ["in.txt", "--map", "job:same", "-o", "out.txt", "-p", "2"]
    running = begin(*words)
    wait_until(lambda: len(processes_in(tmp_path)) == 3, 30)

    running.kill()
    running.wait()

    wait_until(lambda: not processes_in(tmp_path), 15)


class TestPipes:
    @pytest.mark.parametrize(("closed", "code"), [("1", 2), ("2", 0), ("0", 0)])
    def test_closed_stream_is_no_other_file(
        self, environment: dict[str, str], streamq: Streamq, source: Path, closed: str, code: int
    ) -> None:
        line = [*COMMAND, "run", "in.txt", "--map", "job:talks", "-o", "-", "-p", "1"]
        done = subprocess.run(
            ["sh", "-c", f'"$@" {closed}>&-', "sh", *line],
            env=environment,
            cwd=source.parent,
            capture_output=True,
            timeout=60,
        )

        assert done.returncode == code, done.stderr
        if code:
            assert b"Standard output is closed: give -o FILE" in done.stderr
        else:
            assert done.stdout == source.read_bytes()

    def test_results_go_to_the_pipe_and_words_to_stderr(
        self, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        with (tmp_path / "out.txt").open("wb") as out:
            done = streamq("run", "in.txt", "--map", "job:talks", "--lines", 100, stdout=out)

        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()
        assert "hello from a handler" in done.stderr
        assert "3,001 records in 31 parts" in done.stderr
        assert not (tmp_path / ".streamq").exists()

    @pytest.mark.parametrize("words", [("--map", "job:same"), ("--exec", "cat")])
    def test_it_is_a_filter(
        self, environment: dict[str, str], streamq: Streamq, source: Path, words: tuple[str, str]
    ) -> None:
        with source.open("rb") as stdin:
            done = subprocess.run(
                [*COMMAND, "run", "-", *words, "--lines", "100"],
                env=environment,
                cwd=source.parent,
                stdin=stdin,
                capture_output=True,
                timeout=60,
            )

        assert done.returncode == 0, done.stderr
        assert done.stdout == source.read_bytes()

    def test_failures_are_told(self, streamq: Streamq, source: Path) -> None:
        done = streamq("run", "in.txt", "--map", "job:picky", "-o", "-", "--retries", 0)

        assert done.returncode == 1
        assert done.stdout.count("\n") == 2_700, "the last line had no newline"
        assert "in.txt:8: ValueError: seven" in done.stderr
        assert "and 290 more" in done.stderr

    @EMBEDDED
    def test_whoever_reads_no_more_ends_it_quietly(
        self, environment: dict[str, str], streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        words = ["run", "in.txt", "--map", "job:slow", "-p", "2", "--lines", "1"]
        running = subprocess.Popen(
            [*COMMAND, *words],
            env=environment | {"TMPDIR": str(tmp_path)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert running.stdout
        assert running.stderr
        assert running.stdout.readline() == b"line 0\r\n"
        below = descendants(running.pid)
        running.stdout.close()

        assert running.wait(30) == 141
        assert running.stderr.read() == b""
        running.stderr.close()
        assert len(below) >= 4, "two processes, a supervisor and its server"
        wait_until(lambda: not any(is_alive(pid) for pid in below), 10)
        assert not (tmp_path / ".streamq").exists()
        assert not list(tmp_path.glob("streamq-*"))


class TestPrograms:
    def test_any_program_is_a_handler(self, streamq: Streamq, source: Path, tmp_path: Path) -> None:
        same = streamq("run", "in.txt", "--exec", "cat", "--lines", 100, "-o", "same.jsonl")
        upper = streamq("run", "in.txt", "--exec", "tr a-z A-Z", "--lines", 100)
        lines = streamq("run", "in.txt", "--exec", "sort -r", "--lines", 1000)
        first = streamq("run", "in.txt", "--exec", "head -n 1", "--bytes", "64KiB")

        assert (tmp_path / "same.jsonl").read_bytes() == source.read_bytes()
        assert "3,001 records in 31 parts" in same.stderr
        assert upper.stdout == source.read_bytes().decode().upper()
        assert lines.stdout.splitlines()[0] == "line 999"
        assert first.stdout == "line 0\r\n", "it need not read to the end"

    def test_its_exit_code_is_a_failure_with_what_it_said(
        self, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        program(tmp_path / "fails", "cat >/dev/null; echo so sorry >&2; exit 3")

        done = streamq(
            "run", "in.txt", "--exec", "./fails", "-o", "out.txt", "--retries", 0, "--lines", 1000
        )

        assert done.returncode == 1, done.stderr
        failures = (tmp_path / "out.errors.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in failures]
        assert [failure["line"] for failure in found] == [1, 1001, 2001, 3001]
        assert {failure["message"] for failure in found} == {"exit code 3: so sorry"}

    def test_one_that_hangs_is_ended_with_all_it_started(
        self, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        program(tmp_path / "hangs", "sleep 1000 & echo $! >>pids; echo $$ >>pids; wait")

        done = streamq(
            "run", "in.txt", "--exec", "./hangs", "-o", "out.txt", "--retries", 0, "--timeout", "1s"
        )

        assert done.returncode == 1, done.stderr
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
        assert "it took longer than 1 s" in (tmp_path / "out.errors.jsonl").read_text()

    def test_killed_run_leaves_no_program(
        self, begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        program(tmp_path / "hangs", "sleep 1000 & echo $! >>pids; echo $$ >>pids; wait")
        words = ["in.txt", "--exec", "./hangs", "-o", "out.txt"]
        running = begin(*words)
        pids = tmp_path / "pids"
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, 60)
        below = descendants(running.pid)

        running.kill()
        running.wait()

        wait_until(lambda: not any(is_alive(pid) for pid in below), 10)

    def test_two_runs_on_one_server_do_not_run_each_others_parts(
        self, begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        for name in ("one", "two"):
            program(
                tmp_path / name,
                f"cat >/dev/null; touch {name}.runs; until test -e go; do sleep 0.05; done; "
                f"echo {name}",
            )
        with LocalServer.start() as server:
            words = ["in.txt", "-p", "1", "--lines", "10", "--limit", "4"]
            words += ["--url", server.url]
            running = [
                begin(*words, "--exec", f"./{name}", "-o", f"{name}.txt") for name in ("one", "two")
            ]
            wait_until(lambda: len(list(tmp_path.glob("*.runs"))) == 2, 60)
            (tmp_path / "go").touch()

            assert [each.wait(60) for each in running] == [0, 0]

        for name in ("one", "two"):
            assert (tmp_path / f"{name}.txt").read_text() == f"{name}\n" * 301


class TestOutputs:
    def test_full_disk_is_named_and_the_run_goes_on_later(
        self, begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        running, output = begin_slowly(begin, tmp_path, 100)
        # A disk of the collector's own: no file that it writes may grow beyond this.
        resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (3_000, resource.RLIM_INFINITY))

        _, said = running.communicate(timeout=100)

        assert running.returncode == 1, said
        assert f"cannot write {output}: File too large" in said
        go_on(streamq, said, tmp_path)
        assert output.read_bytes() == source.read_bytes()

    def test_device_that_is_full_is_named(self, streamq: Streamq, source: Path) -> None:
        done = streamq("run", "in.txt", "--map", "job:same", "-o", "/dev/full")

        assert done.returncode == 1
        assert "cannot write /dev/full: No space left on device" in done.stderr
        assert "Traceback" not in done.stderr

    def test_file_moved_on_the_way_is_missed_and_goes_on_when_it_is_back(
        self, begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        running, output = begin_slowly(begin, tmp_path, 100)
        output.rename(tmp_path / "moved.txt")

        _, said = running.communicate(timeout=100)

        assert running.returncode == 1, said
        assert "was moved or removed while it was written" in said
        request_id = run_left_in(tmp_path)
        missed = streamq("run", "--resume", request_id)
        (tmp_path / "moved.txt").rename(output)
        done = streamq("run", "--resume", request_id)
        assert missed.returncode == 2
        assert "were written for request" in missed.stderr
        assert done.returncode == 0, done.stderr
        assert output.read_bytes() == source.read_bytes()

    def test_file_that_exists_is_written_over_only_by_force(
        self, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "out.txt").write_bytes(b"precious\n" * 9_000)

        refused = streamq("run", "in.txt", "--map", "job:same", "-o", "out.txt")
        forced = streamq("run", "in.txt", "--map", "job:same", "-o", "out.txt", "--force")

        assert (refused.returncode, forced.returncode) == (2, 0)
        assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()

    def test_failures_never_replace_an_input(self, streamq: Streamq, tmp_path: Path) -> None:
        kept = tmp_path / "out.errors.jsonl"
        kept.write_text("precious 7\n")

        done = streamq(
            "run", kept.name, "--format", "lines", "--map", "job:picky", "-o", "out.jsonl"
        )

        assert (done.returncode, kept.read_text()) == (2, "precious 7\n")
        assert "of the inputs" in done.stderr

    def test_failures_of_an_earlier_run_do_not_stay(
        self, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        words = ("run", "in.txt", "-o", "out.jsonl", "--retries", 0, "--force", "--map")

        codes = [streamq(*words, each).returncode for each in ("job:picky", "job:same")]

        assert codes == [1, 0]
        assert not (tmp_path / "out.errors.jsonl").exists()

    @pytest.mark.parametrize("target", ["job:same", "job:picky"])
    def test_failures_never_replace_what_is_not_theirs(
        self, streamq: Streamq, source: Path, tmp_path: Path, target: str
    ) -> None:
        beside, precious = tmp_path / "out.errors.jsonl", tmp_path / "precious"
        beside.write_text("precious")
        words = ("run", "in.txt", "--map", target, "-o", "out.txt", "--retries", 0)

        refused = streamq(*words)
        beside.unlink()
        precious.write_text("precious")
        beside.symlink_to(precious)
        linked = streamq(*words)

        assert (refused.returncode, linked.returncode) == (2, 2)
        assert "out.errors.jsonl exists" in refused.stderr
        assert not (tmp_path / "out.txt").exists()
        forced = streamq(*words, "--force")
        assert forced.returncode == (1 if target == "job:picky" else 0)
        assert precious.read_text() == "precious"
        assert not beside.is_symlink()
        assert beside.exists() == (target == "job:picky")

    def test_failures_that_cannot_be_written_are_told(
        self, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "out.errors.jsonl").mkdir()

        done = streamq("run", "in.txt", "--map", "job:picky", "-o", "out.jsonl", "--retries", 0)

        assert done.returncode == 1
        assert f"cannot write {tmp_path}/out.errors.jsonl: Is a directory" in done.stderr
        assert "in.txt:8: ValueError" in done.stderr

    def test_last_lines_without_a_newline_are_not_glued_to_what_follows(
        self, streamq: Streamq, tmp_path: Path
    ) -> None:
        for number in (1, 2, 3):
            (tmp_path / f"{number}.txt").write_text(f"a{number}\nb{number}")

        done = streamq("run", "1.txt", "2.txt", "3.txt", "--map", "job:same", "-o", "out.txt")

        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out.txt").read_text() == "a1\nb1\na2\nb2\na3\nb3"

    def test_last_line_without_a_newline_may_come_first(
        self, streamq: Streamq, tmp_path: Path
    ) -> None:
        (tmp_path / "in.txt").write_text("slow\nquick\nlast")
        (tmp_path / "own.py").write_text(
            "import pathlib, time\n"
            "def f(line: str):\n"
            "    while line == 'slow' and b'last' not in pathlib.Path('out.txt').read_bytes():\n"
            "        time.sleep(0.01)\n"
            "    return line\n"
        )
        words = ("--lines", 1, "-p", 2, "--unordered")

        done = streamq("run", "in.txt", "--map", "own:f", "-o", "out.txt", *words)

        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out.txt").read_text() == "quick\nlast\nslow\n"

    def test_column_that_a_csv_has_no_place_for_is_told(
        self, streamq: Streamq, tmp_path: Path
    ) -> None:
        (tmp_path / "in.txt").write_text("a\nb\nb\n")
        (tmp_path / "own.py").write_text(
            "def f(line: str):\n    return {'a': 1} | ({'extra': 2} if line == 'b' else {})\n"
        )

        done = streamq("run", "in.txt", "--map", "own:f", "-o", "out.csv")

        assert (tmp_path / "out.csv").read_text() == "a\n1\n1\n1\n"
        assert done.stderr.count("extra of a later one is left out") == 1

    def test_two_runs_do_not_write_the_same_file(
        self, begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        # A hundred lines take long enough for the second to start, also on a busy machine.
        (tmp_path / "job.py").write_text(
            "import time\ndef same(line: bytes) -> bytes:\n    return line\n"
            "def slow(line: bytes) -> bytes:\n    time.sleep(0.01)\n    return line\n"
        )
        running, output = begin_slowly(begin, tmp_path, 100)

        second = streamq("run", "in.txt", "--map", "job:same", "-o", str(output), "--force")

        assert second.returncode == 2
        assert "just being written by somebody else" in second.stderr
        assert running.wait(100) == 0
        assert output.read_bytes() == source.read_bytes()

    def test_carriage_returns_in_a_csv_are_quoted(self, streamq: Streamq, tmp_path: Path) -> None:
        (tmp_path / "in.txt").write_bytes(b"x\n")
        (tmp_path / "own.py").write_text(
            'def f(line: str):\n    return {"a": "x\\ry", "b": "0\\r"}\n'
        )

        done = streamq("run", "in.txt", "--map", "own:f", "-o", "out.csv")

        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out.csv").read_bytes() == b'a,b\n"x\ry","0\r"\n'


def test_bad_input_is_what_is_told_of_whoever_finds_out_first(
    streamq: Streamq, tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_bytes(b"short\n" + b"x" * 1_500_000)

    for _ in range(5):
        done = streamq("run", "long.txt", "--map", "job:same", "-o", "out.txt")

        assert done.returncode == 2, done.stderr
        assert "long.txt" in done.stderr
        assert not (tmp_path / ".streamq").exists()
        assert not (tmp_path / "out.txt").exists()


def test_window_of_a_few_bytes_is_slow_but_ends(streamq: Streamq, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\nb\nc\n")

    done = streamq(
        "run", "in.txt", "--map", "job:same", "-o", "out.txt", "--lines", 1, "--window", 3
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_text() == "a\nb\nc\n"


@STOPS
def test_stopped_it_goes_on(
    streamq: Streamq,
    begin: Begin,
    source: Path,
    tmp_path: Path,
    number: int,
    code: int,
) -> None:
    running, output = begin_slowly(begin, tmp_path, 1_000, "-c", "2")

    running.send_signal(number)
    _, said = running.communicate(timeout=100)

    assert running.returncode == code
    go_on(streamq, said, tmp_path)
    assert output.read_bytes() == source.read_bytes()
    assert not (tmp_path / ".streamq").exists()


@EMBEDDED
@STOPS
def test_stopped_before_it_works_it_goes_on(
    streamq: Streamq,
    begin: Begin,
    source: Path,
    tmp_path: Path,
    number: int,
    code: int,
) -> None:
    words = ["in.txt", "--map", "job:same", "-o", "out.txt", "-p", "1"]
    running = begin(*words)
    wait_until(lambda: list((tmp_path / ".streamq").glob("*/server")), 60)

    running.send_signal(number)
    _, said = running.communicate(timeout=60)

    assert running.returncode == code
    assert "Traceback" not in said
    go_on(streamq, said, tmp_path)
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()


@pytest.mark.timeout(600)
def test_run_killed_at_random_moments_gives_the_input_back(
    begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
) -> None:
    """Nothing is lost or doubled, no part is blamed, and nothing is left running."""
    kills = int(os.environ.get("STREAMQ_TEST_KILLS", "3"))
    chance = random.Random(kills)
    output = tmp_path / "out.txt"
    marks = sorted(chance.randrange(source.stat().st_size) for _ in range(kills))
    words = ["in.txt", "--map", "job:slow", "-o", "out.txt", "-p", "2", "--lines", "10"]
    for mark in [0, *marks]:
        running = begin(*words)
        while running.poll() is None and mark >= (output.stat().st_size if output.exists() else 0):
            time.sleep(0.001)
        time.sleep(chance.random() / 20)
        below = descendants(running.pid)
        running.kill()
        _, said = running.communicate()
        assert running.returncode == -9, said
        wait_for_the_end_of(below)
        request_id = run_left_in(tmp_path)
        words = ["--resume", request_id]

    done = streamq("run", *words)

    assert done.returncode == 0, done.stderr
    assert output.read_bytes() == source.read_bytes()
    assert not (tmp_path / ".streamq").exists()


@EMBEDDED
def test_no_part_is_blamed_for_the_death_of_the_whole_run(
    begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
) -> None:
    """What ran when everything was killed is taken over, not found expired: that would count."""
    words = ["in.txt", "--map", "job:stuck_thrice", "-o", "out.txt", "-p", "1"]
    for times in (1, 2, 3):
        running = begin(*words)
        wait_until((tmp_path / f"stuck{times}").exists, 30)
        running.kill()
        running.wait()
        request_id = run_left_in(tmp_path)
        words = ["--resume", request_id]

    done = streamq("run", *words)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()


def test_samples_run_as_their_readme_says(streamq: Streamq, tmp_path: Path) -> None:
    for file in SAMPLES.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)

    counted = streamq("run", "README.md", "--map", "wordcount:count_words", "-o", "counts.jsonl")
    cleaned = streamq("run", "orders.csv", "--map", "orders:clean", "-o", "clean.csv")

    assert counted.returncode == 0, counted.stderr
    assert json.loads((tmp_path / "counts.jsonl").read_text().splitlines()[0]) == {
        "#": 1,
        "samples": 1,
    }
    assert cleaned.returncode == 1, cleaned.stderr
    assert (tmp_path / "clean.csv").read_text() == (
        'item,count,total\napple,3,1.5\npear,2,1.5\n"jam, strawberry",1,4.2\ntea,5,15.0\n'
    )
    failures = [
        json.loads(line) for line in (tmp_path / "clean.errors.jsonl").read_text().splitlines()
    ]
    assert [failure["line"] for failure in failures] == [5, 6, 7]


def test_sample_of_one_part_per_file(streamq: Streamq, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES, tmp_path / "files", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SAMPLES / "checksums.py", tmp_path)

    done = streamq(
        "run", "files", "--format", "file", "--map", "checksums:describe", "-o", "sums.jsonl"
    )

    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    files = sorted(path for path in (tmp_path / "files").rglob("*") if path.is_file())
    assert [each["file"] for each in found] == [str(path.relative_to(tmp_path)) for path in files]
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    assert [each["sha256"] for each in found] == sums


def test_sample_of_a_flaky_api(
    streamq: Streamq, environment: dict[str, str], tmp_path: Path
) -> None:
    for name in ("ask.py", "words.txt"):
        shutil.copy(SAMPLES / name, tmp_path)
    command = [sys.executable, str(SAMPLES / "slow_api.py"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as api:
        try:
            assert api.stdout
            environment["API"] = api.stdout.readline().strip()
            words = (
                "run words.txt --map ask:ask -o out.jsonl --lines 1 -p 1 -c 8 --rate 40/s --json"
            )
            done = streamq(*words.split())
        finally:
            api.kill()

    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    asked = (tmp_path / "words.txt").read_text().split()
    assert [answer["word"] for answer in answers] == asked


def test_demo_kills_a_worker_and_loses_nothing(streamq: Streamq) -> None:
    done = streamq("demo", "--lines", 60_000)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was lost" in done.stdout
    assert "killed with signal 9" in done.stdout


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


@pytest.mark.parametrize("is_ignored", [False, True])
def test_terminal_that_is_closed_stops_it_unless_it_is_not_to_care(
    streamq: Streamq,
    environment: dict[str, str],
    source: Path,
    tmp_path: Path,
    is_ignored: bool,
) -> None:
    ours, its = pty.openpty()

    def sit_at_the_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if is_ignored:  # as nohup does
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    words = ["run", "in.txt", "--map", "job:slow", "-o", "out.txt", "-p", "2", "--lines", "10"]
    running = subprocess.Popen(
        [*COMMAND, *words],
        env=environment,
        cwd=tmp_path,
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        preexec_fn=sit_at_the_terminal,
    )
    os.close(its)
    output = tmp_path / "out.txt"
    wait_until(lambda: output.exists() and output.stat().st_size > 1_000, 60)

    os.close(ours)

    assert running.wait(60) == (0 if is_ignored else 129)
    if not is_ignored:
        done = streamq("run", "--resume", run_left_in(tmp_path))
        assert done.returncode == 0, done.stderr
    assert output.read_bytes() == source.read_bytes()


@EMBEDDED
def test_output_that_is_gone_is_missed_and_begun_anew_by_force(
    streamq: Streamq, begin: Begin, source: Path, tmp_path: Path
) -> None:
    running, output = begin_slowly(begin, tmp_path, 1_000)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    written = output.read_bytes()
    output.unlink()
    request_id = run_left_in(tmp_path)

    missed = streamq("run", "--resume", request_id)

    assert missed.returncode == 2
    assert "out.txt is gone" in missed.stderr
    assert "put it back" in missed.stderr
    assert "--force" in missed.stderr
    forced = streamq("run", "--resume", request_id, "--force")
    assert forced.returncode == 0, forced.stderr
    gone = re.search(r"results of parts 1 to (\d+) are gone", forced.stderr)
    assert gone, forced.stderr
    lines = source.read_bytes().splitlines(keepends=True)
    assert output.read_bytes() == b"".join(lines[10 * int(gone[1]) :])
    assert source.read_bytes().startswith(written)


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


class TestWords:
    def test_failures_are_among_the_records(self, streamq: Streamq, tmp_path: Path) -> None:
        (tmp_path / "in.txt").write_text("1\nnan\ninf\n2\n-inf\n")

        done = streamq("run", "in.txt", "--map", "job:endless", "-o", "out.jsonl")

        assert "5 records in 1 part, 3 of them failed" in done.stderr

    def test_record_that_does_not_decode_or_encode_says_so(
        self, streamq: Streamq, tmp_path: Path
    ) -> None:
        (tmp_path / "in.jsonl").write_text('{"a":1}\n[1]\n{"a"\n')
        (tmp_path / "in.csv").write_text("a,b\n1\n")
        (tmp_path / "in.txt").write_text("nan\n")

        for name, function, errors in (
            ("in.jsonl", "typed", ["DecodeError"] * 2),
            ("in.csv", "rowed", ["DecodeError"]),
            ("in.txt", "endless", ["EncodeError"]),
        ):
            out = f"{name}.out"
            done = streamq("run", name, "--map", f"job:{function}", "-o", out, "--retries", 0)
            assert done.returncode == 1, done.stderr
            lines = (tmp_path / f"{name}.errors.jsonl").read_text().splitlines()
            found = [json.loads(line) for line in lines]
            assert [each["error"] for each in found] == errors
            assert {each.get("traceback", "") for each in found} == {""}

    @pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
    def test_compressed_file_that_is_cut_is_named(
        self, streamq: Streamq, tmp_path: Path, suffix: str
    ) -> None:
        text = random.Random(1).randbytes(50_000).hex().encode()
        whole = {"gz": gzip.compress(text), "bz2": bz2.compress(text), "xz": lzma.compress(text)}[
            suffix
        ]
        (tmp_path / f"in.{suffix}").write_bytes(whole[: len(whole) // 2])

        done = streamq("run", f"in.{suffix}", "--map", "job:same", "-o", "out.txt")

        assert done.returncode == 2
        assert f"in.{suffix}: " in done.stderr
        assert "the file is cut off" in done.stderr
