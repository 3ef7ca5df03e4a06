"""The memory that a process and its parent share, on the real class: two sides that race."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from streamq.queue.pace import MOST_PARTS
from streamq.units import EPILOGUES
from streamq.worker.slot_table import UNCUT, SlotState, SlotTable

ROUNDS = 1_500


@pytest.fixture
def tables() -> Iterator[Callable[[int], tuple[SlotTable, SlotTable]]]:
    """Two mappings of the same memory: the slot's, and the parent's."""
    made: list[SlotTable] = []

    def tables(slots: int = 1) -> tuple[SlotTable, SlotTable]:
        first, fd = SlotTable.create(slots)
        made.extend((first, SlotTable(fd, slots)))
        os.close(fd)
        return made[-2], made[-1]

    yield tables
    for table in made:
        table.close()


@pytest.fixture
def pair(tables: Callable[[int], tuple[SlotTable, SlotTable]]) -> tuple[SlotTable, SlotTable]:
    return tables(1)


def seen(table: SlotTable, slot: int = 0) -> SlotState:
    held = table.read(slot)
    assert held is not None
    return held


def run_beside(work: Callable[[], None]) -> Callable[[], int]:
    """Do it in another process. Returns what waits for it, and tells its exit code."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # should nobody wait for it any more
        try:
            work()
        except BaseException:  # noqa: BLE001  the exit code tells
            os._exit(1)
        os._exit(0)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def pause(most_s: float) -> None:
    """Do nothing for up to so long, without sleeping."""
    until = time.perf_counter() + random.random() * most_s
    while time.perf_counter() < until:
        pass


class TestBatch:
    def test_parent_sees_what_the_slot_holds(self, pair: tuple[SlotTable, SlotTable]) -> None:
        slot, parent = pair
        assert parent.read(0) is None

        slot.hold(0, "holder", "request")
        slot.describe(0, "handler", timeout_ms=500, is_async=True)
        slot.deal(0, [7, 8, 9])
        slot.expect(0, 3, 250)
        slot.start(0, 1, 12_345)
        slot.set_progress(0, 40.4)

        held = seen(parent)
        assert (held.holder, held.request_id, held.handler) == ("holder", "request", "handler")
        assert (held.numbers, held.running, held.since_ms) == ((7, 8, 9), 8, 12_345)
        assert (held.timeout_ms, held.is_async, held.progress) == (500, True, 40)
        assert (held.attempt, held.retry_ms) == (3, 250)

    def test_progress_is_that_of_the_running_part(self, pair: tuple[SlotTable, SlotTable]) -> None:
        slot, parent = pair
        slot.hold(0, "holder", "request")
        slot.deal(0, [7, 8])
        slot.start(0, 0, 1)
        for told, noted in ((40.4, 40), (250, 100), (-3, 0), (99.6, 100)):
            slot.set_progress(0, told)
            assert seen(parent).progress == noted

        slot.start(0, 1, 2)

        assert seen(parent).progress == 0

    def test_part_that_ended_does_not_run(self, pair: tuple[SlotTable, SlotTable]) -> None:
        slot, parent = pair
        slot.hold(0, "h", "r")
        slot.deal(0, [7, 8])
        assert seen(parent).running is None
        slot.start(0, 0, 0)

        slot.end(0, 0)

        assert (seen(parent).is_ended, seen(parent).running) == (True, None)

    def test_dropped_lease_is_nothing(self, pair: tuple[SlotTable, SlotTable]) -> None:
        slot, parent = pair
        slot.hold(0, "h", "r")
        slot.deal(0, [7])

        slot.drop(0)

        assert parent.read(0) is None

    def test_as_many_parts_as_there_is_room_for_touch_no_other_slot(
        self, tables: Callable[[int], tuple[SlotTable, SlotTable]]
    ) -> None:
        slot, parent = tables(3)
        for index in range(3):
            slot.hold(index, f"h{index}", f"r{index}")
            slot.deal(index, [index + 1])

        slot.deal(1, range(1, MOST_PARTS + 1))

        assert seen(parent, 1).numbers == tuple(range(1, MOST_PARTS + 1))
        assert [(seen(parent, n).holder, seen(parent, n).numbers) for n in (0, 2)] == [
            ("h0", (1,)),
            ("h2", (3,)),
        ]

    def test_more_parts_than_there_is_room_for_are_refused(
        self, tables: Callable[[int], tuple[SlotTable, SlotTable]]
    ) -> None:
        slot, parent = tables(2)
        for index in range(2):
            slot.hold(index, f"h{index}", f"r{index}")
            slot.deal(index, [index + 1])
        before = [seen(parent, index) for index in range(2)]

        with pytest.raises(ValueError, match="more than the 500"):
            slot.deal(0, range(1, MOST_PARTS + 2))

        assert [seen(parent, index) for index in range(2)] == before

    def test_calls_are_numbered_with_room_for_those_of_the_parent(
        self, pair: tuple[SlotTable, SlotTable]
    ) -> None:
        slot, parent = pair
        slot.hold(0, "h", "r")
        first = slot.next_call(0)

        slot.answered(0)

        assert slot.next_call(0) == 2 * first
        assert seen(parent).calls * first + 1 in range(first + 1, 2 * first)


