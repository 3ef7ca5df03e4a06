"""A reader of results: how much it takes at once, in what order, and where it ends."""

from typing import Any

import pytest

from streamq.protocol.replies import part_of_field
from streamq.queue.results import ResultReader
from tests.conftest import ONE_KIND
from tests.support.by_hand import RequestByHand

pytestmark = ONE_KIND


def end(driver: RequestByHand, parts: int) -> None:
    """A request of so many parts that is done."""
    driver.load(parts)
    holder, _ = driver.claim(parts)
    driver.finish(holder, range(1, parts + 1))


def batches(reader: ResultReader) -> list[list[str]]:
    """The fields of each read that gave some, to the end."""
    found: list[list[str]] = []
    for _ in range(100):
        batch = reader.read()
        if batch:
            found.append([field for field, _ in batch])
        elif batch is None:
            break
    assert reader.is_over
    return found


def test_so_many_are_read_at_once(driver: RequestByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamq.queue.results.BATCH", 3)
    end(driver, 7)
    reader = ResultReader(driver.protocol, driver.id)

    assert batches(reader) == [["1", "2", "3"], ["4", "5", "6"], ["7"]]
    assert reader.next == 8


def test_so_many_bytes_are_read_at_once(
    driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamq.queue.results.BATCH_BYTES", 4)
    end(driver, 5)

    assert batches(ResultReader(driver.protocol, driver.id)) == [["1", "2"], ["3", "4"], ["5"]]


def test_what_failed_parts_yielded_comes_run_after_run(driver: RequestByHand) -> None:
    end(driver, 3)
    late = {"3.1": b"c", "1.2": b"d", "2.1": b"b", "10.1": b"e", "garbage": b"x"}
    driver.redis.hset(driver.keys.results, mapping=late)

    found = batches(ResultReader(driver.protocol, driver.id))

    assert found == [["1", "2", "3"], ["2.1", "3.1", "10.1", "1.2"]]
    assert [part_of_field(field) for field in found[1]] == [2, 3, 10, 1]


@pytest.mark.parametrize(("limit", "value"), [("BATCH", 2), ("BATCH_BYTES", 4)])
def test_of_those_as_many_are_read_at_once(
    driver: RequestByHand, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    end(driver, 1)
    late = {f"{number}.1": b"yy" for number in range(1, 6)}
    driver.redis.hset(driver.keys.results, mapping=late)
    monkeypatch.setattr(f"streamq.queue.results.{limit}", value)
    reader = ResultReader(driver.protocol, driver.id)

    assert batches(reader) == [["1"], ["1.1", "2.1"], ["3.1", "4.1"], ["5.1"]]


def test_of_those_one_that_is_gone_meanwhile_is_passed_over(
    driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(driver, 1)
    driver.redis.hset(driver.keys.results, mapping={"1.1": b"a", "2.1": b"b"})
    monkeypatch.setattr("streamq.queue.results.BATCH", 1)
    reader = ResultReader(driver.protocol, driver.id)
    while reader._late is None:
        reader.read()
    driver.redis.hdel(driver.keys.results, "2.1")

    assert reader.read() == [("1.1", b"a")]
    assert not reader.is_over
    assert reader.read() is None
    assert reader.is_over


def test_who_begins_later_is_given_what_is_left_of_before(driver: RequestByHand) -> None:
    end(driver, 5)

    found = batches(ResultReader(driver.protocol, driver.id, first=4))

    assert found == [["4", "5"], ["1", "2", "3"]]


def test_who_begins_at_the_first_part_reads_nothing_twice(
    driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(driver, 2)
    calls: list[dict[str, Any]] = []
    collect = driver.protocol.collect

    def note(*words: Any, **options: Any) -> Any:
        calls.append(options)
        return collect(*words, **options)

    monkeypatch.setattr(driver.protocol, "collect", note)
    batches(ResultReader(driver.protocol, driver.id))

    assert [call["next_number"] for call in calls] == [1, 1, 3], "settled, read, and over"


def test_live_request_is_read_as_far_as_it_is_and_goes_on(driver: RequestByHand) -> None:
    driver.load(4)
    holder, _ = driver.claim(3)
    reader = ResultReader(driver.protocol, driver.id)
    assert (reader.read(), reader.is_over) == (None, False)
    driver.finish(holder, [1, 3], 1)

    assert reader.read() == [("1", b"r1")]
    assert (reader.read(), reader.next, reader.is_over) == (None, 2, False)
    driver.finish(holder, [2, 4])

    assert batches(reader) == [["2", "3", "4"]]


@pytest.mark.parametrize("is_patient", [True, False])
def test_parts_that_run_when_a_request_has_failed_are_waited_for_by_a_patient_reader(
    driver: RequestByHand, is_patient: bool
) -> None:
    driver.load(3, max_failures=0, limit=3)
    first, second = driver.claim()[0], driver.claim()[0]
    driver.fail(first, 1, kind="abandon")
    driver.release(first)
    assert driver.meta("state") == "failed"
    reader = ResultReader(driver.protocol, driver.id, is_patient=is_patient)

    if not is_patient:
        assert batches(reader) == []
        return
    assert (reader.read(), reader.is_over) == (None, False)
    driver.finish(second, [2])
    assert batches(reader) == [["2"]]


def test_who_forgets_what_it_was_given_ends_when_nothing_is_left(driver: RequestByHand) -> None:
    end(driver, 3)
    reader = ResultReader(driver.protocol, driver.id, is_forgetting=True)
    assert reader.read() == []
    assert reader.read() == [("1", b"r1"), ("2", b"r2"), ("3", b"r3")]
    driver.redis.hdel(driver.keys.results, "1", "2", "3")

    assert reader.read() is None
    assert reader.is_over


def give_up_the_first(driver: RequestByHand, parts: int) -> None:
    """A request that has failed with its first part; the others have not run."""
    driver.load(parts, max_failures=0)
    driver.give_up(1)
    assert driver.meta("state") == "failed"


def test_request_that_lives_again_is_not_over(driver: RequestByHand) -> None:
    give_up_the_first(driver, 1)
    reader = ResultReader(driver.protocol, driver.id)
    assert reader.read() == [], "nobody runs anything"
    driver.redrive(1)

    assert (reader.read(), reader.is_over) == (None, False)
    holder, _ = driver.claim()
    driver.finish(holder, [1])

    assert batches(reader) == [["1.1"]]


def test_parts_that_have_not_run_are_looked_for_once_more_and_no_oftener(
    driver: RequestByHand,
) -> None:
    give_up_the_first(driver, 4)
    driver.redis.hset(driver.keys.results, mapping={"1.1": b"late"})

    assert batches(ResultReader(driver.protocol, driver.id)) == [["1.1"]]


def test_who_reads_on_waits_for_a_grace_where_only_the_dead_have_leases(
    driver: RequestByHand,
) -> None:
    driver.load(2, max_failures=0, limit=2)
    dead, _ = driver.claim()
    driver.give_up(2)
    driver.expire(dead)
    reader = ResultReader(driver.protocol, driver.id)

    assert (reader.read(), reader.is_over) == (None, False)
    reader.is_following = False

    assert reader.read() == [], "who looks once believes what it sees"
