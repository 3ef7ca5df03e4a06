"""A real cluster on loopback, for tests and for trying things out.

The nodes are processes that can be killed one by one and started again, and the cluster fails over
as one in production does. It is joined with the servers' own commands, so no other tool is needed.
Starting takes a little over 2 s, because a primary waits that long before it believes that the
cluster is well.
"""

import functools
import signal
from pathlib import Path
from typing import Literal, Self

import msgspec

from streamq.errors import InvalidValue, ServerError
from streamq.servers.launcher import LOOPBACK, Launcher, ask_server, start_on_free_port
from streamq.servers.local import (
    Options,
    checked_options,
    find_server,
    make_directory,
    server_command_line,
)
from streamq.servers.topology import Peer, join_nodes

_JOIN_TIMEOUT_S = 20.0


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
            peers = [_peer_on_loopback(node) for node in cluster.nodes]
            join_nodes([peers[i::primaries] for i in range(primaries)], _JOIN_TIMEOUT_S)
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

        The node answers when this returns, but joins the others in its own time. ``nodes`` has the
        new record.
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

    def __exit__(self, *_: object) -> None:
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
                raise ServerError(
                    f"{self.directory} has the nodes of another cluster: give another directory"
                ) from None
            self._start_node(directory, "primary" if index < primaries else "replica")

    def _start_node(self, directory: Path, role: Literal["primary", "replica"]) -> None:
        def run(port: int) -> ClusterNode:
            return ClusterNode(port, self._run(port, directory), role, directory)

        self.nodes += (start_on_free_port(run),)

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
            # By default a primary waits 5 s for more replicas before it sends data to the first.
            ("repl-diskless-sync-delay", "0"),
        )
        argv = server_command_line(self._program, directory, base, self._options)
        return self._launcher.run(argv, directory, (LOOPBACK, port))


def _peer_on_loopback(node: ClusterNode) -> Peer:
    ask_node = functools.partial(ask_server, (LOOPBACK, node.port))
    return Peer(f"{LOOPBACK}:{node.port}", LOOPBACK, node.port, ask_node)