class TestStrike:
    def test_struck_parts_are_not_started(self, pair: tuple[SlotTable, SlotTable]) -> None:
        slot, parent = pair
        slot.hold(0, "h", "r")
        slot.deal(0, [7, 8, 9])
        assert slot.start(0, 0, 0)

        assert parent.strike(0, seen(parent)) == (8, 9)

        assert not slot.start(0, 1, 0)
        assert not slot.start(0, 2, 0)

    def test_part_that_was_started_meanwhile_is_not_struck(
        self, pair: tuple[SlotTable, SlotTable]
    ) -> None:
        slot, parent = pair
        slot.hold(0, "h", "r")
        slot.deal(0, [7, 8, 9])
        slot.start(0, 0, 0)
        held = seen(parent)
        assert slot.start(0, 1, 0)

        assert parent.strike(0, held) == (9,)

    def test_last_part_leaves_nothing_to_strike(self, pair: tuple[SlotTable, SlotTable]) -> None:
        slot, parent = pair
        slot.hold(0, "h", "r")
        slot.deal(0, [7])
        slot.start(0, 0, 0)

        assert parent.strike(0, seen(parent)) == ()

    def test_another_batch_is_not_struck_for_the_one_before(
        self, pair: tuple[SlotTable, SlotTable]
    ) -> None:
        slot, parent = pair
        slot.hold(0, "h", "r")
        slot.deal(0, [7, 8, 9])
        slot.start(0, 0, 0)
        held = seen(parent)
        slot.deal(0, [10, 11, 12])

        assert parent.strike(0, held) == (), "nobody hands back what may be started"

    def test_part_is_started_or_struck_and_never_both(
        self, pair: tuple[SlotTable, SlotTable]
    ) -> None:
        """Two processes race for the parts of many batches; each says which it has."""
        slot, parent = pair
        parts = 250
        slot.hold(0, "h", "r")
        begun, some, done = os.pipe(), os.pipe(), os.pipe()

        def start_all() -> None:
            for _ in range(ROUNDS):
                os.read(begun[0], 1)
                # On a busy machine the other process is woken here, and does not come too late.
                started, wakes = 0, random.randrange(parts)
                while started < parts and slot.start(0, started, 0):
                    started += 1
                    if started > wakes:
                        os.write(some[1], b".")
                        wakes = parts
                os.write(done[1], bytes([started]))

        wait = run_beside(start_all)
        cuts: set[int] = set()
        for _ in range(ROUNDS):
            slot.deal(0, range(1, parts + 1))
            held = seen(parent)
            os.write(begun[1], b".")
            os.read(some[0], 1)
            pause(1e-4)
            struck = parent.strike(0, held)
            started = os.read(done[0], 1)[0]
            assert struck == tuple(range(parts - len(struck) + 1, parts + 1))
            # When each sees the other one part may belong to neither: the slot does not start it,
            # and hands it back itself when its lease ends.
            assert parts - 1 <= started + len(struck) <= parts, "no part belongs to both sides"
            cuts.add(started)
        for fd in (*begun, *some, *done):
            os.close(fd)
        assert wait() == 0
        assert len(cuts) > 3, "the two did meet"


