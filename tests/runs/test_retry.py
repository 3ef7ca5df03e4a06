"""``streamq run --retry-failed``: failed records run again, and their results get their place."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import streamq as package
from streamq.runs.finished import Finished
from tests.runs.running import (
    EMBEDDED,
    Begin,
    Streamq,
    descendants,
    program,
    run_left_in,
)
from tests.runs.test_run_found import kill_all
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.commands, EMBEDDED]
CODE = """
import pathlib
import time
def picky(line: str) -> str | None:
    if line.endswith("3"):
        return None
    if line.endswith("7") and not pathlib.Path("mended").exists():
        raise ValueError("seven")
    if line.endswith("77") and not pathlib.Path("wholly").exists():
        raise ValueError("seventy-seven")
    return line.upper()
def slow(line: str) -> str | None:
    if pathlib.Path("mended").exists():
        time.sleep(0.01)
    return picky(line)
def row(line: dict) -> dict:
    picky(line["n"])
    return line
"""
WORDS = ("run", "in.txt", "--map", "seven:picky", "-p", "2", "--retries", "0", "--lines", "9")
INPUT = b"".join(b"line %d%s" % (n, b"\r\n" if n % 5 == 0 else b"\n") for n in range(200))
INPUT += b"last 7"
#: Runs a command that is killed at the step with a number: a change of a folder, or a sync.
KILLED_AT = """
import os, pathlib, signal, sys
left = int(sys.argv.pop(1))
def counted(place, name):
    real = getattr(place, name)
    def call(*args, **options):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    setattr(place, name, call)
for name in ("fsync", "fdatasync", "truncate"):
    counted(os, name)
for name in ("mkdir", "rename", "replace", "rmdir", "unlink"):
    counted(pathlib.Path, name)
