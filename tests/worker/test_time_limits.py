"""Which slot takes too long, by what its parent reads in the table."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from streamq.worker.slot_table import SlotTable
from streamq.worker.time_limits import ASYNC_GRACE_MS, TimeLimits

LIMIT_MS = 1_000


class Handle:
    """A process as the parent sees it: its table, and what the parent did."""

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self.late: dict[int, Any] = {}
        self.overdue: dict[int, Any] = {}
        self.drained_at = 0.0
        self.heard_at = time.monotonic()
        self.orders: list[str] = []
        self.killed = ""

    def held(self) -> list[Any]:
        found = ((slot, self.table.read(slot)) for slot in range(self.table.slots))
        return [(slot, held) for slot, held in found if held]

    def order(self, word: str) -> None:
        self.orders.append(word)

    def kill(self, why: str) -> None:
        self.killed = self.killed or why


class Desk:
    """Two slots, of which the first is looked at, at moments that the test says."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.table = handle.table
        self.limits = TimeLimits(10.0)

    def begin(self, slot: int, *, is_async: bool = False) -> None:
        self.table.hold(slot, f"w{slot}", "r")
        self.table.describe(slot, "h", timeout_ms=LIMIT_MS, is_async=is_async)
        self.table.deal(slot, [7 + slot])
        assert self.table.start(slot, 0, 0)

    def look(self, now_ms: float, slot: int = 0) -> str:
        held = self.table.read(slot)
        assert held
        self.limits.check(self.handle, slot, held, now_ms)  # type: ignore[arg-type]
        return self.handle.killed


@pytest.fixture
def desk() -> Iterator[Desk]:
    table, _ = SlotTable.create(2)
    yield Desk(Handle(table))
    table.close()


def test_part_over_its_time_is_stopped_at_the_second_look(desk: Desk) -> None:
    desk.begin(0)

    assert desk.look(LIMIT_MS) == ""
    assert desk.look(LIMIT_MS + 1) == "", "one look may have been torn"
    assert desk.look(LIMIT_MS + 40) == "part 7 of r took longer than 1 s"


def test_limit_is_for_the_record_that_runs(desk: Desk) -> None:
    desk.begin(0)
    for index in range(9):
        desk.table.start_record(0, index, index * 900)
        assert desk.look(index * 900 + 890) == ""
        assert desk.look(index * 900 + 899) == ""

    assert desk.look(8 * 900 + 1_001) == ""
    assert desk.look(8 * 900 + 1_041) == "record 9 of part 7 of r took longer than 1 s"


def test_slot_that_went_on_between_two_looks_is_left_alone(desk: Desk) -> None:
    desk.begin(0)
    desk.table.start_record(0, 0, 0)
    assert desk.look(1_001) == ""
    desk.table.start_record(0, 1, 1_002)

    assert desk.look(1_041) == ""
    assert desk.look(2_001) == ""
    assert desk.handle.overdue == {}


def test_nothing_is_limited_between_two_records(desk: Desk) -> None:
    desk.begin(0)
    desk.table.start_record(0, 0, 0)
    desk.table.rest(0)

    assert desk.look(90_000) == ""
    assert desk.look(90_040) == ""


def test_loop_has_two_more_seconds_to_cancel_a_coroutine(desk: Desk) -> None:
    desk.begin(0, is_async=True)

    assert desk.look(LIMIT_MS + ASYNC_GRACE_MS) == ""
    assert desk.look(LIMIT_MS + ASYNC_GRACE_MS) == ""
    desk.look(LIMIT_MS + ASYNC_GRACE_MS + 1)
    assert desk.look(LIMIT_MS + ASYNC_GRACE_MS + 41) != ""


class TestNeighbour:
    @pytest.fixture(autouse=True)
    def two(self, desk: Desk) -> None:
        """The first slot is late, and the second runs."""
        desk.begin(0)
        desk.begin(1)
        desk.look(1_001)

    def test_it_may_end_what_it_runs_first(self, desk: Desk) -> None:
        assert desk.look(1_041) == ""
        assert desk.look(1_081) == ""
        assert desk.handle.orders == ["stop"]

        desk.table.drop(1)
        assert desk.look(1_121) != ""

    def test_it_is_not_waited_for_if_it_is_late_itself(self, desk: Desk) -> None:
        desk.look(1_041)
        desk.look(1_001, slot=1)
        assert desk.look(1_041, slot=1) != ""

    def test_process_that_says_nothing_is_stuck_as_a_whole(self, desk: Desk) -> None:
        desk.look(1_041)
        desk.handle.drained_at -= 4
        assert desk.look(1_081) == "", "it has spoken since"

        desk.handle.heard_at -= 4
        assert desk.look(1_121) != ""

    def test_it_is_not_waited_for_for_ever(self, desk: Desk) -> None:
        desk.look(1_041)
        desk.handle.drained_at -= 11

        assert desk.look(1_081) != ""
