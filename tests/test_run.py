"""``streamq run`` and ``streamq demo`` through their commands: the whole job at once."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

SAMPLES = Path(__file__).parents[1] / "samples"
Streamq = Callable[..., "subprocess.CompletedProcess[str]"]
COMMAND = [sys.executable, "-m", "streamq.cli"]
CODE = """
import time
def same(line: bytes) -> bytes:
    return line
def slow(line: bytes) -> bytes:
    time.sleep(0.002)
    return line
def picky(line: str) -> str:
    if line.endswith("7"):
        raise ValueError("seven")
    return line.upper()
"""


@pytest.fixture
def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.endswith(("_URL", "URL_FILE"))}


@pytest.fixture
def streamq(tmp_path: Path, environment: dict[str, str]) -> Streamq:
    (tmp_path / "code.py").unlink(missing_ok=True)
    (tmp_path / "job.py").write_text(CODE)

    def streamq(*words: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, *map(str, words)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )

    return streamq


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_bytes(b"".join(b"line %d\r\n" % n for n in range(3_000)) + b"last")
    return path


@pytest.mark.parametrize("target", ["job:same", "job.py:same"])
def test_identity_gives_the_input_back_and_leaves_nothing(
    streamq: Streamq, source: Path, tmp_path: Path, target: str
) -> None:
    done = streamq("run", "in.txt", "--map", target, "-o", "out.txt", "-p", 2, "--lines", 100)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()
    assert not (tmp_path / ".streamq").exists()
    assert "3,001 records in 31 parts, 0 failed" in done.stderr


def test_failures_are_written_beside_and_the_code_is_1(
    streamq: Streamq, source: Path, tmp_path: Path
) -> None:
    done = streamq(
        "run", "in.txt", "--map", "job:picky", "-o", "out.jsonl", "--retries", 0, "--json"
    )

    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["records"]["done"], summary["records"]["failed"]) == (2701, 300)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines[:2]] == ["LINE 0", "LINE 1"]
    failures = [
        json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()
    ]
    assert [(f["line"], f["error"]) for f in failures[:2]] == [
        (8, "ValueError"),
        (18, "ValueError"),
    ]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("run", "in.txt", "--map", "job:same"), 2, "-o OUT"),
        (("run", "none.txt", "--map", "job:same", "-o", "out.txt"), 2, "none.txt: No such file"),
        (("run", "in.txt", "--map", "job:nothing", "-o", "out.txt"), 4, "no 'nothing'"),
        (("run", "in.txt", "--map", "nowhere:f", "-o", "out.txt"), 4, "no module 'nowhere'"),
        (("run", "in.txt", "--map", "job:same", "-o", "no/out.txt"), 2, "there is no folder"),
        (("run", "in.txt", "--map", "job:same", "-o", "in.txt"), 2, "exists"),
        (("run", "--resume", "other"), 2, "no run other was stopped"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(
    streamq: Streamq, source: Path, tmp_path: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    done = streamq(*words)

    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".streamq").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_or_killed_it_goes_on(
    streamq: Streamq,
    environment: dict[str, str],
    source: Path,
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    words = ["run", "in.txt", "--map", "job:slow", "-o", "out.txt", "-p", "2", "--lines", "10"]
    running = subprocess.Popen(
        [*COMMAND, *words], env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    output = tmp_path / "out.txt"
    wait_until(lambda: output.exists() and output.stat().st_size > 1_000, 20)

    running.send_signal(number)
    code = running.wait(40)

    assert code == (130 if number == signal.SIGINT else -9)
    (request_id,) = [path.name for path in (tmp_path / ".streamq").iterdir()]
    done = streamq("run", "--resume", request_id)
    assert done.returncode == 0, done.stderr
    assert output.read_bytes() == source.read_bytes()
    assert not (tmp_path / ".streamq").exists()


def test_samples_run_as_their_readme_says(streamq: Streamq, tmp_path: Path) -> None:
    for file in SAMPLES.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)

    counted = streamq("run", "README.md", "--map", "wordcount:count_words", "-o", "counts.jsonl")
    cleaned = streamq("run", "orders.csv", "--map", "orders:clean", "-o", "clean.csv")

    assert counted.returncode == 0, counted.stderr
    assert json.loads((tmp_path / "counts.jsonl").read_text().splitlines()[0]) == {
        "#": 1,
        "samples": 1,
    }
    assert cleaned.returncode == 1, cleaned.stderr
    assert (tmp_path / "clean.csv").read_text() == (
        'item,count,total\napple,3,1.5\npear,2,1.5\n"jam, strawberry",1,4.2\ntea,5,15.0\n'
    )
    failures = [
        json.loads(line) for line in (tmp_path / "clean.errors.jsonl").read_text().splitlines()
    ]
    assert [failure["line"] for failure in failures] == [5, 6, 7]


def test_demo_kills_a_worker_and_loses_nothing(streamq: Streamq) -> None:
    done = streamq("demo", "--lines", 60_000)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was lost" in done.stdout
    assert "killed with signal 9" in done.stdout
