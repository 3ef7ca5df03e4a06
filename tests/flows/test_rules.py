"""Each rule of flows: what it promises holds, and does not once the scripts are without it.

``lua/README.md`` has the rules F1 to F17; those of callbacks, K1 to K4, are in
``tests/queue/test_callback_rules.py``.
"""

from collections.abc import Callable

import pytest

from streamq import Protocol
from tests.flows.rules import CUTS, scripts_without
from tests.support.flow_by_hand import FlowByHand, StageByHand

Make = Callable[..., FlowByHand]
SPREAD = "spread,map,join"
RUN = {"on_failure": "run"}


@pytest.fixture
def make(protocol: Protocol, queue: str, request_id: str) -> Make:
    def make(kinds: str, count: int, **options: object) -> FlowByHand:
        return FlowByHand(protocol, queue, request_id, kinds, **options).load(count)  # type: ignore[arg-type]

    return make


def lost_lease(stage: StageByHand) -> tuple[str, list]:  # type: ignore[type-arg]
    """Parts of a holder that was silent for too long; they lie in retry."""
    holder, grant = stage.claim(9)
    stage.expire(holder)
    stage.reap()
    return holder, grant.parts


def whole_group(flow: FlowByHand, *, failing: bool = False) -> None:
    """One part with two children; the first may fail."""
    flow[1].run(children={1: [b"a", b"b"]})
    if failing:
        flow[2].give_up(1)
    flow[2].run(2)


def one_script(make: Make) -> None:
    flow = make("map,map", 1)
    holder, grant = flow[1].claim()
    flow[1].pass_on(holder, grant.parts)
    # The worker dies here.
    assert flow[2].waiting() == ["1@1"]


def ack_gate(make: Make) -> None:
    flow = make("map,map", 2)
    holder, grant = flow[1].claim()
    for _ in range(2):  # the first reply is lost
        flow[1].pass_on(holder, grant.parts, most=1, call=1_000)
    assert flow[2].waiting() == ["1@1"]


def mercy_hands_over(make: Make) -> None:
    flow = make("map,map", 1)
    flow[1].pass_on(*lost_lease(flow[1]))
    assert flow[2].waiting() == ["1@1"]


def counted_last(make: Make) -> None:
    flow = make("map,map", 1)
    flow[1].run()
    assert flow.states() == ["open", "open"]


def failed_child_counts(make: Make) -> None:
    flow = make(SPREAD, 1, stages={3: RUN})
    whole_group(flow, failing=True)
    assert flow[3].waiting() == ["1@1"]


def dropped_child_counts(make: Make) -> None:
    flow = make(SPREAD, 1)
    flow[1].run(children={1: [b"a", b"b"]})
    flow[2].run(2, children={1: []})
    assert flow[3].waiting() == ["1@1"]


def own_item(make: Make) -> None:
    flow = make("map,map", 2)
    flow[1].run(2)
    holder, parts = lost_lease(flow[2])
    parts[0].about = b"1@another"  # since a failover number 1 is another item
    assert flow[2].pass_on(holder, parts[:1]).counted == 0


def no_gap(make: Make) -> None:
    flow = make("map,map", 2)
    flow[1].run(2)
    holder, grant = flow[2].claim()
    grant.parts[0].about = b"1@another"
    assert flow[2].pass_on(holder, grant.parts, call=3_000).counted == 0


def one_join_part(make: Make) -> None:
    flow = make(SPREAD, 1)
    whole_group(flow, failing=True)
    flow[3].give_up(1)
    flow[2].redrive(1)
    flow[2].run()
    assert flow[3].waiting() == ["1@1"]


def not_after_join(make: Make) -> None:
    flow = make(SPREAD, 1, stages={3: RUN})
    whole_group(flow, failing=True)
    assert flow[2].redrive(1)[0] == 0


def not_after_reduce(make: Make) -> None:
    flow = make("map,reduce", 2, stages={2: RUN})
    flow[1].give_up(1)
    flow[1].run()
    assert flow[1].redrive(1)[0] == 0


