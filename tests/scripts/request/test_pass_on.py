"""pass_on: a result becomes a part of the next stage in the step that acknowledges it, once."""

import pytest

from streamq import Protocol, Request, RequestOpen
from streamq.errors import RequestUnknown
from streamq.model import State
from streamq.queue.callbacks import callbacks_of
from streamq.records.encoding import FAILED, NOTHING, encode_result
from tests.support.flow_by_hand import FlowByHand

CALLS = callbacks_of(queue="q", keep="1h", then="h")
RESULT = encode_result(["x"])


@pytest.fixture
def flow(protocol: Protocol, queue: str, request_id: str) -> FlowByHand:
    return FlowByHand(protocol, queue, request_id, "map,map")


class TestMaps:
    def test_hand_over_one_for_one_and_the_counter_stands_still(self, flow: FlowByHand) -> None:
        flow.load(3)
        holder, grant = flow[1].claim(2)

        over = flow[1].pass_on(holder, grant.parts)

        assert (over.word, over.counted) == ("over", 2)
        assert flow.left == 3
        assert flow[2].waiting() == ["1@1", "1@2"]
        assert (flow[1].meta("done"), flow[2].meta("total")) == ("2", "2")
        assert flow[1].entries() == [3]

    def test_tokens_for_the_next_stage_come_with_it(self, flow: FlowByHand) -> None:
        flow.load(3)
        holder, grant = flow[1].claim(2)

        over = flow[1].pass_on(holder, grant.parts)

        (other,) = over.tokens.others
        assert (other.place, other.queue) == (flow[2].id, flow.queue)
        assert (other.tokens.count, other.tokens.to) == (2, "h:50")
        assert flow[2].meta("out") == "2"

    def test_last_part_of_the_last_stage_ends_all_stages(self, flow: FlowByHand) -> None:
        flow.load(2)
        with flow[1].published() as heard:
            flow.run_all()

        assert flow.states() == ["done", "done"]
        assert flow.left == 0
        assert heard == ["done"]
        assert flow.results() == {"1": b"1", "2": b"2"}

    def test_repeat_after_a_lost_reply_hands_over_nothing(self, flow: FlowByHand) -> None:
        flow.load(3)
        holder, grant = flow[1].claim(2)
        first = flow[1].pass_on(holder, grant.parts, most=1, call=1_000)

        again = flow[1].pass_on(holder, grant.parts, most=1, call=1_000)

        assert (again.word, again.counted) == ("ok", 0)
        assert [part.number for part in again.parts] == [part.number for part in first.parts] == [3]
        assert flow[2].waiting() == ["1@1", "1@2"]

    def test_item_that_drops_out_leaves_a_mark_and_is_counted(self, flow: FlowByHand) -> None:
        flow.load(2)
        holder, grant = flow[1].claim(2)

        flow[1].pass_on(holder, grant.parts, children={1: []})

        assert flow[2].waiting() == ["1@2"]
        assert flow.results() == {"1": NOTHING}
        assert flow.left == 1

    def test_mercy_hands_over_what_lies_in_retry(self, flow: FlowByHand) -> None:
        flow.load(1)
        holder, grant = flow[1].claim()
        flow[1].expire(holder)
        flow[1].reap()

        late = flow[1].pass_on(holder, grant.parts)

        assert (late.word, late.counted) == ("lost", 1)
        assert flow[2].waiting() == ["1@1"]
        assert flow[1].retry() == {}

    def test_result_of_an_earlier_flow_of_the_same_id_is_not_handed_over(
        self, flow: FlowByHand
    ) -> None:
        flow.load(1)
        old, grant = flow[1].claim()
        flow.protocol.cancel(flow.id)
        flow.protocol.purge(flow.id, force=True)
        flow.load(1)
        new, _ = flow[1].claim()
        flow[1].handback(new, [1])

        # It may have been made in the same moment as the later one.
        late = flow[1].pass_on(old, grant.parts, created_ms=grant.created_ms - 1)

        assert (late.word, late.counted) == ("lost", 0)
        assert (flow[2].waiting(), flow[1].retry()) == ([], {1: 1})

    def test_late_result_does_not_come_after_what_was_handed_over_before_a_redrive(
        self, flow: FlowByHand
    ) -> None:
        flow.open()
        flow[1].append(1, records=3)
        flow.protocol.seal(flow.id, 1, "c1")
        slow, grant = flow[1].claim()
        flow[1].expire(slow)
        flow[1].reap()
        holder, _ = flow[1].claim()
        flow[1].fail(holder, 1, kind="abandon", records=(2, 1), result=RESULT)
        flow[1].release(holder)
        flow[1].redrive(1)

        late = flow[1].pass_on(slow, grant.parts)

        assert (late.word, late.counted) == ("lost", 0)
        assert flow[2].waiting() == ["2@1"]

    def test_result_for_another_item_is_not_taken_without_the_lease(self, flow: FlowByHand) -> None:
        flow.load(2)
        flow[1].run(2)
        holder, grant = flow[2].claim()
        flow[2].expire(holder)
        flow[2].reap()
        # After a failover number 1 of the stage may be another item.
        flow[2].redis.xdel(flow[2].keys.parts, "1-0")
        (part,) = grant.parts
        part.about = b"1@2"

        late = flow[2].pass_on(holder, [part])

        assert (late.word, late.counted) == ("lost", 0)
        assert flow.results() == {}

    def test_result_for_another_item_is_not_taken_after_a_gap_in_the_calls(
        self, flow: FlowByHand
    ) -> None:
        flow.load(2)
        flow[1].run(2)
        holder, grant = flow[2].claim()
        (part,) = grant.parts
        part.about = b"1@2"

        lost = flow[2].pass_on(holder, [part], call=3_000)

        assert lost.counted == 0
        assert flow.results() == {}

    def test_repeat_of_that_call_does_not_take_it_either(self, flow: FlowByHand) -> None:
        flow.load(3)
        flow[1].run(3)
        holder, grant = flow[2].claim()
        (part,) = grant.parts
        part.about = b"1@another"

        over = [flow[2].pass_on(holder, [part], most=1, call=3_000) for _ in range(2)]

        assert [(each.word, each.counted) for each in over] == [("ok", 0)] * 2
        assert flow.results() == {}
        assert flow[2].entries() == [1, 2, 3]

    @pytest.mark.parametrize("between", ["handback", "fail", "keep"])
    def test_a_gap_stays_a_gap_whatever_is_called_before_the_hand_over(
        self, flow: FlowByHand, between: str
    ) -> None:
        """A failover has forgotten call 2: it handed part 3 to the holder, as another item."""
        flow.load(3)
        flow[1].run(3)
        holder, grant = flow[2].claim(2)
        mine, lost = grant.parts
        flow[2].pass_on(holder, [], most=0, call=1_000)
        holder, _ = flow[2].claim(1)
        lost.about = b"1@another"
        if between == "handback":
            flow[2].handback(holder, [], call=2_001)
        elif between == "fail":
            flow[2].fail(holder, mine.number, call=3_000)
        else:
            flow[2].keep(holder, mine.number, b"kept", call=3_000)

        over = flow[2].pass_on(holder, [lost], call=4_000)

        assert over.counted == 0
        assert flow.results() == {}

    def test_outcomes_are_not_kept_for_a_number_that_may_be_another_item(
        self, flow: FlowByHand
    ) -> None:
        flow.load(1)
        flow[1].run()
        holder, grant = flow[2].claim()
        flow[2].expire(holder)
        flow[2].reap()

        assert flow[2].keep(holder, grant.parts[0].number, b"of another item") == "lost"
        assert flow[2].partial() == {}

    def test_marks_of_finished_parts_are_forgotten(self, flow: FlowByHand) -> None:
        flow.load(1)
        holder, grant = flow[1].claim()
        flow[1].keep(holder, 1, b"kept", b"mark", call=1_000)

        flow[1].pass_on(holder, grant.parts, call=2_000)

        assert flow[1].partial() == {}

    def test_without_the_next_stage_nothing_is_written(self, flow: FlowByHand) -> None:
        flow.load(1)
        holder, grant = flow[1].claim()
        flow[2].redis.unlink(flow[2].keys.meta)
        before = flow[1].snapshot()

        with pytest.raises(RequestUnknown):
            flow[1].pass_on(holder, grant.parts)
        assert flow[1].snapshot() == before

    def test_caller_that_knows_no_flow_is_told(
        self, flow: FlowByHand, url: str, queue: str
    ) -> None:
        flow.load(2)
        stranger = Protocol(flow.protocol.connection)
        place = FlowByHand(stranger, queue, flow.id, "map,map")

        assert [part.number for part in place[1].run()] == [1]
        assert [part.number for part in place[2].run()] == [1]
        assert stranger.cancel(flow.id) == 1
        assert flow.states() == ["cancelled", "cancelled"]


