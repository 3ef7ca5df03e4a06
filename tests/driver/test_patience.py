"""Commands that are started while the server fails over or is not ready yet."""

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions as driver

from streamq import Client, Connection
from streamq.model import Policy
from streamq.servers.launcher import LOOPBACK, ask_server
from streamq.servers.local import LocalServer
from streamq.servers.local_cluster import LocalCluster
from tests.support.command import COMMAND, NOBODY, environment, run
from tests.support.waiting import allowed_s, wait_until


def start(*words: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, *words],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_failover_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a line\n")
    with LocalCluster.start(node_timeout_ms=3_000) as cluster:
        with Client(cluster.url) as client:
            client.submit([], handler="h", id="there")
            redis = client._protocol.connection.redis
            port = redis.get_node_from_key("{r:there}").port
            assert client.get("there").status().state == "done"
            node = next(node for node in cluster.nodes if node.port == port)
            # Its replica has it all, or it could not take over.
            wait_until(lambda: client._protocol.connection.replicas("{r:there}", 1, 1.0) == 1)

        cluster.kill(node)
        begun = [
            start(*words, STREAMQ_URL=cluster.url)
            for words in (
                ("status", "there"),
                ("wait", "there"),
                ("ls", "--all"),
                ("load", str(tmp_path / "in.txt"), "--handler", "h", "--id", "new"),
            )
        ]
        said = [process.communicate(timeout=60) for process in begun]

        assert [process.returncode for process in begun] == [0] * 4, said
        assert "there" in said[2][0]


