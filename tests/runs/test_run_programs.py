"""``streamq run --exec``: programs as handlers."""

import json
from pathlib import Path

import pytest

from streamq.servers.local import LocalServer
from tests.runs.running import Begin, Streamq, descendants, program
from tests.support.waiting import is_alive, wait_until

pytestmark = pytest.mark.commands


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
        assert {int(pid) for pid in pids.read_text().split()} <= set(below)

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