class TestEnds:
    def test_who_ends_the_last_stage_has_a_janitor_look_at_the_request_that_owes(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, calls=CALLS).load(1)
        flow[1].run()
        holder, grant = flow[2].claim()

        over = flow[2].pass_on(holder, grant.parts)

        assert over.word == "done"
        (first,) = over.tokens.others
        assert (first.place, first.tokens.count, first.tokens.to) == (flow.id, 0, "h:50")
        assert over.tokens.next_look_ms(queue) > 0

    @pytest.mark.parametrize("stage", [1, 2])
    def test_too_many_failures_of_one_stage_fail_all(
        self, protocol: Protocol, queue: str, request_id: str, stage: int
    ) -> None:
        options = {stage: {"max_failures": "10%"}}
        flow = FlowByHand(protocol, queue, request_id, "map,map", options).load(2)
        if stage == 2:
            flow[1].run(2)
        flow[stage].give_up(1)
        assert flow.states() == ["open", "open"]

        flow.run_all()

        assert flow.states() == ["failed", "failed"]

    def test_stage_is_not_purged_while_the_request_owes(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, calls=CALLS, keep="0s").load(1)
        flow.run_all()

        with pytest.raises(RequestOpen, match="callbacks"):
            protocol.purge(flow[2].id)
        assert flow.results() == {"1": b"1"}

    def test_results_of_a_cancelled_flow_can_be_read(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "spread,map").load(2)
        flow[1].run(children={1: [RESULT, RESULT]})
        flow[2].run(2)
        protocol.cancel(flow.id)

        assert len(list(Request(protocol, flow.id).results(5))) == 2


