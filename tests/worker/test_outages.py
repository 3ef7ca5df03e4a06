"""Servers and nodes that hang or go away for longer than a lease: nobody pays for it.

No part may be charged with a crash, run twice or be stopped, for nobody has died.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from streamq import Client, Connection, Janitor, Protocol, Request
from streamq.protocol.keys import QueueKeys, RequestKeys, token_list_of
from streamq.protocol.replies import Audit
from streamq.servers.local import LocalServer
from streamq.servers.local_cluster import LocalCluster
from tests.support.fleet import Fleet
from tests.support.waiting import is_alive, wait_until

JANITOR = [sys.executable, "-m", "streamq.cli", "janitor"]
LEASE_S = 2.0
AWAY_S = 4.0
PART_S = 12.0


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Three primaries. One that hangs is neither replaced nor missed by the others."""
    with LocalCluster.start(primaries=3, replicas=0, node_timeout_ms=60_000) as cluster:
        yield cluster


@pytest.fixture
def fleet_on(queue: str, tmp_path: Path) -> Iterator[Callable[[str], Fleet]]:
    """Pools on a server of the test's own."""
    fleets: list[Fleet] = []

    def fleet_on(url: str) -> Fleet:
        fleets.append(Fleet(url, queue, tmp_path))
        return fleets[-1]

    yield fleet_on
    for fleet in fleets:
        fleet.end()


def by_node(cluster: LocalCluster, client: Client, queue: str) -> dict[int, Request]:
    """A request of one long part on each node, by the port of the node."""
    found: dict[int, Request] = {}
    redis = client._protocol.connection.redis
    number = 0
    while len(found) < len(cluster.nodes):
        number += 1
        request_id = f"{queue}-{number}"
        port = redis.get_node_from_key(RequestKeys(request_id).meta).port
        if port not in found:
            found[port] = client.submit([PART_S], handler="nap", queue=queue, id=request_id)
    return found


def crashes(protocol: Protocol, request: Request) -> int:
    """How many crashes the parts of a request were charged with so far."""
    tries = protocol.connection.redis.hvals(RequestKeys(request.id).tries)
    return sum(int(text.split()[1]) for text in tries)


def assert_unharmed(
    fleet: Fleet, protocol: Protocol, requests: list[Request], pids: set[int]
) -> None:
    """See the requests to their end: each part was started once, and nobody was to blame."""
    while any(request.status().state.is_live for request in requests):
        assert [crashes(protocol, request) for request in requests] == [0] * len(requests)
        time.sleep(0.1)
    for request in requests:
        status = request.status()
        assert (status.parts.failed, status.parts.done) == (0, status.parts.total)
        assert len(fleet.notes("S", request.id)) == status.parts.total
    assert all(map(is_alive, pids))


def remaining_ms(protocol: Protocol, request: Request) -> int:
    """How long the only lease of a request stands without another renewal."""
    leases = protocol.connection.redis.zrange(
        RequestKeys(request.id).leases, 0, -1, withscores=True
    )
    return int(leases[0][1]) - protocol.inspect(request.id).count("now_ms")


@pytest.mark.parametrize("is_of_queue", [False, True])
def test_node_that_hangs_costs_no_lease_of_the_others(
    cluster: LocalCluster, queue: str, fleet_on: Callable[[str], Fleet], is_of_queue: bool
) -> None:
    with closing(Connection(cluster.url)) as connection, Client(cluster.url) as client:
        protocol, fleet = Protocol(connection), fleet_on(cluster.url)
        requests = by_node(cluster, client, queue)
        pool = fleet.ready("-c", "3", "--lease", f"{LEASE_S:g}s")
        wait_until(lambda: len(fleet.notes("S")) == 3, 10)
        pids = {pool.pid, *fleet.children(pool)}
        key = f"sq:{{q:{queue}}}:due"
        home = connection.redis.get_node_from_key(key).port
        hung = next(node for node in cluster.nodes if (node.port == home) is is_of_queue)
        healthy = [request for port, request in requests.items() if port != hung.port]

        os.kill(hung.pid, signal.SIGSTOP)
        try:
            end = time.monotonic() + 3 * LEASE_S
            while time.monotonic() < end:
                left = [remaining_ms(protocol, request) for request in healthy]
                assert min(left) > 0, "it was renewed in time"
                time.sleep(0.05)
        finally:
            os.kill(hung.pid, signal.SIGCONT)

        assert_unharmed(fleet, protocol, list(requests.values()), pids)


def hang(server: LocalServer, _: Path) -> LocalServer:
    """Let the server hang for longer than a lease."""
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(AWAY_S)
    os.kill(server.pid, signal.SIGCONT)
    return server


