"""Paid calls: a polite stop makes none twice, a kill one for each slot at most."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs.running import EMBEDDED

pytestmark = EMBEDDED

BENCH = Path(__file__).parents[2] / "bench" / "paid_calls.py"


def measure(*words: str | int) -> dict[str, Any]:
    command = [sys.executable, str(BENCH), *map(str, words), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def story(calls: int, stops: int, kills: int, slots: int) -> dict[str, Any]:
    words = ("--calls", calls, "--stops", stops, "--kills", kills, "--slots", slots)
    return measure("stops", *words)


def check(told: dict[str, Any]) -> None:
    assert told["exact"], told
    assert told["twice_by_stops"] == 0, told
    assert told["twice_by_kills"] <= told["allowed_by_kills"], told


def test_stopped_and_killed() -> None:
    check(story(calls=120, stops=1, kills=1, slots=6))


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_two_thousand_calls_stopped_ten_times_and_killed_ten_times() -> None:
    check(story(calls=2_000, stops=10, kills=10, slots=30))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_whole_of_a_long_job_takes_what_the_api_gives() -> None:
    """All of the command counts: its start, the steady state, the last retries and its end."""
    told = measure("rate", "--calls", 10_000, "--bare", 0)["streamq run"]

    assert told["exact"], told
    assert (told["peak"], told["refused"]) == (30, 0), told
    assert told["share"] > 0.9, told
