"""What the line says that shows how far a run is."""

from typing import Any

import pytest

from cli.progress import progress_in_words
from streamq.model import PartCounts, RecordCounts, State, Status
from streamq.runs.progress import Progress


def said(**changes: Any) -> str:
    status = Status(
        id="r",
        queue="default",
        handler="h",
        state=State.OPEN,
        level=50,
        limit=8,
        parts=PartCounts(total=10, waiting=5, running=0, retry=0, done=5, failed=0),
        records=RecordCounts(total=100, done=50, failed=0),
        created_ms=0,
        started_ms=0,
        finished_ms=None,
        rate=1.0,
        eta_s=None,
        **{"paused": False} | changes,
    )
    counts: dict[str, Any] = {"done": 0.5, "total": 100, "is_counted": True}
    pace: dict[str, Any] = {"eta_s": 50.0, "rate": 1.0, "busy": 2, "slots": 4, "retried": 0}
    return progress_in_words(Progress(status=status, **counts, **pace))


def test_rate_and_time_left_are_shown() -> None:
    assert said() == " 50% 50/100 records · 1/s · 50s left · 2/4 busy"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"paused": True}, "paused, until streamq resume r"),
        ({"waits_for_release": True}, "waits for streamq release r"),
    ],
)
def test_run_that_waits_for_its_user_says_for_what(change: dict[str, Any], words: str) -> None:
    assert said(**change) == f" 50% 50/100 records · {words} · 2/4 busy"
