"""Paid calls: a polite stop makes none of them twice, a kill at most one for each slot."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs.running import EMBEDDED

pytestmark = EMBEDDED

BENCH = Path(__file__).parents[2] / "bench" / "paid_calls.py"


def story(calls: int, stops: int, kills: int, slots: int) -> dict[str, Any]:
    words = ["--calls", calls, "--stops", stops, "--kills", kills, "--slots", slots, "--json"]
    command = [sys.executable, str(BENCH), *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


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
