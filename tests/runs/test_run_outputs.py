"""Files that ``streamq run`` writes: full disks, files of before, failures beside."""

import re
import resource
import signal
from pathlib import Path

import pytest

from tests.runs.running import EMBEDDED, Begin, Streamq, begin_slowly, go_on, run_left_in

pytestmark = pytest.mark.commands


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

    @pytest.mark.long
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
        told = f"run {run_left_in(tmp_path)} (process {running.pid}) writes {output} now"
        assert told in second.stderr
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
