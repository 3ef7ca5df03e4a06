"""From a URL to a server, and from the driver's errors to ours."""

import os
import secrets
import signal
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import hiredis
import pytest
from redis import RedisCluster
from redis import exceptions as driver
from redis.connection import SSLConnection

from streamq import (
    Client,
    Connection,
    InvalidValue,
    Protocol,
    ServerBusy,
    ServerError,
    ServerFull,
    ServerRefused,
    ServerUnreachable,
    ServerUnsafe,
)
from streamq.driver.errors import translating_driver_errors
from streamq.driver.lanes import Lane, pack
from streamq.driver.url import ServerURL, mask
from streamq.protocol.replies import Token, Tokens
from streamq.servers.launcher import LOOPBACK, Launcher, on_free_port
from streamq.servers.local import LocalServer, find_server
from tests.support.simulated import tokens
from tests.support.waiting import wait_until

#: Nothing a URL can hold as it is.
PASSWORD = "p@ss:/?#[%]&= ü"


@pytest.fixture(scope="module")
def server() -> Generator[LocalServer]:
    """A server on a port, whose settings these tests may change."""
    with LocalServer.start(port=0) as server:
        yield server


@pytest.fixture
def admin(server: LocalServer) -> Iterator[Any]:
    connection = Connection(server.url)
    yield connection.redis
    connection.close()


@contextmanager
def connected(url: str) -> Generator[Connection]:
    connection = Connection(url)
    try:
        yield connection
    finally:
        connection.close()


def with_login(url: str, login: str) -> str:
    return url.replace("://", f"://{login}@")


class TestUrl:
    @pytest.mark.parametrize(
        ("url", "kind", "is_tls"),
        [
            ("redis://h", "single", False),
            ("rediss://h", "single", True),
            ("valkey://h", "single", False),
            ("valkeys://h", "single", True),
            ("unix:///tmp/s", "unix", False),
            ("redis+cluster://h", "cluster", False),
            ("rediss+cluster://h", "cluster", True),
            ("valkey+cluster://h", "cluster", False),
            ("valkeys+cluster://h", "cluster", True),
            ("redis+sentinel://h/main", "sentinel", False),
            ("rediss+sentinel://h/main", "sentinel", True),
            ("valkey+sentinel://h/main", "sentinel", False),
            ("local://", "local", False),
            ("REDIS://h", "single", False),
        ],
    )
    def test_scheme_says_how_to_connect(self, url: str, kind: str, is_tls: bool) -> None:
        target = ServerURL(url)

        assert (target.kind, target.options.get("ssl", False)) == (kind, is_tls)

    @pytest.mark.parametrize(
        ("url", "hosts"),
        [
            ("redis://", [("localhost", 6379)]),
            ("redis://h:7", [("h", 7)]),
            ("redis://[::1]:7", [("::1", 7)]),
            ("redis+cluster://u:p@a:1,b:2,c", [("a", 1), ("b", 2), ("c", 6379)]),
            ("redis+sentinel://a,b:2/main", [("a", 26379), ("b", 2)]),
        ],
    )
    def test_hosts(self, url: str, hosts: list[tuple[str, int]]) -> None:
        assert ServerURL(url).hosts == hosts

    def test_service_and_database(self) -> None:
        sentinel = ServerURL("redis+sentinel://h/main/3")

        assert (sentinel.service, sentinel.options) == ("main", {"db": 3})
        assert ServerURL("redis://h/4").options == {"db": 4}
        assert ServerURL("unix:///tmp/s?db=5").options == {"db": 5}
        assert ServerURL("redis+cluster://h/0").options == {}

    @pytest.mark.parametrize(
        "url", ["redis://{}h", "redis+cluster://{}h", "redis+sentinel://{}h/main", "unix://{}/s"]
    )
    def test_login_is_percent_encoded(self, url: str) -> None:
        named = ServerURL(url.format(f"me%40home:{quote(PASSWORD, safe='')}@"))
        nameless = ServerURL(url.format(f":{quote(PASSWORD, safe='')}@"))

        assert named.options == {"username": "me@home", "password": PASSWORD}
        assert nameless.options == {"password": PASSWORD}

    def test_options_have_their_types(self) -> None:
        target = ServerURL("rediss://h?socket_timeout=3&ssl_check_hostname=false&client_name=me")

        assert target.options == {
            "ssl": True,
            "socket_timeout": 3.0,
            "ssl_check_hostname": False,
            "client_name": "me",
        }

    def test_driver_gets_what_the_url_says(self) -> None:
        with connected("rediss://me:pw@h:7/3?socket_timeout=3") as connection:
            pool = connection.redis.connection_pool
            blocking = connection.blocking(20).connection_pool

        assert pool.connection_class is SSLConnection
        wanted = {"host": "h", "port": 7, "db": 3, "username": "me", "password": "pw"}
        assert pool.connection_kwargs.items() >= (wanted | {"socket_timeout": 3.0}).items()
        assert blocking.connection_kwargs.items() >= wanted.items()
        assert blocking.connection_kwargs["socket_timeout"] > 20

    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("", "scheme"),
            ("localhost:6379", "scheme"),
            ("http://h", "no such scheme"),
            ("redis+ring://h", "no such scheme"),
            ("unix+cluster:///s", "no such scheme"),
            ("redis://h:port", "host or port"),
            ("redis://h:70000", "host or port"),
            ("redis+cluster://a:1,b:x", "host or port"),
            ("redis://[::1", "cannot be read"),
            ("redis://a,b", "several hosts"),
            ("redis://h/main", "number of a database"),
            ("redis+sentinel://h", "wants a service"),
            ("redis+sentinel://h/main/x", "number of a database"),
            ("redis+cluster://h/1", "database than 0"),
            ("unix://relative/s", "unix:///path"),
            ("unix://", "unix:///path"),
            ("redis://h?colour=red", "no such option"),
            ("redis://h?socket_timeout=soon", "socket_timeout"),
            ("redis://h?decode_responses=true", "no such option"),
        ],
    )
    def test_url_that_cannot_be(self, url: str, says: str) -> None:
        with pytest.raises(InvalidValue, match=says):
            Connection(url)

    @pytest.mark.parametrize("url", [None, 7, b"redis://h"], ids=repr)
    def test_url_that_is_no_text(self, url: Any) -> None:
        with pytest.raises(InvalidValue, match="a URL is text"):
            Connection(url)


