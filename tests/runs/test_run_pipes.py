"""``streamq run`` as a filter."""

import subprocess
from pathlib import Path

import pytest

from tests.runs.running import COMMAND, EMBEDDED, Streamq, descendants
from tests.support.waiting import is_alive, wait_until

pytestmark = pytest.mark.commands


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
