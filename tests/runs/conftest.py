"""The commands ``load`` and ``run``, as the tests of loads and runs start them."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import KINDS
from tests.runs.loads import Load
from tests.runs.running import COMMAND, Begin, Streamq
from tests.support import warm
from tests.support.secure import as_role


@pytest.fixture
def command(url: str, queue: str) -> tuple[list[str], dict[str, str]]:
    """The command's beginning, and its environment."""
    environment = os.environ | {"STREAMQ_URL": as_role(url, "load"), "STREAMQ_QUEUE": queue}
    return [*warm.MODULE, "load"], environment


@pytest.fixture
def load(command: tuple[list[str], dict[str, str]]) -> Load:
    """Runs the command to its end."""

    def load(*words: Any, stdin: bytes = b"") -> "subprocess.CompletedProcess[str]":
        line = [*command[0], *map(str, words)]
        done = warm.run(line, env=command[1], input=stdin)
        texts = done.stdout.decode(), done.stderr.decode()
        return subprocess.CompletedProcess(line, done.returncode, *texts)

    return load


CODE = """
import os
import pathlib
import time
def same(line: bytes) -> bytes:
    return line
def slow(line: bytes) -> bytes:
    time.sleep(float(os.environ.get("PAUSE_S", "0.001")))
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
NUMBER = 7
from streamq import App
app = App()
@app.map
def shout(line: str) -> str:
    return line.upper()
@app.map
async def later(line: str) -> str:
    return line
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
        line = [*COMMAND, *map(str, words)]
        done = warm.run(line, env=environment, cwd=tmp_path, stdout=stdout, timeout=100)
        texts = [text.decode() if text is not None else "" for text in (done.stdout, done.stderr)]
        return subprocess.CompletedProcess(done.args, done.returncode, *texts)

    return streamq


@pytest.fixture
def begin(environment: dict[str, str], streamq: Streamq, tmp_path: Path) -> Iterator[Begin]:
    """Starts ``streamq run``, and goes on while it runs."""
    begun: list[subprocess.Popen[str]] = []

    def begin(*words: Any, **variables: str) -> "subprocess.Popen[str]":
        begun.append(
            subprocess.Popen(
                [*COMMAND, "run", *map(str, words)],
                env=environment | variables,
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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_bytes(b"".join(b"line %d\r\n" % n for n in range(3_000)) + b"last")
    return path