class TestSecrets:
    @pytest.mark.parametrize(
        ("url", "masked"),
        [
            ("redis://h:7/3", "redis://h:7/3"),
            ("redis://me:secret@h:7/3", "redis://me:***@h:7/3"),
            ("redis://:secret@h", "redis://:***@h"),
            ("redis+cluster://me:secret@a:1,b:2", "redis+cluster://me:***@a:1,b:2"),
            ("redis://h?db=1&password=secret&x=1", "redis://h?db=1&password=***&x=1"),
            ("unix:///tmp/a@b.sock?password=secret", "unix:///tmp/a@b.sock?password=***"),
            ("unix://me:secret@/tmp/s", "unix://me:***@/tmp/s"),
            ("local://", "local://"),
        ],
    )
    def test_password_is_not_shown(self, url: str, masked: str) -> None:
        assert mask(url) == masked

    @pytest.mark.parametrize("between", [*"@:/?#[]%&= ", "://"])
    @pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel", "http", "unix"])
    def test_nor_one_that_should_have_been_encoded(self, scheme: str, between: str) -> None:
        url = f"{scheme}://me:topsecret{between}hushhush@h:x/main"

        with pytest.raises(InvalidValue) as failure:
            Connection(url)

        for text in (mask(url), str(failure.value), repr(failure.value)):
            assert "topsecret" not in text
            assert "hushhush" not in text

    @pytest.mark.parametrize(
        "url", ["me:secret@h", "redis:secret@h", "secret@h://x", "//:secret@h"]
    )
    def test_nor_one_in_what_is_no_url(self, url: str) -> None:
        with pytest.raises(InvalidValue) as failure:
            Connection(url)

        assert "secret@" not in str(failure.value)


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


class HurryError(BaseException):
    """Somebody is in a hurry."""


@contextmanager
def _taking(protocol: Protocol, queue: str) -> Generator[list[object]]:
    """A take of half a minute in a thread; what it came to."""
    came: list[object] = []

    def take() -> None:
        try:
            came.append(protocol.take(queue, ("h",), 30))
        except ServerError as error:
            came.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    yield came
    thread.join()


def _end_wait(protocol: Protocol, taken: list[object]) -> bool:
    protocol.connection.wake()
    return bool(taken)


def _left(connection: Connection, taken: list[object]) -> bool:
    connection.check_waits()
    return bool(taken)