def restart(server: LocalServer, home: Path) -> LocalServer:
    """Let the server be away for longer than a lease, and come back with what it wrote."""
    port = int(server.url.rpartition(":")[2])
    server.kill()
    server.stop()
    time.sleep(AWAY_S)
    return LocalServer.start(home, persist=True, port=port)


@pytest.mark.parametrize("fault", [hang, restart])
def test_server_away_for_longer_than_the_lease_harms_nobody(
    queue: str,
    tmp_path: Path,
    fleet_on: Callable[[str], Fleet],
    fault: Callable[[LocalServer, Path], LocalServer],
) -> None:
    home = tmp_path / "data"
    server = LocalServer.start(home, persist=True, port=0, options=[("appendfsync", "always")])
    with Client(server.url) as client, closing(Connection(server.url)) as connection:
        fleet = fleet_on(server.url)
        pools = [fleet.ready("-p", "2", "--lease", f"{LEASE_S:g}s") for _ in range(3)]
        request = client.submit([PART_S] * 5, handler="nap", queue=queue, limit=5)
        wait_until(lambda: len(fleet.notes("S")) == 5, 10)
        pids = {pid for pool in pools for pid in (pool.pid, *fleet.children(pool))}

        server = fault(server, home)

        assert_unharmed(fleet, Protocol(connection), [request], pids)
        said = "".join(map(fleet.errors, pools))
        assert "reaped" not in said
        assert not re.search(r"process \d+ ", said), "none is stopped or replaced"
    server.stop()


def test_queue_on_a_node_that_hangs_holds_up_no_other_of_a_janitor(
    cluster: LocalCluster, queue: str
) -> None:
    with closing(Connection(cluster.url)) as connection, Client(cluster.url) as client:
        redis = connection.redis

        def port_of(key: str) -> int:
            return int(redis.get_node_from_key(key).port)

        def name(kind: Callable[[str], str], *, on_hung: bool) -> str:
            names = (f"{queue}-{number}" for number in count())
            return next(each for each in names if (port_of(kind(each)) == hung.port) == on_hung)

        hung = cluster.nodes[0]
        away = name(lambda each: QueueKeys(each).due, on_hung=True)
        well = name(lambda each: QueueKeys(each).due, on_hung=False)
        request_id = name(lambda each: RequestKeys(each).meta, on_hung=False)
        client.submit([0.0], handler="nap", queue=well, id=request_id)
        tokens = QueueKeys(well, to=token_list_of("nap", 50)).tokens

        def lose_token(within_s: float) -> None:
            """A token that is lost is put back with the next look."""
            redis.unlink(tokens)
            redis.zadd(QueueKeys(well).due, {request_id: 1})
            wait_until(lambda: redis.llen(tokens), within_s)

        words = [*JANITOR, "--interval", "500ms", "--url", cluster.url]
        janitor = subprocess.Popen([*words, "--queue", away, "--queue", well])
        try:
            lose_token(30)
            os.kill(hung.pid, signal.SIGSTOP)
            try:
                for _ in range(4):
                    lose_token(8)  # a call to the node that hangs waits 10 s, and is repeated
            finally:
                os.kill(hung.pid, signal.SIGCONT)
        finally:
            janitor.terminate()
            assert janitor.wait(20) == 0


def test_sweep_waits_for_a_node_that_hangs_once(cluster: LocalCluster, queue: str) -> None:
    """Requests that are looked at together are not tried one by one if their node is away."""

    class Noting(Protocol):
        def audit(self, request_id: str, pushed: int = 0) -> Audit:
            one_by_one.append(request_id)
            return super().audit(request_id, pushed)

    one_by_one: list[str] = []
    url = f"{cluster.url}?socket_timeout=1"
    with closing(Connection(url)) as connection, Client(cluster.url) as client:
        protocol = Noting(connection)
        home = protocol.node_of_queue(queue)
        ids = [
            client.submit([0.0], handler="nap", queue=queue, id=f"{queue}-{number}").id
            for number in range(20)
        ]
        hung = next(node for node in cluster.nodes if not home.endswith(f":{node.port}"))
        away = [each for each in ids if protocol.node_of(each).endswith(f":{hung.port}")]
        assert 1 < len(away) < len(ids)
        for each in ids:
            connection.redis.zadd(QueueKeys(queue).due, {each: 1})

        os.kill(hung.pid, signal.SIGSTOP)
        try:
            Janitor(protocol, queue).sweep()
        finally:
            os.kill(hung.pid, signal.SIGCONT)

    assert not set(one_by_one) & set(away)
