"""Errors of handlers in the log: each kind once in full, and the others counted."""

import time

import pytest

from streamq.worker import tracebacks
from streamq.worker.tracebacks import Complaints, users_traceback


def complain(complaints: Complaints, number: int, kind: type[Exception] = ValueError) -> None:
    try:
        raise kind(f"number {number}")
    except kind as error:
        complaints.say(f"part {number} failed", error, users_traceback(error))


def complain_elsewhere(complaints: Complaints) -> None:
    try:
        raise ValueError("another line")
    except ValueError as error:
        complaints.say("part 0 failed", error, users_traceback(error))


def test_first_of_each_kind_is_logged_in_full(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()

    for number in range(50):
        complain(complaints, number)
        complain(complaints, number, KeyError)
        complain_elsewhere(complaints)

    assert len(caplog.messages) == 3
    assert all("Traceback" in each for each in caplog.messages)
    assert "ValueError: number 0" in caplog.messages[0]


def test_the_others_are_counted_in_one_line_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints, now = Complaints(), 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for second in range(70):
        now = 1_000.0 + second
        complain(complaints, second)

    assert len(caplog.messages) == 3
    # 10 s after the first, and 20 s after that; the next comes 40 s later.
    assert caplog.messages[1] == (
        "part 10 failed: ValueError: number 10; in the last 10 s there were 10 ValueError"
    )
    assert "part 30 failed: ValueError: number 30" in caplog.messages[2]
    assert "20 ValueError" in caplog.messages[2]


def test_of_very_many_kinds_only_some_are_logged_in_full(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    for number in range(100):
        complain(complaints, number, type(f"Error{number}", (Exception,), {}))

    assert len(caplog.messages) == tracebacks._MOST_KINDS