class TestLanes:
    """Calls on connections that are kept: each gets its own answer, or an error."""

    def test_call_that_is_interrupted_leaves_no_answer_behind(self, server: LocalServer) -> None:
        def interrupt(*_: Any) -> None:
            raise HurryError

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with connected(server.url) as connection:
                connection.call_once("ECHO", "a")
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with pytest.raises(HurryError):
                    connection.pop(("never",), 1)

                assert connection.call_once("ECHO", "b") == b"b"
                assert connection.pop(("never",), 0.01) is None
        finally:
            signal.signal(signal.SIGALRM, before)

    def test_wait_can_be_ended_and_loses_nothing(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        with _taking(protocol, queue) as taken:
            wait_until(lambda: _end_wait(protocol, taken))

        assert taken == [None]
        # The connection is whole: what comes next is the answer to the next call.
        protocol.mint(queue, request_id, Tokens(1, "h:50"))
        assert protocol.take(queue, ("h",), 1) == Token(request_id, "h", 50)

    def test_wait_that_may_not_be_ended_is_hung_up(self, server: LocalServer, admin: Any) -> None:
        user = ("on", ">secret", "~*", "+@all", "-client|unblock")
        admin.execute_command("ACL", "SETUSER", "waits", *user)
        with connected(with_login(server.url, "waits:secret")) as connection:
            protocol = Protocol(connection)
            with _taking(protocol, "q") as taken:
                wait_until(lambda: _end_wait(protocol, taken))

            assert [type(each) for each in taken] == [ServerUnreachable]
            assert protocol.take("q", ("h",), 0.01) is None

    def test_wait_at_a_server_that_hangs_is_left(self) -> None:
        with LocalServer.start(port=0) as server, connected(server.url) as connection:
            protocol = Protocol(connection)
            with _taking(protocol, "q") as taken:
                wait_until(lambda: any(each.blocked for each in connection._lanes.values()))
                connection.check_waits()
                assert taken == []
                os.kill(server.pid, signal.SIGSTOP)
                begun = time.monotonic()
                try:
                    wait_until(lambda: _left(connection, taken), 20)
                finally:
                    os.kill(server.pid, signal.SIGCONT)
            assert [type(each) for each in taken] == [ServerUnreachable]
            assert time.monotonic() - begun < 9

    def test_refusal_is_the_answer_to_its_own_call(self, server: LocalServer) -> None:
        with connected(server.url) as connection:
            answers = connection.call_all([("ECHO", "a"), ("NONSENSE",), ("ECHO", "b")])

            assert [answers[0], answers[2]] == [b"a", b"b"]
            assert isinstance(answers[1], driver.ResponseError)
            with pytest.raises(driver.ResponseError):
                connection.call("NONSENSE")
            assert connection.call("ECHO", "c") == b"c"

    @pytest.mark.parametrize("method", ["call", "call_once"])
    def test_connection_that_the_server_has_closed_is_not_used(
        self, server: LocalServer, admin: Any, method: str
    ) -> None:
        with connected(server.url) as connection:
            call = getattr(connection, method)
            call("ECHO", "a")
            admin.client_kill_filter(_type="normal", skipme=True)

            assert call("ECHO", "b") == b"b"

    def test_connection_that_the_server_closes_just_then_is_renewed(
        self, server: LocalServer, admin: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with connected(server.url) as connection:
            connection.call_once("ECHO", "a")
            admin.client_kill_filter(_type="normal", skipme=True)
            # It was closed after the look at it, so sending is what finds out.
            monkeypatch.setattr(Lane, "is_usable", lambda _: True)
            lane = connection._lanes_for(1, ("ECHO",))._free[0]
            lane._socket.shutdown(socket.SHUT_WR)

            assert connection.call_once("ECHO", "b") == b"b"

    def test_threads_have_lanes_of_their_own(self, server: LocalServer) -> None:
        found = []

        def echo(word: str) -> None:
            for _ in range(100):
                found.append((word, connection.call("ECHO", word)))

        with connected(server.url) as connection:
            threads = [threading.Thread(target=echo, args=(str(n),)) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        assert len(found) == 800
        assert all(word.encode() == answer for word, answer in found)

    def test_lanes_that_are_kept_shut_nobody_out(self, server: LocalServer, admin: Any) -> None:
        with connected(server.url) as connection:
            admin.client_pause(500)
            threads = [threading.Thread(target=connection.call, args=("PING",)) for _ in range(120)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

            assert connection.redis.ping()

    def test_copy_of_the_process_has_lanes_of_its_own(self, server: LocalServer) -> None:
        with connected(server.url) as connection:
            connection.call("ECHO", "a")
            mine = connection.call("CLIENT", "ID")
            reader, writer = os.pipe()
            if (pid := os.fork()) == 0:
                os.write(writer, str(connection.call("CLIENT", "ID")).encode())
                os._exit(0)
            os.waitpid(pid, 0)

            assert int(os.read(reader, 20)) != mine
            assert connection.call("CLIENT", "ID") == mine
            os.close(reader)
            os.close(writer)

    def test_lane_to_a_former_primary_is_left(self, server: LocalServer) -> None:
        with LocalServer.start(port=0) as other, sentinel_for(server, "main") as address:
            host, port = other.url.rpartition("/")[2].split(":")
            with (
                connected(f"redis+sentinel://{address}/main") as connection,
                connected(f"redis://{address}") as sentinel,
            ):
                before = connection.call("CONFIG", "GET", "port")
                sentinel.redis.execute_command("SENTINEL REMOVE", "main")
                sentinel.redis.execute_command("SENTINEL MONITOR", "main", host, port, 1)
                connection.redis.ping()

                assert (
                    connection.call("CONFIG", "GET", "port") == [b"port", port.encode()] != before
                )

    def test_lane_to_one_that_is_no_primary_any_more_is_left(self) -> None:
        with (
            LocalServer.start(port=0) as former,
            LocalServer.start(port=0) as other,
            sentinel_for(former, "main") as address,
            connected(f"redis+sentinel://{address}/main") as connection,
            connected(f"redis://{address}") as sentinel,
            connected(former.url) as demoted,
        ):
            host, port = other.url.rpartition("/")[2].split(":")
            connection.call("SET", "a", "1")
            connection.pop(("never",), 0.01)
            demoted.redis.execute_command("REPLICAOF", host, port)
            sentinel.redis.execute_command("SENTINEL REMOVE", "main")
            sentinel.redis.execute_command("SENTINEL MONITOR", "main", host, port, 1)

            assert connection.call("SET", "a", "2")
            assert connection.pop(("never",), 0.01) is None
            assert connection.call("CONFIG", "GET", "port")[1] == port.encode()

    def test_limit_of_the_drivers_pool_does_not_count(self, server: LocalServer) -> None:
        with connected(f"{server.url}?max_connections=1") as connection:
            connection.call("ECHO", "a")

            assert connection.redis.ping()

    def test_nonsense_in_place_of_several_answers(self) -> None:
        with nonsense() as url, Client(url) as client, pytest.raises(ServerUnreachable):
            client.submit([1], handler="h")


@contextmanager
def nonsense() -> Generator[str]:
    """Where a PING is answered, and all else with what is no answer."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while heard := self.request.recv(65_536):
                self.request.sendall(b"+OK\r\n" if b"EVALSHA" not in heard else b"?\r\n")

    with socketserver.ThreadingTCPServer((LOOPBACK, 0), Answer) as speaker:
        speaker.daemon_threads = True
        threading.Thread(target=speaker.serve_forever).start()
        yield f"redis://{LOOPBACK}:{speaker.server_address[1]}"
        speaker.shutdown()


@contextmanager
def sentinel_for(server: LocalServer, service: str) -> Generator[str]:
    """A sentinel that watches a server, and its address."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        launcher = Launcher(home)
        stack.callback(launcher.stop)
        watched = server.url.rpartition(":")[2]

        def run(port: int) -> int:
            file = home / "sentinel.conf"
            file.write_text(
                f"port {port}\nbind {LOOPBACK}\ndir {home}\n"
                f"sentinel monitor {service} {LOOPBACK} {watched} 1\n"
            )
            launcher.run([str(find_server()), str(file), "--sentinel"], home, (LOOPBACK, port))
            return port

        yield f"{LOOPBACK}:{on_free_port(run)}"


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

        assert time.monotonic() - begin < 5
        assert str(failure.value).startswith(f"{mask(url)} does not answer")
        assert "secret" not in str(failure.value)

    def test_blocking_call_to_somebody_silent_is_given_up_as_soon_as_the_url_says(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as silent:
            port = silent.getsockname()[1]
            protocol = Protocol(Connection(f"redis://{LOOPBACK}:{port}?socket_timeout=0.5"))
            begun = time.monotonic()

            with pytest.raises(ServerUnreachable):
                protocol.take("q", ("h",), 1)

            assert time.monotonic() - begun < 5

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


@pytest.mark.parametrize("large", [(), (2,), (3,), (2, 3), (2, 5), (4, 5)], ids=str)
def test_large_words_are_sent_as_all_others(large: tuple[int, ...]) -> None:
    words: tuple[Any, ...] = ("EVALSHA", "ab", 7, b"x\r\ny", 1.5, "\xe9")
    words = tuple(b"\r\n" * 2**17 if place in large else word for place, word in enumerate(words))

    assert b"".join(pack(words)) == hiredis.pack_command(words)
