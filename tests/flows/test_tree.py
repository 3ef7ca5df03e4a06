"""A reduce as a tree: every result goes into one part of it, and comes to the end once."""

import pytest

from streamq import Protocol, Request
from tests.support.flow_by_hand import FlowByHand


@pytest.fixture
def flow(protocol: Protocol, queue: str, request_id: str) -> FlowByHand:
    return FlowByHand(protocol, queue, request_id, "map,reduce", {2: {"width": 2}})


def runs(flow: FlowByHand) -> list[str]:
    return [about.partition("@")[2] for about in flow[2].waiting()]


class TestTree:
    def test_part_is_made_of_each_so_many_that_arrive(self, flow: FlowByHand) -> None:
        flow.load(5)
        flow[1].run(3)

        assert runs(flow) == ["1-2"]
        flow[1].run(2)
        assert runs(flow) == ["1-2", "3-4"]
        assert flow.left == 2
        assert set(flow[2].inbox()) == {"1", "2", "3", "4", "5"}

    def test_what_a_part_yields_arrives_again_and_the_last_has_the_rest(
        self, flow: FlowByHand
    ) -> None:
        flow.load(5)
        flow[1].run(5)
        flow[2].run(1)
        assert set(flow[2].inbox()) == {"3", "4", "5", "6"}
        assert runs(flow) == ["3-4", "5-6"]

        flow[2].run(1)
        flow[2].run(1)

        # 7 and 8 were a whole run; what it yielded is the rest.
        assert runs(flow) == ["7-8"]
        flow[2].run(1)
        assert runs(flow) == ["1"]
        assert set(flow[2].inbox()) == {"9"}
        assert flow.states() == ["open", "open"]
        flow[2].run(1)
        assert flow.states() == ["done", "done"]
        assert set(flow.results()) == {"1"}
        assert flow[2].inbox() == {}

    @pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 9])
    def test_any_number_of_inputs_comes_to_one_result(self, flow: FlowByHand, count: int) -> None:
        flow.load(count)

        flow.run_all()

        assert flow.states() == ["done", "done"]
        assert set(flow.results()) == {"1"}
        assert flow.left == 0

    def test_part_that_failed_fails_the_end_and_comes_back_with_a_redrive(
        self, flow: FlowByHand
    ) -> None:
        flow.load(2)
        flow[1].run(2)
        flow[2].give_up(1)
        assert runs(flow) == ["1-2", "1"]
        flow[2].give_up(2)
        assert flow.states() == ["failed", "failed"]
        assert flow[2].redrive(2)[0] == 0, "it comes back with what it lacks"

        assert flow[2].redrive(1)[0] == 1
        flow.run_all()

        assert flow.states() == ["done", "done"]
        assert flow[2].failed() == {}
        assert flow.left == 0

    def test_input_that_is_redriven_arrives_and_the_final_part_comes_back(
        self, flow: FlowByHand
    ) -> None:
        flow.load(3)
        flow[1].give_up(1)
        flow[1].run(2)
        flow[2].run(1)
        flow[2].give_up(2)

        assert flow[1].redrive(1)[0] == 1
        flow.run_all()

        assert flow.states() == ["done", "done"]
        assert flow.left == 0

    def test_nothing_is_redriven_behind_a_final_part_that_did_without_it(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        stages = {2: {"width": 2, "on_failure": "run"}}
        flow = FlowByHand(protocol, queue, request_id, "map,reduce", stages).load(3)
        flow[1].give_up(1)
        flow[1].run(2)
        flow[2].give_up(1)

        assert flow[1].redrive(1)[0] == 0
        assert flow[2].redrive(1)[0] == 0

    def test_part_that_failed_is_told_by_what_arrived(
        self, flow: FlowByHand, protocol: Protocol
    ) -> None:
        flow.load(2)
        flow[1].run(2)
        flow[2].give_up(1)

        (failure,) = Request(protocol, flow.id).errors()

        assert (failure.stage, failure.item, failure.part) == ("h", "1-2", 1)

    def test_late_result_of_a_run_of_arrivals_is_not_taken(self, flow: FlowByHand) -> None:
        """After a failover the same numbers may be other results."""
        flow.load(2)
        flow[1].run(2)
        holder, grant = flow[2].claim()
        flow[2].expire(holder)
        flow[2].reap()

        assert flow[2].pass_on(holder, grant.parts).counted == 0
        flow.run_all()
        assert flow.states() == ["done", "done"]
