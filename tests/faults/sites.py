"""The servers under test, each behind a door of ours."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from streamq.errors import ServerError
from streamq.servers.launcher import LOOPBACK, ask_server
from streamq.servers.local import LocalServer, find_server
from streamq.servers.local_cluster import ClusterNode, LocalCluster
from tests.faults.proxy import Proxy
from tests.support.waiting import wait_until

#: A reply that does not come is given up after this: half a lease, as it is by default.
IMPATIENCE = "socket_timeout=1&socket_connect_timeout=1"
#: Debian's package libfaketime; under it Valkey starts, Debian's Redis does not.
_CLOCKS = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))


def has_movable_clock(kind: str) -> bool:
    """Whether a server of this kind can be given a clock of its own here."""
    return kind == "valkey" and bool(_CLOCKS)


class Site:
    """Servers, and the doors through which clients reach them."""

    url: str
    proxies: list[Proxy]
    #: How far the servers' clock is ahead of the others'.
    ahead_s = 0.0

    def admin(self, key: str) -> Redis:
        """A way to the server that has the key, past the door."""
        raise NotImplementedError

    def names(self) -> tuple[str, str]:
        """A queue and a request, on different servers where there are several."""
        return "faults", "batch"

    def ports(self) -> list[Callable[[], int]]:
        """Where each server really is, at the moment of asking."""
        raise NotImplementedError

    def calm(self) -> None:
        """Stop misbehaving."""
        for proxy in self.proxies:
            proxy.calm()

    def stop(self) -> None:
        """End the servers and close the doors."""
        for proxy in self.proxies:
            proxy.close()


class Single(Site):
    """One server. It keeps an append-only file if it is told how often to sync it."""

    def __init__(
        self, kind: str, folder: Path, seed: int, fsync: str = "", *, own_clock: bool = False
    ) -> None:
        binary = shutil.which("redis-server") if kind == "redis" else None
        self._folder = folder
        self._clock = folder / "clock"
        self._binary = self._under_clock(find_server(binary)) if own_clock else binary
        self._fsync = fsync
        self._started = 0
        self._servers: list[LocalServer] = []
        self.server = self._start(folder / "data")
        self.proxy = Proxy(self.port, seed)
        self.proxies = [self.proxy]

    @property
    def url(self) -> str:  # type: ignore[override]
        """Where clients find it."""
        return f"redis://{LOOPBACK}:{self.proxy.port}?{IMPATIENCE}"

    @property
    def port(self) -> int:
        """Where it really is."""
        return int(self.server.url.rpartition(":")[2])

    def admin(self, key: str = "") -> Redis:
        return Redis(host=LOOPBACK, port=self.port, socket_timeout=5)

    def ports(self) -> list[Callable[[], int]]:
        return [lambda: self.port]

    def kill(self) -> None:
        """End the server with signal 9."""
        self.server.kill()
        self.server.stop()

    def start_again(self) -> None:
        """Start a server on what the last one left on the disk."""
        self.server = self._start(self.server.directory)
        self.proxy.switch(self.port)

    def _under_clock(self, binary: Path) -> Path:
        """A server whose time of day is what ``_clock`` says; intervals it measures as ever."""
        self._clock.write_text("+0\n")
        settings = f"LD_PRELOAD={_CLOCKS[0]} FAKETIME_TIMESTAMP_FILE={self._clock}"
        settings += " FAKETIME_NO_CACHE=1 FAKETIME_DONT_FAKE_MONOTONIC=1"
        program = self._folder / "server"
        program.write_text(f'#!/bin/sh\nexport {settings}\nexec {binary} "$@"\n')
        program.chmod(0o755)
        return program

    def set_clock(self, ahead_s: float) -> None:
        """Let the server's clock jump."""
        temporary = self._clock.with_suffix(".new")
        temporary.write_text(f"{ahead_s:+g}\n")
        temporary.rename(self._clock)
        self.ahead_s = ahead_s

    def saved_at(self, moment: Path) -> None:
        """Keep what is on the disk now."""
        shutil.copytree(self.server.directory / "appendonlydir", moment)

    def lose_power(self, moment: Path) -> None:
        """End the server, and leave on the disk only what was kept before."""
        self.kill()
        shutil.rmtree(self.server.directory / "appendonlydir")
        shutil.copytree(moment, self.server.directory / "appendonlydir")
        self.start_again()

    def fail_over(self, behind_s: float, away_s: float) -> None:
        """Let a replica take over that has missed the last moments, after a while with nobody."""
        replica = self._start(self._folder / "replica")
        port = int(replica.url.rpartition(":")[2])
        with Redis(host=LOOPBACK, port=port) as redis:
            redis.execute_command("REPLICAOF", LOOPBACK, self.port)
            wait_until(lambda: redis.info("replication")["master_link_status"] == "up", 20)
            redis.execute_command("REPLICAOF", "NO", "ONE")
            time.sleep(behind_s)
        self.kill()
        time.sleep(away_s)
        self.server = replica
        self.proxy.switch(port)

    def stop(self) -> None:
        super().stop()
        for server in self._servers:
            server.stop()

    def _start(self, directory: Path) -> LocalServer:
        options = [("enable-debug-command", "yes"), ("repl-diskless-sync-delay", "0")]
        if self._fsync:
            options.append(("appendfsync", self._fsync))
        server = LocalServer.start(
            directory, port=0, persist=bool(self._fsync), binary=self._binary, options=options
        )
        self._servers.append(server)
        return server


