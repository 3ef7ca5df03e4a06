"""``streamq demo`` through its command."""

import pytest

from tests.runs.running import Streamq

pytestmark = pytest.mark.commands


def test_demo_kills_a_worker_and_loses_nothing(streamq: Streamq) -> None:
    done = streamq("demo", "--lines", 60_000)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was lost" in done.stdout
    assert "killed with signal 9" in done.stdout
