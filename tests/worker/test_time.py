"""Parts that take longer than their time, or than their lease."""

from typing import Any

import pytest

from tests.conftest import ANY_KIND
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until
from tests.worker.common import TWO_KINDS

pytestmark = pytest.mark.commands


class TestTime:
    @ANY_KIND
    def test_sync_part_over_its_time_is_stopped_and_its_neighbours_lose_no_attempt(
        self, fleet: Fleet, submit: Any
    ) -> None:
        fleet.ready("-c", "3")
        beside = submit([1.0, 1.0], "nap", retries=0)
        wait_until(lambda: len(fleet.notes("S", beside.id)) == 2)

        request = submit([9.0], "overdue", backoff="10ms")

        assert request.wait(20).parts.failed == 1
        assert [(each.error, each.attempts) for each in request.errors()] == [("Timeout", 2)]
        assert len(fleet.notes("S", request.id)) == 2, "it was tried again once"
        assert beside.wait(20).parts.done == 2

    @ANY_KIND
    def test_coroutine_over_its_time_is_cancelled_alone(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready("-c", "3")
        before = fleet.children(pool)

        request = submit([9.0, 0.0], "overdue_async", backoff="10ms")

        assert request.wait(20).parts.failed == 1
        assert [failure.error for failure in request.errors()] == ["Timeout"]
        assert fleet.children(pool) == before

    @TWO_KINDS
    @pytest.mark.parametrize("handler", ["nap", "holds_gil"])
    def test_part_longer_than_its_lease_runs_once(
        self, fleet: Fleet, submit: Any, handler: str
    ) -> None:
        fleet.ready("--lease", "1s")
        fleet.ready("--lease", "1s")

        request = submit([2.5], handler)

        assert request.wait(20).parts.done == 1
        assert len(fleet.notes("S")) == 1

    @ANY_KIND
    def test_parts_behind_one_that_turns_slow_are_handed_to_others(
        self, fleet: Fleet, submit: Any
    ) -> None:
        fleet.ready("-p", "2")

        request = submit([0.0] * 300 + [3.0] + [0.0] * 100, "nap", limit=2)

        wait_until(lambda: len(fleet.notes("S")) == 401, 10)
        slow = next(note for note in fleet.notes("S") if note.part == 301)
        assert max(note.time for note in fleet.notes("S")) < slow.time + 2.0
        assert request.wait(10).parts.done == 401
        assert len(fleet.notes("S")) == 401, "none was started by two"