class TestWindows:
    def test_stage_starts_no_part_for_which_the_next_has_no_room(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map", {2: {"window": "2 parts"}})
        flow.load(5)
        holder, grant = flow[1].claim(5)

        assert len(grant.parts) == 2
        assert flow[1].claim()[1].word == "empty"
        flow[1].pass_on(holder, grant.parts)
        assert flow[1].claim()[1].word == "empty"

    def test_batch_that_is_handed_out_takes_room_from_the_tokens(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map", {2: {"window": "2 parts"}})
        flow.load(4)
        holder, grant = flow[1].claim(1)
        flow[1].redis.hset(flow[1].keys.meta, "out", 0)

        over = flow[1].pass_on(holder, grant.parts, most=1)

        assert [part.number for part in over.parts] == [2]
        assert over.tokens.count == 0

    def test_stage_before_gets_a_token_when_half_of_it_is_free(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map", {2: {"window": "2 parts"}})
        flow.load(5)
        flow[1].run(5)
        holder, grant = flow[2].claim()

        over = flow[2].pass_on(holder, grant.parts)

        assert [(each.place, each.tokens.count) for each in over.tokens.others] == [(flow.id, 1)]
        assert len(flow[1].claim()[1].parts) == 1

    def test_stage_before_gets_one_token_for_the_half_and_none_for_what_is_below(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map", {2: {"window": "4 parts"}})
        flow.load(9)
        flow[1].run(4)
        told = []
        for _ in range(4):
            holder, grant = flow[2].claim()
            over = flow[2].pass_on(holder, grant.parts)
            told.append([each.tokens.count for each in over.tokens.others])

        # 3 are left, 2, which is half of the window, 1, and none.
        assert told == [[], [1], [], [1]]

    def test_call_that_finishes_nothing_gets_it_none(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map", {2: {"window": "4 parts"}})
        flow.load(9)
        out = flow[1].meta("out")

        _, state, tokens = flow[2].redrive()

        assert (state, list(tokens.others)) == (State.OPEN, [])
        assert flow[1].meta("out") == out

    def test_result_that_comes_again_gets_it_none(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map", {2: {"window": "4 parts"}})
        flow.load(9)
        flow[1].run(1)
        holder, grant = flow[2].claim()
        first, again = (flow[2].pass_on(holder, grant.parts, call=1_000) for _ in range(2))

        assert [each.tokens.count for each in first.tokens.others] == [1]
        assert (again.counted, list(again.tokens.others)) == (0, [])

    def test_window_in_bytes_is_of_as_many_parts_as_have_them(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map", {2: {"window": "30B"}})
        flow.open()
        flow[1].append(9, size=10)
        protocol.seal(flow.id, 9, "c9")
        flow[1].run(1)

        assert len(flow[1].claim(9)[1].parts) == 2

    def test_part_that_is_given_up_frees_it_too(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map", {2: {"window": "1 parts"}})
        flow.load(2)
        flow[1].run(5)
        holder, grant = flow[2].claim()

        failed = flow[2].fail(holder, grant.parts[0].number, kind="abandon")

        assert [(each.place, each.tokens.count) for each in failed.tokens.others] == [(flow.id, 1)]
        assert flow.results() == {"1": FAILED}


def test_spread_gets_a_token_when_nothing_is_left_behind_it(
    protocol: Protocol, queue: str, request_id: str
) -> None:
    flow = FlowByHand(protocol, queue, request_id, "spread,map", {2: {"window": "2 parts"}}).load(2)
    flow[1].run(children={1: [b"a", b"b", b"c"]})
    flow[2].run(2)
    # Half of the window is free, but a part has three children.
    assert flow[1].claim()[1].word == "empty"
    holder, grant = flow[2].claim()

    over = flow[2].pass_on(holder, grant.parts)

    assert [(each.place, each.tokens.count) for each in over.tokens.others] == [(flow.id, 1)]
    assert flow[1].claim()[1].word == "ok"


@pytest.mark.parametrize("kinds", ["spread,map", "spread,map,join", "spread,join", "spread,reduce"])
def test_many_parts_with_many_children_are_handed_over_at_once(
    protocol: Protocol, queue: str, request_id: str, kinds: str
) -> None:
    flow = FlowByHand(protocol, queue, request_id, kinds).load(12)
    holder, grant = flow[1].claim(12)

    flow[1].pass_on(holder, grant.parts, children={n: [b"%d" % n] * 1_000 for n in range(1, 13)})

    assert flow[1].meta("done") == "12"
    if kinds == "spread,map" or kinds.startswith("spread,map"):
        assert flow[2].meta("total") == "12000"
        assert flow[2].waiting()[-1] == "1@12/1000"
    else:
        inbox = flow[2].inbox()
        assert {name: inbox[name] for name in ("1/1", "9/1000", "12/1000")} == {
            "1/1": b"1", "9/1000": b"9", "12/1000": b"12",
        }  # fmt: skip
        assert sum(not name.endswith("/0") for name in inbox) == 12_000


class TestLikeFinish:
    def test_hold_eases_the_limit_of_what_is_handed_out(self, flow: FlowByHand) -> None:
        flow.load(5)
        holder, grant = flow[1].claim()
        other, held = flow[1].claim()
        flow[1].fail(other, held.parts[0].number, kind="hold", delay_ms=1)
        flow[1].set_meta(hold_ms=0)
        assert flow[1].meta("eased") == "1"

        over = flow[1].pass_on(holder, grant.parts, most=1)

        assert (over.word, over.counted, over.parts) == ("over", 1, [])

    def test_marks_of_a_part_are_forgotten_with_it(self, flow: FlowByHand) -> None:
        flow.load(2)
        holder, grant = flow[1].claim()
        flow[1].keep(holder, 1, b"outcomes", b"begun 0 1 0 1 0")

        flow[1].pass_on(holder, grant.parts)

        assert flow[1].redis.hgetall(flow[1].keys.partial) == {}
