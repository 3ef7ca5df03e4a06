"""``streamq cluster``: real servers on several addresses of loopback are made into one."""

import json
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from streamq import Client
from streamq.admin.cluster import _refuse_used_cluster_node, arranged_cluster_groups
from streamq.errors import ServerRefused
from streamq.servers.launcher import LOOPBACK, Launcher, ask_server, start_on_free_port
from streamq.servers.local import LocalServer, find_server, server_command_line
from streamq.servers.topology import Peer, own_member, view_of_nodes
from tests.support.command import COMMAND, environment, run
from tests.support.waiting import wait_until

has_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server")
NODE = (
    ("cluster-enabled", "yes"),
    ("cluster-node-timeout", "1000"),
    ("repl-diskless-sync-delay", "0"),
    ("save", ""),
)
#: Three machines with two servers each.
MACHINES = ["127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.4", "127.0.0.4"]


def port_of(node: str) -> int:
    return int(node.rpartition(":")[2])


def peer(node: str) -> Peer:
    host, _, port = node.rpartition(":")

    def ask_node(*words: str) -> str:
        return ask_server(("127.0.0.1", int(port)), *words)

    return Peer(node, host, int(port), ask_node)


class Servers:
    """Servers that can become nodes, as processes that end with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._launcher = Launcher(folder)
        self._pids: dict[str, int] = {}
        self._started: dict[str, tuple[list[str], Path, tuple[str, int]]] = {}

    def start(
        self, machines: list[str], password: str = "", masterauth: str = "", binary: str = ""
    ) -> list[str]:
        """One on each address given, as HOST:PORT."""
        nodes = []
        for host in machines:
            folder = self._folder / f"node{len(self._pids)}"
            folder.mkdir()
            nodes.append(self._start(host, folder, password, masterauth, binary))
        return nodes

    def kill(self, node: str) -> None:
        self._launcher.end(self._pids[node], signal.SIGKILL)

    def restart(self, node: str) -> None:
        argv, folder, place = self._started[node]
        self._pids[node] = self._launcher.run(argv, folder, place)

    def stop(self) -> None:
        self._launcher.stop()

    def move(self, node: str, host: str) -> str:
        """End a node, and start it with what it knows at another address."""
        self.kill(node)
        _, folder, _ = self._started[node]
        return self._start(host, folder)

    def _start(
        self, host: str, folder: Path, password: str = "", masterauth: str = "", binary: str = ""
    ) -> str:
        place = (("bind", *dict.fromkeys((LOOPBACK, host))), ("cluster-announce-ip", host))

        def run_at(port: int) -> int:
            base = (("port", str(port)), *place, *NODE, ("masterauth", masterauth))
            argv = server_command_line(find_server(binary or None), folder, base, ())
            self._started[f"{host}:{port}"] = (argv, folder, (LOOPBACK, port))
            self._pids[f"{host}:{port}"] = self._launcher.run(*self._started[f"{host}:{port}"])
            return port

        port = start_on_free_port(run_at)
        if password:
            ask_server((LOOPBACK, port), "CONFIG", "SET", "requirepass", password)
        return f"{host}:{port}"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Six servers on three machines, made into a cluster by the command."""
    servers = Servers(tmp_path_factory.mktemp("six"))
    nodes = servers.start(MACHINES)
    made = run("cluster", "create", *nodes)
    assert made.returncode == 0, made.stderr
    assert "the cluster is made" in made.stderr
    assert "ok: 3 primaries, 3 replicas, 16384 of 16384 slots" in made.stdout
    yield nodes
    servers.stop()


def test_it_is_spread_over_the_machines(six: list[str]) -> None:
    shown = json.loads(run("cluster", "status", six[-1], "--json").stdout)

    assert (shown["state"], shown["slots"], shown["problems"]) == ("ok", 16384, [])
    assert {node["address"] for node in shown["nodes"]} == set(six)
    primaries = [node for node in shown["nodes"] if node["role"] == "primary"]
    assert len({node["address"].split(":")[0] for node in primaries}) == 3
    for node in shown["nodes"]:
        if node["primary"]:
            assert node["address"].split(":")[0] != node["primary"].split(":")[0]


def test_made_again_it_is_left_as_it_is(six: list[str]) -> None:
    before = [own_member(view_of_nodes(peer(node))) for node in six]
    with Client(f"redis+cluster://{six[0]}") as client:
        assert client.submit([b"x"], handler="shout").status().parts.total == 1

    again = run("cluster", "create", *reversed(six))

    assert (again.returncode, "stands already, as asked" in again.stderr) == (0, True)
    after = [own_member(view_of_nodes(peer(node))) for node in six]
    assert [(m.id, m.primary, m.slots) for m in after] == [
        (m.id, m.primary, m.slots) for m in before
    ]


