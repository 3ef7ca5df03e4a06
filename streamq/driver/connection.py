"""The way to a server: calls, waits and subscriptions, and whether the server can be used.

Clients are made in ``clients``; what errors of the driver mean to a caller is in ``errors``.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from itertools import chain
from threading import Lock
from typing import Any

from redis import RedisCluster
from redis import exceptions as driver
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.client import PubSub
from redis.retry import Retry

from streamq.driver.clients import CONNECT_S, cluster_slot_of_key, first_key_of_command, make_client
from streamq.driver.errors import our_error_of_driver, translating_driver_errors
from streamq.driver.lanes import GONE, Lane, Lanes
from streamq.driver.patience import Patience
from streamq.driver.server_versions import version_of_server
from streamq.driver.url import ServerURL, mask_passwords_of_url
from streamq.errors import ServerError, ServerRefused, ServerUnreachable, ServerUnsafe
from streamq.servers.local import LocalServer

#: Seconds to wait for the reply to a command that ends another connection's wait.
WAKE_S = 1.0
#: How often an ordinary call is sent again. All of them are scripts that may run twice.
RETRIES = 3
#: A node answers with one of these when it has not made the call and another node may make it.
_ELSEWHERE = (
    driver.AskError,
    driver.ReadOnlyError,
    driver.TryAgainError,
    driver.ClusterDownError,
    driver.RedisClusterException,
)


def refuse_open(url: ServerURL, where: str) -> None:
    """Raise ServerUnsafe for a server that lets in anybody from anywhere."""
    if url.is_open:
        raise ServerUnsafe(
            f"{where} is on another machine and the URL has neither a password nor a "
            "client certificate: whoever reaches it could read and change everything. Give it "
            "a user and a password (streamq acl), or say --insecure (STREAMQ_INSECURE=1)"
        )


class Connection:
    """Connect to one server or cluster. Threads may share a connection; processes may not.

    Example:
        connection = Connection("redis+cluster://n1,n2,n3")
    """

    def __init__(self, url: str, *, reply_s: float = 0.0) -> None:
        """``reply_s``: wait that long for a reply or a connection, repeat no call; 0: as usual."""
        self._server_url = ServerURL(url)
        self.where = mask_passwords_of_url(url)
        self._url = url
        self._is_hasty = reply_s > 0
        self._local: LocalServer | None = None
        if self._server_url.kind == "local":
            # A server with a path keeps its data there.
            path = self._server_url.path
            self._local = LocalServer.start(path or None, persist=bool(path))
            self._url = self._local.url
            self._server_url = ServerURL(self._url)
        #: Whether keys of different requests are on different servers.
        self.is_cluster = self._server_url.kind == "cluster"
        self._blocking: dict[int, Any] = {}
        self._lanes: dict[tuple[float | None, str], Lanes] = {}
        self._lock = Lock()
        retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), RETRIES)
        changes: dict[str, Any] = {"retry": retry}
        if self._is_hasty:
            changes = {"socket_timeout": reply_s, "socket_connect_timeout": reply_s}
            changes["retry"] = Retry(NoBackoff(), 0)
        with translating_driver_errors(self.where):
            self.redis: Any = make_client(self._server_url, **changes)
        # Making a client of a cluster or of sentinels asks a server: one has answered by now.
        has_answered = self._server_url.kind in ("cluster", "sentinel")
        self._patience = self.redis.patience = Patience(self.where, has_answered=has_answered)

    def hasty(self, reply_s: float) -> "Connection":
        """Return another connection to the same server that waits that long and repeats no call."""
        return Connection(self._url, reply_s=reply_s)

    def node_of(self, key: str) -> str:
        """Return the node of a cluster that has the key, as far as is known; "" for one server.

        This asks no server, and takes no lock that another thread could hold while it asks one.
        """
        if not self.is_cluster:
            return ""
        nodes = self.redis.nodes_manager.slots_cache.get(cluster_slot_of_key(key))
        return str(nodes[0].name) if nodes else ""

    def patience(
        self, patience_s: float, say: Callable[[str], object]
    ) -> AbstractContextManager[None]:
        """Within the block, repeat this thread's calls for so long while the server is not ready.

        Not ready: the server fails over, reads its data, or is away after it has answered once. A
        server that never answered is not waited for. ``say`` gets a sentence, once for each call.
        """
        return self._patience.block(patience_s, say)

    def enter(self, *, is_insecure: bool = False) -> None:
        """Make sure that a server answers, and that it does not let in anybody from anywhere.

        Raises:
            ServerError: no server answers, it does not let us in, or (unless ``is_insecure``) it
                lets in anybody from anywhere.
        """
        if not is_insecure:
            refuse_open(self._server_url, self.where)
        self._shake_hands()
        with translating_driver_errors(self.where):
            try:
                self.redis.ping()
            except driver.ResponseError as error:
                # For example: the server has no database of that number.
                raise our_error_of_driver(error, self.where) or ServerRefused(
                    f"{self.where} refuses: {error}"
                ) from None

    def check(
        self, *, is_insecure: bool = False, warn: Callable[[str], object] = lambda _: None
    ) -> None:
        """Make sure that a server answers which can run our scripts and drops no keys.

        ``warn`` gets a sentence for each thing that should be mended but does not rule the server
        out.

        Raises:
            ServerError: as ``enter``; or the server is too old, or may drop keys.
        """
        self.enter(is_insecure=is_insecure)
        is_tls = bool(self._server_url.options.get("ssl"))
        with translating_driver_errors(self.where):
            infos = self._infos()
        warnings: dict[str, None] = {}
        for info in infos:
            version = version_of_server(info)
            if version.is_too_old:
                raise ServerError(
                    f"{self.where} is {version}, which is too old: use Redis 7 or newer, or Valkey"
                )
            policy = str(info.get("maxmemory_policy", "noeviction"))
            remedy = (
                "Set it to noeviction: CONFIG SET maxmemory-policy noeviction, "
                "and the same in its configuration file"
            )
            if policy.startswith("volatile-"):
                # Only heartbeats of workers have a TTL: the next heartbeat brings a lost one back.
                warnings[
                    f"{self.where} may drop what workers say of themselves, when it is full: its "
                    f"maxmemory-policy is {policy}. {remedy}"
                ] = None
            elif policy != "noeviction":
                raise ServerUnsafe(
                    f"{self.where} may drop keys: its maxmemory-policy is {policy}. {remedy}"
                )
            for danger in version.dangers(is_tls=is_tls):
                warnings[f"{self.where} is {version}, which {danger}: streamq doctor"] = None
        for text in warnings:
            warn(text)

    def _shake_hands(self) -> None:
        """Try TLS once, and for no longer than a connection may take.

        A server without TLS does not answer a handshake. redis-py would try again several
        times, and wait each time as long as for a reply.
        """
        if self._server_url.kind != "single" or not self._server_url.options.get("ssl"):
            return
        wait_s = self._server_url.options.get("socket_connect_timeout", CONNECT_S)
        client = make_client(self._server_url, socket_timeout=wait_s, retry=Retry(NoBackoff(), 0))
        try:
            client.connection_pool.make_connection().connect()
        except driver.TimeoutError:
            raise ServerUnreachable(
                f"{self.where} does not answer within {wait_s:g} s; a server without TLS is "
                "redis:// or valkey://, not rediss:// or valkeys://"
            ) from None
        except (driver.RedisError, OSError):
            return  # the next call raises the same error, or waits
        finally:
            client.close()

    def insist(self, call: Callable[[], Any]) -> Any:
        """Make the call; while this thread is patient, repeat it until the server is ready."""
        return self._patience.ask(call)

    def primaries(self) -> list[Any]:
        """Return the primaries of a cluster, as far as they are known; [None] for one server."""
        return list(self.redis.get_primaries()) if self.is_cluster else [None]

    def ask_node(self, node: Any, *words: Any) -> Any:
        """Send a command to one of the ``primaries`` and return the answer.

        Raises:
            ServerError: the node does not answer, or refuses the command.
        """
        options = {} if node is None else {"target_nodes": node}
        where = self.where if node is None else str(node.name)
        try:
            with translating_driver_errors(where):
                return self.redis.execute_command(*words, **options)
        except driver.ResponseError as error:
            raise ServerRefused(f"{where} refuses {words[0]}: {error}") from None

    def load_script(self, text: str, key: str, *, everywhere: bool) -> None:
        """Load a script into the node that has the key, or into every primary that answers."""
        with translating_driver_errors(self.where):
            if not self.is_cluster:
                self.redis.execute_command("SCRIPT LOAD", text)
                return
            if not everywhere:
                node = self.redis.get_node_from_key(key)
                self.redis.execute_command("SCRIPT LOAD", text, target_nodes=node)
                return
            for node in self.redis.get_primaries():
                with suppress(driver.RedisError, OSError):
                    self.redis.execute_command("SCRIPT LOAD", text, target_nodes=node)

    def blocking(self, block_s: float) -> Any:
        """Return a client for calls that block that long. It never repeats a call."""
        seconds = math.ceil(block_s)
        patience_s = self._server_url.options.get("socket_timeout", CONNECT_S)
        with self._lock:
            if seconds not in self._blocking:
                with translating_driver_errors(self.where):
                    self._blocking[seconds] = make_client(
                        self._server_url,
                        socket_timeout=seconds + patience_s,
                        retry=Retry(NoBackoff(), 0),
                    )
            return self._blocking[seconds]

    # A call through redis-py costs several times what a short call does, so calls use lanes, which
    # are kept. When a node of a cluster sends us to another, or a call is to be repeated, redis-py
    # makes the call: it follows a cluster that changes.

    def call(self, *words: Any) -> Any:
        """Make a call that may be repeated, and repeat it if no answer comes and there is time."""
        if self._patience.is_wanted:
            return self._patience.ask(self._call, *words)
        return self._call(*words)

    def _call(self, *words: Any) -> Any:
        try:
            return self._lanes_for(None, words).call(words)
        except _ELSEWHERE:
            pass  # contextlib.suppress would cost every call something
        except GONE:
            if self._is_hasty:
                if self.is_cluster:
                    self._read_nodes_again(self.redis)
                raise
        return self.redis.execute_command(*words)

    def call_once(self, *words: Any) -> Any:
        """Make a call that must not be repeated, unless a node refused it: then it was not made."""
        return self._once(words, 1, Lanes.call)

    def _once(self, words: tuple[Any, ...], block_s: float, call: Callable[..., Any]) -> Any:
        try:
            return call(self._lanes_for(block_s, words), words)
        except _ELSEWHERE:
            pass
        except GONE:
            if self.is_cluster:
                self._read_nodes_again(self.blocking(block_s))
            raise
        if words[0] == "BRPOP":
            # ``wake`` ends only waits on lanes, so this one is 1 s at most. The next uses a lane.
            words = (*words[:-1], min(1, words[-1]))
        return self.blocking(block_s).execute_command(*words)

    def call_all(self, calls: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Send calls in one go, to the node of the first one's keys. A refusal is an answer."""
        calls = iter(calls)
        first = next(calls)
        try:
            return self._lanes_for(None, first).call_all(chain((first,), calls))
        except GONE:
            if self.is_cluster:
                self._read_nodes_again(self.redis)
            raise

    def pop(self, lists: tuple[str, ...], block_s: float) -> Any:
        """Wait for an element of the first list that has one. Return the list and the element."""
        try:
            return self._once(("BRPOP", *lists, block_s), block_s, Lanes.block)
        except (driver.RedisError, driver.RedisClusterException, OSError):
            with translating_driver_errors(self.where):
                raise

    def wake(self) -> None:
        """End every wait of ``pop``, from another thread: ``pop`` then returns without an element.

        Where the server does not allow CLIENT UNBLOCK, this closes the connection instead. An
        element that was just on its way is then lost, so it is the second choice.
        """
        for lane, beside in self._blocked():
            try:
                if lane.number:
                    beside.ask(("CLIENT", "UNBLOCK", lane.number), WAKE_S)
                elif lane.number == 0:
                    lane.hang_up()
            except (driver.RedisError, OSError):
                lane.hang_up()

    def check_waits(self) -> None:
        """Make every ``pop`` fail that waits at a server which does not answer a PING.

        Called from another thread. Servers that hang, and hosts that vanish, close no connection.
        """
        for lane, beside in self._blocked():
            try:
                beside.ask(("PING",), CONNECT_S)
            except (driver.RedisError, OSError):
                lane.hang_up()

    def _blocked(self) -> Iterator[tuple[Lane, Lanes]]:
        """Yield lanes on which a ``pop`` waits, each with lanes to its server for short calls."""
        for (_, name), lanes in list(self._lanes.items()):
            for lane in list(lanes.blocked):
                client = self._client_of(name)
                if client is None or not lane.is_owned_by(client.connection_pool):
                    lane.hang_up()  # its node has left the cluster, or is no primary any more
                else:
                    yield lane, self._kept_lanes(None, name, client)

    def _client_of(self, name: str) -> Any:
        """Return the client of a node, or of the only server; None if there is no such node."""
        if not name:
            return self.redis
        node = self.redis.get_node(node_name=name)
        if node is None:
            # The node may have joined since this client read the list of nodes.
            self._read_nodes_again(self.redis)
            node = self.redis.get_node(node_name=name)
        return self.redis.get_redis_connection(node) if node else None

    def _lanes_for(self, block_s: float | None, words: tuple[Any, ...]) -> Lanes:
        """Return lanes to the node of a call, for calls that block so long or (None) not at all."""
        name = ""
        if self.is_cluster:
            client = self._client_for(block_s)
            node = client.get_node_from_key(first_key_of_command(words))
            name, client = node.name, client.get_redis_connection(node)
            return self._kept_lanes(block_s, name, client)
        lanes = self._lanes.get((block_s, name))
        return lanes or self._kept_lanes(block_s, name, self._client_for(block_s))

    def _kept_lanes(self, block_s: float | None, name: str, client: Any) -> Lanes:
        """Return the lanes of a client, which are made when first asked for."""
        lanes = self._lanes.get((block_s, name))
        if lanes is None:
            lanes = self._lanes.setdefault((block_s, name), Lanes(client.connection_pool))
        return lanes

    def _client_for(self, block_s: float | None) -> Any:
        return self.redis if block_s is None else self.blocking(block_s)

    @staticmethod
    def _read_nodes_again(client: Any) -> None:
        """Read the list of nodes again, as redis-py does when a node is gone."""
        # IndexError: the nodes that answer have no slots.
        with suppress(driver.RedisError, driver.RedisClusterException, OSError, IndexError):
            client.nodes_manager.initialize()

    def replicas(self, key: str, wanted: int, wait_s: float) -> int:
        """Wait until so many replicas have what the key's node has. Return how many have it.

        WAIT counts the writes of its own connection only, so a small write goes before it.
        """
        with translating_driver_errors(self.where):
            node = self.redis
            if self.is_cluster:
                node = node.get_redis_connection(node.get_node_from_key(key))
            with node.pipeline(transaction=False) as pipe:
                pipe.set(key, "", px=1)
                pipe.wait(wanted, round(wait_s * 1e3))
                return int(pipe.execute()[-1])

    def lane(self, key: str) -> Lane:
        """Return a lane to the node that has the key; the caller closes it."""
        with translating_driver_errors(self.where):
            node = self.redis
            if self.is_cluster:
                node = node.get_redis_connection(node.get_node_from_key(key))
            return Lane(node.connection_pool)

    def subscribe(self, channel: str) -> PubSub:
        """Subscribe to a sharded channel; the caller closes the subscription."""
        with translating_driver_errors(self.where):
            pubsub: PubSub = self.redis.pubsub()
            pubsub.ssubscribe(channel)
            return pubsub

    def close(self) -> None:
        """Drop every connection, and the embedded server if there is one."""
        for lanes in self._lanes.values():
            lanes.close()
        for client in [self.redis, *self._blocking.values()]:
            client.close()
        if self._local:
            self._local.stop()

    def _infos(self) -> list[dict[str, Any]]:
        if self.is_cluster:
            reply = self.redis.info(target_nodes=RedisCluster.PRIMARIES)
            return list(reply.values()) if "maxmemory_policy" not in reply else [reply]
        return [self.redis.info()]
