"""What slots did lately: rings in shared memory, and the reader in the parent."""

import pytest

from streamq.model import Part
from streamq.queue.outcomes import PartNotDone
from streamq.queue.told import ToldSpan, slot_of_told_span
from streamq.worker import counters
from streamq.worker.slot_book import SlotBook
from streamq.worker.slot_table import SlotTable
from streamq.worker.spans import MOST_SPANS, SpanReader

HOLDER = "pool.abcdef-1-77"


def span(number: int) -> ToldSpan:
    return ToldSpan("abc/1", number, number + 1, "night/2", number, 0, 1)


@pytest.fixture
def table() -> SlotTable:
    return SlotTable.create(2)[0]


def test_spans_are_read_once_and_in_order(table: SlotTable) -> None:
    reader = SpanReader()
    for number in range(3):
        table.spans.add(1, span(number))
    assert reader.read([(7, table.spans, 2)], 9) == ([span(0), span(1), span(2)], 0)
    table.spans.add(1, span(3))
    assert reader.read([(7, table.spans, 2)], 9) == ([span(3)], 0)
    assert reader.read([(7, table.spans, 2)], 9) == ([], 0)


def test_ring_keeps_the_latest_and_of_many_the_oldest_are_left_out(table: SlotTable) -> None:
    for number in range(MOST_SPANS + 5):
        table.spans.add(0, span(number))
    written, found = table.spans.after(0, 0)
    assert written == MOST_SPANS + 5
    # One of the ring may be written over at this moment, so it is not told.
    assert found == [span(number) for number in range(6, MOST_SPANS + 5)]
    told, left_out = SpanReader().read([(7, table.spans, 2)], 4)
    assert told == [span(number) for number in range(MOST_SPANS + 1, MOST_SPANS + 5)]
    assert left_out == len(found) - 4


def test_rings_of_two_slots_do_not_touch(table: SlotTable) -> None:
    for number in range(MOST_SPANS * 2):
        table.spans.add(0, span(number))
    table.spans.add(1, span(1))
    assert table.spans.after(1, 0) == (1, [span(1)])
    assert table.counters.rows(1) == [(0,) * len(table.counters.rows(1)[0])]


def test_book_writes_a_span_of_a_lease_that_ran_something(table: SlotTable) -> None:
    book = SlotBook(table, 1, {"h": 0})
    book.hold(HOLDER, "night/2")
    book.drop()  # a claim that was refused
    assert table.spans.after(1, 0) == (0, [])

    book.hold(HOLDER, "night/2")
    book.count_finished("h", 3, 3)
    book.count_finished("h", 2, 2)
    book.drop()
    book.drop()
    (found,) = table.spans.after(1, 0)[1]
    assert (found.slot, found.request, found.done, found.failed) == ("abc/1", "night/2", 5, 0)
    assert 0 < found.from_ms <= found.to_ms


def test_book_tells_parts_that_are_retried_from_those_that_failed(table: SlotTable) -> None:
    book, part = SlotBook(table, 1, {"h": 0}), Part(1, b"", b"5")
    book.hold(HOLDER, "night/2")
    book.count_failed("h", part, PartNotDone("retry", 0, [], (0, -1)), "retry")
    book.count_failed("h", part, PartNotDone("snooze", 0, [], (0, -1), is_stopped=True), "retry")
    book.count_failed("h", part, PartNotDone("abandon", 0, [], (5, 0)), "failed")
    book.count_failed("h", part, PartNotDone("abandon", 0, [], (4, 1)), "ended")
    book.drop()

    (found,) = table.spans.after(1, 0)[1]
    assert (found.done, found.failed, found.retried) == (0, 2, 1)
    row = table.counters.rows(1)[0]
    assert [row[at] for at in (counters.RETRIED, counters.FAILED)] == [1, 2]
    assert [row[at] for at in (counters.RECORDS_DONE, counters.RECORDS_FAILED)] == [9, 1]


def test_slot_of_a_holder() -> None:
    assert slot_of_told_span("pool.abcdef-12-5") == ("pool", "abc/12")
    assert slot_of_told_span("odd") == ("", "/")
