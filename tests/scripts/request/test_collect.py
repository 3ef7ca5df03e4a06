"""collect.lua: results in input order; what is committed is forgotten."""

import pytest

from streamq import Protocol
from streamq.errors import CollectorLost, RequestUnknown
from streamq.model import State
from tests.support.by_hand import RequestByHand
from tests.support.flow_by_hand import FlowByHand


@pytest.fixture
def running(driver: RequestByHand) -> RequestByHand:
    """Of six parts 1, 2 and 4 are finished; 3, 5 and 6 run."""
    driver.load(6)
    holder, _ = driver.claim(6)
    driver.finish(holder, [1, 2, 4], 0, call=0)
    return driver


class TestOrder:
    def test_results_come_in_input_order_up_to_the_first_that_is_missing(
        self, running: RequestByHand
    ) -> None:
        collected = running.protocol.collect(running.id, next_number=1)

        assert collected.state == State.OPEN
        assert collected.results == [(1, b"r1"), (2, b"r2")]
        assert (collected.next, collected.left) == (3, 3)

    def test_goes_on_where_it_is_told_to(self, running: RequestByHand) -> None:
        collected = running.protocol.collect(running.id, next_number=2)

        assert collected.results == [(2, b"r2")]

    def test_waits_at_a_missing_part(self, running: RequestByHand) -> None:
        collected = running.protocol.collect(running.id, next_number=3)

        assert (collected.results, collected.next) == ([], 3)

    def test_part_that_was_given_up_is_passed_over(self, driver: RequestByHand) -> None:
        driver.load(3)
        driver.give_up(1)
        holder, _ = driver.claim()
        driver.finish(holder, [2])

        collected = driver.protocol.collect(driver.id, next_number=1)

        assert (collected.results, collected.next) == ([(2, b"r2")], 3)

    def test_part_that_was_given_up_may_have_yielded_something(self, driver: RequestByHand) -> None:
        driver.load(2)
        holder, _ = driver.claim()
        driver.fail(holder, 1, kind="abandon", records=(1, 1), result=b"good")

        collected = driver.protocol.collect(driver.id, next_number=1)

        assert collected.results == [(1, b"good")]

    def test_part_that_was_redriven_and_finished_is_passed_over(
        self, driver: RequestByHand
    ) -> None:
        driver.load(3)
        driver.give_up(1)
        driver.redrive(1)
        holder, _ = driver.claim()
        waits = driver.protocol.collect(driver.id, next_number=1)
        driver.finish(holder, [1])
        holder, _ = driver.claim()
        driver.finish(holder, [2])

        collected = driver.protocol.collect(driver.id, next_number=1)

        assert (waits.results, waits.next) == ([], 1)
        assert (collected.state, collected.results) == (State.OPEN, [(2, b"r2")])
        assert (collected.next, set(driver.results())) == (3, {"1.1", "2"})

    def test_after_the_end_nothing_is_waited_for(self, running: RequestByHand) -> None:
        running.protocol.cancel(running.id)

        collected = running.protocol.collect(running.id, next_number=1)

        assert collected.state == State.CANCELLED
        assert collected.results == [(1, b"r1"), (2, b"r2"), (4, b"r4")]
        assert collected.next == 7

    def test_does_not_go_beyond_what_is_loaded(self, driver: RequestByHand) -> None:
        driver.open()
        driver.append(1)
        holder, _ = driver.claim()
        driver.finish(holder, [1])

        collected = driver.protocol.collect(driver.id, next_number=1)

        assert (collected.state, collected.next) == (State.LOADING, 2)

    def test_empty_request_has_no_results(self, driver: RequestByHand) -> None:
        driver.load(0)

        collected = driver.protocol.collect(driver.id, next_number=1)

        assert (collected.state, collected.results, collected.next) == (State.DONE, [], 1)


class TestBounds:
    @pytest.fixture
    def done(self, driver: RequestByHand) -> RequestByHand:
        """Nine results of ten bytes each."""
        driver.load(9)
        holder, _ = driver.claim(9)
        driver.finish(holder, range(1, 10))
        results = {str(number): str(number) * 10 for number in range(1, 10)}
        driver.redis.hset(driver.keys.results, mapping=results)
        return driver

    def test_looks_at_so_many_parts(self, done: RequestByHand) -> None:
        collected = done.protocol.collect(done.id, next_number=3, most=4)

        assert [number for number, _ in collected.results] == [3, 4, 5, 6]
        assert (collected.next, collected.left) == (7, 9)

    @pytest.mark.parametrize("most", [25, 30])
    def test_stops_after_the_result_that_reaches_the_bytes(
        self, done: RequestByHand, most: int
    ) -> None:
        collected = done.protocol.collect(done.id, next_number=1, max_bytes=most)

        assert [number for number, _ in collected.results] == [1, 2, 3]
        assert collected.next == 4

    def test_counts_parts_without_a_result_too(self, done: RequestByHand) -> None:
        done.redis.hdel(done.keys.results, *map(str, range(1, 9)))

        collected = done.protocol.collect(done.id, next_number=1, most=5)

        assert (collected.results, collected.next) == ([], 6)


