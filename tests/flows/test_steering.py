"""What requests can do, with flows: canary, deadline, pause, cancel, settings of one stage."""

import pytest

from streamq import Client, InvalidValue, Protocol, RequestEnded, State
from streamq.queue.request import Request
from tests.support.flow_by_hand import FlowByHand
from tests.support.simulated import Worker


@pytest.fixture
def flow(protocol: Protocol, queue: str, request_id: str) -> FlowByHand:
    """Three items, of which one is in each of three stages."""
    made = FlowByHand(protocol, queue, request_id, "map,map,map").load(3)
    protocol.register_all([(stage.id, queue) for stage in made.stages])
    made[1].run(2)
    made[2].run(1)
    return made


def request_of(flow: FlowByHand) -> Request:
    return Request(flow.protocol, flow.id)


def claimed(flow: FlowByHand) -> list[int]:
    """How many parts each stage gives away now."""
    return [len(stage.claim(9)[1].parts) for stage in flow.stages]


class TestCanary:
    def test_first_items_go_through_all_stages_and_the_others_wait(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map", canary=2).load(5)
        request = request_of(flow)
        flow[1].run(9)
        assert not request.status().waits_for_release, "they are in stage 2 still"

        flow.run_all()

        assert sorted(flow.results()) == ["1", "2"]
        status = request.status()
        assert (status.state, status.canary, status.waits_for_release) == (State.OPEN, 2, True)
        assert [stage.held_by for stage in status.stages or []] == ["canary", ""]

        request.release()
        flow.run_all()
        assert flow.states() == ["done", "done"]
        assert sorted(flow.results()) == ["1", "2", "3", "4", "5"]

    def test_group_of_its_last_item_is_joined_and_a_reduce_waits_for_the_others(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        kinds = "spread,map,join,reduce"
        flow = FlowByHand(protocol, queue, request_id, kinds, canary=1).load(2)
        flow.run_all()
        assert list(flow[4].inbox()) == ["1"]
        assert request_of(flow).status().waits_for_release

        request_of(flow).release()
        flow.run_all()
        assert flow.states() == ["done"] * 4

    def test_cancel_leaves_what_came_through(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map", canary=1).load(3)
        flow.run_all()

        assert request_of(flow).cancel() == 2
        assert (flow.states(), list(flow.results())) == (["cancelled"] * 2, ["1"])


class TestDeadline:
    def test_ends_all_stages_with_its_reason_and_what_is_in_hand_is_dropped(
        self, flow: FlowByHand
    ) -> None:
        held = flow[2].claim()
        flow[1].set_meta(deadline_ms=flow[1].now_ms() - 1)

        Worker(flow.protocol, flow.queue).sweep()

        assert flow.states() == ["failed"] * 3
        assert request_of(flow).status().reason == "deadline"
        assert claimed(flow) == [0, 0, 0]
        flow[2].pass_on(held[0], held[1].parts)
        assert flow.states() == ["failed"] * 3

    def test_retry_goes_on_in_all_stages(self, flow: FlowByHand) -> None:
        flow[1].set_meta(deadline_ms=flow[1].now_ms() - 1)
        Worker(flow.protocol, flow.queue).sweep()
        assert flow.states() == ["failed"] * 3

        request_of(flow).retry()

        flow.run_all()
        assert flow.states() == ["done"] * 3
        assert sorted(flow.results()) == ["1", "2", "3"]


class TestPauseAndCancel:
    def test_pause_holds_every_stage_and_what_runs_is_handed_over(self, flow: FlowByHand) -> None:
        holder, grant = flow[2].claim() if flow[2].waiting() else flow[1].claim()
        request_of(flow).pause()

        assert claimed(flow) == [0, 0, 0]
        assert [stage.meta("paused") for stage in flow.stages] == ["1", "1", "1"]
        stage = flow[2] if grant.parts and flow[2].leases() else flow[1]
        assert stage.pass_on(holder, grant.parts, most=9).parts == []

        request_of(flow).resume()
        flow.run_all()
        assert flow.states() == ["done"] * 3

    def test_cancel_ends_every_stage_and_what_runs_is_told(self, flow: FlowByHand) -> None:
        holder, grant = flow[1].claim()

        assert request_of(flow).cancel() == 3

        assert flow.states() == ["cancelled"] * 3
        assert flow[1].pass_on(holder, grant.parts).word == "cancelled"
        assert [stage.waiting() for stage in flow.stages] == [[], [], []]
        with pytest.raises(RequestEnded):
            request_of(flow).set(limit=3, stage="2")


class TestSettings:
    def test_of_one_stage_leave_the_others(self, flow: FlowByHand) -> None:
        request = request_of(flow)
        request.set(stage="2", limit=1, rate="10/s", level=7, weight=3)

        stages = request.status().stages or []
        assert [stage.limit for stage in stages] == [8, 1, 8]
        assert [stage.level for stage in stages] == [50, 7, 50]
        assert flow[2].meta("rate_ms") == "100"
        assert [stage.meta("weight") for stage in flow.stages][1] == "3"

    def test_of_a_stage_that_is_not_there_change_nothing(self, flow: FlowByHand) -> None:
        for stage in ("9", "0", "nowhere", ""):
            with pytest.raises(InvalidValue, match="no stage"):
                request_of(flow).set(stage=stage or "-", limit=1)
        assert [stage.meta("limit") for stage in flow.stages] == ["8", "8", "8"]

    def test_stage_is_no_request(self, flow: FlowByHand, client: Client) -> None:
        for make in (client.get, lambda each: Request(flow.protocol, each)):
            with pytest.raises(InvalidValue, match=f"{flow.id}"):
                make(f"{flow.id}/2")
