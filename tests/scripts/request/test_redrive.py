"""redrive.lua: failed -> retry for parts; done, failed -> open for the request."""

import pytest

from streamq import Protocol
from streamq.errors import RequestEnded, RequestUnknown
from streamq.model import State
from streamq.protocol.replies import Tokens
from tests.support.by_hand import RequestByHand
from tests.support.flow_by_hand import FlowByHand

RUN = {"on_failure": "run"}


@pytest.fixture
def ended(driver: RequestByHand) -> RequestByHand:
    """Done: parts 1 and 3 were given up with three bad records of ten, part 2 is fine."""
    driver.open()
    driver.append(3, records=10)
    driver.protocol.seal(driver.id, 3, "c3")
    holder, _ = driver.claim(3, level=50)
    for number in (1, 3):
        driver.fail(holder, number, kind="abandon", records=(7, 3), result=b"good", partial=b"some")
    assert driver.finish(holder, [2], records=10).word == "done"
    return driver


class TestFromDone:
    def test_request_is_open_again(self, ended: RequestByHand) -> None:
        redriven, state, tokens = ended.redrive(1, 3)

        assert (redriven, state, tokens) == (2, State.OPEN, Tokens(2, "h:50"))
        assert (ended.meta("state"), ended.left()) == ("open", 2)
        assert (ended.meta("finished_ms"), ended.meta("redrives")) == ("0", "1")

    def test_parts_wait_at_the_front_under_their_numbers(self, ended: RequestByHand) -> None:
        ended.redrive(3, 1)

        assert (ended.retry(), ended.failed()) == ({1: 1, 3: 3}, {})
        _, grant = ended.claim(9)
        assert [(p.number, p.payload, p.partial) for p in grant.parts] == [
            (1, b"1", b"some"),
            (3, b"3", b"some"),
        ]

    def test_counts_are_as_if_the_parts_had_not_failed(self, ended: RequestByHand) -> None:
        assert [ended.meta(f) for f in ("failed", "records_done", "records_failed")] == [
            "2",
            "24",
            "6",
        ]

        ended.redrive(1)

        assert [ended.meta(f) for f in ("failed", "records_done", "records_failed")] == [
            "1",
            "24",
            "3",
        ]

    def test_tokens_believed_out_are_forgotten(self, ended: RequestByHand) -> None:
        ended.set_meta(out=8, due_ms=ended.now_ms() + 60_000)

        _, _, tokens = ended.redrive(1)

        assert (tokens.count, ended.meta("out"), ended.meta("due_ms")) == (1, "1", "0")

    def test_other_failed_parts_stay_failed(self, ended: RequestByHand) -> None:
        ended.redrive(1)

        assert (set(ended.failed()), set(ended.retry()), ended.left()) == ({3}, {1}, 1)

    def test_new_yield_stands_beside_the_old(self, ended: RequestByHand) -> None:
        ended.redrive(1, 3)
        holder, _ = ended.claim(2)

        assert ended.finish(holder, [1, 3], records=6).word == "done"

        assert ended.results() == {
            "1": b"good",
            "2": b"r2",
            "3": b"good",
            "1.1": b"r1",
            "3.1": b"r3",
        }
        assert [ended.meta(f) for f in ("done", "failed", "records_done", "records_failed")] == [
            "3",
            "0",
            "30",
            "0",
        ]
        assert ended.existing_keys() == {"meta", "left", "results"}

    def test_end_is_published_once_for_each_run(self, ended: RequestByHand) -> None:
        with ended.published() as published:
            for _ in range(2):
                ended.redrive(1)
                ended.give_up(1)

        assert published == ["done", "done"]
        assert (ended.meta("redrives"), ended.left()) == ("2", 0)

    def test_part_that_fails_again_can_be_redriven_again(self, ended: RequestByHand) -> None:
        ended.redrive(1)
        holder, _ = ended.claim()
        ended.fail(holder, 1, kind="abandon", records=(1, 2), result=b"better")
        assert (ended.meta("state"), ended.results()["1.1"]) == ("done", b"better")

        ended.redrive(1)
        holder, _ = ended.claim()
        ended.finish(holder, [1], records=2)

        assert (ended.results()["1.1"], ended.results()["1.2"]) == (b"better", b"r1")
        assert (ended.meta("records_done"), ended.meta("records_failed")) == ("27", "3")

    def test_twice_redrives_once(self, ended: RequestByHand) -> None:
        ended.redrive(1)

        redriven, state, tokens = ended.redrive(1)

        assert (redriven, state, bool(tokens)) == (0, State.OPEN, False)
        assert (ended.left(), ended.meta("failed"), ended.meta("redrives")) == (1, "1", "1")

    @pytest.mark.parametrize("numbers", [(), (2,), (99,)], ids=["none", "done", "absent"])
    def test_request_with_nothing_to_run_again_stays_ended(
        self, ended: RequestByHand, numbers: tuple[int, ...]
    ) -> None:
        before = ended.snapshot()

        redriven, state, tokens = ended.redrive(*numbers)

        assert (redriven, state, bool(tokens)) == (0, State.DONE, False)
        assert ended.snapshot() == before

    def test_late_result_counts_while_nobody_has_the_part_and_no_run_has_yielded_anything(
        self, driver: RequestByHand
    ) -> None:
        driver.load(1, poison=1)
        late, _ = driver.claim()
        driver.expire(late)
        driver.reap()
        driver.redrive(1)

        grant = driver.finish(late, [1])

        assert (grant.word, grant.counted, driver.results()) == ("done", 1, {"1.1": b"r1"})
        assert (driver.meta("records_done"), driver.meta("records_failed")) == ("1", "0")

    def test_late_result_is_dropped_where_another_run_has_yielded_a_part_of_it(
        self, ended: RequestByHand
    ) -> None:
        ended.redrive(1)
        holder, _ = ended.claim()
        ended.expire(holder)
        ended.reap()

        assert ended.finish(holder, [1], records=99).counted == 0

        assert (ended.meta("records_done"), ended.meta("records_failed")) == ("24", "3")
        assert "1.1" not in ended.results()
        assert set(ended.retry()) == {1}

    def test_poison_fails_only_the_records_that_had_failed(self, ended: RequestByHand) -> None:
        ended.redrive(1)
        for _ in range(3):
            holder, _ = ended.claim()
            ended.release(holder, crashed=1)

        assert set(ended.failed()) == {1, 3}
        assert (ended.meta("records_done"), ended.meta("records_failed")) == ("24", "6")


