"""keep.lua: running -> running; outcomes of records outlive the process that has them."""

import pytest

from streamq.errors import RequestUnknown
from streamq.model import Part
from tests.support.by_hand import RequestByHand


@pytest.fixture
def holder(driver: RequestByHand) -> str:
    """Holds parts 1 and 2 of three."""
    driver.load(3)
    holder, _ = driver.claim(2)
    return holder


def next_of(driver: RequestByHand) -> Part:
    _, grant = driver.claim()
    return grant.parts[0]


class TestKeep:
    def test_next_attempt_is_told_of_outcomes_and_of_the_records_that_ran(
        self, driver: RequestByHand, holder: str
    ) -> None:
        assert driver.keep(holder, 1, b"outcomes", b"begun 0 0 1 2 0") == "ok"
        assert driver.held(holder) == [1, 2]

        driver.release(holder, crashed=1)

        part = next_of(driver)
        assert (part.number, part.partial, part.mark) == (1, b"outcomes", b"begun 0 0 1 2 0")
        assert (part.crashes, part.poison, part.run) == (1, 3, 0)

    def test_no_outcomes_leave_those_that_are_there_and_no_mark_removes_it(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.keep(holder, 1, b"outcomes", b"mark")
        driver.keep(holder, 1)
        driver.release(holder)

        part = next_of(driver)
        assert (part.partial, part.mark) == (b"outcomes", b"")

    def test_repeat_after_a_lost_reply_is_acknowledged(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.keep(holder, 1, b"outcomes", b"mark", call=5)

        assert driver.keep(holder, 1, b"outcomes", b"mark", call=5) == "ok"
        assert driver.keep(holder, 3, b"of another", call=5) == "late"
        assert driver.redis.hgetall(driver.keys.partial) == {b"1": b"outcomes", b"1@": b"mark"}

    def test_call_that_comes_late_changes_nothing(self, driver: RequestByHand, holder: str) -> None:
        driver.keep(holder, 1, b"new", call=5)

        assert driver.keep(holder, 1, b"old", call=4) == "late"
        assert driver.keep(holder, 3, b"of another", call=6) == "late"
        driver.finish(holder, [1], call=7)
        assert driver.keep(holder, 1, b"old", call=6) != "ok"
        assert driver.partial() == {}

    def test_result_removes_outcomes_and_mark(self, driver: RequestByHand, holder: str) -> None:
        driver.keep(holder, 1, b"outcomes", b"mark")

        driver.finish(holder, [1])

        assert driver.redis.hgetall(driver.keys.partial) == {}

    def test_failure_of_the_part_removes_the_mark(self, driver: RequestByHand, holder: str) -> None:
        driver.keep(holder, 1, b"outcomes", b"mark")

        driver.fail(holder, 1)

        assert driver.redis.hgetall(driver.keys.partial) == {b"1": b"outcomes"}


class TestWithoutALease:
    def test_outcomes_count_while_nobody_has_taken_the_part(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.release(holder)

        assert driver.keep(holder, 1, b"outcomes", b"mark") == "lost"
        assert driver.redis.hgetall(driver.keys.partial) == {b"1": b"outcomes"}

    def test_outcomes_are_dropped_when_another_has_the_part(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.release(holder)
        driver.claim()

        assert driver.keep(holder, 1, b"outcomes") == "lost"
        assert driver.partial() == {}

    def test_outcomes_of_a_former_request_of_that_id_are_dropped(
        self, driver: RequestByHand, holder: str
    ) -> None:
        driver.release(holder)

        assert driver.keep(holder, 1, b"outcomes", created_ms=12) == "lost"
        assert driver.partial() == {}

    def test_ended_and_unknown_requests(self, driver: RequestByHand, holder: str) -> None:
        driver.protocol.cancel(driver.id)
        assert driver.keep(holder, 1, b"outcomes") == "cancelled"
        assert driver.partial() == {}

        driver.protocol.purge(driver.id, force=True)
        with pytest.raises(RequestUnknown):
            driver.keep(holder, 1, b"outcomes")

    def test_outcomes_are_dropped_where_another_run_has_yielded_some_of_them(
        self, driver: RequestByHand
    ) -> None:
        driver.open()
        driver.append(1, records=10)
        driver.protocol.seal(driver.id, 1, "c1")
        frozen, _ = driver.claim()
        driver.release(frozen)
        other, _ = driver.claim()
        driver.fail(other, 1, kind="abandon", records=(7, 3), result=b"good", partial=b"delivered")
        driver.redrive(1)

        assert driver.keep(frozen, 1, b"outcomes") == "lost"
        assert driver.finish(frozen, [1]).counted == 0
        assert driver.partial() == {1: b"delivered"}
        assert driver.results() == {"1": b"good"}