def test_it_is_not_made_into_another(six: list[str], servers: Servers) -> None:
    some = six[:3]
    part = run("cluster", "create", *some, "--replicas", "0")
    assert (part.returncode, part.stdout) == (3, "")
    assert f"{some[0]} is already in a cluster, with {six[3]}" in part.stderr

    flat = run("cluster", "create", *six, "--replicas", "0")
    assert (flat.returncode, "data" in flat.stderr or "layout" in flat.stderr) == (3, True)

    more = servers.start(["127.0.0.1"] * 2)
    wider = run("cluster", "create", *six, *more)
    assert wider.returncode == 3
    assert all(len(view_of_nodes(peer(node))) == 1 for node in more)


def test_status_says_what_is_wrong(servers: Servers) -> None:
    nodes = servers.start(["127.0.0.1"] * 6)
    assert run("cluster", "create", *nodes).returncode == 0
    first, second, *_ = nodes
    servers.kill(first)
    wait_until(lambda: any(m.is_failed for m in view_of_nodes(peer(second)).values()), 20)

    shown = run("cluster", "status", STREAMQ_URL=f"redis+cluster://{first},{second}")

    assert shown.returncode == 1
    assert f"{first} is down, say the others" in shown.stdout
    again = run("cluster", "create", *nodes)
    assert (again.returncode, f"{first} does not answer" in again.stderr) == (3, True)


@pytest.mark.parametrize("binary", ["", pytest.param("redis-server", marks=has_redis)])
def test_with_a_password_from_a_file_and_names_for_addresses(
    servers: Servers, tmp_path: Path, binary: str
) -> None:
    nodes = servers.start(["127.0.0.1"] * 6, "se:cret", "se:cret", binary)
    named = [f"localhost:{port_of(node)}" for node in nodes]
    refused = run("cluster", "create", *named)
    assert (refused.returncode, "does not let us in" in refused.stderr) == (3, True)

    file = tmp_path / "url"
    file.write_text(f"redis+cluster://:se%3Acret@{named[0]}\n")
    made = run("cluster", "create", *named, STREAMQ_URL_FILE=str(file))
    shown = run("cluster", "status", STREAMQ_URL_FILE=str(file))

    assert made.returncode == shown.returncode == 0, made.stderr
    assert "ok: 3 primaries, 3 replicas" in shown.stdout
    assert "cret" not in made.stdout + made.stderr + shown.stdout + shown.stderr


def test_replicas_that_could_not_log_in_are_seen_before_anything_is_done(servers: Servers) -> None:
    nodes = servers.start(["127.0.0.1"] * 6, "se:cret")

    refused = run("cluster", "create", *nodes, STREAMQ_URL=f"redis://:se%3Acret@{nodes[0]}")

    assert refused.returncode == 3
    assert "has a password but no masterauth" in refused.stderr
    assert "cret" not in refused.stderr
    url = f"redis://:se%3Acret@{nodes[0]}"
    shown = json.loads(run("cluster", "status", "--json", STREAMQ_URL=url).stdout)
    assert (shown["state"], len(shown["nodes"])) == ("down", 1)