class Cluster(Site):
    """Three primaries with a replica each; every node announces its door."""

    def __init__(self, seed: int, replicas: int = 1, node_timeout_ms: int = 2_000) -> None:
        self._cluster = LocalCluster.start(3, replicas, node_timeout_ms=node_timeout_ms)
        self._doors = {node.port: Proxy(node.port, seed + node.port) for node in self.nodes}
        self.proxies = list(self._doors.values())
        for node in self.nodes:
            self._announce(node)
        doors = {str(proxy.port) for proxy in self.proxies}
        wait_until(lambda: all(doors <= self._announced(node) for node in self.nodes), 20)
        hosts = ",".join(f"{LOOPBACK}:{self._doors[node.port].port}" for node in self.nodes)
        self.url = f"redis+cluster://{hosts}?{IMPATIENCE}"

    @property
    def nodes(self) -> tuple[ClusterNode, ...]:
        """All its nodes."""
        return self._cluster.nodes

    def names(self) -> tuple[str, str]:
        queue = "faults"
        tail = next(
            n
            for n in range(100)
            if self.owner(f"{{r:batch{n}}}").port != self.owner(f"{{q:{queue}}}").port
        )
        return queue, f"batch{tail}"

    def spread(self) -> list[str]:
        """A request's name on each primary."""
        found: dict[int, str] = {}
        for n in range(1_000):
            found.setdefault(self.owner(f"{{r:spread{n}}}").port, f"spread{n}")
            if len(found) == len(self.primaries()):
                break
        return list(found.values())

    def elsewhere(self, queue: str, count: int) -> list[str]:
        """So many names of requests on one other primary than the queue's."""
        home = self.owner(f"{{q:{queue}}}").port
        found: dict[int, list[str]] = {}
        for n in range(1_000):
            port = self.owner(f"{{r:apart{n}}}").port
            names = found.setdefault(port, [])
            names.append(f"apart{n}")
            if port != home and len(names) == count:
                return names
        raise RuntimeError("all requests are where the queue is")

    def ports(self) -> list[Callable[[], int]]:
        return [lambda port=node.port: port for node in self.nodes]  # type: ignore[misc]

    def admin(self, key: str) -> Redis:
        return self.direct(self.owner(key))

    def direct(self, node: ClusterNode) -> Redis:
        """A way to one node, past its door."""
        return Redis(host=LOOPBACK, port=node.port, socket_timeout=5)

    def door(self, node: ClusterNode) -> Proxy:
        """The door of a node."""
        return self._doors[node.port]

    def owner(self, key: str) -> ClusterNode:
        """The primary that has the key's slot."""
        slot = key_slot(key.encode())
        for _ in range(200):
            for node in self.nodes:
                with suppress(ServerError):
                    if "master" in self._myself(node)[2] and slot in self._slots(node):
                        return node
            time.sleep(0.05)
        raise RuntimeError(f"nobody has slot {slot}")

    def replica_of(self, primary: ClusterNode) -> ClusterNode | None:
        """A replica of the primary that is in step with it."""
        name = self.id_of(primary)
        for node in self.nodes:
            with suppress(ServerError):
                info = ask_server((LOOPBACK, node.port), "INFO", "replication")
                if self._myself(node)[3] == name and "master_link_status:up" in info:
                    return node
        return None

    def primaries(self) -> list[ClusterNode]:
        """Nodes that have slots now."""
        found = []
        for node in self.nodes:
            with suppress(ServerError):
                if "master" in self._myself(node)[2] and self._slots(node):
                    found.append(node)
        return found

    def id_of(self, node: ClusterNode) -> str:
        """What the cluster calls the node."""
        return ask_server((LOOPBACK, node.port), "CLUSTER", "MYID")

    def fail_over(self, primary: ClusterNode, how: str) -> None:
        """Let the replica take over: plainly, by FORCE or by TAKEOVER."""
        replica = wait_until(lambda: self.replica_of(primary), 30)
        assert replica
        with self.direct(replica) as redis, suppress(RedisError):
            redis.execute_command("CLUSTER", "FAILOVER", *([how] if how else []))
        wait_until(lambda: replica.port in [node.port for node in self.primaries()], 30)

    def kill(self, primary: ClusterNode, *, is_behind: bool = False) -> None:
        """Kill a primary, wait until another took its place, and start it again."""
        if not is_behind:
            wait_until(lambda: self.replica_of(primary), 30)
        others = {node.port for node in self.primaries()} - {primary.port}
        self._cluster.kill(primary)
        wait_until(lambda: {node.port for node in self.primaries()} - others - {primary.port}, 60)
        again = self._cluster.restart(primary)
        self._announce(again)

    @contextmanager
    def moving(self, key: str) -> Iterator[None]:
        """Move the key's slot to another primary; while it is half done the block runs."""
        slot = key_slot(key.encode())
        source = self.owner(key)
        target = next(node for node in self.primaries() if node.port != source.port)
        names = {source.port: self.id_of(source), target.port: self.id_of(target)}
        with self.direct(source) as old, self.direct(target) as new:
            new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source.port])
            old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target.port])
            self._migrate(old, target, slot, most=1)
            yield
            self._migrate(old, target, slot)
            for node in (new, old):
                node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[target.port])

    def stop(self) -> None:
        super().stop()
        self._cluster.stop()

    def _migrate(self, old: Any, target: ClusterNode, slot: int, most: int = 1000) -> None:
        while keys := old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, most):
            words = [LOOPBACK, target.port, "", 0, 5000, "REPLACE", "KEYS", *keys]
            old.execute_command("MIGRATE", *words)
            if most < 1000:
                return

    def _announce(self, node: ClusterNode) -> None:
        door = str(self._doors[node.port].port)
        ask_server((LOOPBACK, node.port), "CONFIG", "SET", "cluster-announce-port", door)

    def _announced(self, node: ClusterNode) -> set[str]:
        lines = ask_server((LOOPBACK, node.port), "CLUSTER", "NODES").splitlines()
        return {line.split()[1].partition("@")[0].rpartition(":")[2] for line in lines}

    def _myself(self, node: ClusterNode) -> list[str]:
        lines = ask_server((LOOPBACK, node.port), "CLUSTER", "NODES", timeout_s=1).splitlines()
        return next(line.split() for line in lines if "myself" in line.split()[2])

    def _slots(self, node: ClusterNode) -> set[int]:
        found: set[int] = set()
        for word in self._myself(node)[8:]:
            if not word.startswith("["):
                first, _, last = word.partition("-")
                found |= set(range(int(first), int(last or first) + 1))
        return found
