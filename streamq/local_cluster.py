"""A real cluster of one's own, on loopback: for tests and for trying things out.

The nodes are processes that can be killed one by one and started again, and the
cluster fails over as one in production does. It is joined with the servers' own
commands, so no other tool is needed. It takes a little over two seconds: so long a
primary waits before it believes that the cluster is well.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from streamq.errors import InvalidValue, ServerError
from streamq.launcher import LOOPBACK, Launcher, ask, on_free_port
from streamq.server import Options, checked_options, command_line, find_server, make_directory

SLOTS = 16384

_JOIN_TIMEOUT_S = 20.0
_POLL_S = 0.02


class ClusterNode(msgspec.Struct, frozen=True):
    """One server of a cluster. The role is the one it had at the start."""

    port: int
    pid: int
    role: Literal["primary", "replica"]
    directory: Path


class LocalCluster:
    """A running cluster. As a context manager it stops at the end of the block.

    ``nodes`` has the primaries first. Nothing is persisted unless an option says so: a
    primary that is restarted before a replica has taken its place comes back empty.
    """

    directory: Path
    nodes: tuple[ClusterNode, ...]

    def __init__(
        self, launcher: Launcher, program: Path, directory: Path, options: Options
    ) -> None:
        """Use ``start``."""
        self._launcher = launcher
        self._program = program
        self._options = tuple(options)
        self.directory = directory
        self.nodes = ()

    @classmethod
    def start(
        cls,
        primaries: int = 3,
        replicas: int = 1,
        directory: str | Path | None = None,
        *,
        node_timeout_ms: int = 2000,
        binary: str | Path | None = None,
        options: Options = (),
    ) -> Self:
        """Start a cluster, with so many replicas for each primary, and wait until it is whole.

        Raises: ServerMissing, ServerError.
        """
        if primaries < 1 or replicas < 0:
            raise InvalidValue("a cluster has at least one primary and no fewer than 0 replicas")
        extra = (("cluster-node-timeout", str(node_timeout_ms)), *checked_options(options))
        program = find_server(binary)
        own: list[Path] = []
        home = make_directory(directory, own)
        cluster = cls(Launcher(home, own=own), program, home, extra)
        try:
            cluster._start_nodes(primaries, replicas)
            _Join(cluster.nodes, primaries).run()
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @property
    def url(self) -> str:
        """Where a client finds the cluster: the nodes that began as primaries."""
        hosts = (f"{LOOPBACK}:{node.port}" for node in self.nodes if node.role == "primary")
        return f"redis+cluster://{','.join(hosts)}"

    def kill(self, node: ClusterNode) -> None:
        """End a node at once with signal 9, as a fault would."""
        self._launcher.end(self._current(node).pid, signal.SIGKILL)

    def restart(self, node: ClusterNode) -> ClusterNode:
        """Start a node again on its port, after ending it if it runs.

        It answers then, but joins the others in its own time. ``nodes`` has the new record.
        """
        node = self._current(node)
        self._launcher.end(node.pid, signal.SIGTERM)
        again = msgspec.structs.replace(node, pid=self._run(node.port, node.directory))
        self.nodes = tuple(again if n.port == node.port else n for n in self.nodes)
        return again

    def stop(self) -> None:
        """End all nodes, and remove their directories unless one was given."""
        self._launcher.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _current(self, node: ClusterNode) -> ClusterNode:
        for current in self.nodes:
            if current.port == node.port:
                return current
        raise InvalidValue(f"no node of this cluster has port {node.port}")

    def _start_nodes(self, primaries: int, replicas: int) -> None:
        for index in range(primaries * (1 + replicas)):
            directory = self.directory / f"node-{index}"
            try:
                directory.mkdir(mode=0o700)
            except FileExistsError:
                raise ServerError(f"{self.directory} has the nodes of another cluster") from None
            self._start_node(directory, "primary" if index < primaries else "replica")

    def _start_node(self, directory: Path, role: Literal["primary", "replica"]) -> None:
        def run(port: int) -> ClusterNode:
            return ClusterNode(port, self._run(port, directory), role, directory)

        self.nodes += (on_free_port(run),)

    def _run(self, port: int, directory: Path) -> int:
        base = (
            ("port", str(port)),
            ("bind", LOOPBACK),
            ("save", ""),
            ("appendonly", "no"),
            ("maxmemory-policy", "noeviction"),
            ("cluster-enabled", "yes"),
            ("cluster-announce-ip", LOOPBACK),
            ("cluster-require-full-coverage", "no"),
            # The default waits five seconds for more replicas before it feeds the first.
            ("repl-diskless-sync-delay", "0"),
        )
        argv = command_line(self._program, directory, base, self._options)
        return self._launcher.run(argv, directory, (LOOPBACK, port))


class _Join:
    """Making one cluster of servers that do not know each other."""

    def __init__(self, nodes: tuple[ClusterNode, ...], primaries: int) -> None:
        self._primaries = nodes[:primaries]
        self._replicas = nodes[primaries:]
        self._nodes = nodes
        self._deadline = time.monotonic() + _JOIN_TIMEOUT_S

    def run(self) -> None:
        """Give out the slots, introduce all to all, and wait until every node sees the same."""
        first, *others = self._nodes
        for index, node in enumerate(self._nodes):
            # Different epochs from the start spare the nodes settling who is newer.
            _cluster(node, "SET-CONFIG-EPOCH", str(index + 1))
        for index, node in enumerate(self._primaries):
            begin, end = (SLOTS * i // len(self._primaries) for i in (index, index + 1))
            _cluster(node, "ADDSLOTSRANGE", str(begin), str(end - 1))
        for node in others:
            _cluster(first, "MEET", LOOPBACK, str(node.port))
        for node in self._nodes:
            self._wait(node, self._knows_all)
        for index, node in enumerate(self._replicas):
            primary = self._primaries[index % len(self._primaries)]
            _cluster(node, "REPLICATE", _cluster(primary, "MYID"))
        for condition in (self._is_linked, self._is_whole):
            for node in self._nodes:
                self._wait(node, condition)

    def _wait(self, node: ClusterNode, condition: Callable[[ClusterNode], bool]) -> None:
        while not condition(node):
            if time.monotonic() > self._deadline:
                raise ServerError(f"the cluster does not join: {_cluster(node, 'INFO')}")
            time.sleep(_POLL_S)

    def _knows_all(self, node: ClusterNode) -> bool:
        lines = _cluster(node, "NODES").splitlines()
        return len(lines) == len(self._nodes) and "handshake" not in str(lines)

    def _is_linked(self, node: ClusterNode) -> bool:
        if node.role == "primary":
            return True
        return "master_link_status:up" in ask((LOOPBACK, node.port), "INFO", "replication")

    def _is_whole(self, node: ClusterNode) -> bool:
        info = _cluster(node, "INFO").splitlines()
        wanted = ("cluster_state:ok", f"cluster_slots_ok:{SLOTS}")
        roles = [line.split()[2] for line in _cluster(node, "NODES").splitlines()]
        replicas = sum("slave" in role for role in roles)
        return all(line in info for line in wanted) and replicas == len(self._replicas)


def _cluster(node: ClusterNode, *words: str) -> str:
    return ask((LOOPBACK, node.port), "CLUSTER", *words)
