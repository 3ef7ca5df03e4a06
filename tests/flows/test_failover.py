"""A failover forgets the last moments, and numbers of a later stage come to be other items.

A replica is cut off and then takes over, as with asynchronous replication: what was acknowledged
since is gone. Holders go on with what they knew.
"""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from streamq import Connection, Protocol
from streamq.servers.local import LocalServer
from tests.conftest import ONE_KIND, start
from tests.flows.rules import scripts_without
from tests.support.flow_by_hand import FlowByHand
from tests.support.waiting import wait_until

pytestmark = [ONE_KIND]


@dataclass
class Pair:
    """A primary and its replica."""

    primary: Protocol
    replica: Protocol

    def cut_off(self) -> None:
        """Let the replica have everything up to now, and nothing from now on."""
        redis: Any = self.primary.connection.redis
        assert redis.wait(1, 5_000) == 1
        self.replica.connection.redis.execute_command("REPLICAOF", "NO", "ONE")

    def on_replica(self, flow: FlowByHand) -> FlowByHand:
        """The same flow, as it is in the replica, which has taken over."""
        other = FlowByHand(self.replica, flow.queue, flow.id, flow.kinds)
        for stage in other.stages:
            stage.calls = flow[stage.number].calls
        return other


@pytest.fixture
def pair(kind: str) -> Iterator[Pair]:
    """A primary and its replica, on a port of this machine."""
    if kind == "cluster":
        pytest.skip("two servers of their own are enough")
    first, second = start(kind), start(kind)
    assert isinstance(first, LocalServer) and isinstance(second, LocalServer)  # noqa: PT018
    protocols = [Protocol(Connection(each.url)) for each in (first, second)]
    redis: Any = protocols[0].connection.redis
    port = _free_port()
    redis.config_set("port", port)
    other: Any = protocols[1].connection.redis
    other.execute_command("REPLICAOF", "127.0.0.1", port)
    wait_until(lambda: other.info("replication").get("master_link_status") == "up", 20)
    yield Pair(*protocols)
    for protocol in protocols:
        protocol.connection.close()
    first.stop()
    second.stop()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def own_item(pair: Pair, queue: str, request_id: str) -> None:
    """F6: its lease is forgotten, and its number is another item that lies in retry."""
    flow = FlowByHand(pair.primary, queue, request_id).load(2)
    one, first = flow[1].claim()
    two, second = flow[1].claim()
    pair.cut_off()
    flow[1].pass_on(one, first.parts)
    slow, grant = flow[2].claim()
    flow = pair.on_replica(flow)
    flow[1].pass_on(two, second.parts)
    dead, _ = flow[2].claim()
    flow[2].expire(dead)
    flow[2].reap()

    flow[2].pass_on(slow, grant.parts, created_ms=int(flow[1].meta("created_ms")))

    assert_whole(flow, 2)


def no_gap(pair: Pair, queue: str, request_id: str) -> None:
    """F7: its lease stands, and its second batch is forgotten and another's item."""
    flow = FlowByHand(pair.primary, queue, request_id).load(3)
    flow[1].run()
    holder, first = flow[2].claim()
    two, second = flow[1].claim()
    three, third = flow[1].claim()
    pair.cut_off()
    flow[1].pass_on(two, second.parts)
    again = flow[2].pass_on(holder, first.parts, most=1)
    assert [part.number for part in again.parts] == [2]
    flow = pair.on_replica(flow)
    flow[1].pass_on(three, third.parts)
    flow[2].claim()

    flow[2].pass_on(holder, again.parts)

    assert_whole(flow, 3)


def assert_whole(flow: FlowByHand, count: int) -> None:
    """Everything runs to its end, and each item has its own result."""
    for stage in flow.stages:
        for holder in stage.leases():
            stage.expire(holder)
        stage.reap()
    flow.run_all()
    assert flow.states() == ["done", "done"]
    numbers = range(1, count + 1)
    assert flow.results() == {str(number): str(number).encode() for number in numbers}


CASES: dict[str, Callable[[Pair, str, str], None]] = {
    "F6 its own item": own_item,
    "F7 no gap": no_gap,
}


@pytest.mark.parametrize("rule", CASES)
def test_each_item_has_its_own_result_after_a_failover(
    rule: str, pair: Pair, queue: str, request_id: str
) -> None:
    CASES[rule](pair, queue, request_id)


@pytest.mark.parametrize("rule", CASES)
def test_without_the_check_it_has_not(rule: str, pair: Pair, queue: str, request_id: str) -> None:
    with scripts_without(rule), pytest.raises(AssertionError):
        CASES[rule](pair, queue, request_id)
