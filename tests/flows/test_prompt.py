"""A flow on an idle fleet: nothing is asked twice, and a slot goes on with the next stage."""

from typing import Any

import pytest

from streamq import Client, Protocol
from streamq.errors import FleetTooOld
from streamq.flows.flow import Flow, Stage
from streamq.protocol import call
from streamq.protocol.replies import PassedPart, StageTokens, Token, Tokens
from streamq.queue import fleet as fleet_of
from streamq.queue.outcomes import PartDone
from streamq.queue.taker import Host, Invitation, Taker
from tests.conftest import FIRST_KIND
from tests.queue.test_holding import Diary
from tests.support.apps import flows
from tests.support.by_hand import CAN_RUN, HANDLER
from tests.support.fleet import Fleet
from tests.support.flow_by_hand import FlowByHand
from tests.support.waiting import wait_until

pytestmark = [FIRST_KIND]


def host(protocol: Protocol, queue: str) -> Taker[str]:
    """A host that has the handlers a and b, and serves levels 10 to 50."""
    own = Host(
        name="host",
        queue=queue,
        levels=tuple(range(10, 51)),
        offers={"a": "parts a", "b": "parts b"},
        lease_ms=20_000,
        quantum_s=0.05,
    )
    return Taker(protocol, own, lambda *_: "", lambda _: None)


def stage(place: str, to: str, queue: str, count: int = 1, look_ms: int = 0) -> StageTokens:
    return StageTokens(place, queue, Tokens(count, to, look_ms))


class TestKeptToken:
    def test_is_for_a_later_stage_and_the_rest_is_pushed(
        self, protocol: Protocol, queue: str
    ) -> None:
        before, after = stage("f/2", "a:50", queue), stage("f/4", "b:50", queue, 3)
        tokens = Tokens(1, "a:50", 7, (before, after))

        kept, rest = host(protocol, queue).keep_one("f/3", tokens)

        assert kept == Token("f/4", "b", 50)
        assert rest == Tokens(1, "a:50", 7, (before, stage("f/4", "b:50", queue, 2)))

    def test_last_one_leaves_the_look_to_be_registered(
        self, protocol: Protocol, queue: str
    ) -> None:
        mine = host(protocol, queue)
        one = Tokens(others=(stage("f/2", "a:50", queue),))
        assert mine.keep_one("f", one) == (Token("f/2", "a", 50), Tokens())
        look = Tokens(others=(stage("f/2", "a:50", queue, 1, 99),))
        assert mine.keep_one("f", look)[1].others == (stage("f/2", "a:50", queue, 0, 99),)

    @pytest.mark.parametrize(
        ("place", "to", "elsewhere", "count"),
        [
            ("f/2", "a:50", "", 1),
            ("f/4", "c:50", "", 1),
            ("f/4", "a:09", "", 1),
            ("f/4", "a:50", "x", 1),
            ("f/4", "a:50", "", 0),
        ],
        ids=["an earlier stage", "a handler", "a level", "a queue", "none"],
    )
    def test_is_none_that_the_host_could_not_take(
        self, protocol: Protocol, queue: str, place: str, to: str, elsewhere: str, count: int
    ) -> None:
        tokens = Tokens(others=(stage(place, to, queue + elsewhere, count),))

        assert host(protocol, queue).keep_one("f/3", tokens) == (None, tokens)


@pytest.mark.parametrize("slots", ["1", "3"])
def test_slot_that_hands_a_part_over_runs_it(
    client: Client, protocol: Protocol, fleet: Fleet, queue: str, slots: str
) -> None:
    fleet.ready("-p", "1", "-c", slots, target="flows:app")

    def goes_on() -> bool:
        """Whether tokens were pushed for the first stage only: no other list came into use."""
        protocol.connection.call("DEL", protocol.queue_keys(queue).used)
        assert client.submit(["a"], flow=flows.reduced, queue=queue).wait(30).state == "done"
        handlers = ("letters", "code", "merge", "total")
        return protocol.used_lists(queue, handlers) == frozenset({"letters:50"})

    # At first the process may not wait for tokens yet.
    wait_until(goes_on, 30)


def waiting(redis: Any, nodes: list[Any]) -> set[str]:
    """Ids of the connections that wait for a token. Those of one socket have the same address."""
    each = (redis.client_list(target_nodes=node) if node else redis.client_list() for node in nodes)
    return {one["id"] for found in each for one in found if one["cmd"] == "brpop"}


def test_request_of_a_better_level_waits_for_a_part_and_not_for_all_stages(
    client: Client, protocol: Protocol, fleet: Fleet, queue: str
) -> None:
    chain = Flow("chain", [Stage(kind="map", handler="nap")] * 4)
    redis = protocol.connection.redis
    nodes = redis.get_primaries() if protocol.connection.is_cluster else [None]
    before = waiting(redis, nodes)
    pool = fleet.ready("-p", "1", "-c", "1")
    wait_until(lambda: waiting(redis, nodes) - before or pool.poll() is not None, 15)
    assert pool.poll() is None, fleet.errors(pool)
    slow = client.submit([0.3], flow=chain, queue=queue)
    wait_until(lambda: fleet.notes("S", slow.id))

    urgent = client.submit([0.0], handler="nap", queue=queue, level=0)

    assert {each.wait(30).state for each in (slow, urgent)} == {"done"}
    order = [note.request for note in fleet.notes("S") if note.request in (slow.id, urgent.id)]
    assert order == [slow.id, urgent.id, slow.id, slow.id, slow.id]