class TestCommit:
    def test_committed_results_are_forgotten(self, running: RequestByHand) -> None:
        collected = running.protocol.collect(
            running.id, next_number=3, commit=("", "at 20"), forget=[1, 2]
        )

        assert (collected.left, running.results()) == (1, {"4": b"r4"})
        assert running.meta("committed") == "at 20"

    def test_next_commit_begins_where_the_last_ended(self, running: RequestByHand) -> None:
        running.protocol.collect(running.id, next_number=3, commit=("", "at 20"), forget=[1])

        running.protocol.collect(running.id, next_number=3, commit=("at 20", "at 30"), forget=[2])

        assert (running.meta("committed"), set(running.results())) == ("at 30", {"4"})

    def test_yield_of_a_redrive_is_forgotten_by_its_field(self, running: RequestByHand) -> None:
        running.redis.hset(running.keys.results, "1.1", b"again")

        running.protocol.collect(running.id, next_number=3, commit=("", "x"), forget=["1.1"])

        assert set(running.results()) == {"1", "2", "4"}

    def test_another_collector_is_fenced_off(self, running: RequestByHand) -> None:
        running.protocol.collect(running.id, next_number=3, commit=("", "at 20"), forget=[1])
        before = running.snapshot()

        with pytest.raises(CollectorLost, match="another collector"):
            running.protocol.collect(running.id, next_number=3, commit=("", "at 25"), forget=[2, 4])

        assert running.snapshot() == before

    def test_repeated_after_a_lost_reply_is_no_other_collector(
        self, running: RequestByHand
    ) -> None:
        first, again = (
            running.protocol.collect(running.id, next_number=3, commit=("", "at 20"), forget=[1, 2])
            for _ in range(2)
        )

        assert first == again
        assert running.meta("committed") == "at 20"

    def test_reading_is_fenced_off_from_nothing_and_forgets_nothing(
        self, running: RequestByHand
    ) -> None:
        running.protocol.collect(running.id, next_number=3, commit=("", "at 20"), forget=[1])
        before = running.snapshot()

        collected = running.protocol.collect(
            running.id, next_number=2, commit=("at 7", "at 7"), forget=[2]
        )

        assert collected.results == [(2, b"r2")]
        assert running.snapshot() == before


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.protocol.collect(driver.id, next_number=1, commit=("", "x"), forget=[1])

    assert driver.existing_keys() == set()


def test_full_server_still_forgets(running: RequestByHand) -> None:
    with running.full_server():
        running.protocol.collect(running.id, next_number=3, commit=("", "x"), forget=[1, 2])

    assert set(running.results()) == {"4"}


def test_last_part_that_was_handed_out_and_given_up_is_waited_for_by_nobody(
    driver: RequestByHand,
) -> None:
    driver.load(3, max_failures=9)
    driver.give_up(1)

    found = driver.protocol.collect(driver.id, next_number=1)

    assert (found.state.is_live, found.next, found.results) == (True, 2, [])


class TestFlow:
    @pytest.fixture
    def spread(self, protocol: Protocol, queue: str, request_id: str) -> FlowByHand:
        """The parts 1 and 2 have two children each, and 3 has none yet; 1/1 has a result."""
        flow = FlowByHand(protocol, queue, request_id, "spread,map").load(3)
        flow[1].run(2, children={1: [b"a", b"b"], 2: [b"c", b"d"]})
        flow[2].run()
        return flow

    def test_waits_at_the_first_child_without_a_result(self, spread: FlowByHand) -> None:
        collected = spread.protocol.collect(spread.id, next_number=1)

        assert (collected.state, collected.fields) == (State.OPEN, ["1/1"])
        assert (collected.next, collected.within) == (1, "1/2")

    def test_goes_on_within_a_part_and_behind_it(self, spread: FlowByHand) -> None:
        spread[2].run(2)

        collected = spread.protocol.collect(spread.id, next_number=1, within="1/2")

        assert collected.fields == ["1/2", "2/1"]
        assert (collected.next, collected.within) == (2, "2/2")

    def test_waits_at_a_part_that_was_not_run_yet(self, spread: FlowByHand) -> None:
        spread[2].run(3)

        collected = spread.protocol.collect(spread.id, next_number=1)

        assert collected.fields == ["1/1", "1/2", "2/1", "2/2"]
        assert (collected.next, collected.within) == (3, "")

    def test_after_the_end_nothing_is_waited_for(self, spread: FlowByHand) -> None:
        spread[2].run(1)
        spread[2].claim(1)
        spread.protocol.cancel(spread.id)

        collected = spread.protocol.collect(spread.id, next_number=1)

        assert (collected.state, collected.fields) == (State.CANCELLED, ["1/1", "1/2"])
        assert (collected.next, collected.within) == (4, "")

    # In six steps it comes by 1, 1/1, 1/2, 2, 2/1 and 2/2.
    @pytest.mark.parametrize(
        ("most", "fields", "stands"),
        [
            (1, [], (1, "1/1")),
            (3, ["1/1", "1/2"], (2, "")),
            (5, ["1/1", "1/2", "2/1"], (2, "2/2")),
            (6, ["1/1", "1/2", "2/1", "2/2"], (3, "")),
        ],
    )
    def test_looks_at_so_many_items(
        self, spread: FlowByHand, most: int, fields: list[str], stands: tuple[int, str]
    ) -> None:
        spread[2].run(3)

        collected = spread.protocol.collect(spread.id, next_number=1, most=most)

        assert (collected.fields, (collected.next, collected.within)) == (fields, stands)

    @pytest.mark.parametrize(("most", "count"), [(3, 1), (4, 2), (6, 2), (7, 3)])
    def test_stops_after_the_result_that_reaches_the_bytes(
        self, spread: FlowByHand, most: int, count: int
    ) -> None:
        spread[2].run(3)
        for field in spread.results():
            spread[1].redis.hset(spread[1].keys.results, field, "abc")

        collected = spread.protocol.collect(spread.id, next_number=1, max_bytes=most)

        assert collected.fields == ["1/1", "1/2", "2/1"][:count]

    def test_behind_the_one_output_of_a_reduce_is_the_end(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,reduce").load(3)
        before = protocol.collect(flow.id, next_number=1)
        flow.run_all()

        collected = protocol.collect(flow.id, next_number=1)

        assert (before.fields, before.next) == ([], 1)
        assert (collected.fields, collected.next) == (["1"], 4)