class TestTold:
    def test_lease_that_is_not_wanted_starts_nothing_more(
        self, pair: tuple[SlotTable, SlotTable]
    ) -> None:
        slot, parent = pair
        slot.hold(0, "h", "r")
        slot.deal(0, [7, 8])
        slot.start(0, 0, 0)

        parent.ask_to_stop(0, seen(parent))

        assert slot.is_asked_to_stop(0)
        assert not slot.start(0, 1, 0)

    def test_another_lease_is_not_told_for_the_one_before(
        self, pair: tuple[SlotTable, SlotTable]
    ) -> None:
        slot, parent = pair
        slot.hold(0, "h", "r")
        slot.deal(0, [7, 8])
        held = seen(parent)
        slot.hold(0, "h2", "r2")
        slot.deal(0, [1])

        parent.ask_to_stop(0, held)

        assert not slot.is_asked_to_stop(0)
        assert slot.start(0, 0, 0)

    def test_next_lease_begins_untold_and_uncut(self, pair: tuple[SlotTable, SlotTable]) -> None:
        slot, parent = pair
        slot.hold(0, "h", "r")
        slot.deal(0, [7, 8])
        slot.start(0, 0, 0)
        parent.strike(0, seen(parent))
        parent.ask_to_stop(0, seen(parent))

        slot.hold(0, "h2", "r2")
        slot.deal(0, [1, 2])

        assert slot.start(0, 0, 0)
        assert slot.start(0, 1, 0)
        assert UNCUT > MOST_PARTS


class TestReading:
    def test_no_mixture_is_seen_while_a_slot_writes(
        self, pair: tuple[SlotTable, SlotTable]
    ) -> None:
        """The numbers, the holder and the request of one lease all tell the same number."""
        slot, parent = pair
        end = time.monotonic() + 1.5

        def write() -> None:
            number = 0
            while time.monotonic() < end:
                number += 1
                slot.hold(0, f"h{number}", f"r{number}")
                slot.deal(0, [number] * (1 + number % 50))
                pause(1e-4)

        wait = run_beside(write)
        read: set[int] = set()
        while time.monotonic() < end:
            held = parent.read(0)
            if held is None or not held.numbers:
                continue
            number = held.numbers[0]
            assert (held.holder, held.request_id) == (f"h{number}", f"r{number}")
            assert held.numbers == (number,) * (1 + number % 50)
            read.add(number)
        assert wait() == 0
        assert len(read) > 20

    def test_threads_see_no_mixture_either(self, pair: tuple[SlotTable, SlotTable]) -> None:
        slot, parent = pair
        end = time.monotonic() + 0.5

        def write() -> None:
            number = 0
            while time.monotonic() < end:
                number += 1
                slot.deal(0, [number] * (1 + number % 50))

        slot.hold(0, "h", "r")
        thread = threading.Thread(target=write)
        thread.start()
        while time.monotonic() < end:
            held = parent.read(0)
            if held and held.numbers:
                assert held.numbers == (held.numbers[0],) * (1 + held.numbers[0] % 50)
        thread.join()

    def test_what_a_dead_process_was_just_writing_counts(
        self, pair: tuple[SlotTable, SlotTable]
    ) -> None:
        slot, parent = pair
        slot.hold(0, "h", "r")
        slot.deal(0, [7])

        class Dead(Exception):
            pass

        class Numbers(list[int]):
            def __iter__(self) -> Iterator[int]:
                raise Dead

        with pytest.raises(Dead):
            slot.deal(0, Numbers([8, 9]))

        assert parent.read(0) is None, "it may be about to change"
        held = parent.read(0, is_dead=True)
        assert held is not None
        assert (held.holder, held.running) == ("h", None)