class TestFromFailed:
    def test_request_that_failed_at_its_end_is_open_again(self, driver: RequestByHand) -> None:
        driver.load(2, max_percent=10.0)
        driver.give_up(1)
        holder, _ = driver.claim()
        assert driver.finish(holder, [2]).word == "failed"

        redriven, state, _ = driver.redrive(1)

        assert (redriven, state, driver.left()) == (1, State.OPEN, 1)
        holder, _ = driver.claim()
        assert driver.finish(holder, [1]).word == "done"

    def test_request_that_failed_before_its_end_goes_on_with_the_rest(
        self, driver: RequestByHand
    ) -> None:
        driver.load(5, max_failures=0)
        driver.give_up(1)
        assert driver.meta("state") == "failed"

        redriven, state, tokens = driver.redrive(1)

        assert (redriven, state, tokens.count) == (1, State.OPEN, 5)
        holder, grant = driver.claim(9)
        assert [part.number for part in grant.parts] == [1, 2, 3, 4, 5]
        assert driver.finish(holder, [1, 2, 3, 4, 5]).word == "done"

    def test_goes_on_with_the_rest_also_without_a_failed_part(self, driver: RequestByHand) -> None:
        driver.load(5, max_failures=0)
        driver.give_up(1)

        redriven, state, tokens = driver.redrive()

        assert (redriven, state, tokens.count) == (0, State.OPEN, 4)
        assert set(driver.failed()) == {1}

    def test_load_that_was_cut_off_goes_on(self, driver: RequestByHand) -> None:
        driver.open(max_failures=0)
        driver.append(1)
        driver.give_up(1)

        assert driver.redrive(1)[1] == State.LOADING

        driver.append(1, first=2)
        driver.protocol.seal(driver.id, 2, "c2")
        holder, _ = driver.claim(2)
        assert driver.finish(holder, [1, 2]).word == "done"

    def test_leases_that_stood_still_count(self, driver: RequestByHand) -> None:
        driver.load(5, max_failures=0, limit=2)
        other, _ = driver.claim()
        driver.give_up(2)

        _, _, tokens = driver.redrive(2)

        assert (tokens.count, set(driver.leases())) == (1, {other})


