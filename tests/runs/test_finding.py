"""Commands without a URL find the run that goes on in their folder."""

import json
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamq import Client, InvalidValue
from streamq.runs.finding import find_run
from tests.runs.running import COMMAND, EMBEDDED, Begin, Streamq, run_left_in
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.commands, EMBEDDED]
WORDS = ("in.txt", "--map", "gate:gated", "-p", "1", "--lines", "1", "--retries", "0")
GATED = """
import pathlib, time
def gated(line: bytes) -> bytes:
    if line == b"bad":
        raise ValueError("no")
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    return line
"""


@pytest.fixture
def folder(tmp_path: Path, streamq: Streamq) -> Path:
    (tmp_path / "gate.py").write_text(GATED)
    (tmp_path / "in.txt").write_bytes(b"bad\n" + b"line\n" * 9)
    return tmp_path


def start(begin: Begin, folder: Path, output: str = "out.txt") -> "subprocess.Popen[str]":
    """Begin a run that waits for the file ``go``, and return when its server answers."""
    running = begin(*WORDS, "-o", output)
    assert running.stderr is not None
    running.stderr.readline()
    return running


class TestOneRun:
    @pytest.fixture
    def running(self, begin: Begin, folder: Path) -> "subprocess.Popen[str]":
        return start(begin, folder)

    def test_every_command_finds_it(
        self,
        running: "subprocess.Popen[str]",
        streamq: Streamq,
        folder: Path,
        environment: dict[str, str],
    ) -> None:
        run_id = run_left_in(folder)

        def told(*words: str) -> Any:
            done = streamq(*words, "--json")
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        assert told("set", "--limit", "1") == [{"id": run_id, "ok": True, "limit": 1}]
        assert told("pause")[0]["paused"]
        assert told("status")["paused"]
        assert told("status", run_id)["limit"] == 1
        assert told("resume")[0]["id"] == run_id
        wait_until(lambda: told("errors"), 30)
        assert [each["error"] for each in told("errors", run_id)] == ["ValueError"]
        assert [each["id"] for each in told("ls")] == [run_id]
        assert [each["id"] for each in told("top")["requests"]] == [run_id]
        assert [each["slots"] for each in told("workers")] == [1]
        assert streamq("results").returncode == 0
        refused = streamq("results", "-o", "mine.txt")
        assert refused.returncode == 2
        assert f"run {run_id} itself writes its results, to {folder}/out.txt" in refused.stderr
        waiting = subprocess.Popen(
            [*COMMAND, "wait", "-q", "--json"], env=environment, cwd=folder, stdout=subprocess.PIPE
        )
        wait_until(lambda: _has_unix_socket(waiting.pid), 30)
        (folder / "go").touch()
        (end,) = json.loads(waiting.communicate(timeout=60)[0])
        assert (end["id"], end["records"]["failed"], waiting.returncode) == (run_id, 1, 1)
        assert running.wait(60) == 1

    def test_cancel_ends_it(
        self, running: "subprocess.Popen[str]", streamq: Streamq, folder: Path
    ) -> None:
        done = streamq("cancel")
        (folder / "go").touch()

        assert done.returncode == 0, done.stderr
        assert running.wait(60) == 1

    def test_python_finds_it(
        self, running: "subprocess.Popen[str]", folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder)

        run = find_run()

        assert (run.id, run.pid) == (run_left_in(folder), running.pid)
        assert find_run(run.id) == run
        with Client(run.url, prefix=run.prefix) as client:
            assert client.get(run.id).status().state.is_live
        with pytest.raises(InvalidValue, match="no run nope is in this folder; there is"):
            find_run("nope")

    def test_wait_ends_when_the_run_is_killed(
        self,
        running: "subprocess.Popen[str]",
        folder: Path,
        environment: dict[str, str],
    ) -> None:
        run_id = run_left_in(folder)
        waiting = subprocess.Popen(
            [*COMMAND, "wait"], env=environment, cwd=folder, stderr=subprocess.PIPE, text=True
        )
        wait_until(lambda: _has_unix_socket(waiting.pid), 30)

        running.kill()

        said = waiting.communicate(timeout=60)[1]
        assert waiting.returncode == 2, said
        assert f"run {run_id} was stopped, and its server with it" in said
        assert f"streamq run --resume {run_id}" in said