class TestSlots:
    """What is done to one slot is done to no other: here to that in the middle."""

    @pytest.fixture
    def trio(
        self, tables: Callable[[int], tuple[SlotTable, SlotTable]]
    ) -> tuple[SlotTable, SlotTable]:
        slot, parent = tables(3)
        for index in range(3):
            slot.hold(index, f"h{index}", f"r{index}")
            slot.describe(index, f"f{index}", timeout_ms=100 + index, is_async=index == 1)
            slot.deal(index, [10 * index + n for n in range(1, 5)])
            slot.expect(index, 3 + index, 250 + index)
            assert slot.start(index, 0, 1_000 + index)
        return slot, parent

    def test_each_has_its_own_words(self, trio: tuple[SlotTable, SlotTable]) -> None:
        slot, parent = trio
        for index in range(3):
            slot.set_progress(index, 40 + index)
            for _ in range(index):
                slot.answered(index)

        found = [seen(parent, index) for index in range(3)]

        assert [held.version for held in found] == [4, 4, 4]
        assert [held.holder for held in found] == ["h0", "h1", "h2"]
        assert [held.request_id for held in found] == ["r0", "r1", "r2"]
        assert [held.handler for held in found] == ["f0", "f1", "f2"]
        assert [held.timeout_ms for held in found] == [100, 101, 102]
        assert [held.is_async for held in found] == [False, True, False]
        assert [held.attempt for held in found] == [3, 4, 5]
        assert [held.retry_ms for held in found] == [250, 251, 252]
        assert [held.since_ms for held in found] == [1_000, 1_001, 1_002]
        assert [held.progress for held in found] == [40, 41, 42]
        assert [held.calls for held in found] == [0, 1, 2]
        assert [held.asked_to_stop for held in found] == [0, 0, 0]
        assert [held.current for held in found] == [0, 0, 0]
        assert [held.running for held in found] == [1, 11, 21]
        assert [slot.next_call(index) for index in range(3)] == [1_000, 2_000, 3_000]

    def test_part_that_ends_ends_in_its_own(self, trio: tuple[SlotTable, SlotTable]) -> None:
        slot, parent = trio

        slot.end(1, 0)

        assert [seen(parent, index).running for index in range(3)] == [1, None, 21]
        assert slot.start(1, 1, 0)
        assert [seen(parent, index).running for index in range(3)] == [1, 12, 21]

    def test_lease_that_is_not_wanted_is_told_in_its_own(
        self, trio: tuple[SlotTable, SlotTable]
    ) -> None:
        slot, parent = trio

        parent.ask_to_stop(1, seen(parent, 1))

        assert [slot.is_asked_to_stop(index) for index in range(3)] == [False, True, False]
        assert [seen(parent, index).asked_to_stop for index in range(3)] == [0, 1, 0]
        assert [slot.start(index, 1, 0) for index in range(3)] == [True, False, True]

    def test_what_is_struck_is_of_its_own(self, trio: tuple[SlotTable, SlotTable]) -> None:
        slot, parent = trio

        assert parent.strike(1, seen(parent, 1)) == (12, 13, 14)

        assert [slot.start(index, 1, 0) for index in range(3)] == [True, False, True]

    def test_strike_begins_behind_what_was_started_meanwhile(
        self, trio: tuple[SlotTable, SlotTable]
    ) -> None:
        slot, parent = trio
        held = seen(parent, 1)
        assert slot.start(1, 1, 0)
        assert slot.start(1, 2, 0)

        assert parent.strike(1, held) == (14,)
        assert not slot.start(1, 3, 0)

    def test_strike_leaves_another_batch_of_its_own_slot_alone(
        self, trio: tuple[SlotTable, SlotTable]
    ) -> None:
        slot, parent = trio
        held = seen(parent, 1)
        slot.deal(1, [15, 16])
        parent.ask_to_stop(1, held)

        assert parent.strike(1, held) == ()
        assert not slot.is_asked_to_stop(1)

    def test_new_batch_begins_as_if_nothing_had_been(
        self, trio: tuple[SlotTable, SlotTable]
    ) -> None:
        slot, parent = trio
        slot.end(1, 0)
        parent.strike(1, seen(parent, 1))

        slot.deal(1, [15, 16])

        held = seen(parent, 1)
        assert (held.current, held.running, held.numbers) == (-1, None, (15, 16))
        assert [slot.start(1, index, 0) for index in range(2)] == [True, True]

    def test_lease_that_is_over_leaves_the_others(self, trio: tuple[SlotTable, SlotTable]) -> None:
        slot, parent = trio

        slot.drop(1)

        assert parent.read(1) is None
        assert [seen(parent, index).holder for index in (0, 2)] == ["h0", "h2"]
        slot.hold(1, "again", "r1")
        held = seen(parent, 1)
        assert (held.calls, held.current, held.numbers) == (0, -1, ())
        assert (held.progress, held.asked_to_stop, held.running) == (0, 0, None)

    def test_what_a_process_was_just_writing_is_not_read(
        self, trio: tuple[SlotTable, SlotTable]
    ) -> None:
        slot, parent = trio

        class Numbers(list[int]):
            def __iter__(self) -> Iterator[int]:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            slot.deal(1, Numbers([1]))

        found = [parent.read(index) for index in range(3)]
        assert [held and held.holder for held in found] == ["h0", None, "h2"]
        dead = parent.read(1, is_dead=True)
        assert dead is not None
        assert (dead.holder, dead.request_id) == ("h1", "r1")


