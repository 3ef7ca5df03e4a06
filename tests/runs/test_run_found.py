"""``streamq run`` that finds what the same command began, and goes on with it or says why not."""

import gzip
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamq import Client, State, find_run
from streamq.records.inputs import InputIdentity
from tests.runs.running import (
    COMMAND,
    EMBEDDED,
    Begin,
    Streamq,
    begin_slowly,
    descendants,
    run_left_in,
)
from tests.support.waiting import is_alive, wait_until

pytestmark = [pytest.mark.commands, EMBEDDED]
LONG = pytest.mark.long
WORDS = ("run", "in.txt", "--map", "job:slow", "-o", "out.txt", "-p", "2", "--lines", "10")


def kill_all(running: "subprocess.Popen[str]") -> None:
    """Kill the command and everything below it, with its server, at one moment."""
    every = [running.pid, *descendants(running.pid)]
    for pid in every:
        os.kill(pid, signal.SIGSTOP)
    for pid in every:
        os.kill(pid, signal.SIGKILL)
    running.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in every[1:]), 15)


@pytest.fixture
def killed(begin: Begin, source: Path, tmp_path: Path) -> Callable[..., Path]:
    """Begins a run and kills it in the middle. Returns its output."""

    def killed(*options: str) -> Path:
        running, output = begin_slowly(begin, tmp_path, 1_000, *options)
        kill_all(running)
        return output

    return killed


