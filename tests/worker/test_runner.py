"""Running one part: outcomes of its records over several attempts."""

from typing import Any

import pytest

from streamq import Abandon, Context, Retry, Snooze
from streamq.app import describe_handler
from streamq.model import Part, Spec
from streamq.queue.outcomes import PartDone, PartNotDone
from streamq.records.encoding import decode_item, decode_result
from streamq.worker.runner import Runner


class Story:
    """A map whose records do as they are told, and remember how often they were called."""

    def __init__(self, **told: list[Any]) -> None:
        self.told = told
        self.calls: list[str] = []

    def tell(self, line: str) -> Any:
        self.calls.append(line)
        say = self.told.get(line)
        outcome = say.pop(0) if say else line.upper()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def attempts(story: Story, retries: int = 2) -> list[PartDone | PartNotDone]:
    """Run a part of three records until it is done or given up."""
    runner = Runner(
        describe_handler(story.tell, is_map=True), Spec(format="lines", retries=retries)
    )
    part = Part(1, b"a\nb\nc\n", b"3 0 1")
    outcomes: list[PartDone | PartNotDone] = []
    while True:
        outcome = runner.run(part, Context("r", 1, part.attempt))
        outcomes.append(outcome)
        if isinstance(outcome, PartDone) or outcome.kind == "abandon":
            return outcomes
        attempt = part.attempt + (outcome.kind == "retry")
        part = Part(1, part.payload, part.about, attempt, partial=outcome.partial)


def values(outcome: PartDone | PartNotDone) -> list[Any]:
    return [decode_item(item) for item in decode_result(outcome.result)[0]]


def test_only_records_without_an_outcome_run_again() -> None:
    story = Story(b=[ValueError("no"), ValueError("no")])

    *_, last = attempts(story)

    assert isinstance(last, PartDone)
    assert (values(last), last.records) == (["A", "B", "C"], 3)
    assert story.calls == ["a", "b", "c", "b", "b"]


def test_outcomes_that_cannot_be_read_are_told_in_words(caplog: pytest.LogCaptureFixture) -> None:
    """They are no error of the handler, and no traceback of ours helps anybody."""
    runner = Runner(describe_handler(Story().tell, is_map=True), Spec(format="lines"), 9, "r")

    outcome = runner.run(Part(1, b"a\nb\n", b"2 0 1", partial=b"\xff not ours\n"), None)

    assert isinstance(outcome, PartNotDone)
    assert (outcome.kind, outcome.records) == ("abandon", (0, -1))
    (failure,) = outcome.failures
    assert (failure.error, failure.traceback) == ("Damaged", "")
    assert "cannot be read" in failure.message
    assert caplog.messages == [f"part 1 of r is given up: {failure.message}"]


def test_after_the_last_attempt_good_results_are_kept() -> None:
    story = Story(b=[ValueError("no")] * 9)

    *_, last = attempts(story)

    assert isinstance(last, PartNotDone)
    assert (values(last), last.records) == (["A", None, "C"], (2, 1))
    assert [(failure.record, failure.attempts) for failure in last.failures] == [(2, 3)]


@pytest.mark.parametrize("wants_context", [False, True])
def test_nobody_is_called_with_a_part_of_blank_lines(wants_context: bool) -> None:
    calls: list[Any] = []

    def alone(rows: list[Any]) -> int:
        calls.append(rows)
        return rows[0]  # type: ignore[no-any-return]

    def informed(rows: list[Any], context: Context) -> int:
        return alone(rows)

    handler = describe_handler(informed if wants_context else alone, is_map=False)
    runner = Runner(handler, Spec(format="jsonl"))

    outcome = runner.run(Part(1, b"\n \n", b"2 0 1"), Context("r", 1, 1))

    assert isinstance(outcome, PartDone)
    assert (values(outcome), calls) == ([None], [])


def test_what_was_abandoned_does_not_run_again_with_the_others() -> None:
    story = Story(a=[Abandon("never")], b=[ValueError("no")])

    *_, last = attempts(story)

    assert isinstance(last, PartNotDone)
    assert story.calls == ["a", "b", "c", "b"]
    assert (values(last), last.records) == ([None, "B", "C"], (2, 1))
    assert [failure.error for failure in last.failures] == ["Abandon"]


def test_record_that_does_not_decode_stops_none_of_the_others() -> None:
    calls = []

    def double(number: int) -> int:
        calls.append(number)
        return 2 * number

    runner = Runner(describe_handler(double, is_map=True), Spec(format="jsonl"))

    outcome = runner.run(Part(1, b"1\n\n2\nx\n3\n", b"5 0 1"), None)

    assert isinstance(outcome, PartNotDone)
    assert calls == [1, 2, 3]
    assert [failure.record for failure in outcome.failures] == [4]
    assert values(outcome) == [2, None, 4, None, 6]


def test_result_that_cannot_be_kept_is_made_once() -> None:
    story = Story(b=[object()])

    *_, last = attempts(story)

    assert story.calls == ["a", "b", "c"]
    assert isinstance(last, PartNotDone)
    assert values(last) == ["A", None, "C"]


def test_snooze_stops_the_part_and_spends_no_attempt() -> None:
    story = Story(b=[Snooze(after=5, scope="request")])

    first, last = attempts(story, retries=0)

    assert isinstance(first, PartNotDone)
    assert (first.kind, first.delay_ms) == ("hold", 5_000)
    assert isinstance(last, PartDone)
    assert story.calls == ["a", "b", "b", "c"]


def test_retry_says_when() -> None:
    first, _ = attempts(Story(c=[Retry(after="3s")]))

    assert isinstance(first, PartNotDone)
    assert (first.kind, first.delay_ms) == ("retry", 3_000)


