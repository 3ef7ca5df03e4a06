"""Commands that run in a fork, as most tests run them, behave like those of a new interpreter."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.command import COMMAND, NOBODY, environment, python_path

#: Commands that show their environment, their folder, their standard input, and usage errors.
LINES = (
    ["--help"],
    ["stauts"],
    pytest.param(["config", "show", "--origin"], marks=pytest.mark.long),
    pytest.param(["status", "x", "--url", NOBODY], marks=pytest.mark.long),
    pytest.param(["load", "nothing.txt", "--handler", "h"], marks=pytest.mark.long),
    ["run", "-", "--map", "job:nothing", "-o", "out.txt"],
)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_command_does_the_same_in_a_fork(line: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("def same(line):\n    return line\n")
    env = environment(STREAMQ_QUEUE="mine")
    own: Any = {"env": env, "cwd": tmp_path, "input": b"some\n" * 50_000, "timeout": 60}

    for start in (COMMAND, warm.MODULE):
        forked = warm.run([*start, *line], **own)
        new = subprocess.run([*start, *line], capture_output=True, check=False, **own)

        assert (forked.returncode, forked.stdout, forked.stderr) == (
            new.returncode,
            new.stdout,
            new.stderr,
        )


def test_command_that_takes_too_long_is_killed_and_the_next_one_runs() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run([*COMMAND, "load", "-", "--handler", "h"], env=environment(), timeout=0.01)

    assert warm.run([*COMMAND, "ls", "--url", NOBODY], env=environment()).returncode == 3


def test_variables_of_the_interpreter_get_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")

    done = warm.run([*COMMAND, "--version"], env=os.environ | {"PYTHONPATH": python_path(tmp_path)})

    assert done.stdout.startswith(b"mine\n")
