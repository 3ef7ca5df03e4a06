"""Handlers that yield: all values of a record are its result, and each is a line."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from streamq import Abandon, App, Context, Retry
from streamq.app import describe_handler
from streamq.flows.flow import MOST_CHILDREN
from streamq.model import Part, Spec
from streamq.queue.outcomes import PartDone, PartNotDone
from streamq.records.encoding import decode_item, decode_result, holds_several_items
from streamq.records.writer import Writer
from streamq.worker.runner import Runner
from streamq.worker.stage_runner import SpreadRunner

CONTEXT = Context("r", 1, 1)


def outcome(
    function: Callable[..., Any], payload: bytes, *, is_map: bool = True, most: int = 10_000
) -> PartDone | PartNotDone:
    handler = describe_handler(function, is_map=is_map)
    runner = Runner(handler, Spec(format="lines", retries=0), most)
    part = Part(1, payload, b"%d 0 1" % payload.count(b"\n"))
    if handler.is_async:
        return asyncio.run(runner.run_async(part, CONTEXT))
    return runner.run(part, CONTEXT)


def values(outcome: PartDone | PartNotDone) -> list[Any]:
    return [decode_item(item) for item in decode_result(outcome.result)[0]]


def words(line: str, context: Context) -> Iterator[Any]:
    """Each word; an error in the middle where one says so."""
    assert context.request == "r"
    for word in line.split():
        if word == "fails":
            raise ValueError("in the middle")
        yield None if word == "none" else {"word": word} if word == "row" else word


async def later(line: str, context: Context) -> AsyncIterator[Any]:
    for value in words(line, context):
        await asyncio.sleep(0)
        yield value


@pytest.mark.parametrize("function", [words, later])
def test_each_value_is_a_line_and_all_are_one_record(function: Callable[..., Any]) -> None:
    found = outcome(function, b"a b none\n \nrow c\n")

    assert isinstance(found, PartDone)
    assert found.records == 3
    assert values(found) == [["a", "b"], [], [{"word": "row"}, "c"]]
    assert Writer("raw", []).lines(found.result) == b'a\nb\n{"word":"row"}\nc\n'
    assert Writer("jsonl", []).lines(found.result) == b'"a"\n"b"\n{"word":"row"}\n"c"\n'
    keyed = Writer("jsonl", [], has_keys=True).lines(found.result, 7)
    assert keyed.splitlines()[1] == b'{"part":7,"record":1,"result":"b"}'
    assert keyed.splitlines()[2] == b'{"part":7,"record":3,"result":{"word":"row"}}'


def test_lines_end_as_the_line_of_their_record_did() -> None:
    found = outcome(words, b"a b\r\nc d\n")

    assert Writer("raw", []).lines(found.result) == b"a\r\nb\r\nc\nd\n"


@pytest.mark.parametrize("function", [words, later])
def test_after_an_error_nothing_of_the_record_is_left(function: Callable[..., Any]) -> None:
    found = outcome(function, b"a b\nc fails d\ne\n")

    assert isinstance(found, PartNotDone)
    assert [(each.error, each.record) for each in found.failures] == [("ValueError", 2)]
    assert "in the middle" in found.failures[0].traceback
    assert values(found) == [["a", "b"], None, ["e"]]
    assert Writer("raw", []).lines(found.result) == b"a\nb\ne\n"


@pytest.mark.parametrize("error", [Retry("again", after=1), Abandon("never")])
def test_what_it_raises_means_what_it_means_elsewhere(error: Exception) -> None:
    def raising(line: str) -> Iterator[str]:
        yield line
        raise error

    found = outcome(raising, b"a\n")

    assert isinstance(found, PartNotDone)
    assert [each.message for each in found.failures] == [str(error)]


def test_of_a_whole_part_the_values_are_its_lines() -> None:
    def lines(part: list[str]) -> Iterator[str]:
        yield from reversed(part)

    found = outcome(lines, b"a\nb\n", is_map=False)

    assert isinstance(found, PartDone)
    assert Writer("raw", []).lines(found.result) == b"b\na\n"
    assert found.records == 2


@pytest.mark.parametrize("value", ["", "x" * 100])
def test_one_that_does_not_end_is_ended(value: str) -> None:
    ended = []

    def endless(line: str) -> Iterator[str]:
        try:
            while True:
                yield value
        finally:
            ended.append(line)

    found = outcome(endless, b"a\n")

    assert isinstance(found, PartNotDone)
    assert found.failures[0].error == "ResultTooLarge"
    assert ended == ["a"]


def test_a_value_that_cannot_be_kept_fails_its_record_alone() -> None:
    def odd(line: str) -> Iterator[Any]:
        yield line
        yield float("nan") if line == "b" else 1

    found = outcome(odd, b"a\nb\n")

    assert isinstance(found, PartNotDone)
    assert [(each.error, each.record) for each in found.failures] == [("EncodeError", 2)]
    assert values(found) == [["a", 1], None]


def test_what_returns_an_iterator_is_no_generator() -> None:
    def listing(line: str) -> list[str]:
        return [line]

    found = outcome(listing, b"a\n")

    assert values(found) == [["a"]]
    assert not any(map(holds_several_items, decode_result(found.result)[0]))


@pytest.mark.parametrize("function", [words, later])
def test_a_spread_may_yield_its_children_and_no_more_than_it_may_have(
    function: Callable[..., Any],
) -> None:
    handler = describe_handler(function, is_map=True)
    spec = Spec(format="lines", retries=0, stage=1, shape="spread,map")
    runner = SpreadRunner(handler, spec)

    def run(payload: bytes) -> PartDone | PartNotDone:
        part = Part(1, payload, b"1 0 1")
        if handler.is_async:
            return asyncio.run(runner.run_async(part, CONTEXT))
        return runner.run(part, CONTEXT)

    good, bad, many = run(b"a b\n"), run(b"a fails\n"), run(b"a " * (MOST_CHILDREN + 5) + b"\n")

    assert isinstance(good, PartDone)
    assert good.passed is not None
    assert [decode_result(each)[0] for each in good.passed.payloads] == [["a"], ["b"]]
    assert isinstance(bad, PartNotDone)
    assert [each.error for each in bad.failures] == ["ValueError"]
    assert isinstance(many, PartNotDone)
    assert [each.error for each in many.failures] == ["TooManyChildren"]


def test_it_is_registered_as_others_are() -> None:
    app = App()
    app.map(words)
    app.map(later)

    assert [each.is_async for each in app.handlers.values()] == [False, True]
