"""Commands that are started while the server fails over or is not ready yet."""

import subprocess
import time
from pathlib import Path

import pytest

from streamq import Client
from streamq.servers.launcher import LOOPBACK, ask
from streamq.servers.local import LocalServer
from streamq.servers.local_cluster import LocalCluster
from tests.test_cli import COMMAND, NOBODY, environment, run
from tests.waiting import wait_until


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
            ask(place, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")

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
    assert time.monotonic() - begun < 60
