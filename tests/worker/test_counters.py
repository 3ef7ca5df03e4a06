"""What slots have done, counted in memory that outlives their process."""

import os
from collections.abc import Iterator

import pytest

from streamq.telemetry.metrics import BOUNDS_S, CLASSES
from streamq.worker import counters
from streamq.worker.counters import MOST_HANDLERS, NOTHING, RAN, WAITED, WORDS, SlotCounters
from streamq.worker.slot_table import SlotTable

SLOTS = 3


@pytest.fixture
def tally() -> Iterator[SlotCounters]:
    with memoryview(bytearray(SLOTS * WORDS * 8)) as memory, memory.cast("q") as words:
        yield SlotCounters(words, SLOTS)


def test_nothing_was_done_at_first(tally: SlotCounters) -> None:
    assert tally.rows(2) == [NOTHING, NOTHING]


def test_slots_of_one_handler_are_added_up(tally: SlotCounters) -> None:
    for slot in range(SLOTS):
        tally.count(slot, 1, counters.DONE, 10)
        tally.count(slot, 1, counters.FAILED)

    first, second = tally.rows(2)

    assert first == NOTHING
    assert (second[counters.DONE], second[counters.FAILED]) == (30, 3)
    assert counters.parts_counted(second) == 33


def test_records_that_failed_before_their_time_was_counted_measure_nothing(
    tally: SlotCounters,
) -> None:
    tally.count(0, 0, counters.RECORDS_FAILED, 2)
    before = counters.measured_records(tally.rows(1)[0], is_coroutine=False, is_map=True)
    tally.observe(0, 0, RAN, [0.5])
    after = counters.measured_records(tally.rows(1)[0], is_coroutine=False, is_map=True)

    assert (before.records, after.records, after.seconds) == (0, 2, 0.5)


def test_each_count_has_a_place_of_its_own(tally: SlotCounters) -> None:
    kinds = (
        counters.DONE,
        counters.FAILED,
        counters.RETRIED,
        counters.RECORDS_DONE,
        counters.RECORDS_FAILED,
    )
    for kind in kinds:
        tally.count(SLOTS - 1, 0, kind, kind + 1)
    tally.observe(SLOTS - 1, 0, RAN, [1.0])
    tally.observe(SLOTS - 1, 0, WAITED, [2.0])

    (row,) = tally.rows(1)

    assert [row[kind] for kind in kinds] == [1, 2, 3, 4, 5]
    assert [sum(counters.times_counted(row, what)[0]) for what in (RAN, WAITED)] == [1, 1]
    assert [counters.times_counted(row, what)[1] for what in (RAN, WAITED)] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("seconds", "place"),
    [(0.0, 0), *((bound, at) for at, bound in enumerate(BOUNDS_S)), (1e9, CLASSES - 1)],
)
def test_time_is_in_the_class_that_it_does_not_exceed(
    tally: SlotCounters, seconds: float, place: int
) -> None:
    tally.observe(0, 0, RAN, [seconds])

    classes, _ = counters.times_counted(tally.rows(1)[0], RAN)
    assert [at for at, number in enumerate(classes) if number] == [place]


def test_short_times_that_are_sorted_together_are_all_counted(tally: SlotCounters) -> None:
    tally.observe(0, 0, RAN, [BOUNDS_S[0] / 2] * 500)
    tally.observe(0, 0, WAITED, (BOUNDS_S[1],), 40)

    (row,) = tally.rows(1)
    assert counters.times_counted(row, RAN)[0][0] == 500
    assert counters.times_counted(row, WAITED)[0][1] == 40
    assert counters.times_counted(row, WAITED)[1] == pytest.approx(BOUNDS_S[1] * 40, abs=1e-3)


def test_sum_that_does_not_fit_stays_at_the_largest_number(tally: SlotCounters) -> None:
    for _ in range(2):
        tally.observe(0, 0, RAN, [9e12])

    assert tally.rows(1)[0][RAN.at] == 2**63 - 1
    assert sum(counters.times_counted(tally.rows(1)[0], RAN)[0]) == 2


def test_handlers_beyond_the_last_row_are_counted_together(tally: SlotCounters) -> None:
    for handler in range(MOST_HANDLERS + 10):
        tally.count(1, handler, counters.DONE)

    rows = tally.rows(MOST_HANDLERS + 10)

    assert len(rows) == MOST_HANDLERS
    assert [row[counters.DONE] for row in rows] == [1] * (MOST_HANDLERS - 1) + [11]


def test_last_row_of_the_last_slot_ends_where_the_memory_does(tally: SlotCounters) -> None:
    tally.observe(SLOTS - 1, MOST_HANDLERS - 1, WAITED, [1e9])

    assert counters.times_counted(tally.rows(MOST_HANDLERS)[-1], WAITED)[0][-1] == 1


def test_counts_of_a_process_that_is_gone_stay() -> None:
    table, fd = SlotTable.create(2)
    pid = os.fork()
    if pid == 0:
        SlotTable(fd, 2).counters.count(1, 0, counters.DONE, 5)
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(fd)

    assert table.counters.rows(1)[0][counters.DONE] == 5
    table.close()


def test_metrics_have_what_rows_and_others_tell() -> None:
    row = tuple(range(len(NOTHING)))

    samples = counters.samples_of_work_done({"f": row}, {("f", "crashed"): 2, ("g", "failed"): 1})

    told = {(at["handler"], at["state"]): n for at, n in samples["streamq_parts_total"]}
    assert told == {
        ("f", "done"): 0,
        ("f", "failed"): 1,
        ("f", "retried"): 2,
        ("f", "crashed"): 2,
        ("g", "failed"): 1,
    }
    assert set(samples) == {
        "streamq_parts_total",
        "streamq_records_total",
        "streamq_part_duration_seconds",
        "streamq_part_wait_seconds",
    }