def _has_unix_socket(pid: int) -> bool:
    """Return whether a process has a connection to a server beside it."""
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if str(each.readlink()).startswith("socket:"):
                return True
    return False


class TestOthers:
    def test_none(self, streamq: Streamq, folder: Path) -> None:
        for words in (["status"], ["pause"], ["wait", "nightly"], ["top", "--once"]):
            done = streamq(*words)

            assert done.returncode == 2
            assert "which server? Give its URL" in done.stderr
            assert "no run goes on in this folder" in done.stderr
        assert not (folder / ".streamq").exists()

    def test_stopped(self, streamq: Streamq, begin: Begin, folder: Path) -> None:
        running = start(begin, folder)
        run_id = run_left_in(folder)
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)

        for words in (["status"], ["cancel", run_id]):
            done = streamq(*words)

            assert done.returncode == 2
            assert f"run {run_id} was stopped" in done.stderr
            assert f"streamq run --resume {run_id} goes on" in done.stderr

    def test_several(self, streamq: Streamq, begin: Begin, folder: Path) -> None:
        start(begin, folder, "first.txt")
        first = run_left_in(folder)
        start(begin, folder, "second.txt")
        (second,) = {each.name for each in (folder / ".streamq").iterdir()} - {first}

        read, refused = streamq("status", "--json"), streamq("pause")
        both = streamq("pause", first, second, "--json")

        assert json.loads(read.stdout)["id"] == second
        assert f"run {second}, the newest of 2" in read.stderr
        assert refused.returncode == 2
        assert f"{first}  writes {folder}/first.txt" in refused.stderr
        assert f"{second}  writes {folder}/second.txt" in refused.stderr
        assert [each["ok"] for each in json.loads(both.stdout)] == [True, True]

    def test_folder_whose_path_is_too_long_for_a_socket(
        self, begin: Begin, streamq: Streamq, folder: Path, environment: dict[str, str]
    ) -> None:
        deep = folder / ("long" * 30)
        deep.mkdir()
        for name in ("gate.py", "in.txt"):
            (deep / name).write_bytes((folder / name).read_bytes())
        words = ("run", *WORDS, "-o", "out.txt")
        running = subprocess.Popen(
            [*COMMAND, *words], env=environment, cwd=deep, stderr=subprocess.PIPE, text=True
        )
        assert running.stderr is not None
        running.stderr.readline()

        done = subprocess.run(
            [*COMMAND, "status", "--json"],
            env=environment,
            cwd=deep,
            capture_output=True,
            check=True,
        )

        assert json.loads(done.stdout)["id"] == run_left_in(deep)
        (deep / "go").touch()
        running.communicate(timeout=60)

    def test_one_on_a_server_that_was_named(
        self, url: str, environment: dict[str, str], folder: Path
    ) -> None:
        named = environment | {"STREAMQ_URL": url}
        words = ("run", *WORDS, "-o", "out.txt")
        running = subprocess.Popen(
            [*COMMAND, *words], env=named, cwd=folder, stderr=subprocess.PIPE, text=True
        )
        assert running.stderr is not None
        running.stderr.readline()

        def status(env: dict[str, str], *more: str) -> "subprocess.CompletedProcess[str]":
            return subprocess.run(
                [*COMMAND, *more],
                env=env,
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )

        unnamed, steered = status(environment, "status"), status(named, "pause", "--json")
        assert unnamed.returncode == 2
        assert "works on a server that was named with --url or a variable" in unnamed.stderr
        assert json.loads(steered.stdout)[0]["id"] == run_left_in(folder)
        status(named, "resume")
        (folder / "go").touch()
        running.communicate(timeout=60)
