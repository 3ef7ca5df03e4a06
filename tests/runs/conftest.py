"""The commands ``load`` and ``run``, as the tests of loads and runs start them."""

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.runs.loads import Load
from tests.support.secure import as_role


@pytest.fixture
def command(url: str, queue: str) -> tuple[list[str], dict[str, str]]:
    """The command's beginning, and its environment."""
    environment = os.environ | {"STREAMQ_URL": as_role(url, "load"), "STREAMQ_QUEUE": queue}
    return [sys.executable, "-m", "streamq.cli", "load"], environment


@pytest.fixture
def load(command: tuple[list[str], dict[str, str]]) -> Load:
    """Runs the command to its end."""

    def load(*words: Any, stdin: bytes = b"") -> "subprocess.CompletedProcess[str]":
        line = [*command[0], *map(str, words)]
        done = subprocess.run(line, env=command[1], capture_output=True, input=stdin, timeout=60)
        texts = done.stdout.decode(), done.stderr.decode()
        return subprocess.CompletedProcess(line, done.returncode, *texts)

    return load