class TestSameCommand:
    @pytest.mark.timeout(600)
    def test_killed_at_random_moments_it_goes_on_by_itself(
        self, begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        kills = int(os.environ.get("STREAMQ_TEST_KILLS", "6"))
        chance = random.Random(kills)
        for _ in range(kills):
            running = begin(*WORDS[1:])
            time.sleep(chance.random() * 2.5)
            ended = running.poll()
            if ended is not None:
                break
            kill_all(running)

        done = streamq(*WORDS)
        if done.returncode == 2 and "exists" in done.stderr:
            # One had ended, or was killed when all was done: the next was told of its output.
            assert ended in (None, 0, 2)
        else:
            assert done.returncode == 0, done.stderr

        assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()
        assert not (tmp_path / ".streamq").exists()
        assert not list(tmp_path.glob("out.txt.*"))

    def test_it_says_what_it_does(
        self, killed: Callable[..., Path], streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        output = killed()
        run_id = run_left_in(tmp_path)

        done = streamq(*WORDS)

        assert done.returncode == 0, done.stderr
        assert f"going on with run {run_id}, which was stopped" in done.stderr
        assert output.read_bytes() == source.read_bytes()

    def test_processes_limit_and_window_may_be_others(
        self, killed: Callable[..., Path], streamq: Streamq, source: Path
    ) -> None:
        output = killed()

        done = streamq(*WORDS, "-p", "1", "--limit", "1", "--window", "1MiB", "--rate", "1000/s")

        assert done.returncode == 0, done.stderr
        assert output.read_bytes() == source.read_bytes()

    def test_after_success_it_is_refused_as_ever(
        self, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        assert streamq(*WORDS[:3], "job:same", *WORDS[4:]).returncode == 0

        again = streamq(*WORDS[:3], "job:same", *WORDS[4:])

        assert again.returncode == 2
        assert "out.txt exists: remove it, or say --force" in again.stderr

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (("--map", "job:same"), "the function was job:slow, and is job:same"),
            (("--map", "", "--exec", "cat"), "the program was job:slow, and is cat"),
            (("--lines", "7"), "--lines was 10, and is 7"),
            pytest.param(("--unordered",), "--ordered was True, and is False", marks=LONG),
            pytest.param(("--retries", "7"), "--retries was not given, and is 7", marks=LONG),
            pytest.param(("more.txt",), "the input was 1 files, and is 2", marks=LONG),
        ],
    )
    def test_other_command_for_the_same_output_is_told_what_differs(
        self,
        killed: Callable[..., Path],
        streamq: Streamq,
        source: Path,
        tmp_path: Path,
        words: tuple[str, ...],
        says: str,
    ) -> None:
        (tmp_path / "more.txt").write_text("more\n")
        output = killed()
        before = output.read_bytes()
        run_id = run_left_in(tmp_path)

        refused = streamq(*WORDS, *words, "--force")

        assert refused.returncode == 2, refused.stderr
        assert says in refused.stderr
        assert f"--resume {run_id} goes on" in refused.stderr
        assert "--fresh starts over" in refused.stderr
        assert output.read_bytes() == before
        assert streamq("run", "--resume", run_id).returncode == 0
        assert output.read_bytes() == source.read_bytes()

    def test_function_that_was_changed_is_told(
        self, killed: Callable[..., Path], streamq: Streamq, tmp_path: Path
    ) -> None:
        killed()
        with (tmp_path / "job.py").open("a") as file:
            file.write("# mended\n")

        refused = streamq(*WORDS)

        assert refused.returncode == 2
        assert "the function changed: job.py has other content than it had" in refused.stderr
        assert streamq("run", "--resume").returncode == 0

    def test_input_that_was_changed_is_told_and_nothing_is_lost(
        self, killed: Callable[..., Path], streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        output = killed()
        before, text = output.read_bytes(), source.read_bytes()
        times = source.stat().st_atime_ns, source.stat().st_mtime_ns
        source.write_bytes(b"L" + text[1:])

        refused = streamq(*WORDS)

        assert refused.returncode == 1
        assert "another input: in.txt has other content than it had" in refused.stderr
        assert "the same command with --fresh" in refused.stderr
        assert before.startswith(output.read_bytes())
        source.write_bytes(text)
        os.utime(source, ns=times)
        assert streamq(*WORDS).returncode == 0
        assert output.read_bytes() == text

    def test_output_that_was_moved_away_is_missed_and_the_run_stays(
        self, killed: Callable[..., Path], streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        output = killed()
        output.rename(tmp_path / "moved")
        run_id = run_left_in(tmp_path)

        missed = [streamq(*WORDS), streamq(*WORDS, "--force")]

        for each in missed:
            assert each.returncode == 2
            assert "out.txt is gone" in each.stderr
            assert "the same command with --fresh" in each.stderr
        assert run_left_in(tmp_path) == run_id
        (tmp_path / "moved").rename(output)
        assert streamq(*WORDS).returncode == 0
        assert output.read_bytes() == source.read_bytes()

    def test_file_of_somebody_else_is_not_cut(
        self, killed: Callable[..., Path], streamq: Streamq, tmp_path: Path
    ) -> None:
        output = killed()
        precious = b"precious\n" * 5_000
        output.unlink()
        output.write_bytes(precious)

        refused = streamq(*WORDS)

        assert refused.returncode == 2
        assert "is not the file that was written" in refused.stderr
        assert output.read_bytes() == precious

    def test_lines_that_somebody_added_are_kept(
        self, killed: Callable[..., Path], streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        output = killed()
        with output.open("ab") as file:
            file.write(b"mine\n")

        done = streamq(*WORDS)

        assert done.returncode == 0, done.stderr
        assert output.read_bytes() == source.read_bytes()
        (kept,) = tmp_path.glob("out.txt.aside-*")
        assert kept.read_bytes().endswith(b"mine\n")
        assert kept.name in done.stderr

    def test_second_at_the_same_time_is_told_of_the_first(
        self, begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "job.py").write_text(
            "import pathlib, time\n"
            "def slow(line: bytes) -> bytes:\n"
            "    while not pathlib.Path('go').exists():\n"
            "        time.sleep(0.01)\n"
            "    return line\n"
        )
        several = [begin(*WORDS[1:]) for _ in range(3)]
        wait_until(lambda: sum(each.poll() is not None for each in several) == 2, 60)
        (tmp_path / "go").touch()

        told = [each.communicate(timeout=60)[1] for each in several]

        assert sorted(each.returncode for each in several) == [0, 2, 2]
        (first,) = [each for each in several if each.returncode == 0]
        for each, text in zip(several, told, strict=True):
            if each is not first:
                assert re.search(rf"run \w+ \(process {first.pid}\) writes .*out.txt now", text)
        assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()


class TestStandardInput:
    def run(
        self, environment: dict[str, str], folder: Path, text: bytes, *options: str
    ) -> "subprocess.CompletedProcess[bytes]":
        words = ["run", "-", *WORDS[2:], *options]
        return subprocess.run(
            [*COMMAND, *words],
            input=text,
            env=environment,
            cwd=folder,
            capture_output=True,
            timeout=100,
            check=False,
        )

    def test_it_is_never_left_unread_for_what_was_begun_before(
        self, streamq: Streamq, environment: dict[str, str], source: Path, tmp_path: Path
    ) -> None:
        words = ["run", "-", *WORDS[2:]]
        with source.open("rb") as text:
            running = subprocess.Popen(
                [*COMMAND, *words], stdin=text, env=environment, cwd=tmp_path
            )
        output = tmp_path / "out.txt"
        wait_until(lambda: output.exists() and output.stat().st_size > 1_000, 60)
        # What is written first may not be committed yet. What is written next comes after that.
        first = output.stat().st_size
        wait_until(lambda: output.stat().st_size > first, 60)
        kill_all(running)  # type: ignore[arg-type]

        refused = self.run(environment, tmp_path, b"other\n")
        fresh = self.run(environment, tmp_path, b"other\n", "--fresh")

        assert refused.returncode == 2
        assert b"it reads standard input, which can be read only once" in refused.stderr
        assert fresh.returncode == 0, fresh.stderr
        assert output.read_bytes() == b"other\n"
        assert not (tmp_path / ".streamq").exists()


class TestFresh:
    def test_it_starts_over_and_leaves_nothing_of_the_other(
        self, killed: Callable[..., Path], streamq: Streamq, tmp_path: Path
    ) -> None:
        output = killed()

        done = streamq(
            "run", "in.txt", "--map", "job:picky", "-o", "out.txt", "--fresh", "--keep", "0s"
        )

        assert output.read_bytes().startswith(b"LINE 0")
        assert "going on" not in done.stderr
        assert not (tmp_path / ".streamq").exists()
        assert not list(tmp_path.glob("out.txt.*"))

    @pytest.mark.parametrize(
        "words", [("--map", "nowhere:f"), ("--map", "job:nothing"), ("--lines", "-4")]
    )
    def test_nothing_is_deleted_before_it_works(
        self,
        killed: Callable[..., Path],
        streamq: Streamq,
        source: Path,
        tmp_path: Path,
        words: tuple[str, ...],
    ) -> None:
        output = killed()
        before, run_id = output.read_bytes(), run_left_in(tmp_path)

        failed = streamq(*WORDS, *words, "--fresh")

        assert failed.returncode in (2, 4)
        assert output.read_bytes() == before
        assert run_left_in(tmp_path) == run_id
        assert streamq(*WORDS).returncode == 0
        assert output.read_bytes() == source.read_bytes()

    def test_killed_it_is_what_is_gone_on_with(
        self,
        killed: Callable[..., Path],
        begin: Begin,
        streamq: Streamq,
        source: Path,
        tmp_path: Path,
    ) -> None:
        output = killed()
        (old,) = (tmp_path / ".streamq").iterdir()
        running = begin(*WORDS[1:], "--fresh")
        wait_until(lambda: list(tmp_path.glob("out.txt.before-*")), 60)
        wait_until(lambda: output.exists() and output.stat().st_size > 500, 60)
        kill_all(running)
        assert old.exists()

        done = streamq(*WORDS)

        assert done.returncode == 0, done.stderr
        assert f"going on with run {old.name}" not in done.stderr
        assert output.read_bytes() == source.read_bytes()
        assert not (tmp_path / ".streamq").exists()
        assert not list(tmp_path.glob("out.txt.*"))

    def test_file_that_the_old_run_did_not_write_needs_force(
        self, killed: Callable[..., Path], streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        output = killed()
        output.unlink()
        output.write_bytes(b"precious\n")

        refused = streamq(*WORDS, "--fresh")
        kept = output.read_bytes()
        forced = streamq(*WORDS, "--fresh", "--force")

        assert refused.returncode == 2
        assert "out.txt exists" in refused.stderr
        assert kept == b"precious\n"
        assert forced.returncode == 0, forced.stderr
        assert output.read_bytes() == source.read_bytes()


class TestResume:
    def test_run_that_is_named_is_not_given_another_job(
        self, killed: Callable[..., Path], streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        """What it would not do may not be typed beside it, and what it does may."""
        output = killed()
        run_id = run_left_in(tmp_path)
        (tmp_path / "other.txt").write_text("line\n")
        wrong = streamq("run", "other.txt", "--map", "job:same", "-o", "other.out", "--resume")
        right = streamq("run", "in.txt", "--map", "job:slow", "-o", "out.txt", "--resume")

        assert wrong.returncode == 2
        assert (
            f"run {run_id} was begun with another FILE and another --map and another -o"
            in wrong.stderr
        )
        assert not (tmp_path / "other.out").exists()
        assert (right.returncode, output.read_bytes()) == (0, source.read_bytes()), right.stderr

    def test_alone_it_takes_the_last(
        self,
        killed: Callable[..., Path],
        begin: Begin,
        streamq: Streamq,
        source: Path,
        tmp_path: Path,
    ) -> None:
        output = killed()
        first = run_left_in(tmp_path)
        running = begin(
            "in.txt", "--map", "job:slow", "-o", "second.txt", "-p", "2", "--lines", "9"
        )
        second = tmp_path / "second.txt"
        wait_until(lambda: second.exists() and second.stat().st_size > 100, 60)
        kill_all(running)

        done = streamq("run", "--resume")

        assert done.returncode == 0, done.stderr
        assert second.read_bytes() == source.read_bytes()
        assert run_left_in(tmp_path) == first
        assert streamq("run", "--resume", "--json").returncode == 0
        assert output.read_bytes() == source.read_bytes()

    def test_there_is_none(self, streamq: Streamq, tmp_path: Path) -> None:
        done = streamq("run", "--resume")

        assert done.returncode == 2
        assert "no run was stopped in this folder" in done.stderr
        assert not (tmp_path / ".streamq").exists()

    def test_one_that_runs_is_not_taken(
        self, begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        running, _ = begin_slowly(begin, tmp_path, 100)

        told = [streamq("run", "--resume"), streamq("run", "--resume", run_left_in(tmp_path))]

        for each in told:
            assert each.returncode == 2
            assert f"process {running.pid}" in each.stderr


class TestTold:
    def test_id_and_command_come_while_it_runs(
        self, begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        running, _ = begin_slowly(begin, tmp_path, 100)
        assert running.stderr is not None

        said = running.stderr.readline()

        run_id = run_left_in(tmp_path)
        assert said == f"run {run_id}; if it is stopped: streamq run --resume {run_id}\n"

    @pytest.mark.parametrize("words", [("--map", "job:nothing"), ("--exec", "no-such-program")])
    def test_not_for_what_cannot_be_resumed(
        self, streamq: Streamq, source: Path, words: tuple[Any, ...]
    ) -> None:
        failed = streamq("run", "in.txt", *words, "-o", "out.txt")

        assert failed.returncode == 4
        assert "--resume" not in failed.stderr


class TestFolder:
    """The folder of a run is moved, or copied, after the run was killed."""

    @pytest.fixture
    def same_command(self, environment: dict[str, str]) -> Callable[[Path], str]:
        def same_command(folder: Path) -> str:
            words = (*COMMAND, *WORDS)
            done = subprocess.run(
                words, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            return done.stderr

        return same_command

    def test_that_was_moved_is_gone_on_with_where_it_is(
        self,
        killed: Callable[..., Path],
        source: Path,
        tmp_path: Path,
        same_command: Callable[[Path], str],
    ) -> None:
        killed()
        moved = tmp_path / "elsewhere"
        moved.mkdir()
        for each in ("in.txt", "job.py", "out.txt", ".streamq"):
            (tmp_path / each).rename(moved / each)

        said = same_command(moved)

        assert "going on with run" in said
        assert (moved / "out.txt").read_bytes() == (moved / source.name).read_bytes()
        assert not (tmp_path / "out.txt").exists()

    def test_copy_goes_on_on_its_own(
        self,
        killed: Callable[..., Path],
        source: Path,
        tmp_path: Path,
        same_command: Callable[[Path], str],
    ) -> None:
        output = killed()
        before = output.read_bytes()
        copy = tmp_path / "copy"
        for each in (tmp_path / "in.txt", tmp_path / "job.py", output):
            copy.mkdir(exist_ok=True)
            shutil.copy2(each, copy)
        shutil.copytree(
            tmp_path / ".streamq", copy / ".streamq", ignore=shutil.ignore_patterns("*.sock")
        )

        same_command(copy)

        assert (copy / "out.txt").read_bytes() == source.read_bytes()
        assert output.read_bytes() == before
        same_command(tmp_path)
        assert output.read_bytes() == source.read_bytes()


class TestInputThatGrows:
    @pytest.mark.long
    def test_what_is_added_is_not_read_and_everything_else_is_done(
        self, begin: Begin, source: Path, tmp_path: Path
    ) -> None:
        before = source.read_bytes()  # its last line has no end yet
        # With a window of 4 KiB the rest of the file is read later.
        running, output = begin_slowly(begin, tmp_path, 1_000, "--window", "4KiB", "--no-spool")
        with source.open("ab") as file:
            file.write(b" line\r\nadded 1\r\nadded 2\r\n")

        _, said = running.communicate(timeout=100)

        assert running.returncode == 0, said
        assert "in.txt has 25 bytes more by now, which are not read" in said
        assert output.read_bytes() in (before, before + b" line\r\n")

    @pytest.mark.parametrize("options", [(), ("--no-spool",)])
    def test_a_run_that_was_stopped_goes_on(
        self,
        killed: Callable[..., Path],
        streamq: Streamq,
        source: Path,
        options: tuple[str, ...],
    ) -> None:
        with source.open("ab") as file:
            file.write(b"\r\n")
        before = source.read_bytes()
        output = killed(*options)
        with source.open("ab") as file:
            file.write(b"added\r\n")

        done = streamq(*WORDS, *options)

        assert done.returncode == 0, done.stderr
        assert done.stderr.count("in.txt has 7 bytes more by now, which are not read") == 1
        assert output.read_bytes() == before

    def test_what_is_not_read_is_told_at_once(
        self,
        begin: Begin,
        streamq: Streamq,
        source: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Also if all was loaded when the run was killed: then nothing is read again."""
        monkeypatch.chdir(tmp_path)
        source.write_bytes(b"".join(b"line %d\n" % n for n in range(600)))
        running, output = begin_slowly(begin, tmp_path, 200)
        found = find_run()
        with Client(found.url, prefix=found.prefix) as client:
            wait_until(lambda: client.get(found.id).status().state is not State.LOADING, 20)
        kill_all(running)
        with source.open("ab") as file:
            file.write(b"added\n")

        done = streamq("run", "--resume")

        assert done.returncode == 0, done.stderr
        assert done.stderr.count("in.txt has 6 bytes more by now, which are not read") == 1
        assert len(output.read_bytes().splitlines()) == 600

    def test_compressed_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "in.gz"
        path.write_bytes(gzip.compress(b"a\n"))
        then = InputIdentity.of(str(path))
        path.write_bytes(path.read_bytes() + gzip.compress(b"b\n"))

        assert not then.has_only_grown

    def test_file_whose_beginning_changed_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "in.txt"
        path.write_text("a\n")
        then = InputIdentity.of(str(path))
        path.write_text("b\nc\n")

        assert not then.has_only_grown
