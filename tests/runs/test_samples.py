"""The samples run as their README says."""

import hashlib
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.running import Streamq
from tests.support.waiting import wait_until

pytestmark = pytest.mark.commands
SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.mark.long
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


def answers(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
def test_samples_of_flows(streamq: Streamq, environment: dict[str, str], tmp_path: Path) -> None:
    for file in SAMPLES.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment["SITE"] = f"http://127.0.0.1:{port}"
    site = subprocess.Popen(
        [sys.executable, tmp_path / "site.py"], env=environment | {"PORT": port}
    )
    try:
        wait_until(lambda: answers(int(port)), 30)
        crawled = streamq("run", "pages.txt", "--flow", "crawl:crawl", "-o", "crawl.jsonl")
    finally:
        site.kill()
        site.wait()
    counted = streamq("run", "README.md", "--flow", "longest:text", "-o", "words.jsonl")
    loaded = streamq(
        *("run", "orders.csv", "--flow", "etl:etl", "-o", "orders.sql"),
        *("--output-format", "raw", "--lines", "1"),
    )

    assert crawled.returncode == 1, crawled.stderr
    pages = [json.loads(line) for line in (tmp_path / "crawl.jsonl").read_text().splitlines()]
    assert [(page["links_to"], page["broken"]) for page in pages] == [
        (["Fruit", "Tea"], 1),
        (["Apple", "Pear"], 0),
        ([], 0),
        (["Fruit", "Home"], 0),
    ]
    assert counted.returncode == 0, counted.stderr
    (words,) = (tmp_path / "words.jsonl").read_text().splitlines()
    assert len(json.loads(words)) == 10
    assert json.loads(words)["streamq"] > 5
    assert loaded.returncode == 1, loaded.stderr
    assert (tmp_path / "orders.sql").read_text() == (
        "INSERT INTO orders VALUES ('apple', 3, 1.5)\n"
        "INSERT INTO orders VALUES ('pear', 2, 1.5)\n"
        "INSERT INTO orders VALUES ('jam, strawberry', 1, 4.2)\n"
        "INSERT INTO orders VALUES ('tea', 5, 15.0)\n"
    )
    failures = [
        json.loads(line) for line in (tmp_path / "orders.errors.jsonl").read_text().splitlines()
    ]
    assert [(each["stage"], each["line"]) for each in failures] == [("extract", 5), ("extract", 7)]


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
