"""``streamq errors``: what was given up, by part and by kind."""

import json

import pytest

from streamq.model import Failure
from tests.cli.common import rows
from tests.support.by_hand import RequestByHand
from tests.support.command import Streamq

pytestmark = pytest.mark.commands


def test_errors_by_part(streamq: Streamq, failed: RequestByHand) -> None:
    by_part = streamq("errors", failed.id)
    first = streamq("errors", failed.id, "--limit", "1", "--json")

    assert [row[0] for row in rows(by_part.stdout)] == ["1", "2"]
    assert "ValueError: no" in by_part.stdout
    assert by_part.stderr == ""
    assert [(f["part"], f["error"], f["message"]) for f in json.loads(first.stdout)] == [
        (1, "ValueError", "no")
    ]
    assert first.stderr == "1 of 2 are shown; --limit 0 shows every one\n"


def test_errors_by_kind(streamq: Streamq, failed: RequestByHand) -> None:
    text = streamq("errors", failed.id, "--group").stdout
    groups = json.loads(streamq("errors", failed.id, "--group", "--json").stdout)

    assert text.startswith("2x ValueError: no (e.g. part 1")
    assert [(g["count"], g["error"], g["message"]) for g in groups] == [(2, "ValueError", "no")]
    assert groups[0]["example"]["part"] == 1


def test_errors_with_their_tracebacks(streamq: Streamq, submitted: RequestByHand) -> None:
    holder, _ = submitted.claim()
    failure = Failure(error="ValueError", message="no", traceback="Traceback:\n  x = \x1b[2J\n")
    submitted.protocol.fail(submitted.id, holder, 1, 1, [failure], kind="abandon")

    out = streamq("errors", submitted.id, "--traceback").stdout

    assert out == "part 1: ValueError: no\n    Traceback:\n      x = \\x1b[2J\n"