sys.path[0] = ""
from streamq.cli import main
main()
"""


@pytest.fixture
def folder(tmp_path: Path, streamq: Streamq) -> Path:
    (tmp_path / "seven.py").write_text(CODE)
    (tmp_path / "in.txt").write_bytes(INPUT)
    return tmp_path


@pytest.fixture
def failed(streamq: Streamq, folder: Path) -> Callable[..., Path]:
    """Runs with failures, and mends the function. Returns the output."""

    def failed(*options: str, output: str = "out.txt") -> Path:
        done = streamq(*WORDS, "-o", output, *options)
        assert done.returncode == 1, done.stderr
        assert f"to run them again: streamq run --retry-failed {run_left_in(folder)}" in done.stderr
        (folder / "mended").touch()
        return folder / output

    return failed


def whole(*, is_wholly: bool = True) -> bytes:
    """The output of a run in which nothing fails, or only what ends with 77."""
    lines = INPUT.splitlines(keepends=True)
    kept = [line.upper() for line in lines if not line.strip().endswith(b"3")]
    return b"".join(line for line in kept if is_wholly or not line.strip().endswith(b"77"))


def left(folder: Path) -> list[str]:
    """What a run has left beside what was there before."""
    names = {each.name for each in folder.iterdir()}
    ours = {"seven.py", "job.py", "in.txt", "mended", "wholly", "__pycache__"}
    return sorted(names - ours)


class TestInPlace:
    def test_twice_and_then_nothing_is_left(
        self, failed: Callable[..., Path], streamq: Streamq
    ) -> None:
        some, all_ = whole(is_wholly=False), whole()
        output = failed()
        folder = output.parent
        errors = folder / "out.errors.jsonl"
        assert len(errors.read_text().splitlines()) == 21

        first = streamq("run", "--retry-failed")
        half, half_failed = output.read_bytes(), errors.read_text().splitlines()
        (folder / "wholly").touch()
        second = streamq("run", "--retry-failed", run_left_in(folder), "--json")

        assert first.returncode == 1, first.stderr
        assert half == some
        assert [json.loads(each)["line"] for each in half_failed] == [78, 178]
        assert second.returncode == 0, second.stderr
        assert output.read_bytes() == all_
        assert left(folder) == ["out.txt"]

    @pytest.mark.parametrize(
        ("output", "head", "line"),
        [("out.csv", "n\n", "{}\n"), ("out.jsonl", "", '{{"n":"{}"}}\n')],
    )
    def test_other_formats(
        self,
        failed: Callable[..., Path],
        streamq: Streamq,
        folder: Path,
        output: str,
        head: str,
        line: str,
    ) -> None:
        (folder / "in.txt").write_text("n\n" + "".join(f"{n}\n" for n in range(7, 60)))
        options = ("--format", "csv", "--map", "seven:row")
        written = failed(*options, output=output)
        (folder / "wholly").touch()

        done = streamq("run", "--retry-failed")

        assert done.returncode == 0, done.stderr
        assert written.read_text() == head + "".join(line.format(n) for n in range(7, 60))

    def test_all_records_failed_at_first(self, streamq: Streamq, folder: Path) -> None:
        (folder / "in.txt").write_text("n\n7\n17\n")
        options = ("--format", "csv", "--map", "seven:row")
        assert streamq(*WORDS, "-o", "out.csv", *options).returncode == 1
        (folder / "mended").touch()

        assert streamq("run", "--retry-failed").returncode == 0
        assert (folder / "out.csv").read_bytes() == b"n\n7\n17\n"

    def test_unordered_results_come_at_the_end(
        self, failed: Callable[..., Path], streamq: Streamq
    ) -> None:
        want = whole()
        output = failed("--unordered")
        before = output.read_bytes()
        (output.parent / "wholly").touch()

        assert streamq("run", "--retry-failed").returncode == 0
        assert output.read_bytes().startswith(before)
        assert sorted(output.read_bytes().split()) == sorted(want.split())

    def test_program(self, streamq: Streamq, folder: Path) -> None:
        program(folder / "grumpy", "test -e mended && cat || { cat > /dev/null; exit 3; }")
        words = ("run", "in.txt", "--exec", "./grumpy", "-o", "out.txt", "--lines", "50")
        assert streamq(*words, "--retries", "0").returncode == 1
        (folder / "mended").touch()

        assert streamq("run", "--retry-failed").returncode == 0
        lines = (folder / "in.txt").read_bytes().splitlines()
        assert (folder / "out.txt").read_bytes().splitlines() == lines

    def test_run_that_too_many_failures_ended_is_done_to_its_end(
        self, failed: Callable[..., Path], streamq: Streamq
    ) -> None:
        want = whole()
        output = failed("--max-failures", "2", "--window", "1KiB")
        (output.parent / "wholly").touch()

        done = streamq("run", "--retry-failed")

        assert done.returncode == 0, done.stderr
        assert sorted(output.read_bytes().split()) == sorted(want.split())

    def test_link_and_mode_of_the_output_stay(
        self, failed: Callable[..., Path], streamq: Streamq, folder: Path
    ) -> None:
        (folder / "elsewhere").mkdir()
        (folder / "out.txt").symlink_to("elsewhere/real.txt")
        output = failed("--force")
        output.chmod(0o640)

        assert streamq("run", "--retry-failed").returncode == 1
        assert output.is_symlink()
        assert (folder / "elsewhere/real.txt").stat().st_mode & 0o777 == 0o640

    def test_python(
        self, failed: Callable[..., Path], streamq: Streamq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output = failed()
        monkeypatch.chdir(output.parent)
        monkeypatch.delenv("STREAMQ_URL", raising=False)

        status = package.run(retry_failed="last")

        assert status.records.failed == 2


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (
                lambda path: path.write_bytes(path.read_bytes() + b"mine\n"),
                "has 5 bytes more than were written",
            ),
            (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"X"), "was changed since"),
            (lambda path: path.rename(f"{path}.moved"), "is gone: put it back"),
            (
                lambda path: path.with_suffix(".errors.jsonl").write_text("mine"),
                "out.errors.jsonl exists",
            ),
        ],
    )
    def test_files_that_are_not_as_they_were_left(
        self,
        failed: Callable[..., Path],
        streamq: Streamq,
        change: Callable[[Path], Any],
        says: str,
    ) -> None:
        output = failed()
        folder = output.parent
        change(output)
        before = {each: each.read_bytes() for each in folder.glob("out.*")}

        refused = streamq("run", "--retry-failed")

        assert refused.returncode == 2
        assert says in refused.stderr
        assert {each: each.read_bytes() for each in folder.glob("out.*")} == before
        assert run_left_in(folder)

    def test_other_commands_tell_what_it_is(
        self, failed: Callable[..., Path], streamq: Streamq, folder: Path
    ) -> None:
        failed()
        run_id = run_left_in(folder)

        for words in (
            (*WORDS, "-o", "out.txt"),
            ("run", "--resume", run_id),
            ("status",),
        ):
            told = streamq(*words)
            assert told.returncode == 2
            assert f"streamq run --retry-failed {run_id}" in told.stderr
        assert "no run was stopped" in streamq("run", "--resume").stderr
        both = streamq("run", "--retry-failed", "--resume", run_id)
        assert both.returncode == 2

    def test_none(self, streamq: Streamq, folder: Path) -> None:
        none = streamq("run", "--retry-failed")

        assert none.returncode == 2
        assert "no run is done with failures in this folder" in none.stderr
        assert streamq("run", "--retry-failed", "nope").returncode == 2

    def test_lines_that_are_added_after_a_kill_are_not_lost(
        self, failed: Callable[..., Path], begin: Begin, streamq: Streamq, folder: Path
    ) -> None:
        output = failed("--map", "seven:slow")
        (folder / "wholly").touch()
        running = self.begin_slowly(begin, folder)
        kill_all(running)
        (folder / "seven.py").write_text(CODE)
        with output.open("ab") as file:
            file.write(b"mine\n")

        done = streamq("run", "--retry-failed")

        (kept,) = folder.glob("out.txt.aside-*")
        assert kept.read_bytes() == b"mine\n"
        assert kept.name in done.stderr
        assert output.read_bytes() == whole()

    @staticmethod
    def begin_slowly(begin: Begin, folder: Path) -> "subprocess.Popen[str]":
        """A retry whose function has begun, and takes a second for each record."""
        (folder / "seven.py").write_text(CODE.replace("0.01", "1"))
        running = begin("--retry-failed")
        assert running.stderr is not None
        running.stderr.readline()
        return running


class TestKept:
    def test_not_at_all(self, streamq: Streamq, folder: Path) -> None:
        done = streamq(*WORDS, "-o", "out.txt", "--keep", "0s")

        assert done.returncode == 1
        assert "--retry-failed" not in done.stderr
        assert not (folder / ".streamq").exists()

    @staticmethod
    def expire(folder: Path) -> Path:
        """Let the time be over for which the run is kept. Returns the note that says so."""
        note = folder / ".streamq" / run_left_in(folder) / "finished.json"
        old = msgspec.json.decode(note.read_bytes(), type=Finished)
        new = msgspec.structs.replace(old, until_s=time.time() - 1)
        note.write_bytes(msgspec.json.encode(new))
        return note

    def test_expired_one_that_is_still_there_can_be_retried(
        self, failed: Callable[..., Path], streamq: Streamq, folder: Path
    ) -> None:
        output = failed()
        self.expire(folder)
        (folder / "wholly").touch()

        done = streamq("run", "--retry-failed")

        assert (done.returncode, output.read_bytes()) == (0, whole()), done.stderr
        assert left(folder) == ["out.txt"]

    def test_expired_ones_are_removed_unless_they_are_retried_now(
        self, failed: Callable[..., Path], streamq: Streamq, begin: Begin, folder: Path
    ) -> None:
        failed("--map", "seven:slow")
        running = TestRefused.begin_slowly(begin, folder)
        note = self.expire(folder)
        other = streamq("run", "in.txt", "--map", "job:same", "-o", "other.txt")
        assert (other.returncode, note.exists()) == (0, True)
        kill_all(running)
        self.expire(folder)
        (folder / "other.txt").unlink()

        assert streamq("run", "in.txt", "--map", "job:same", "-o", "other.txt").returncode == 0
        assert not (folder / ".streamq").exists()

    def test_new_run_of_the_same_output_ends_it(
        self, failed: Callable[..., Path], streamq: Streamq, folder: Path
    ) -> None:
        output = failed()

        done = streamq("run", "in.txt", "--map", "job:same", "-o", "out.txt", "--force")

        assert done.returncode == 0, done.stderr
        assert output.read_bytes() == (folder / "in.txt").read_bytes()
        assert left(folder) == ["out.txt"]


class TestKilled:
    @pytest.mark.timeout(600)
    def test_at_random_moments_of_the_retry(
        self,
        failed: Callable[..., Path],
        begin: Begin,
        streamq: Streamq,
        folder: Path,
    ) -> None:
        want = whole()
        output = failed("--map", "seven:slow")
        (folder / "wholly").touch()
        kills = int(os.environ.get("STREAMQ_TEST_KILLS", "2"))
        chance = random.Random(kills)
        for _ in range(kills):
            running = begin("--retry-failed")
            time.sleep(chance.random() * 2.5)
            if running.poll() is not None:
                break
            kill_all(running)

        done = streamq("run", "--retry-failed")

        assert done.returncode in (0, 2), done.stderr
        assert output.read_bytes() == want
        assert left(folder) == ["out.txt"]

    @pytest.mark.long
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("what", ["run", "retry"])
    def test_at_every_step(
        self,
        failed: Callable[..., Path],
        streamq: Streamq,
        environment: dict[str, str],
        folder: Path,
        what: str,
    ) -> None:
        """Every fifth step, or all with STREAMQ_TEST_KILLS=all."""
        some, want = whole(is_wholly=False), whole()
        stride = 1 if os.environ.get("STREAMQ_TEST_KILLS") == "all" else 6
        step = random.Random(what).randrange(1, stride + 1)
        is_killed = True
        while is_killed:
            for mark in ("mended", "wholly"):
                (folder / mark).unlink(missing_ok=True)
            words = [*WORDS, "-o", "out.txt"]
            if what == "retry":
                failed()
                words = ["run", "--retry-failed"]
            else:
                (folder / "mended").touch()
            is_killed = self._kill_at(step, words, environment, folder)
            done = streamq(*words) if is_killed else None
            if what == "run" and done and "--retry-failed" in done.stderr:
                assert done.returncode in (1, 2), (step, done.stderr)
            assert (folder / "out.txt").read_bytes() == some, step
            errors = (folder / "out.errors.jsonl").read_text().splitlines()
            assert [json.loads(each)["line"] for each in errors] == [78, 178], step
            (folder / "wholly").touch()
            last = streamq("run", "--retry-failed")
            assert last.returncode == 0, (step, last.stderr)
            assert (folder / "out.txt").read_bytes() == want, step
            assert left(folder) == ["out.txt"], step
            (folder / "out.txt").unlink()
            step += stride

    def _kill_at(
        self, step: int, words: list[str], environment: dict[str, str], folder: Path
    ) -> bool:
        """Run a command that is killed at a step. Return whether it came so far."""
        line = [sys.executable, "-c", KILLED_AT, str(step), *words]
        with subprocess.Popen(line, env=environment, cwd=folder, stderr=subprocess.PIPE) as run:
            below: list[int] = []
            while run.poll() is None:
                below = descendants(run.pid) or below
                time.sleep(0.02)
            assert run.stderr is not None
            said = run.stderr.read()
        assert run.returncode in (1, -9), said
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 15)
        return run.returncode == -9


def test_errors_of_a_run_that_is_done_are_shown_without_its_id(
    streamq: Streamq, folder: Path
) -> None:
    assert streamq(*WORDS, "-o", "out.txt").returncode == 1

    shown = streamq("errors", "--json")

    assert shown.returncode == 0, shown.stderr
    kept = [json.loads(line) for line in (folder / "out.errors.jsonl").read_text().splitlines()]
    told = json.loads(shown.stdout)
    assert [each["line"] for each in told] == [each["line"] for each in kept]
    assert len(told) == 21
    status = streamq("status")
    assert status.returncode != 0
    assert f"listed in {folder / 'out.errors.jsonl'}" in status.stderr
