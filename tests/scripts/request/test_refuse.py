"""refuse.lua: (absent) -> failed, without a worker."""

import msgspec
import pytest

from streamq import Request
from streamq.errors import LoadGap, RequestEnded
from streamq.model import Failure, State
from streamq.protocol.replies import Terms
from tests.support.by_hand import RequestByHand

BAD = Failure(error="BadInput", message="cut off", source="x.gz")


def refuse(driver: RequestByHand, number: int, cursor: str, after: str | None = None) -> bool:
    at = driver.meta("cursor") if after is None else after
    is_counted, _ = driver.protocol.refuse(driver.id, number, at, cursor, [BAD])
    return is_counted


def run_all(driver: RequestByHand) -> list[int]:
    """Run what can be run, and return the numbers."""
    ran: list[int] = []
    while True:
        holder, grant = driver.claim(10)
        if not grant.parts:
            return ran
        numbers = [part.number for part in grant.parts]
        results = [value for n in numbers for value in (n, b"r")]
        driver.protocol.finish(driver.id, holder, 1, results, len(numbers), Terms(0))
        ran += numbers


def test_is_a_failed_part_that_no_worker_is_handed(driver: RequestByHand) -> None:
    driver.open()
    driver.append(2)

    assert refuse(driver, 3, "c3")
    driver.append(2, first=4)
    driver.protocol.seal(driver.id, 5, "c5")

    assert run_all(driver) == [1, 2, 4, 5]
    status = Request(driver.protocol, driver.id).status()
    assert status.state is State.DONE
    assert (status.parts.done, status.parts.failed, status.parts.waiting) == (4, 1, 0)
    assert (status.records.total, status.records.failed) == (5, 1)
    (failure,) = Request(driver.protocol, driver.id).errors()
    assert failure == msgspec.structs.replace(BAD, part=3)


def test_retry_leaves_it_alone(driver: RequestByHand) -> None:
    driver.open()
    driver.append(1)
    refuse(driver, 2, "c2")
    driver.protocol.seal(driver.id, 2, "c2")
    assert run_all(driver) == [1]

    assert Request(driver.protocol, driver.id).retry() == 0

    assert driver.meta("state") == "done"
    assert run_all(driver) == []


def test_again_changes_nothing(driver: RequestByHand) -> None:
    driver.open()
    driver.append(1)
    refuse(driver, 2, "c2")

    assert refuse(driver, 2, "c2", after="c1")

    assert (driver.meta("total"), driver.meta("failed"), driver.left()) == ("2", "1", 2)


def test_needs_the_place_and_a_load(driver: RequestByHand) -> None:
    driver.open()
    driver.append(1)

    with pytest.raises(LoadGap):
        refuse(driver, 3, "c3")
    with pytest.raises(LoadGap):
        refuse(driver, 2, "c2", after="elsewhere")
    driver.protocol.seal(driver.id, 1, "c1")
    with pytest.raises(RequestEnded):
        refuse(driver, 2, "c2")


def test_parts_before_it_stay_in_order_beside_those_that_run(driver: RequestByHand) -> None:
    driver.open()
    driver.append(5)
    holder, grant = driver.claim(2)

    refuse(driver, 6, "c6")

    assert [part.number for part in grant.parts] == [1, 2]
    second, rest = driver.claim(10)
    assert [part.number for part in rest.parts] == [3, 4, 5]
    assert [part.attempt for part in rest.parts] == [1, 1, 1]
    assert holder != second


def test_many_waiting_parts_are_passed_by_several_calls(driver: RequestByHand) -> None:
    driver.open()
    for first in range(1, 2_201, 440):
        driver.append(440, first=first)

    calls = 1
    while not refuse(driver, 2_201, "end"):
        calls += 1

    assert calls == 3
    assert run_all(driver) == [*range(1, 2_201)]


def test_counts_for_the_failures_that_are_tolerated(driver: RequestByHand) -> None:
    driver.open(max_failures=0)
    driver.append(1)

    refuse(driver, 2, "c2")

    assert driver.meta("state") == "failed"


class TestBehindACanary:
    def test_what_waits_behind_it_does_not_start(self, driver: RequestByHand) -> None:
        driver.open(canary=2)
        driver.append(5)

        refuse(driver, 6, "c6")
        driver.append(2, first=7)
        driver.protocol.seal(driver.id, 8, "c8")

        assert run_all(driver) == [1, 2]

    def test_a_canary_may_be_of_one_part(self, driver: RequestByHand) -> None:
        driver.open(canary=1)
        driver.append(3)
        driver.protocol.seal(driver.id, 3, "c3")

        assert driver.protocol.audit(driver.id).tokens.count <= 1
        assert run_all(driver) == [1]

    def test_no_token_is_pushed_for_it_before_its_release(self, driver: RequestByHand) -> None:
        driver.open(canary=2)
        driver.append(5)
        refuse(driver, 6, "c6")
        assert run_all(driver) == [1, 2]

        assert driver.protocol.audit(driver.id).tokens.count == 0
        _, tokens = driver.protocol.set(driver.id, ceiling=0)

        assert tokens.count == 3
        assert run_all(driver) == [3, 4, 5]

    def test_what_was_put_off_is_tried_again(self, driver: RequestByHand) -> None:
        driver.open(canary=2)
        driver.append(5)
        refuse(driver, 6, "c6")
        holder, _ = driver.claim(1)
        driver.fail(holder, 1, delay_ms=0)
        driver.release(holder)

        assert run_all(driver) == [1, 2]

    def test_part_that_was_tried_later_than_the_canary_is_tried_again(
        self, driver: RequestByHand
    ) -> None:
        driver.open()
        driver.append(5)
        holder, _ = driver.claim(5)
        driver.fail(holder, 4, delay_ms=1)
        driver.protocol.set(driver.id, ceiling=2)
        driver.release(holder)

        assert sorted(run_all(driver)) == [1, 2, 4]


def test_parts_that_come_from_the_front_are_no_more_than_a_claim_takes(
    driver: RequestByHand,
) -> None:
    driver.open()
    driver.append(100, size=100_000)
    refuse(driver, 101, "c101")

    holder, grant = driver.claim(100, max_bytes=1_000_000)

    assert len(grant.parts) == 10
    driver.finish(holder, [part.number for part in grant.parts])
    assert len(run_all(driver)) == 90
