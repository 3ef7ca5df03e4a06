"""``Request.find``: where one item is, at each moment of its way, and what it came to."""

from collections.abc import Callable, Iterator

import pytest

from streamq import Client, InvalidValue, Item, Protocol, Request
from streamq.errors import RequestUnknown
from tests.conftest import FIRST_KIND
from tests.support.apps import flows
from tests.support.by_hand import RequestByHand
from tests.support.fleet import Fleet
from tests.support.flow_by_hand import FlowByHand

ORDERS = [{"sku": f"B-{n}", "user": {"id": n % 2}} for n in range(1, 7)]


def told(item: Item | None) -> list[dict[str, int]]:
    """How many parts of the item are in which state, stage by stage."""
    assert item
    return [stage.counts for stage in item.stages]


class TestByHand:
    """A flow that is moved by hand, so that it can be looked at at each step."""

    @pytest.fixture
    def flow(self, protocol: Protocol, queue: str, request_id: str) -> FlowByHand:
        kinds = "map,spread,map,join,map"
        return FlowByHand(protocol, queue, request_id, kinds, follow="track").load(2)

    def test_each_step_of_an_item(self, flow: FlowByHand) -> None:
        request = Request(flow.protocol, flow.id)

        def seen(item: str = "1") -> list[dict[str, int]]:
            return told(request.find(item=item))

        nowhere = {"": 1}
        assert seen() == [{"waiting": 1}, nowhere, {}, nowhere, nowhere]
        holder, grant = flow[1].claim(1)
        assert seen() == [{"running": 1}, nowhere, {}, nowhere, nowhere]
        flow[1].pass_on(holder, grant.parts)
        assert seen() == [{"done": 1}, {"waiting": 1}, {}, nowhere, nowhere]
        flow[2].run(children={1: [b"a", b"b", b"c"]})
        assert seen() == [{"done": 1}, {"done": 1}, {"waiting": 3}, {"waits": 1}, nowhere]
        flow[3].run()
        holder, grant = flow[3].claim(1)
        flow[3].fail(holder, grant.parts[0].number, delay_ms=60_000)
        item = request.find(item="1")
        assert told(item)[2] == {"done": 1, "retry": 1, "waiting": 1}
        assert item
        assert (item.stage, item.where) == ("h", "retry")
        assert (item.stages[3].waits_for, item.stages[3].children) == (2, 3)
        late = item.stages[2].parts[1]
        assert (late.item, late.part, late.attempt, bool(late.due_ms)) == ("1/2", 2, 2, True)
        assert told(request.find(item="1/3"))[2] == {"waiting": 1}
        flow[3].run()
        flow[3].redis.zadd(flow[3].keys.retry, {"2": 2})
        flow[3].run()
        assert seen() == [{"done": 1}, {"done": 1}, {"done": 3}, {"waiting": 1}, nowhere]
        flow[4].run()
        assert seen() == [{"done": 1}, {"done": 1}, {"done": 3}, {"done": 1}, {"waiting": 1}]
        flow[5].run()
        assert seen() == [{"done": 1}] * 2 + [{"done": 3}, {"done": 1}, {"done": 1}]
        assert seen("2") == [{"waiting": 1}, nowhere, {}, nowhere, nowhere]
        assert request.find(item="3") is None
        for wrong in ("x", "0x1", "1/", "/1", "1/x"):
            with pytest.raises(InvalidValue, match="is no item"):
                request.find(item=wrong)

    def test_item_that_dropped_out_and_one_that_failed(self, flow: FlowByHand) -> None:
        request = Request(flow.protocol, flow.id)
        flow[1].run(children={1: []})
        holder, grant = flow[1].claim(1)
        flow[1].fail(holder, grant.parts[0].number, kind="abandon")

        assert told(request.find(item="1"))[:2] == [{"dropped": 1}, {"": 1}]
        failed = request.find(item="2")
        assert failed
        assert (failed.where, failed.stages[0].parts[0].error) == ("failed", "ValueError")

    def test_item_is_found_under_the_name_that_a_redrive_gives_it(self, flow: FlowByHand) -> None:
        request = Request(flow.protocol, flow.id)
        flow[1].run(2)
        holder, grant = flow[2].claim(1)
        flow[2].fail(holder, grant.parts[0].number, kind="abandon")
        assert told(request.find(item="1"))[1] == {"failed": 1}

        assert request.retry() == 1
        flow[2].run(children={1: [b"a", b"b"]})

        assert told(request.find(item="1"))[1:4] == [{"done": 1}, {"waiting": 2}, {"waits": 1}]
        flow[3].run(2)
        flow[4].run()
        assert told(request.find(item="1"))[2:] == [{"done": 2}, {"done": 1}, {"waiting": 1}]

    def test_reduce_with_a_width_is_where_its_final_part_is(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        stages = {2: {"width": 2}}
        flow = FlowByHand(protocol, queue, request_id, "map,reduce", stages, follow="track").load(2)
        flow[1].run(2)
        flow[2].run()
        request = Request(protocol, request_id)
        # Part 1 is done: it had the first two results.
        assert told(request.find(item="1"))[1] == {"waiting": 1}

        flow.run_all()

        assert told(request.find(item="1"))[1] == {"done": 1}

    def test_load_that_goes_on_gives_numbers_to_other_keys(
        self, client: Client, queue: str, request_id: str
    ) -> None:
        asked = {"handler": "h", "queue": queue, "id": request_id, "key": "sku"}

        def stopped() -> Iterator[dict[str, str]]:
            yield {"sku": "a"}
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            client.submit(stopped(), **asked)  # type: ignore[arg-type]
        # It told of two more, and died before it added them.
        client._protocol.index(request_id, [2, "b", 3, "c"])
        request = client.submit([{"sku": "a"}, {"sku": "x"}, {"sku": "b"}], **asked)  # type: ignore[arg-type]

        found = {key: request.find(key) for key in ("a", "x", "b", "c")}
        assert {key: item and item.item for key, item in found.items()} == {
            "a": "1", "x": "2", "b": "3", "c": None,
        }  # fmt: skip

    def test_purge_leaves_nothing(self, protocol: Protocol, queue: str, request_id: str) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map", follow="trace", key="k").load(1)
        protocol.index(request_id, [1, "a"])
        flow.run_all()
        redis, keys = flow[1].redis, flow[1].keys
        assert [redis.exists(key) for key in (keys.keys, keys.items, keys.trace)] == [1, 1, 1]

        Request(protocol, request_id).purge()

        assert [redis.exists(key) for key in keys.all().values()] == [0] * len(keys.all())

    def test_nothing_is_kept_where_nobody_asked(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = FlowByHand(protocol, queue, request_id, "map,map").load(2)
        flow[1].run()
        redis, keys = flow[1].redis, flow[1].keys

        assert [redis.exists(key) for key in (keys.keys, keys.items, keys.trace)] == [0, 0, 0]
        seen = Request(protocol, request_id).find(item="1")
        assert told(seen) == [{"done": 1}, {"unknown": 1}]
        with pytest.raises(InvalidValue, match="submitted without a key"):
            Request(protocol, request_id).find("1")


class TestKeys:
    def test_of_a_plain_request(
        self, client: Client, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        request = client.submit(ORDERS, handler="h", queue=queue, id=request_id, key="sku")
        by_hand = RequestByHand(protocol, queue, request_id)
        holder, _ = by_hand.claim(2)
        by_hand.finish(holder, [1])

        found = [request.find(f"B-{n}") for n in (1, 2, 3)]
        assert [each and (each.item, each.where) for each in found] == [
            ("1", "done"),
            ("2", "retry"),
            ("3", "waiting"),
        ]
        assert request.find("B-99") is None
        assert told(found[0]) == [{"done": 1}]

    def test_earlier_versions_leave_it_alone(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        """Their purge would leave the index behind for ever."""
        request = client.submit(ORDERS, handler="h", queue=queue, key="sku")

        meta = protocol.keys(request.id).meta
        assert protocol.connection.redis.hget(meta, "protocol") == b"2"

    def test_by_a_path_a_number_the_payload_itself_and_a_function(
        self, client: Client, queue: str
    ) -> None:
        by_path = client.submit(ORDERS, handler="h", queue=queue, key="user.id")
        item = by_path.find(1)
        assert item
        assert (item.item, item.again, item.value) == ("1", ["3", "5"], "1")
        whole = client.submit(["a", "b" * 500], handler="h", queue=queue, key=".")
        assert [each and each.item for each in (whole.find("a"), whole.find("b" * 500))] == [
            "1",
            "2",
        ]
        made = client.submit(ORDERS, handler="h", queue=queue, key=lambda order: order["sku"][2:])
        assert (made.find("4") or made.find("none")).item == "4"  # type: ignore[union-attr]

    def test_of_a_submission_that_is_repeated(
        self, client: Client, queue: str, request_id: str, protocol: Protocol
    ) -> None:
        for _ in range(2):
            request = client.submit(
                iter(ORDERS), handler="h", queue=queue, id=request_id, key="sku"
            )
        item = request.find("B-2")
        assert item
        assert (item.item, item.again) == ("2", [])

    def test_so_many_parts_of_a_key_are_kept(
        self, client: Client, queue: str, protocol: Protocol
    ) -> None:
        request = client.submit(["x"] * 300, handler="h", queue=queue, key=".")
        item = request.find("x")
        assert item
        assert item.again == [str(n) for n in range(2, 101)]

    def test_what_cannot_be_is_refused_and_leaves_nothing(
        self, client: Client, queue: str, request_id: str
    ) -> None:
        for options, says in (
            ({"key": "price"}, "the first record has no field 'price' to find it by"),
            ({"key": "a=b"}, "has a = in it"),
            ({"key": "x" * 65}, "is no name of a field"),
            ({"track": True}, "track and trace are for flows"),
        ):
            with pytest.raises(InvalidValue, match=says):
                client.submit(ORDERS, handler="h", queue=queue, id=request_id, **options)
            with pytest.raises(RequestUnknown):
                client.get(request_id)

    def test_index_of_a_request_that_is_gone(self, protocol: Protocol, request_id: str) -> None:
        with pytest.raises(RequestUnknown):
            protocol.index(request_id, [1, "a"])


@FIRST_KIND
@pytest.mark.parametrize("trace", [False, True])
def test_flow_that_workers_ran(client: Client, fleet: Fleet, queue: str, trace: bool) -> None:
    key: Callable[[str], str] = str.upper
    request = client.submit(
        ["ab", "c!d", "", "e"], flow=flows.reduced, queue=queue, key=key, trace=trace, retries=0
    )
    fleet.start("-c", "2", target="flows:app")
    request.wait(60)

    good, bad = request.find("AB"), request.find("C!D")
    assert told(good) == [{"done": 1}, {"done": 2}, {"done": 1}, {"done": 1}]
    assert told(bad) == [{"done": 1}, {"done": 2, "failed": 1}, {"done": 1}, {"done": 1}]
    assert good
    assert bad
    assert [part.error for part in bad.stages[1].parts] == ["", "Abandon", ""]
    if trace:
        values = [[part.result for part in stage.parts] for stage in good.stages[:3]]
        assert values == [[["a", "b"]], [97, 98], [{"word": "ab", "sum": 195, "failed": 0}]]
    assert good.stages[3].parts[0].result == ("[('ab', 195), ('c!d', 199), ('', 0), ('e', 101)] 0")
