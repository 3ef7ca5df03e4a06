"""From a URL to a server."""

import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from redis import RedisCluster

from streamq import (
    Client,
    Connection,
    ServerUnreachable,
)
from streamq.servers.local import LocalServer
from tests.driver.common import connected, sentinel_for


class TestServers:
    @pytest.mark.parametrize("scheme", ["redis", "valkey"])
    def test_single_server(self, server: LocalServer, scheme: str) -> None:
        with connected(server.url.replace("redis", scheme)) as connection:
            connection.check()
            assert connection.redis.ping()

    @pytest.mark.parametrize(
        "words",
        [
            ["BRPOP", "sq:{q:a}:tokens:00", "sq:{q:a}:tokens:01", 1],
            ["EVALSHA", "0" * 40, 2, "sq:{r:b}:meta", "sq:{r:b}:parts", "argument"],
            ["ZSCORE", "sq:{q:c}:open", "b"],
        ],
    )
    def test_a_call_goes_where_the_driver_would_send_it(
        self, words: list[Any], connections: Callable[[str], Connection]
    ) -> None:
        """The slot of the first key is that of all: only that one is worked out."""
        cluster = connections("cluster").redis

        assert cluster.determine_slot(*words) == RedisCluster.determine_slot(cluster, *words)

    def test_cluster_under_both_names(self, urls: Callable[[str], str]) -> None:
        for scheme in ("redis+cluster", "valkey+cluster"):
            with connected(urls("cluster").replace("redis+cluster", scheme)) as connection:
                connection.check()
                assert len(connection.redis.get_primaries()) == 3

    def test_local_server_lives_as_long_as_the_connection(self) -> None:
        with connected("local://") as first, connected("local://") as second:
            first.redis.set("k", 1)
            assert second.redis.get("k") is None
            first.check()

    def test_local_server_with_a_directory_keeps_what_it_has(self, tmp_path: Path) -> None:
        url = f"local://{quote(str(tmp_path / 'my data'))}"
        with connected(url) as connection:
            connection.redis.set("k", 1)

        with connected(url) as connection:
            assert connection.redis.get("k") == b"1"

    def test_sentinel_names_the_primary(self, server: LocalServer) -> None:
        with sentinel_for(server, "main") as address:
            with Client(f"redis+sentinel://{address}/main") as client:
                assert client.submit([], handler="h").status().state == "done"
            with pytest.raises(ServerUnreachable, match="other"):
                Client(f"redis+sentinel://{address}/other")

    def test_replicas_are_counted_also_by_a_connection_that_never_wrote(
        self, urls: Callable[[str], str], connections: Callable[[str], Connection]
    ) -> None:
        redis, key = connections("cluster").redis, f"k{secrets.token_hex(4)}"
        at = {"target_nodes": redis.get_node_from_key(key)}
        where = redis.info("replication", **at)["slave0"]
        with connected(f"redis://{where['ip']}:{where['port']}") as replica:
            pid = replica.redis.info("server")["process_id"]

        with connected(urls("cluster")) as fresh:
            os.kill(pid, signal.SIGSTOP)
            try:
                redis.set(key, 1, ex=60)
                behind = fresh.replicas(key, 1, 0.2)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert (behind, fresh.replicas(key, 1, 2)) == (0, 1)

    def test_blocking_calls_share_few_clients(self, server: LocalServer) -> None:
        with connected(server.url) as connection:
            clients = {connection.blocking(1 + i / 100) for i in range(1, 100)}

        assert len(clients) == 1