def children_first(make: Make) -> None:
    flow = make(SPREAD, 1)
    whole_group(flow, failing=True)
    flow[3].give_up(1)
    assert flow[3].redrive(1)[0] == 0


def all_stages_end(make: Make) -> None:
    flow = make("map,map", 1)
    flow.run_all()
    assert flow.states() == ["done", "done"]


def no_token_is_believed(make: Make) -> None:
    flow = make("map,map", 2)
    flow[1].give_up(1)
    flow[1].run()
    flow[2].run()
    flow[2].set_meta(out=8)  # they were dropped after the end
    flow[1].redrive(1)
    holder, grant = flow[1].claim()
    over = flow[1].pass_on(holder, grant.parts)
    assert [each.place for each in over.tokens.others] == [flow[2].id]


def tokens_for_the_next(make: Make) -> None:
    flow = make("map,map", 1)
    holder, grant = flow[1].claim()
    over = flow[1].pass_on(holder, grant.parts)
    assert [(each.place, each.tokens.count) for each in over.tokens.others] == [(flow[2].id, 1)]


def tokens_for_the_one_before(make: Make) -> None:
    flow = make("map,map", 2, stages={2: {"window": "1 parts"}})
    flow[1].run()
    holder, grant = flow[2].claim()
    over = flow[2].pass_on(holder, grant.parts)
    assert [each.place for each in over.tokens.others] == [flow.id]


def reserved(make: Make) -> None:
    flow = make("map,map", 3, stages={2: {"window": "1 parts"}})
    flow[1].claim()
    assert flow[1].claim()[1].parts == []


def inbox_does_not_count(make: Make) -> None:
    flow = make("map,reduce", 3)
    flow[1].run()
    assert len(flow[1].run()) == 1


SCENARIOS = dict(
    zip(
        CUTS,
        (
            one_script,
            ack_gate,
            mercy_hands_over,
            counted_last,
            failed_child_counts,
            dropped_child_counts,
            own_item,
            no_gap,
            one_join_part,
            not_after_join,
            not_after_reduce,
            children_first,
            all_stages_end,
            no_token_is_believed,
            tokens_for_the_next,
            tokens_for_the_one_before,
            reserved,
            inbox_does_not_count,
        ),
        strict=True,
    )
)


@pytest.mark.parametrize("rule", CUTS)
def test_with_the_rule_it_holds(rule: str, make: Make) -> None:
    SCENARIOS[rule](make)


@pytest.mark.parametrize("rule", CUTS)
def test_without_the_rule_it_breaks(rule: str, make: Make) -> None:
    with scripts_without(rule), pytest.raises(AssertionError):
        SCENARIOS[rule](make)


class TestInboxIsEmptiedByItsJoin:
    """F9: who reads an inbox and dies leaves it to the next."""

    @staticmethod
    def read_by_one_that_dies(make: Make, protocol: Protocol) -> None:
        flow = make(SPREAD, 1)
        whole_group(flow)
        first = protocol.inbox_of_group(flow[3].id, "1")
        lost_lease(flow[3])

        assert protocol.inbox_of_group(flow[3].id, "1") == first

    def test_with_the_rule_it_holds(self, make: Make, protocol: Protocol) -> None:
        self.read_by_one_that_dies(make, protocol)

    def test_without_the_rule_it_breaks(
        self, make: Make, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = Protocol.inbox_of_group

        def emptied(self: Protocol, place: str, origin: str) -> list[bytes | None]:
            found = read(self, place, origin)
            self.connection.redis.delete(self.keys(place).got)
            return found

        monkeypatch.setattr(Protocol, "inbox_of_group", emptied)
        with pytest.raises(AssertionError):
            self.read_by_one_that_dies(make, protocol)

    def test_inputs_are_there_until_the_part_is_finished(self, make: Make) -> None:
        flow = make(SPREAD, 1)
        whole_group(flow)
        assert set(flow[3].inbox()) == {"1/0", "1/1", "1/2"}
        assert flow.groups() == {"1": 0, "1#": 2, "1@": 1}

        flow[3].run()

        assert flow[3].inbox() == {}
        assert flow.groups() == {}
