"""An embedded cluster."""

import shutil
from pathlib import Path

import pytest
from redis import RedisCluster

from streamq.errors import ServerError
from streamq.servers import launcher
from streamq.servers.local_cluster import ClusterNode, LocalCluster
from tests.servers.common import ask, is_gone
from tests.support.waiting import wait_until

has_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server")


def view(node: ClusterNode) -> dict[int, str]:
    """The flags of every node by port, as one node sees them."""
    lines = launcher.ask_server(("127.0.0.1", node.port), "CLUSTER", "NODES").splitlines()
    words = [line.split() for line in lines]
    return {int(address.split("@")[0].split(":")[1]): flags for _, address, flags, *_ in words}


def key_count(node: ClusterNode) -> int:
    return int(launcher.ask_server(("127.0.0.1", node.port), "DBSIZE"))


@pytest.mark.parametrize("binary", [None, pytest.param("redis-server", marks=has_redis)])
def test_a_cluster_comes_up_fails_over_and_takes_a_node_back(binary: str | None) -> None:
    with LocalCluster.start(3, 1, node_timeout_ms=1500, binary=binary) as cluster:
        first, second, *_ = cluster.nodes
        began_as_replica = [node.port for node in cluster.nodes if node.role == "replica"]
        assert cluster.url.count("127.0.0.1:") == len(began_as_replica) == 3
        for node in cluster.nodes:
            seen = view(node)
            assert sum("master" in flags for flags in seen.values()) == 3
            assert [port for port in began_as_replica if "slave" in seen[port]] == began_as_replica
        with RedisCluster(host="127.0.0.1", port=first.port, decode_responses=True) as redis:
            for key in "abcdefgh":
                redis.set(key, key)
        # A primary that is killed takes with it what it has not sent yet.
        wait_until(lambda: sum(map(key_count, cluster.nodes[3:])) == 8)

        cluster.kill(first)
        wait_until(lambda: any("master" in view(second)[p] for p in began_as_replica), 10)
        again = cluster.restart(first)
        wait_until(lambda: "slave" in view(second)[first.port], 10)

        assert (again.port, again.pid in (n.pid for n in cluster.nodes)) == (first.port, True)
        with RedisCluster(host="127.0.0.1", port=second.port, decode_responses=True) as redis:
            assert [redis.get(key) for key in "abcdefgh"] == list("abcdefgh")

    assert all(is_gone(node.pid) for node in cluster.nodes)
    assert not cluster.directory.exists()


def test_a_cluster_without_replicas_keeps_a_given_directory(tmp_path: Path) -> None:
    with LocalCluster.start(2, 0, tmp_path, options=[("maxmemory", "50mb")]) as cluster:
        assert [node.role for node in cluster.nodes] == ["primary", "primary"]
        url = f"redis://127.0.0.1:{cluster.nodes[1].port}"
        assert ask(url, "CONFIG", "GET", "maxmemory") == {"maxmemory": str(50 << 20)}

    assert tmp_path.exists()
    with pytest.raises(ServerError, match="nodes of another cluster"):
        LocalCluster.start(2, 0, tmp_path)