def test_server_that_is_not_ready_yet_is_waited_for() -> None:
    """A node of a cluster that has no slots so far."""
    with LocalServer.start(port=0, options=[("cluster-enabled", "yes")]) as node:
        process = start("status", STREAMQ_URL=node.url)
        try:
            assert process.stderr
            assert "waiting for it" in process.stderr.readline()
            place = (LOOPBACK, int(node.url.rpartition(":")[2]))
            ask_server(place, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")

            said = process.communicate(timeout=60)
            assert process.returncode == 0, said
        finally:
            process.kill()
            process.wait()


def test_patience_has_an_end() -> None:
    with LocalServer.start(port=0, options=[("cluster-enabled", "yes")]) as node:
        ran = run("status", STREAMQ_URL=node.url, STREAMQ_PATIENCE_MS="1500")

    assert ran.returncode == 3
    assert "waiting for it" in ran.stderr


@pytest.mark.parametrize(
    "url",
    [NOBODY, "redis://no.such.host.invalid", "redis+cluster://127.0.0.1:1", "unix:///no/socket"],
)
def test_somebody_who_never_answered_is_not(url: str) -> None:
    begun = time.monotonic()

    ran = run("status", STREAMQ_URL=url, STREAMQ_INSECURE="1", STREAMQ_PATIENCE_MS="600000")

    assert ran.returncode == 3
    assert "waiting" not in ran.stderr
    assert time.monotonic() - begun < allowed_s(60)


def test_slot_that_is_half_moved_is_waited_for() -> None:
    """A node that gives a slot away sends us to one that does not know of it yet, and back."""
    with LocalCluster.start(node_timeout_ms=3_000) as cluster, Client(cluster.url) as client:
        client.submit([], handler="h", id="there")
        for key, commands in (
            ("{r:there}", [("status", "there"), ("wait", "there"), ("wait", "there", "-q")]),
            ("{q:default}", [("ls", "--all"), ("status",)]),
        ):
            move = HalfMoved(client._protocol.connection.redis, key)
            begun = [start(*words, STREAMQ_URL=cluster.url) for words in commands]
            try:
                for process in begun:
                    assert process.stderr
                    assert "waiting" in process.stderr.readline()
            finally:
                move.finish()
                said = [process.communicate(timeout=60) for process in begun]

            assert [process.returncode for process in begun] == [0] * len(begun), said


class HalfMoved:
    """A slot whose keys are at another node that was not told that it is to have them."""

    def __init__(self, redis: Any, key: str) -> None:
        self._redis = redis
        self._slot = redis.keyslot(key)
        self._from = redis.get_node_from_key(key)
        self._to = next(n for n in redis.get_primaries() if n.name != self._from.name)
        self._names = {
            node.name: redis.execute_command("CLUSTER MYID", target_nodes=node).decode()
            for node in (self._from, self._to)
        }
        self._set(self._from, "MIGRATING", self._names[self._to.name])
        self._set(self._to, "IMPORTING", self._names[self._from.name])
        keys = redis.execute_command(
            "CLUSTER GETKEYSINSLOT", self._slot, 100, target_nodes=self._from
        )
        words = ("MIGRATE", self._to.host, self._to.port, "", 0, 5000, "KEYS", *keys)
        redis.execute_command(*words, target_nodes=self._from)
        self._set(self._to, "STABLE")

    def finish(self) -> None:
        """Tell both."""
        self._set(self._to, "IMPORTING", self._names[self._from.name])
        for node in (self._to, self._from):
            self._set(node, "NODE", self._names[self._to.name])

    def _set(self, node: Any, *words: str) -> None:
        self._redis.execute_command("CLUSTER SETSLOT", self._slot, *words, target_nodes=node)


class TestThreads:
    """Threads share a connection; each has its own patience."""

    def test_patience_of_one_thread_does_not_hold_up_another(self) -> None:
        with LocalServer.start(port=0, options=[("cluster-enabled", "yes")]) as node:
            connection = Connection(node.url)
            said: list[str] = []
            answers: list[Any] = []

            def wait() -> None:
                with connection.patience(60, said.append):
                    answers.append(connection.redis.execute_command("GET", "k"))

            thread = threading.Thread(target=wait, daemon=True)
            thread.start()
            wait_until(lambda: said)
            begun = time.monotonic()
            with pytest.raises(driver.ClusterDownError):
                connection.redis.execute_command("GET", "k")
            with pytest.raises(driver.ClusterDownError):
                connection.call("GET", "k")

            assert time.monotonic() - begun < allowed_s(5)
            assert thread.is_alive()
            place = (LOOPBACK, int(node.url.rpartition(":")[2]))
            ask_server(place, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
            thread.join(60)
            connection.close()
        assert answers == [None]

    def test_blocks_of_two_threads_end_in_any_order(self) -> None:
        """Whoever leaves first takes nothing from the one who is still inside."""
        with LocalServer.start(port=0) as server:
            connection = Connection(server.url)
            first_is_in, second_is_in = threading.Event(), threading.Event()
            is_patient: list[bool] = []

            def second() -> None:
                assert first_is_in.wait(60)
                with connection.patience(60, len):
                    second_is_in.set()
                    thread.join(60)
                    assert connection.call("PING") == b"PONG"
                    is_patient.append(connection._patience.is_wanted)
                is_patient.append(connection._patience.is_wanted)

            def first() -> None:
                with connection.patience(60, len):
                    first_is_in.set()
                    assert second_is_in.wait(60)
                    assert connection.redis.ping()

            thread = threading.Thread(target=first, daemon=True)
            thread.start()
            second()
            connection.close()
        assert is_patient == [True, False]

    def test_inner_block_counts_and_the_outer_one_after_it(self) -> None:
        with LocalServer.start(port=0, options=[("cluster-enabled", "yes")]) as node:
            connection = Connection(node.url)
            outer: list[str] = []
            inner: list[str] = []
            with connection.patience(1.5, outer.append):
                with connection.patience(1.5, inner.append), pytest.raises(driver.ClusterDownError):
                    connection.call("GET", "k")
                assert (len(outer), len(inner)) == (0, 1)
                with pytest.raises(driver.ClusterDownError):
                    connection.call("GET", "k")
                assert (len(outer), len(inner)) == (1, 1)
            begun = time.monotonic()
            with pytest.raises(driver.ClusterDownError):
                connection.call("GET", "k")
            assert time.monotonic() - begun < allowed_s(1)
            connection.close()


def test_server_that_is_not_ready_among_several_calls_is_waited_for() -> None:
    """What a master without its replicas says to each of the calls that were sent together."""
    with LocalServer.start(port=0) as server, Client(server.url) as client:
        protocol = client._protocol
        connection = protocol.connection
        policy = Policy(handler="h")
        protocol.submit_all([("first", policy, "", [b"x", b"1"])])  # the scripts are there
        connection.redis.config_set("min-replicas-to-write", 1)
        back = threading.Timer(0.5, connection.redis.config_set, ("min-replicas-to-write", 0))
        back.start()

        with connection.patience(30, lambda _: None):
            protocol.submit_all([("late", policy, "", [b"x", b"1"])])

        assert client.get("late").status().parts.total == 1
        back.join()
