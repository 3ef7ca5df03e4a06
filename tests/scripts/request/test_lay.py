"""lay: the later stages of a flow are there, all of them, or none."""

import pytest

from streamq import Protocol
from streamq.errors import RequestExists, RequestUnknown
from tests.support.flow_by_hand import FlowByHand


@pytest.fixture
def flow(protocol: Protocol, queue: str, request_id: str) -> FlowByHand:
    return FlowByHand(protocol, queue, request_id, "map,spread,join", {2: {"limit": 3}})


def lay(flow: FlowByHand, digest: str = "d") -> bool:
    assert flow.policy.flow
    return flow.protocol.lay(flow.id, digest, flow.policy.flow)


def test_creates_every_stage_with_its_policy(flow: FlowByHand) -> None:
    flow.open()

    assert flow.states() == ["loading", "open", "open"]
    assert [stage.meta("kind") for stage in flow.stages] == ["map", "spread", "join"]
    assert [stage.meta("limit") for stage in flow.stages] == ["8", "3", "8"]
    assert [stage.meta("protocol") for stage in flow.stages] == ["3", "3", "3"]
    assert flow[1].meta("laid") == "1"


def test_again_changes_nothing(flow: FlowByHand) -> None:
    flow.open()
    flow[1].append(2)
    flow[1].run()
    before = [stage.snapshot() for stage in flow.stages]

    assert not lay(flow)
    assert [stage.snapshot() for stage in flow.stages] == before


def test_is_refused_for_another_submission_and_without_one(flow: FlowByHand) -> None:
    with pytest.raises(RequestUnknown):
        lay(flow)
    flow.protocol.open(flow.id, "d", flow.policy)

    with pytest.raises(RequestExists):
        lay(flow, digest="other")
    assert not flow[2].redis.exists(flow[2].keys.meta, flow[2].keys.parts)


def test_drops_what_a_purged_flow_of_the_id_left(flow: FlowByHand) -> None:
    redis = flow[2].redis
    redis.xadd(flow[2].keys.parts, {"1": "old"}, id="7-0")
    redis.hset(flow[2].keys.failed, "7", "old")

    flow.open()

    assert flow[2].entries() == []
    assert flow[2].failed() == {}