def test_attempts_beyond_what_fits_are_told_as_the_most(pair: tuple[SlotTable, SlotTable]) -> None:
    slot, parent = pair
    slot.hold(0, "h", "r")

    slot.expect(0, 2**16 + 5, 250)

    assert (seen(parent).attempt, seen(parent).retry_ms) == (2**16 - 1, 250)


def test_table_works_where_there_is_no_memory_without_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    slot, fd = SlotTable.create(2)
    parent = SlotTable(fd, 2)
    os.close(fd)

    slot.hold(1, "h", "r")

    assert seen(parent, 1).holder == "h"
    for table in (slot, parent):
        table.close()


def test_closed_table_has_no_memory_any_more() -> None:
    table, fd = SlotTable.create(1)
    os.close(fd)

    table.close()

    assert table._memory.closed


@pytest.mark.parametrize("place", ["r", "r/2", "r/11", *(f"r/{word}" for word in EPILOGUES)])
def test_place_of_a_lease_is_read_as_it_was_written(
    pair: tuple[SlotTable, SlotTable], place: str
) -> None:
    slot, parent = pair

    slot.hold(0, "h", place)

    assert seen(parent).request_id == place


def test_time_limit_is_for_the_record_that_runs_or_for_the_part(
    pair: tuple[SlotTable, SlotTable],
) -> None:
    slot, parent = pair
    slot.hold(0, "h", "r")
    slot.deal(0, [1])
    assert slot.start(0, 0, 1_000)
    assert seen(parent).limited_ms(1_500) == 500

    slot.start_record(0, 7, 1_200)
    assert (seen(parent).limited_ms(1_500), seen(parent).record) == (300, 8)

    slot.rest(0)
    assert (seen(parent).limited_ms(1_500), seen(parent).record) == (0, 0)