class TestWhileOpen:
    def test_part_runs_again_beside_the_others(self, driver: RequestByHand) -> None:
        driver.load(5)
        driver.give_up(1)
        driver.set_meta(out=2)

        redriven, state, tokens = driver.redrive(1)

        assert (redriven, state, tokens) == (1, State.OPEN, Tokens(3, "h:50"))
        assert (driver.left(), driver.meta("redrives")) == (5, "")

    def test_attempts_and_crashes_begin_anew(self, driver: RequestByHand) -> None:
        driver.load(2, retries=0, poison=2)
        for _ in range(2):
            holder, _ = driver.claim()
            driver.release(holder, crashed=1)
        assert set(driver.failed()) == {1}

        driver.redrive(1)

        assert driver.tries() == {1: "0 0 1 1 1"}, "what killed workers is still handed out alone"
        _, grant = driver.claim(2)
        assert [(part.number, part.attempt) for part in grant.parts] == [(1, 1)]


def test_cancelled_request_is_refused(driver: RequestByHand) -> None:
    driver.load(2)
    driver.give_up(1)
    driver.protocol.cancel(driver.id)
    before = driver.snapshot()

    with pytest.raises(RequestEnded, match="its parts are gone"):
        driver.redrive(1)

    assert driver.snapshot() == before


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.redrive(1)

    assert driver.existing_keys() == set()


def test_any_number_of_parts_may_be_named(driver: RequestByHand) -> None:
    driver.load(2)
    driver.give_up(1, 2)

    redriven, _, _ = driver.redrive(*range(1, 10_001))

    assert (redriven, set(driver.retry())) == (2, {1, 2})


class TestFlow:
    def test_join_is_refused_for_its_failed_child_behind_a_reduce_that_failed(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "spread,map,join,reduce").load(1)
        flow[1].run(children={1: [b"a", b"b"]})
        flow[2].give_up(1)
        flow[2].run()
        flow[3].give_up(1)
        flow[4].give_up(1)

        redriven, _, tokens = flow[3].redrive(1)

        assert (redriven, tokens.refused) == (0, 1)
        assert flow[2].redrive(1)[0] == 1

    def test_child_is_refused_when_the_reduce_was_made_without_its_join(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "spread,map,join,reduce", {4: RUN}).load(1)
        flow[1].run(children={1: [b"a", b"b"]})
        flow[2].give_up(1)
        flow[2].run()
        flow[3].give_up(1)
        assert flow[4].waiting() == ["1@1"]

        redriven, _, tokens = flow[2].redrive(1)

        assert (redriven, tokens.refused) == (0, 1)

    def test_child_runs_again_while_its_join_is_not_made(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "spread,map,join").load(1)
        flow[1].run(children={1: [b"a", b"b"]})
        flow[2].give_up(1)

        redriven, _, tokens = flow[2].redrive(1)

        assert (redriven, tokens.refused) == (1, 0)
        flow.run_all()
        assert flow.states() == ["done"] * 3

    def test_input_of_a_reduce_runs_again_before_it_begins(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,reduce").load(2)
        flow[1].give_up(1)

        redriven, _, tokens = flow[1].redrive(1)

        assert (redriven, tokens.refused) == (1, 0)

    def test_reduce_is_refused_while_a_single_input_of_it_has_failed(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,reduce").load(2)
        flow[1].give_up(1)
        flow[1].run()
        flow[2].give_up(1)

        redriven, _, tokens = flow[2].redrive(1)

        assert (redriven, tokens.refused) == (0, 1)

    def test_reduce_does_not_come_back_while_another_stage_has_a_failed_part(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map,reduce").load(2)
        flow[1].give_up(1)
        flow[1].run()
        flow[2].give_up(1)
        flow[3].give_up(1)

        flow[2].redrive(1)
        flow[2].run()
        assert flow.states() == ["failed"] * 3
        assert set(flow[3].failed()) == {1}

        flow[1].redrive(1)
        flow.run_all()
        assert flow.states() == ["done"] * 3

    def test_redrive_of_a_later_stage_is_one_of_the_request(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map").load(1)
        flow[1].run()
        flow[2].give_up(1)
        flow[1].set_meta(deadline_ms=1, reason="deadline")

        flow[2].redrive(1)

        assert flow[1].meta("redrives") == "1"
        assert flow[1].meta("deadline_ms") == ""
        assert flow[1].meta("reason") == ""
