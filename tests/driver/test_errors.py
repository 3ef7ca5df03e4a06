"""From the driver's errors to ours."""

import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from redis import RedisCluster
from redis import exceptions as driver

from streamq import (
    Client,
    Connection,
    Protocol,
    ServerBusy,
    ServerError,
    ServerFull,
    ServerRefused,
    ServerUnreachable,
    ServerUnsafe,
)
from streamq.driver.errors import translating_driver_errors
from streamq.driver.url import mask_passwords_of_url
from streamq.servers.launcher import LOOPBACK
from streamq.servers.local import LocalServer
from tests.driver.common import PASSWORD, with_login
from tests.support.simulated import tokens
from tests.support.waiting import allowed_s, wait_until


class TestErrors:
    @pytest.mark.parametrize(
        "url",
        [
            f"redis://me:secret@{LOOPBACK}:1",
            f"redis+cluster://me:secret@{LOOPBACK}:1",
            f"redis+sentinel://me:secret@{LOOPBACK}:1/main",
            "unix://me:secret@/nowhere/s.sock",
        ],
    )
    def test_nobody_there_is_said_soon_and_without_the_password(self, url: str) -> None:
        begin = time.monotonic()

        with pytest.raises(ServerUnreachable) as failure:
            Client(url)

        assert time.monotonic() - begin < allowed_s(5)
        assert str(failure.value).startswith(f"{mask_passwords_of_url(url)} does not answer")
        assert "secret" not in str(failure.value)

    def test_blocking_call_to_somebody_silent_is_given_up_as_soon_as_the_url_says(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as silent:
            port = silent.getsockname()[1]
            protocol = Protocol(Connection(f"redis://{LOOPBACK}:{port}?socket_timeout=0.5"))
            begun = time.monotonic()

            with pytest.raises(ServerUnreachable):
                protocol.take("q", ("h",), 1)

            assert time.monotonic() - begun < allowed_s(5)

    def test_server_that_is_no_cluster(self, server: LocalServer) -> None:
        with pytest.raises(ServerUnreachable, match="as a cluster"):
            Client(server.url.replace("redis", "redis+cluster"))

    def test_password_is_asked_for(self, server: LocalServer, admin: Any) -> None:
        admin.config_set("requirepass", PASSWORD)
        try:
            with pytest.raises(ServerRefused, match="does not let us in"):
                Client(server.url)
            with pytest.raises(ServerRefused, match="does not let us in") as failure:
                Client(with_login(server.url, ":wrong"))
            assert "wrong@" not in str(failure.value)
            with Client(with_login(server.url, f":{quote(PASSWORD, safe='')}")) as client:
                assert client.list() == []
        finally:
            admin.config_set("requirepass", "")

    @pytest.mark.parametrize("rights", ["+info +cluster", "-@all"])
    def test_user_without_the_rights(self, server: LocalServer, admin: Any, rights: str) -> None:
        name = f"u{secrets.token_hex(4)}"
        admin.execute_command("ACL", "SETUSER", name, "on", ">pw", "~*", *rights.split())

        def look() -> None:
            with Client(with_login(server.url, f"{name}:pw")) as client:
                client.list()

        with pytest.raises(ServerRefused, match="does not let us do this"):
            look()

    def test_cluster_that_does_not_let_us_in(self, urls: Callable[[str], str]) -> None:
        with pytest.raises(ServerRefused, match="does not let us in") as failure:
            Client(with_login(urls("cluster"), "nobody:secret"))
        assert "secret" not in str(failure.value)

    def test_policy_that_drops_keys(self, server: LocalServer, admin: Any) -> None:
        admin.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(
                ServerUnsafe, match=r"is allkeys-lru.*CONFIG SET maxmemory-policy no"
            ):
                Client(server.url)
        finally:
            admin.config_set("maxmemory-policy", "noeviction")

    def test_policy_that_drops_keys_on_one_node(
        self, urls: Callable[[str], str], connections: Callable[[str], Connection]
    ) -> None:
        redis = connections("cluster").redis
        node = redis.get_primaries()[-1]
        redis.config_set("maxmemory-policy", "allkeys-random", target_nodes=node)
        try:
            with pytest.raises(ServerUnsafe, match="is allkeys-random"):
                Client(urls("cluster"))
        finally:
            redis.config_set("maxmemory-policy", "noeviction", target_nodes=node)
        Client(urls("cluster")).close()

    def test_replica_takes_no_writes(self, server: LocalServer, admin: Any) -> None:
        admin.replicaof(LOOPBACK, 1)
        try:
            with (
                Client(server.url) as client,
                pytest.raises(ServerBusy, match="read only"),
            ):
                client.submit([], handler="h", id="x")
        finally:
            admin.replicaof("NO", "ONE")

    def test_node_without_slots(self) -> None:
        with LocalServer.start(port=0, options=[("cluster-enabled", "yes")]) as node:
            with pytest.raises(ServerError):
                Client(node.url.replace("redis", "redis+cluster")).list()
            with Client(node.url) as client, pytest.raises(ServerBusy, match="is not ready"):
                client.list()

    def test_blocked_call_that_the_server_ends(self, protocol: Protocol, queue: str) -> None:
        raised: list[Exception] = []

        def take() -> None:
            try:
                protocol.take(queue, ("h",), 5)
            except ServerBusy as error:
                raised.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        wait_until(lambda: _unblock_all(protocol.connection.redis))
        thread.join()

        assert "UNBLOCKED" in str(raised)
        assert tokens(protocol, queue) == []

    @pytest.mark.parametrize(
        ("error", "ours"),
        [
            (driver.ReadOnlyError("You can't write against a read only replica."), ServerBusy),
            (driver.BusyLoadingError("Redis is loading the dataset in memory"), ServerBusy),
            (driver.ClusterDownError("CLUSTERDOWN The cluster is down"), ServerBusy),
            (driver.MasterDownError("Link with MASTER is down"), ServerBusy),
            (driver.TryAgainError("Multiple keys request during rehashing of slot"), ServerBusy),
            (driver.MovedError("1 127.0.0.1:7"), ServerBusy),
            (driver.SlotNotCoveredError("Slot 7 is not covered"), ServerBusy),
            (driver.ClusterError("TTL exhausted."), ServerBusy),
            (driver.ResponseError("UNBLOCKED client unblocked via CLIENT UNBLOCK"), ServerBusy),
            (driver.ResponseError("MISCONF Errors writing to the AOF file"), ServerBusy),
            (driver.ResponseError("NOREPLICAS Not enough good replicas to write."), ServerBusy),
            (driver.ResponseError("BUSY Redis is busy running a script"), ServerBusy),
            (driver.OutOfMemoryError("command not allowed when used memory"), ServerFull),
            (driver.ResponseError("OOM command not allowed"), ServerFull),
            (driver.AuthenticationError("Authentication required."), ServerRefused),
            (driver.ResponseError("NOAUTH Authentication required."), ServerRefused),
            (driver.ResponseError("WRONGPASS invalid username-password pair"), ServerRefused),
            (driver.NoPermissionError("this user has no permissions"), ServerRefused),
            (driver.ResponseError("NOPERM this user has no permissions"), ServerRefused),
            (driver.ConnectionError("Connection closed by server."), ServerUnreachable),
            (driver.TimeoutError("Timeout reading from socket"), ServerUnreachable),
            (driver.RedisClusterException("cannot be connected"), ServerUnreachable),
            (ConnectionResetError("reset"), ServerUnreachable),
        ],
        ids=lambda value: str(value)[:30] if isinstance(value, Exception) else value.__name__,
    )
    def test_each_error_of_the_driver_has_its_meaning(
        self, error: Exception, ours: type[ServerError]
    ) -> None:
        with pytest.raises(ServerError) as failure, translating_driver_errors("redis://h"):
            raise error

        assert type(failure.value) is ours
        assert str(failure.value).startswith("redis://h ")
        assert str(error) in str(failure.value)

    def test_an_error_nobody_can_act_on_stays_as_it_is(self) -> None:
        with (
            pytest.raises(driver.ResponseError, match="ERR unknown"),
            translating_driver_errors("redis://h"),
        ):
            raise driver.ResponseError("ERR unknown command")


def _unblock_all(redis: Any) -> bool:
    """End blocked calls with an error. Says whether there were any."""
    nodes = [redis]
    if isinstance(redis, RedisCluster):
        primaries = redis.get_primaries()  # type: ignore[no-untyped-call]
        nodes = [redis.get_redis_connection(node) for node in primaries]
    blocked = [(node, c["id"]) for node in nodes for c in node.client_list() if c["cmd"] == "brpop"]
    return any(node.client_unblock(int(id_), error=True) for node, id_ in blocked)
