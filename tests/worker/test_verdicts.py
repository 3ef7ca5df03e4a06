"""What becomes of a part: which attempt is the last, what a failure tells, what is counted."""

from pathlib import Path
from typing import Any

import pytest

from streamq.app import describe_handler
from streamq.errors import DecodeError
from streamq.model import Part, Spec
from streamq.records.spool import SpoolWriter, spooled_of
from streamq.worker import kept_outcomes
from streamq.worker.runner import Runner

OF_A_FILE = Spec(format="lines", files=("a.txt",), retries=2)


def whole(rows: list[Any]) -> str:
    return "x" * len(rows)


def shout(line: str) -> str:
    return line.upper()


def runner(*, is_map: bool = False, spec: Spec = OF_A_FILE, **options: Any) -> Runner:
    return Runner(describe_handler(shout if is_map else whole, is_map=is_map), spec, **options)


@pytest.mark.parametrize(("attempt", "kind"), [(1, "retry"), (2, "retry"), (3, "abandon")])
def test_part_that_takes_too_long_runs_again_until_its_last_attempt(
    attempt: int, kind: str
) -> None:
    outcome = runner().time_out(Part(7, b"a\n", b"1 0 1", attempt))

    assert outcome.kind == kind
    assert [(each.error, each.part) for each in outcome.failures] == [("Timeout", 7)]


def test_part_that_failed_as_a_whole_is_told_with_its_place() -> None:
    outcome = runner().fail(Part(7, b"a\nb\n", b"2 0 41"), ValueError("no"))

    assert outcome.kind == "retry"
    (failure,) = outcome.failures
    place = (failure.source, failure.line, failure.last_line, failure.records)
    assert (failure.error, place) == ("ValueError", ("a.txt", 41, 42, 2))


def test_error_of_the_users_code_has_a_traceback_and_that_of_a_record_has_none() -> None:
    def caught(error: Exception) -> Exception:
        try:
            raise error
        except Exception as raised:  # noqa: BLE001  it has a traceback now
            return raised

    part = Part(1, b"a\n", b"1 0 1")

    assert "ValueError" in runner().describe(caught(ValueError("no")), part, 0).traceback
    assert runner().describe(caught(DecodeError("no")), part, 0).traceback == ""


def test_record_of_a_map_is_told_with_its_own_line() -> None:
    part = Part(1, b"a\nb\nc\n", b"3 0 41")

    assert runner(is_map=True).place(part, 2) == {"source": "a.txt", "line": 43}
    assert runner(is_map=True).source_of(part) == "a.txt"
    assert runner().source_of(Part(1, b"[]", b"1j")) == ""


@pytest.mark.parametrize(
    ("is_map", "about", "outcomes", "records"),
    [(True, b"5 0 1", 3, 3), (False, b"5 0 1", 1, 5), (False, b"5 0 1", 0, 0), (False, b"1", 1, 1)],
)
def test_outcome_of_a_map_is_of_one_record_and_that_of_a_handler_of_the_part(
    is_map: bool, about: bytes, outcomes: int, records: int
) -> None:
    assert runner(is_map=is_map)._count(Part(1, b"", about), outcomes) == records


def test_outcomes_are_one_for_each_record() -> None:
    outcomes = kept_outcomes.outcomes_of_items([b"x", None], 4)

    assert outcomes == [[1, b"x"], [1, None], [0], [0]]
    assert (
        kept_outcomes.decode_kept_outcomes(kept_outcomes.encode_kept_outcomes(outcomes), 4)
        == outcomes
    )
    assert kept_outcomes.encode_kept_outcomes(kept_outcomes.outcomes_of_items([], 4)) == b""


def test_part_with_earlier_outcomes_is_not_spooled_because_its_items_have_places(
    tmp_path: Path,
) -> None:
    long = "x" * 9_000
    data = f"{long}\n{long}\n".encode()
    run = runner(is_map=True, spool=SpoolWriter(str(tmp_path), "raw"))
    items: list[Any] = [b"a" * 9_000, b"b" * 9_000]

    whole, rest = (
        run.done(Part(1, data, b"2 0 1", partial=partial, reference=b"{}"), items, 2, b"")
        for partial in (b"", kept_outcomes.encode_kept_outcomes([[1, items[0]], [0]]))
    )

    assert [spooled_of(each.result) is not None for each in (whole, rest)] == [True, False]
