"""Words that a shell completes."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.commands.completion import Shell
from streamq import Client
from tests.runs.running import COMMAND
from tests.support import warm
from tests.support.waiting import allowed_s

Completed = Callable[..., list[str]]


@pytest.fixture
def completed(tmp_path: Path) -> Completed:
    """What the last of some words may become, in a folder of its own and without a server."""

    def completed(*words: str, **variables: str) -> list[str]:
        env = {k: v for k, v in os.environ.items() if "URL" not in k} | variables
        done = warm.run([*COMMAND, "_complete", *words], env=env, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode().splitlines()

    return completed


class TestWords:
    def test_commands_and_second_words(self, completed: Completed) -> None:
        assert completed("wo") == ["worker", "workers"]
        assert {"run", "ls", "cluster"} <= {*completed("")}
        assert completed("cluster", "") == ["create", "status"]
        assert completed("help", "purg") == ["purge"]
        assert completed("nonsense", "x") == []

    def test_options_and_their_values(self, completed: Completed) -> None:
        assert completed("run", "--retr") == ["--retry-failed", "--retries"]
        assert completed("cluster", "create", "--rep") == ["--replicas"]
        assert completed("run", "--output-format", "") == ["jsonl", "csv", "tsv", "raw", "parquet"]
        assert completed("run", "in.txt", "--map", "x") == []
        assert completed("ls", "--state", "f") == ["failed"]

    def test_runs_of_the_folder(self, completed: Completed, tmp_path: Path) -> None:
        for at, (name, is_finished) in enumerate([("aa", True), ("ab", False), ("ac", False)]):
            (tmp_path / ".streamq" / name).mkdir(parents=True)
            plan = tmp_path / ".streamq" / name / "plan.json"
            plan.touch()
            os.utime(plan, (at, at))
            if is_finished:
                plan.with_name("finished.json").touch()

        assert completed("run", "--resume", "") == ["ac", "ab"]
        assert completed("run", "--retry-failed", "") == ["aa"]
        assert completed("status", "a") == ["ac", "ab", "aa"]


class TestServer:
    def test_ids_handlers_and_queues(
        self, completed: Completed, url: str, client: Client, queue: str, request_id: str
    ) -> None:
        client.submit([b"a"], handler="h", queue=queue, id=request_id)
        keys = client.protocol
        keys.connection.redis.zadd(f"{keys.prefix}:{{q:{queue}}}:workers", {"w": time.time() * 1e3})
        details = {"details": '{"handlers": ["clean", "tidy"]}'}
        keys.connection.redis.hset(f"{keys.prefix}:{{q:{queue}}}:worker:w", mapping=details)

        assert completed("status", "--queue", queue, "", STREAMQ_URL=url) == [request_id]
        assert completed("wait", "--url", url, "--queue", queue, request_id[:3]) == [request_id]
        assert completed("ls", "--queue", queue, "--handler", "", STREAMQ_URL=url) == [
            "clean",
            "tidy",
        ]
        assert completed("ls", "--queue", queue[:2], STREAMQ_URL=url).count(queue) <= 1

    @pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "redis://10.255.255.1", "nonsense"])
    def test_none_that_answers(self, completed: Completed, url: str) -> None:
        before = time.monotonic()

        assert completed("status", "", STREAMQ_URL=url) == []
        assert time.monotonic() - before < allowed_s(20)


def test_neither_driver_nor_typer_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from streamq.cli import main; "
        "sys.argv = ['streamq', '_complete', 'status', '']; main(); "
        "print(sorted({'redis', 'typer', 'click', 'rich'} & {*sys.modules}))"
    )
    env = os.environ | {"STREAMQ_URL": "redis://127.0.0.1:1"}
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, check=True
    )

    assert said.stdout == b"[]\n"


class TestScript:
    def run(
        self, folder: Path, *words: str, **variables: str
    ) -> "subprocess.CompletedProcess[bytes]":
        return warm.run(
            [*COMMAND, "completion", *words], env={**os.environ, **variables}, cwd=folder
        )

    def test_bash_completes_with_it(self, tmp_path: Path) -> None:
        script = self.run(tmp_path, "bash").stdout.decode()
        ask = 'COMP_WORDS=(streamq hel); COMP_CWORD=1; _streamq; echo "${COMPREPLY[@]}"'
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

        said = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}"],
            env=os.environ | {"PATH": path},
            cwd=tmp_path,
            capture_output=True,
            check=True,
        )

        assert said.stdout == b"help\n"

    @pytest.mark.parametrize("shell", [*Shell])
    def test_shell_understands_it(self, tmp_path: Path, shell: str) -> None:
        (tmp_path / "script").write_bytes(self.run(tmp_path, shell).stdout)
        if not shutil.which(shell):
            pytest.skip(f"there is no {shell} here")

        subprocess.run([shell, "-n", tmp_path / "script"], check=True)

    def test_installed(self, tmp_path: Path) -> None:
        places = {"XDG_DATA_HOME": f"{tmp_path}/data", "XDG_CONFIG_HOME": f"{tmp_path}/config"}

        done = self.run(tmp_path, "--install", SHELL="/usr/bin/fish", **places)

        assert done.returncode == 0
        written = tmp_path / "config/fish/completions/streamq.fish"
        assert str(written) in done.stderr.decode()
        assert written.read_bytes() == self.run(tmp_path, "fish").stdout
        assert self.run(tmp_path, SHELL="/bin/tcsh").returncode == 2