def test_cut_short_and_run_again_it_goes_on(servers: Servers) -> None:
    for cut in (
        lambda first: own_member(view_of_nodes(first)).slots,
        lambda first: any(member.primary for member in view_of_nodes(first).values()),
    ):
        nodes = servers.start(["127.0.0.1"] * 6)
        with subprocess.Popen(
            [*COMMAND, "cluster", "create", *nodes],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as making:
            wait_until(partial(cut, peer(nodes[0])), 30)
            making.kill()

        made = run("cluster", "create", *nodes)

        assert made.returncode == 0, made.stderr
        assert "ok: 3 primaries, 3 replicas, 16384 of 16384 slots" in made.stdout


class TestNodesJustIntroduced:
    """A node that does not know the other's id yet lists it under one that it made up."""

    HANDSHAKE = "b" * 40 + " 127.0.0.1:{port}@1{port} handshake - 0 0 0 disconnected"

    def peers(self, met: int) -> list[Peer]:
        """Two nodes, of which the first was introduced to the one at the port ``met``."""

        def answers(identity: str, *others: str) -> str:
            return "\n".join([f"{identity * 40} :0@0 myself,master - 0 0 0 connected", *others])

        texts = [answers("a", self.HANDSHAKE.format(port=met)), answers("c")]

        def asking(text: str) -> Peer:
            port = 7000 + texts.index(text)
            return Peer(
                f"127.0.0.1:{port}",
                "127.0.0.1",
                port,
                lambda *words: text if words == ("CLUSTER", "NODES") else "",
            )

        return [asking(text) for text in texts]

    def test_one_of_those_given_is_no_stranger(self) -> None:
        peers = self.peers(met=7001)
        _refuse_used_cluster_node(
            peers[0], peers, {each.name: view_of_nodes(each) for each in peers}
        )

    def test_any_other_is(self) -> None:
        peers = self.peers(met=7009)
        with pytest.raises(ServerRefused, match=r"in a cluster, with 127\.0\.0\.1:7009"):
            _refuse_used_cluster_node(
                peers[0], peers, {each.name: view_of_nodes(each) for each in peers}
            )


@pytest.mark.parametrize("binary", ["", pytest.param("redis-server", marks=has_redis)])
def test_nodes_that_moved_are_introduced_again(servers: Servers, binary: str) -> None:
    nodes = servers.start(["127.0.0.1"] * 3, binary=binary)
    assert run("cluster", "create", *nodes, "--replicas", "0").returncode == 0

    moved = [servers.move(node, "127.0.0.2") for node in nodes]
    made = run("cluster", "create", *moved, "--replicas", "0")

    assert (made.returncode, "stands already" in made.stderr) == (0, True), made.stderr
    shown = json.loads(run("cluster", "status", moved[0], "--json").stdout)
    assert {node["address"] for node in shown["nodes"]} == set(moved)


def test_servers_that_start_late_are_waited_for(servers: Servers) -> None:
    nodes = servers.start(["127.0.0.1"] * 3)
    servers.kill(nodes[2])
    words = ("cluster", "create", *nodes, "--replicas", "0")
    late = run(*words, "--wait", "--timeout", "500ms")
    assert (late.returncode, f"{nodes[2]} does not answer" in late.stderr) == (3, True)

    with subprocess.Popen([*COMMAND, *words, "--wait"], env=environment()) as making:
        servers.restart(nodes[2])

        assert making.wait(30) == 0


def test_servers_that_are_used_are_refused_and_left_alone(servers: Servers) -> None:
    nodes = servers.start(["127.0.0.1"] * 2)
    full = servers.start(["127.0.0.1"])
    ask_server(("127.0.0.1", port_of(full[0])), "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
    wait_until(
        lambda: "state:ok" in ask_server(("127.0.0.1", port_of(full[0])), "CLUSTER", "INFO"), 10
    )
    ask_server(("127.0.0.1", port_of(full[0])), "SET", "a", "1")
    with LocalServer.start(port=0) as single:
        alone = single.url.removeprefix("redis://")
        for node, reason in (
            (full[0], "has data (1 keys)"),
            (alone, "start it with cluster-enabled yes"),
            ("127.0.0.1:1", "does not answer"),
            ("no-such-host.invalid:1", "does not answer"),
        ):
            refused = run("cluster", "create", *nodes, node, "--replicas", "0", "--insecure")

            assert (refused.returncode, refused.stdout) == (3, "")
            assert node in refused.stderr
            assert reason in refused.stderr
    assert all(
        len(view_of_nodes(peer(node))) == 1 and not own_member(view_of_nodes(peer(node))).slots
        for node in nodes
    )


def test_servers_elsewhere_without_a_password_are_not_even_asked() -> None:
    nodes = ["192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1"]
    for words in (["create", *nodes, "--replicas", "0", "--wait"], ["status", nodes[0]]):
        refused = run("cluster", *words)

        assert (refused.returncode, "or say --insecure" in refused.stderr) == (3, True)


def test_a_server_under_two_names_is_seen(servers: Servers) -> None:
    one, two = servers.start(["127.0.0.1"] * 2)

    refused = run("cluster", "create", one, two, f"localhost:{port_of(one)}", "--replicas", "0")

    assert (refused.returncode, "one and the same server" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["a:1", "b:2", "c"], "'c' is not HOST:PORT"),
        (["a:1", "b:2", "c:x"], "'c:x' is not HOST:PORT"),
        (["a:1", "b:2", "c:3/0"], "'c:3/0' is not HOST:PORT"),
        (["a:1", "b:2", "me:pass@c:3"], "is not HOST:PORT"),
        (["a:1", "b:2", "a:1", "--replicas", "0"], "given twice"),
        (["a:1", "b:2", "c:3"], "3 nodes cannot be 2 for each primary: give 2 or 4"),
        (["a:1", "b:2", "c:3", "d:4"], "give 6 nodes"),
        (["a:1", "b:2", "--replicas", "0"], "give 3 nodes"),
    ],
)
def test_what_cannot_be_is_said_at_once(words: list[str], reason: str) -> None:
    refused = run("cluster", "create", *words)

    assert (refused.returncode, refused.stdout) == (2, "")
    assert reason in refused.stderr


@pytest.mark.parametrize(
    "layout", ["aabbcc", "aaabbc", "abcabc", "aabbccdd", "aaabbbccc", "aab" * 4]
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_are_on_other_machines(layout: str, replicas: int) -> None:
    nodes = [Peer(f"{machine}{n}", machine, n, lambda: "") for n, machine in enumerate(layout)]
    nodes = nodes[: len(nodes) // (1 + replicas) * (1 + replicas)]

    groups = arranged_cluster_groups(nodes, replicas)

    assert Counter(node.name for group in groups for node in group) == Counter(
        node.name for node in nodes
    )
    assert {len(group) for group in groups} == {1 + replicas}
    if max(Counter(node.machine for node in nodes).values()) <= len(groups):
        assert all(len({node.machine for node in group}) == 1 + replicas for group in groups)


def test_machines_that_are_few_are_used_all_the_same() -> None:
    nodes = [Peer(f"a{n}", "a", n, lambda: "") for n in range(6)]

    assert [[node.port for node in group] for group in arranged_cluster_groups(nodes, 1)] == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]
