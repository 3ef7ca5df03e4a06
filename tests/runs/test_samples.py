"""The samples run as their README says."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.running import Streamq

pytestmark = pytest.mark.commands
SAMPLES = Path(__file__).parents[2] / "samples"


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


def test_sample_of_one_part_per_file(streamq: Streamq, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES, tmp_path / "files", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SAMPLES / "checksums.py", tmp_path)

    done = streamq(
        "run", "files", "--format", "file", "--map", "checksums:describe", "-o", "sums.jsonl"
    )

    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    files = sorted(path for path in (tmp_path / "files").rglob("*") if path.is_file())
    assert [each["file"] for each in found] == [str(path.relative_to(tmp_path)) for path in files]
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    assert [each["sha256"] for each in found] == sums


def test_sample_of_a_flaky_api(
    streamq: Streamq, environment: dict[str, str], tmp_path: Path
) -> None:
    for name in ("ask.py", "words.txt"):
        shutil.copy(SAMPLES / name, tmp_path)
    command = [sys.executable, str(SAMPLES / "slow_api.py"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as api:
        try:
            assert api.stdout
            environment["API"] = api.stdout.readline().strip()
            words = (
                "run words.txt --map ask:ask -o out.jsonl --lines 1 -p 1 -c 8 --rate 40/s --json"
            )
            done = streamq(*words.split())
        finally:
            api.kill()

    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    asked = (tmp_path / "words.txt").read_text().split()
    assert [answer["word"] for answer in answers] == asked