def test_redrive_runs_only_what_failed_and_yields_only_that() -> None:
    story = Story(b=[ValueError("no")])
    (given_up,) = attempts(story, retries=0)
    assert isinstance(given_up, PartNotDone)
    runner = Runner(describe_handler(story.tell, is_map=True), Spec(format="lines"))

    again = runner.run(
        Part(1, b"a\nb\nc\n", b"3 0 1", partial=given_up.partial), Context("r", 1, 1)
    )

    assert isinstance(again, PartDone)
    assert (values(again), again.records) == ([None, "B", None], 1)


@pytest.mark.parametrize(
    "payload", [b"a\nb\n\nc\n", b"a\r\nb\r\nc\r\n", b"a\r\nb\n\rc", b"a\rb\nc\n"]
)
@pytest.mark.parametrize("bad", [None, "b"])
def test_lines_at_once_are_the_lines_one_by_one(payload: bytes, bad: str | None) -> None:
    """Plain lines are decoded at once; the others, and what follows an error, one by one."""
    calls: list[bytes] = []

    def same(line: bytes) -> bytes:
        calls.append(line)
        if bad and line == bad.encode():
            raise ValueError(bad)
        return line

    runner = Runner(describe_handler(same, is_map=True), Spec(format="lines", retries=0))
    outcome = runner.run(Part(1, payload, b"3 0 1"), Context("r", 1, 1))

    lines = [line.removesuffix(b"\r") for line in payload.removesuffix(b"\n").split(b"\n")]
    assert calls == lines
    found, endings = decode_result(outcome.result)
    expected = [None if bad and line == b"b" else line for line in lines]
    assert found == expected
    if not isinstance(outcome, PartDone):
        assert [failure.record for failure in outcome.failures] == [2]
    letters = {b"r": b"\r\n", b"n": b"\n", b"0": b""}
    if not bad:
        ends = [letters[endings[n : n + 1] or b"n"] for n in range(len(lines))]
        whole = b"".join(bytes(line) + end for line, end in zip(lines, ends, strict=True))
        assert whole == payload


@pytest.mark.parametrize(
    "returned",
    [
        ["A", "\u00e4", ""],
        ["one\ntwo", "B", "C"],
        [b"A", b"", b"\xff\r"],
        [b"A", "B", b"C"],
        ["A", None, "C"],
        [{"a": 1}, ["b"], 3],
        ["", "", ""],
    ],
)
def test_whatever_lines_return_is_kept(returned: list[Any]) -> None:
    *_, last = attempts(Story(a=[returned[0]], b=[returned[1]], c=[returned[2]]))

    assert isinstance(last, PartDone)
    assert (values(last), last.records) == (returned, 3)


@pytest.mark.parametrize("unfit", ["\ud800", object(), "x" * 2**25])
@pytest.mark.parametrize("then", ["C", ValueError("no")])
def test_nobody_is_called_again_after_a_result_that_cannot_be_kept(unfit: Any, then: Any) -> None:
    story = Story(b=[unfit], c=[then])

    first, *_ = attempts(story, retries=0)

    assert isinstance(first, PartNotDone)
    assert story.calls == ["a", "b", "c"]
    failed = [2] if then == "C" else [2, 3]
    assert [failure.record for failure in first.failures] == failed
    assert values(first) == ["A", None, "C" if then == "C" else None]


@pytest.mark.parametrize("first", [None, "A", {"n": 0}])
def test_what_a_handler_changes_later_is_kept_as_it_was_returned(first: Any) -> None:
    seen: dict[str, Any] = {"n": 0}

    def count(line: str) -> Any:
        seen["n"] += 1
        seen["last"] = line
        return first if line == "a" else seen

    runner = Runner(describe_handler(count, is_map=True), Spec(format="lines"))

    outcome = runner.run(Part(1, b"a\nb\nc\nd\n", b"4 0 1"), None)

    later = [{"n": 2, "last": "b"}, {"n": 3, "last": "c"}, {"n": 4, "last": "d"}]
    assert values(outcome) == [first, *later]


@pytest.mark.parametrize("bad", [ValueError("no"), object()])
def test_nobody_is_called_again_after_results_that_a_handler_could_change(bad: Any) -> None:
    story = Story(a=[{"a": 1}], b=[bad], c=[["C"]])

    first, *_ = attempts(story, retries=0)

    assert isinstance(first, PartNotDone)
    assert story.calls == ["a", "b", "c"]
    assert [failure.record for failure in first.failures] == [2]
    assert values(first) == [{"a": 1}, None, ["C"]]


def test_outcomes_that_are_larger_than_a_result_are_not_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = Story(a=["x" * 600] * 9, c=["y" * 600] * 9, b=[ValueError("no")] * 2)
    runner = Runner(
        describe_handler(story.tell, is_map=True), Spec(format="lines", retries=5), 1_000
    )
    part = Part(1, b"a\nb\nc\n", b"3 0 1")

    for attempt in (1, 2):
        outcome = runner.run(Part(1, part.payload, part.about, attempt), None)
        assert isinstance(outcome, PartNotDone)
        assert (outcome.kind, outcome.partial) == ("retry", b"")

    assert story.calls == ["a", "b", "c"] * 2, "all records run again"
    assert sum("all its records run again" in each.message for each in caplog.records) == 1


def test_outcomes_no_larger_than_a_result_are_kept() -> None:
    story = Story(a=["x" * 300], b=[ValueError("no")])
    runner = Runner(
        describe_handler(story.tell, is_map=True), Spec(format="lines", retries=5), 4_000
    )

    outcome = runner.run(Part(1, b"a\nb\n", b"2 0 1"), None)

    assert isinstance(outcome, PartNotDone)
    assert 300 < len(outcome.partial) <= 4_000