@pytest.mark.parametrize("is_prompt", [True, False])
def test_token_is_kept_only_if_nothing_else_waited(
    protocol: Protocol, queue: str, request_id: str, is_prompt: bool
) -> None:
    flow = FlowByHand(protocol, queue, request_id, "map,map").load(1)
    own = Host(
        name="host", queue=queue, levels=tuple(range(100)), offers={HANDLER: CAN_RUN[0]},
        lease_ms=20_000, quantum_s=0.05,
    )  # fmt: skip
    mine = Taker(protocol, own, lambda *_: "", lambda _: None)
    claimed = mine.claim(Invitation(Token(flow.id, HANDLER, 50), was_waiting=False), Diary())
    assert claimed is not None
    lease, (part,) = claimed.lease, claimed.grant.parts
    lease.keep_one = mine.keep_one if is_prompt else None
    lease.record(part, PartDone(b"x", 1, PassedPart(part.number, "1", ["1@1"], [b"x"], 1)))

    lease.finish(0, is_alone=True)

    pushed = protocol.connection.call(
        "LRANGE", f"{protocol.queue_keys(queue).tokens}{HANDLER}:50", 0, -1
    )
    if is_prompt:
        assert (lease.follow, pushed) == (Token(flow[2].id, HANDLER, 50), [])
    else:
        assert (lease.follow, pushed) == (None, [flow[2].id.encode()])


class TestRoundTrips:
    @pytest.fixture
    def sent(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The scripts that are called."""
        names: list[str] = []
        words = call.Call.words

        def noted(self: call.Call[Any]) -> Any:
            names.append(self.script)
            return words(self)

        monkeypatch.setattr(call.Call, "words", noted)
        return names

    def test_small_flow_wakes_its_first_worker_with_its_submission(
        self, client: Client, protocol: Protocol, queue: str, sent: list[str]
    ) -> None:
        for _ in range(2):
            sent.clear()
            client.submit(["ab"], flow=flows.maps, queue=queue)
            assert sent == ["mint", "mint", "open", "lay", "append", "seal", "mint"]
        assert protocol.connection.call("LLEN", f"{protocol.queue_keys(queue).tokens}shout:50") == 2

    def test_claim_of_the_next_flow_of_a_handler_is_not_refused(
        self, client: Client, protocol: Protocol, queue: str, sent: list[str]
    ) -> None:
        """That a request is a flow is guessed from the last of its handler, right or wrong."""
        if protocol.connection.is_cluster:
            pytest.skip("calls are repeated there until each node has the scripts")
        two = Flow("two", [Stage(kind="map", handler="a"), Stage(kind="map", handler="b")])
        three = Flow("three", [*two.stages, Stage(kind="map", handler="b")])
        mine = host(Protocol(protocol.connection), queue)
        book = Diary()

        def claim(**meant: Any) -> int:
            """Claim a part of a new request, and finish it. Returns how many calls of claim."""
            request = client.submit([b"x"], queue=queue, **meant)
            sent.clear()
            token = Token(request.id, "a", 50)
            claimed = mine.claim(Invitation(token, was_waiting=False), book)
            assert claimed is not None
            lease, (part,) = claimed.lease, claimed.grant.parts
            passed = None
            if lease.facts:
                passed = PassedPart(part.number, "1", ["1@1"], [b"x"], 1)
            lease.record(part, PartDone(b"x", 1, passed))
            assert lease.finish(0, is_alone=True).counted == 1
            return sent.count("claim")

        assert claim(flow=two) == 2
        assert claim(flow=two) == 1
        assert claim(flow=three) == 1
        assert claim(handler="a") == 1
        assert claim(flow=two) == 1

    def test_workers_are_looked_at_once_in_a_second(
        self, client: Client, protocol: Protocol, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client.submit(["ab"], flow=flows.maps, queue=queue)
        protocol.beat(queue, "old", 60_000, b'{"name":"old","version":"0.9"}')
        client.submit(["ab"], flow=flows.maps, queue=queue)

        monkeypatch.setattr(fleet_of, "_GOOD_FOR_S", 0.0)
        for _ in range(2):
            with pytest.raises(FleetTooOld):
                client.submit(["ab"], flow=flows.maps, queue=queue)


def test_groups_are_counted_only_where_there_is_a_join(
    client: Client, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def counted(_: Protocol, request_id: str) -> tuple[int, int]:
        asked.append(request_id)
        return 0, 0

    monkeypatch.setattr(Protocol, "group_counts", counted)
    requests = [
        client.submit(["ab"], flow=each, queue=queue) for each in (flows.maps, flows.strict)
    ]

    assert [request.status().groups for request in requests] == [{"open": 0, "blocked": 0}] * 2
    assert asked == [requests[1].id]
