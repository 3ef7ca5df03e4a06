"""Records that crash their process, or hang: exactly these fail, and the others are done."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs.running import Streamq

pytestmark = pytest.mark.commands

CODE = """
import asyncio, ctypes, os, time

def crash(line: str) -> str:
    if line == "37":
        ctypes.string_at(0)
    return line

async def crash_async(line: str) -> str:
    return crash(line)

def crash_all(line: str) -> str:
    if int(line) > 40:
        os._exit(3)
    return line

def hang(row: int) -> int:
    with open("calls", "a") as calls:
        print(row, file=calls)
    if row in (7, 9):
        time.sleep(60)
    return row

def fork(line: str) -> str:
    with open("calls", "a") as calls:
        print(line, file=calls)
    if child := os.fork():
        os.waitpid(child, 0)
    elif line == "50":
        raise ValueError(line)
    return line

def slow(line: str) -> str:
    time.sleep(0.3)
    return line

async def slow_async(line: str) -> str:
    await asyncio.sleep(0.3)
    return line
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bad.py").write_text(CODE)
    (tmp_path / "in.txt").write_text("".join(f"{n}\n" for n in range(1, 61)))
    return tmp_path


def failures(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.errors.jsonl").read_text().splitlines()]


def run(streamq: Streamq, name: str, *options: str) -> str:
    done = streamq("run", "in.txt", "--map", f"bad:{name}", "-o", "out.txt", "-p", "1", *options)
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", [pytest.param("crash", marks=pytest.mark.long), "crash_async"])
def test_record_that_crashes_is_found_and_its_neighbours_are_done(
    streamq: Streamq, folder: Path, name: str
) -> None:
    said = run(streamq, name, "--lines", "60")

    out = (folder / "out.txt").read_text().split()
    assert out == [str(n) for n in range(1, 61) if n != 37]
    (failure,) = failures(folder)
    assert (failure["error"], failure["source"], failure["line"]) == ("Poison", "in.txt", 37)
    # Once as a whole, once in a piece of four, and three times alone.
    assert said.count("was killed by SIGSEGV") == 5


@pytest.mark.long
def test_part_full_of_records_that_crash_costs_a_bounded_number_of_processes(
    streamq: Streamq, folder: Path
) -> None:
    said = run(streamq, "crash_all", "--lines", "60")

    assert (folder / "out.txt").read_text().split() == [str(n) for n in range(1, 41)]
    assert [each["line"] for each in failures(folder)] == list(range(41, 61))
    assert {each["error"] for each in failures(folder)} == {"Poison"}
    assert said.count("ended by itself with code 3") <= 13, "3 x (2 + 2) + 1"


def test_time_limit_of_a_plain_map_is_for_each_record(streamq: Streamq, folder: Path) -> None:
    lines = [f"{n}\n\n" for n in range(1, 21)]
    (folder / "in.jsonl").write_text("".join(lines))

    done = streamq(
        *("run", "in.jsonl", "--map", "bad:hang", "-o", "out.jsonl", "-p", "1", "--lines", "20"),
        *("--timeout", "2s", "--retries", "1"),
    )

    assert done.returncode == 1, done.stderr
    out = [int(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert out == [n for n in range(1, 21) if n not in (7, 9)]
    found = [json.loads(line) for line in (folder / "out.errors.jsonl").read_text().splitlines()]
    # Every other line is blank, and blank lines are neither failures nor records.
    assert [(each["error"], each["line"]) for each in found] == [("Timeout", 13), ("Timeout", 17)]
    # A second after a record has an outcome, the outcome is kept.
    calls = (folder / "calls").read_text().split()
    others = [n for n in range(1, 21) if n not in (7, 9)]
    assert {n: calls.count(str(n)) for n in others} == dict.fromkeys(others, 1)


@pytest.mark.parametrize("name", ["slow", "slow_async"])
def test_part_may_take_longer_than_the_limit_of_a_record(
    streamq: Streamq, folder: Path, name: str
) -> None:
    (folder / "in.txt").write_text("".join(f"{n}\n" for n in range(1, 15)))

    done = streamq(
        *("run", "in.txt", "--map", f"bad:{name}", "-o", "out.txt", "-p", "1", "--lines", "14"),
        *("--timeout", "1200ms", "--retries", "0"),
    )

    assert done.returncode == 0, done.stderr
    assert (folder / "out.txt").read_text().split() == [str(n) for n in range(1, 15)]


@pytest.mark.parametrize("options", [(), ("--timeout", "1m")])
def test_copy_that_a_record_makes_by_forking_runs_no_other_record(
    streamq: Streamq, folder: Path, options: tuple[str, ...]
) -> None:
    words = ("in.txt", "--map", "bad:fork", "-o", "out.txt", "-p", "1", "--lines", "30", *options)

    done = streamq("run", *words)

    assert done.returncode == 0, done.stderr
    assert (folder / "calls").read_text() == (folder / "in.txt").read_text()
    assert (folder / "out.txt").read_text() == (folder / "in.txt").read_text()
