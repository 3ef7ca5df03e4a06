"""A reader of results: how little it remembers of the parts that it has passed."""

import tracemalloc

import pytest

from streamq import Client, Protocol, State
from streamq.model import Part
from streamq.queue.results import ResultMarks, ResultReader
from tests.support.simulated import Worker


def ranges(marks: ResultMarks) -> list[tuple[int, int]]:
    """All ranges of marked numbers."""
    found: list[tuple[int, int]] = []
    while each := marks.next_range(found[-1][1] if found else 1):
        found.append(each)
    return found


@pytest.mark.parametrize(
    ("added", "wanted"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(1, 2)], [(1, 2)]),
        ([(1, 4), (4, 9)], [(1, 9)]),
        ([(4, 9), (1, 4)], [(1, 9)]),
        ([(1, 4), (5, 9)], [(1, 4), (5, 9)]),
        ([(2, 7), (3, 5)], [(2, 7)]),
        ([(2, 4), (8, 9), (4, 6)], [(2, 6), (8, 9)]),
    ],
)
def test_ranges_that_touch_are_one(
    added: list[tuple[int, int]], wanted: list[tuple[int, int]]
) -> None:
    marks = ResultMarks()
    for first, end in added:
        marks.add(first, end)

    assert ranges(marks) == wanted
    assert bool(marks) == bool(wanted)


def test_memory_is_a_byte_for_each_part_however_many_gaps_there_are() -> None:
    tracemalloc.start()
    try:
        marks = ResultMarks()
        for number in range(1, 1_000_000, 2):
            marks.add(number, number + 1)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert taken < 2_000_000
    assert marks.next_range(999_990) == (999_991, 999_992)


@pytest.mark.parametrize("is_forgetting", [False, True])
def test_every_second_part_given_up_and_the_rest_run_later_come_once(
    client: Client,
    protocol: Protocol,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    is_forgetting: bool,
) -> None:
    monkeypatch.setattr("streamq.queue.results.BATCH", 7)
    payloads = [b"%d" % number for number in range(1, 61)]
    request = client.submit(payloads, handler="h", queue=queue, max_failures=14, limit=1)

    def even_fails(part: Part) -> bytes:
        if part.number % 2 == 0:
            raise ValueError("even")
        return part.payload

    Worker(protocol, queue, even_fails, most=1).drain()
    assert request.status().state is State.FAILED
    reader = ResultReader(protocol, request.id, is_forgetting=is_forgetting)
    fields: list[str] = []

    def read() -> None:
        found = [field for field, _ in reader.read() or []]
        fields.extend(found)
        if is_forgetting and found:
            protocol.connection.redis.hdel(protocol.keys(request.id).results, *found)

    while reader.next < 50:
        read()
    request.retry()
    Worker(protocol, queue, lambda part: part.payload, most=1).drain()
    while not reader.is_over:
        read()

    again = {f"{number}.1" for number in range(2, 31, 2)}
    assert sorted(fields) == sorted(
        again | {str(number) for number in range(1, 61)} - {str(n) for n in range(2, 31, 2)}
    )
