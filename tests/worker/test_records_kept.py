"""A part that is stopped between two records: what its records came to is kept."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from streamq import Snooze
from streamq.app import describe_handler
from streamq.model import Part, Spec
from streamq.queue.outcomes import FORGET, PartDone, PartNotDone
from streamq.worker import kept_outcomes
from streamq.worker.kept_outcomes import decode_kept_outcomes
from streamq.worker.part_watch import LONG_STRETCH_S, PartWatch, Stretch
from streamq.worker.runner import Runner
from tests.worker.test_runner import values


class Watch(PartWatch):
    """Stops the part when the test says so, and notes what it is told."""

    def __init__(self, is_over: Callable[[], bool] = lambda: False) -> None:
        self._is_over = is_over
        self.begun: list[int] = []
        self.kept: list[list[list[Any]]] = []
        self.count = 0

    def is_over(self) -> bool:
        return self._is_over()

    def begin(self, index: int) -> None:
        self.begun.append(index)

    def is_due(self) -> bool:
        return self.count > 0

    def keep(self, partial: bytes, mark: bytes, *, must: bool = False) -> None:
        self.kept.append(decode_kept_outcomes(partial, self.count))

    async def keep_later(self, partial: bytes, mark: bytes, *, must: bool = False) -> None:
        self.keep(partial, mark, must=must)


def lines(count: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(count))


def part_of(payload: bytes, outcome: PartDone | PartNotDone | None = None) -> Part:
    kept = outcome.partial if isinstance(outcome, PartNotDone) else b""
    return Part(1, payload, b"%d 0 1" % payload.count(b"\n"), partial=kept)


@pytest.mark.parametrize("format", ["lines", "jsonl"])
@pytest.mark.parametrize("stop_after", [1, 3, 9])
def test_no_record_is_begun_after_a_stop_and_the_others_run_later(
    format: str, stop_after: int
) -> None:
    calls: list[int] = []

    def same(number: int) -> int:
        calls.append(number)
        return number

    runner = Runner(describe_handler(same, is_map=True), Spec(format=format))
    payload = lines(20)
    first = runner.run(part_of(payload), None, Watch(lambda: len(calls) >= stop_after))
    assert isinstance(first, PartNotDone)
    # Records may be begun until the stretch is over: one, then two, then four.
    done = len(calls)
    assert stop_after <= done <= 2 * stop_after
    assert (first.kind, first.delay_ms, first.is_stopped) == ("snooze", 0, True)

    last = runner.run(part_of(payload, first), None)

    assert isinstance(last, PartDone)
    assert (values(last), last.records) == (list(range(20)), 20)
    assert calls == list(range(20)), "none was called twice"


def test_another_thread_ends_a_stretch_after_the_record_that_runs() -> None:
    watch = Watch()
    calls: list[str] = []

    def same(line: str) -> str:
        calls.append(line)
        if line == "700":
            watch._is_over = lambda: True
            stretch = watch.stretch
            assert stretch is not None
            ender = threading.Thread(target=stretch.clear)
            ender.start()
            ender.join()
        return line

    runner = Runner(describe_handler(same, is_map=True), Spec(format="lines"))
    runner._stretch.size = 10_000

    outcome = runner.run(part_of(lines(1_000)), None, watch)

    assert isinstance(outcome, PartNotDone)
    assert calls[-1] == "700"
    again = runner.run(part_of(lines(1_000), outcome), None)
    assert values(again) == [str(number) for number in range(1_000)]
    assert len(calls) == 1_000


def test_stretch_that_was_ended_without_a_stop_goes_on() -> None:
    watch = Watch()

    def same(line: str) -> str:
        if line == "700" and watch.stretch:
            watch.stretch.clear()
        return line

    runner = Runner(describe_handler(same, is_map=True), Spec(format="lines"))
    for size in (10_000, 800):
        runner._stretch.size = size
        outcome = runner.run(part_of(lines(1_000)), None, watch)
        assert isinstance(outcome, PartDone)
        assert values(outcome) == [str(number) for number in range(1_000)]


def test_failures_before_a_stop_have_their_attempt_again() -> None:
    calls: list[str] = []

    def story(line: str) -> str:
        calls.append(line)
        if line == "0" and calls.count("0") == 1:
            raise ValueError("no")
        return line

    runner = Runner(describe_handler(story, is_map=True), Spec(format="lines", retries=1))
    first = runner.run(part_of(lines(3)), None, Watch(lambda: len(calls) == 2))
    assert isinstance(first, PartNotDone)
    assert (first.kind, first.is_stopped) == ("snooze", True)
    assert first.delay_ms > 0, "what failed waits as it would have"

    last = runner.run(part_of(lines(3), first), None)

    assert values(last) == ["0", "1", "2"]
    assert calls == ["0", "1", "0", "2"]


def test_blank_lines_are_no_records_after_a_stop_either() -> None:
    calls: list[int] = []

    def same(number: int) -> int:
        calls.append(number)
        return number

    payload = b"1\n\n2\n\n\n3\n\n"
    runner = Runner(describe_handler(same, is_map=True), Spec(format="jsonl", retries=0))
    first = runner.run(part_of(payload), None, Watch(lambda: len(calls) == 2))
    assert isinstance(first, PartNotDone)
    # A version that knew nothing of blank lines might have kept them as records without outcome.
    kept = [
        [0] if each == [3] else each
        for each in kept_outcomes.decode_kept_outcomes(first.partial, 7)
    ]

    for left in (first.partial, kept_outcomes.encode_kept_outcomes(kept)):
        calls.clear()
        last = runner.run(Part(1, payload, b"3 0 1 7", partial=left), None)
        assert isinstance(last, PartDone)
        assert (values(last), last.records) == ([1, None, 2, None, None, 3, None], 3)
        assert calls == [3]


def test_snooze_is_no_stop() -> None:
    def snooze(line: str) -> str:
        raise Snooze(after=5)

    runner = Runner(describe_handler(snooze, is_map=True), Spec(format="lines"))
    outcome = runner.run(part_of(lines(3)), None, Watch())

    assert isinstance(outcome, PartNotDone)
    assert (outcome.delay_ms, outcome.is_stopped) == (5_000, False)


def test_what_cannot_be_read_is_forgotten_when_the_part_is_given_up() -> None:
    runner = Runner(describe_handler(str.upper, is_map=True), Spec(format="lines"))

    outcome = runner.run(Part(1, lines(3), b"3 0 1", partial=b"\x93"), None)

    assert isinstance(outcome, PartNotDone)
    assert (outcome.kind, outcome.partial) == ("abandon", FORGET)


class TestResultsThatAreTooLargeTogether:
    def runner(self, times: int) -> Runner:
        handler = describe_handler(lambda line: line * times, is_map=True, name="x")
        return Runner(handler, Spec(format="lines"), 1_000)

    def test_those_that_have_room_are_kept_and_the_others_fail(self) -> None:
        outcome = self.runner(600).run(part_of(lines(3)), None)

        assert isinstance(outcome, PartNotDone)
        assert b"0" * 600 in outcome.result
        assert b"1" * 600 not in outcome.result
        assert [each.record for each in outcome.failures] == [2, 3]
        assert {each.error for each in outcome.failures} == {"ResultTooLarge"}
        assert (outcome.kind, outcome.records) == ("abandon", (1, 2))

    def test_a_redrive_runs_only_the_others(self) -> None:
        part = part_of(lines(3))
        outcome = self.runner(600).run(part, None)
        assert isinstance(outcome, PartNotDone)
        part.partial = outcome.partial

        again = self.runner(600).run(part, None)

        assert isinstance(again, PartNotDone)
        assert [each.record for each in again.failures] == [3]

    def test_many_small_ones_fit_when_the_last_are_left_out(self) -> None:
        outcome = self.runner(1).run(part_of(lines(500)), None)

        assert isinstance(outcome, PartNotDone)
        assert len(outcome.result) <= 1_000
        assert sum(outcome.records) == 500


class TestStretch:
    def test_begins_with_one_record_and_doubles_while_they_are_quick(self) -> None:
        stretch = Stretch()
        sizes = []
        for _ in range(4):
            sizes.append(stretch.size)
            stretch.observe(stretch.size, 1e-4)
        assert sizes == [1, 2, 4, 8]

    def test_slow_records_are_run_one_by_one_at_once(self) -> None:
        stretch = Stretch()
        stretch.size = 1_000
        stretch.observe(3, 10 * LONG_STRETCH_S)
        assert stretch.size == 1

    def test_short_part_says_nothing_about_longer_ones(self) -> None:
        stretch = Stretch()
        stretch.size = 1_000
        stretch.observe(3, 1e-6)
        assert stretch.size == 1_000


class TestCoroutines:
    def test_no_record_is_begun_after_a_stop_and_the_others_run_later(self) -> None:
        calls: list[str] = []

        async def same(line: str) -> str:
            calls.append(line)
            await asyncio.sleep(0)
            return line

        runner = Runner(describe_handler(same, is_map=True), Spec(format="lines"))
        first = asyncio.run(
            runner.run_async(part_of(lines(5)), None, Watch(lambda: len(calls) == 2))
        )
        assert isinstance(first, PartNotDone)
        assert (calls, first.is_stopped) == (["0", "1"], True)

        last = asyncio.run(runner.run_async(part_of(lines(5), first), None))

        assert (values(last), calls) == (["0", "1", "2", "3", "4"], ["0", "1", "2", "3", "4"])

    def test_outcomes_are_kept_after_each_record(self) -> None:
        async def same(line: str) -> str:
            return line

        runner = Runner(describe_handler(same, is_map=True), Spec(format="lines"))
        watch = Watch()
        watch.count = 3

        asyncio.run(runner.run_async(part_of(lines(3)), None, watch))

        assert watch.kept[0] == [[1, "0"], [0], [0]]
        assert watch.kept[-1][:2] == [[1, "0"], [1, "1"]]
