"""From a URL to a server: one server, a cluster, a primary behind sentinels, or an embedded one.

What errors of the driver mean to a caller is in ``errors``.
"""

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import chain
from threading import Lock
from typing import Any

from redis import Redis, RedisCluster
from redis import exceptions as driver
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.client import PubSub
from redis.cluster import ClusterNode
from redis.crc import key_slot
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from redis.sentinel import Sentinel

from streamq.driver.errors import ours, translated
from streamq.driver.lanes import GONE, Lane, Lanes
from streamq.driver.server_versions import version_of
from streamq.driver.url import Target, mask
from streamq.errors import (
    ServerBusy,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    ServerUnsafe,
)
from streamq.servers.local import LocalServer

#: Seconds to wait for a reply to an ordinary command, and for a connection.
REPLY_S = 10.0
CONNECT_S = 5.0
#: And for one that ends a wait.
WAKE_S = 1.0
#: How often an ordinary call is sent again. All of them are scripts that bear repetition.
RETRIES = 3
#: What a node says that has not made a call, and others may.
_ELSEWHERE = (
    driver.AskError,
    driver.ReadOnlyError,
    driver.TryAgainError,
    driver.ClusterDownError,
    driver.RedisClusterException,
)
#: How often a server that is not ready is asked again, and when to say that it is waited for.
_ASK_AGAIN_S = 0.2
_SAY_AFTER_S = 1.0


def refuse_open(target: Target, where: str) -> None:
    """Raise ServerUnsafe for a server that lets in anybody from anywhere."""
    if target.is_open:
        raise ServerUnsafe(
            f"{where} is on another machine and the URL has neither a password nor a "
            "client certificate: whoever reaches it could read and change everything. Give it "
            "a user and a password (streamq acl), or say --insecure (STREAMQ_INSECURE=1)"
        )


class Connection:
    """The way to one server or cluster. Threads may share it; processes may not."""

    def __init__(self, url: str, *, reply_s: float = 0.0) -> None:
        """With ``reply_s`` it waits so long for a reply or a connection, and repeats nothing."""
        self._target = Target(url)
        self.where = mask(url)
        self._url = url
        self._is_hasty = reply_s > 0
        self._local: LocalServer | None = None
        if self._target.kind == "local":
            # With a path it keeps its data there.
            path = self._target.path
            self._local = LocalServer.start(path or None, persist=bool(path))
            self._url = self._local.url
            self._target = Target(self._url)
        #: Whether keys of different requests are on different servers.
        self.is_cluster = self._target.kind == "cluster"
        self._blocking: dict[int, Any] = {}
        self._lanes: dict[tuple[float | None, str], Lanes] = {}
        self._lock = Lock()
        retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), RETRIES)
        changes: dict[str, Any] = {"retry": retry}
        if self._is_hasty:
            changes = {"socket_timeout": reply_s, "socket_connect_timeout": reply_s}
            changes["retry"] = Retry(NoBackoff(), 0)
        with translated(self.where):
            self.redis: Any = self._client(**changes)
        # Of a cluster, or of sentinels, somebody has: else we were not here.
        self._has_answered = self._target.kind in ("cluster", "sentinel")

    def hasty(self, reply_s: float) -> "Connection":
        """Another way to the same server: it waits so long for a reply, and repeats no call."""
        return Connection(self._url, reply_s=reply_s)

    def node_of(self, key: str) -> str:
        """The node of a cluster that has the key, as far as is known; "" for the only server.

        Nobody is asked, and nobody is waited for who is just asking.
        """
        if not self.is_cluster:
            return ""
        nodes = self.redis.nodes_manager.slots_cache.get(_slot(key))
        return str(nodes[0].name) if nodes else ""

    @contextmanager
    def patience(self, patience_s: float, say: Callable[[str], object]) -> Generator[None]:
        """Within the block, ask again for so long while the server is not ready.

        It fails over, or reads its data, or is away after it has answered once; somebody who
        never answered is not waited for. What is waited for is said, once for each wait.
        """

        def patient(ask: Callable[..., Any], *words: Any, **options: Any) -> Any:
            begun = time.monotonic()
            is_said = False
            while True:
                try:
                    reply = ask(*words, **options)
                except (driver.RedisError, driver.RedisClusterException, OSError) as error:
                    meant = ours(error, self.where)
                    passing = (ServerBusy, ServerUnreachable) if self._has_answered else ServerBusy
                    waited_s = time.monotonic() - begun
                    if waited_s >= patience_s or not isinstance(meant, passing):
                        raise
                    if waited_s >= _SAY_AFTER_S and not is_said:
                        say(f"{meant}; waiting for it")
                        is_said = True
                    time.sleep(_ASK_AGAIN_S)
                else:
                    self._has_answered = True
                    return reply

        of_driver, own = vars(self.redis), vars(self)
        of_driver["execute_command"] = partial(patient, self.redis.execute_command)
        own["call"] = partial(patient, self.call)
        try:
            yield
        finally:
            del of_driver["execute_command"], own["call"]

    def enter(self, *, is_insecure: bool = False) -> None:
        """Make sure that somebody answers, and not to everybody.

        Raises:
            ServerError: nobody answers, it does not let us in, or it lets in anybody from
                anywhere (unless that is fine).
        """
        if not is_insecure:
            refuse_open(self._target, self.where)
        self._shake_hands()
        with translated(self.where):
            try:
                self.redis.ping()
            except driver.ResponseError as error:
                # That it has no such database, for one.
                raise ours(error, self.where) or ServerRefused(
                    f"{self.where} refuses: {error}"
                ) from None

    def check(
        self, *, is_insecure: bool = False, warn: Callable[[str], object] = lambda _: None
    ) -> None:
        """Make sure somebody answers who can run our scripts, and keeps what it is given.

        What is no reason to refuse the server, and should be mended, goes to ``warn``.

        Raises:
            ServerError: as of ``enter``, the server is too old, or may drop keys.
        """
        self.enter(is_insecure=is_insecure)
        is_tls = bool(self._target.options.get("ssl"))
        with translated(self.where):
            infos = self._infos()
        warnings: dict[str, None] = {}
        for info in infos:
            version = version_of(info)
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
                # Of our keys only those have a TTL that nobody misses for longer than a heartbeat.
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

        A server that speaks none does not answer: the driver would try that again, and wait
        each time as for a reply.
        """
        if self._target.kind != "single" or not self._target.options.get("ssl"):
            return
        wait_s = self._target.options.get("socket_connect_timeout", CONNECT_S)
        client = self._client(socket_timeout=wait_s, retry=Retry(NoBackoff(), 0))
        try:
            client.connection_pool.make_connection().connect()
        except driver.TimeoutError:
            raise ServerUnreachable(
                f"{self.where} does not answer within {wait_s:g} s; a server without TLS is "
                "redis:// or valkey://, not rediss:// or valkeys://"
            ) from None
        except (driver.RedisError, OSError):
            return  # whoever asks next is told, or waits
        finally:
            client.close()

    def load_script(self, text: str, key: str, *, everywhere: bool) -> None:
        """Make a script known where the key is, or on every primary that answers."""
        with translated(self.where):
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
        """A client for calls that block that long: it waits for the reply and never repeats one."""
        seconds = math.ceil(block_s)
        patience_s = self._target.options.get("socket_timeout", CONNECT_S)
        with self._lock:
            if seconds not in self._blocking:
                with translated(self.where):
                    self._blocking[seconds] = self._client(
                        socket_timeout=seconds + patience_s, retry=Retry(NoBackoff(), 0)
                    )
            return self._blocking[seconds]

    # The driver's own way to a server costs several times what a short call does, so calls go by
    # lanes that are kept. When a node of a cluster sends us elsewhere, or a call may be repeated,
    # the driver makes it: it follows a cluster that changes.

    def call(self, *words: Any) -> Any:
        """Make a call that may be repeated, and repeat it if no answer comes and there is time."""
        try:
            return self._lanes_for(None, words).call(words)
        except _ELSEWHERE:
            pass  # a context manager for it would cost every call something
        except GONE:
            if self._is_hasty:
                if self.is_cluster:
                    self._look_around(self.redis)
                raise
        return self.redis.execute_command(*words)

    def call_once(self, *words: Any) -> Any:
        """Make a call that must not be repeated. One that a node refuses was not made."""
        return self._once(words, 1, Lanes.call)

    def _once(self, words: tuple[Any, ...], block_s: float, call: Callable[..., Any]) -> Any:
        try:
            return call(self._lanes_for(block_s, words), words)
        except _ELSEWHERE:
            pass
        except GONE:
            if self.is_cluster:
                self._look_around(self.blocking(block_s))
            raise
        if words[0] == "BRPOP":
            # Nobody could end it (``wake``), so it waits a moment only; the next goes by a lane.
            words = (*words[:-1], min(1, words[-1]))
        return self.blocking(block_s).execute_command(*words)

    def call_all(self, calls: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Make calls in one go, to where the keys of the first are. Refusals are answers here."""
        calls = iter(calls)
        first = next(calls)
        try:
            return self._lanes_for(None, first).call_all(chain((first,), calls))
        except GONE:
            if self.is_cluster:
                self._look_around(self.redis)
            raise

    def pop(self, lists: tuple[str, ...], block_s: float) -> Any:
        """Wait for an element of the first list that has one. Returns the list and the element."""
        try:
            return self._once(("BRPOP", *lists, block_s), block_s, Lanes.block)
        except (driver.RedisError, driver.RedisClusterException, OSError):
            with translated(self.where):
                raise

    def wake(self) -> None:
        """End every wait of ``pop``, from another thread: it returns without an element.

        Where the server does not allow that, the connection is closed. An element that was
        just on its way is lost then, so this comes second.
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
        """See to it that no ``pop`` waits at a server that does not answer: there it is an error.

        From another thread; for servers that hang, and hosts that vanish without a word.
        """
        for lane, beside in self._blocked():
            try:
                beside.ask(("PING",), CONNECT_S)
            except (driver.RedisError, OSError):
                lane.hang_up()

    def _blocked(self) -> Iterator[tuple[Lane, Lanes]]:
        """Lanes on which a ``pop`` waits, each with lanes to the same server for short calls."""
        for (_, name), lanes in list(self._lanes.items()):
            for lane in list(lanes.blocked):
                client = self._client_of(name)
                if client is None or not lane.is_owned_by(client.connection_pool):
                    lane.hang_up()  # its node has left the cluster, or is no primary any more
                else:
                    yield lane, self._kept_lanes(None, name, client)

    def _client_of(self, name: str) -> Any:
        """The client of a node, or of the only server; None when the cluster has no such node."""
        if not name:
            return self.redis
        node = self.redis.get_node(node_name=name)
        if node is None:
            # It may have joined since this client looked around.
            self._look_around(self.redis)
            node = self.redis.get_node(node_name=name)
        return self.redis.get_redis_connection(node) if node else None

    def _lanes_for(self, block_s: float | None, words: tuple[Any, ...]) -> Lanes:
        """Lanes for calls that block so long, or not at all, to where the keys of this one are."""
        name = ""
        if self.is_cluster:
            client = self._client_for(block_s)
            node = client.get_node_from_key(_first_key(words))
            name, client = node.name, client.get_redis_connection(node)
            return self._kept_lanes(block_s, name, client)
        lanes = self._lanes.get((block_s, name))
        return lanes or self._kept_lanes(block_s, name, self._client_for(block_s))

    def _kept_lanes(self, block_s: float | None, name: str, client: Any) -> Lanes:
        """Lanes by a client, those that are there already if there are any."""
        lanes = self._lanes.get((block_s, name))
        if lanes is None:
            lanes = self._lanes.setdefault((block_s, name), Lanes(client.connection_pool))
        return lanes

    def _client_for(self, block_s: float | None) -> Any:
        return self.redis if block_s is None else self.blocking(block_s)

    @staticmethod
    def _look_around(client: Any) -> None:
        """Find out who is there by now, as the driver does when a node is gone."""
        # IndexError: the nodes that answer have no slots.
        with suppress(driver.RedisError, driver.RedisClusterException, OSError, IndexError):
            client.nodes_manager.initialize()

    def replicas(self, key: str, wanted: int, wait_s: float) -> int:
        """How many replicas have what was written so far where the key is, waiting for so many.

        WAIT counts for the writes of its own connection, so a last small one goes before it.
        """
        with translated(self.where):
            node = self.redis
            if self.is_cluster:
                node = node.get_redis_connection(node.get_node_from_key(key))
            with node.pipeline(transaction=False) as pipe:
                pipe.set(key, "", px=1)
                pipe.wait(wanted, round(wait_s * 1e3))
                return int(pipe.execute()[-1])

    def lane(self, key: str) -> Lane:
        """A way of its own to where the key is; the caller closes it."""
        with translated(self.where):
            node = self.redis
            if self.is_cluster:
                node = node.get_redis_connection(node.get_node_from_key(key))
            return Lane(node.connection_pool)

    def subscribe(self, channel: str) -> PubSub:
        """A subscription to a sharded channel; the caller closes it."""
        with translated(self.where):
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

    def _client(self, **changes: Any) -> Any:
        target = self._target
        options = _options(target, **changes)
        if target.kind == "unix":
            return Redis(unix_socket_path=target.path, **options)
        options["socket_keepalive"] = True
        if target.kind == "cluster":
            return _cluster(target, options)
        if target.kind == "sentinel":
            return _primary(target, options)
        host, port = target.hosts[0]
        return Redis(host=host, port=port, **options)


class Line:
    """One node, spoken to directly with the login and TLS of a URL; replies are strings."""

    def __init__(self, target: Target, host: str, port: int) -> None:
        self._where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        options = _options(target, decode_responses=True, retry=Retry(NoBackoff(), 0))
        self._client = Redis(host=host, port=port, **options)
        with translated(self._where):
            self._connection: Any = self._client.connection_pool.get_connection()

    def ask(self, *words: str) -> str:
        """What the node answers; the items of a list below each other.

        Raises:
            ServerError: it does not answer, or refuses.
        """
        try:
            with translated(self._where):
                self._connection.send_command(*words)
                reply = self._connection.read_response()
        except driver.ResponseError as error:
            raise ServerRefused(f"{self._where} refuses {' '.join(words[:2])}: {error}") from None
        return "\n".join(map(str, reply)) if isinstance(reply, list) else str(reply)

    def close(self) -> None:
        """Hang up."""
        self._connection.disconnect()
        self._client.close()


def _options(target: Target, **changes: Any) -> dict[str, Any]:
    """What every client of the driver is made with."""
    return {
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": REPLY_S,
        "protocol": 2,
        # Valkey knows no such notifications and would refuse the connection.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        **target.options,
        # The driver's own limit would count lanes that are kept, and then let nobody else through.
        "max_connections": 2**31,
        **changes,
    }


class _Cluster(RedisCluster):
    """A cluster whose first key tells where a call goes: all keys of a call of ours share a slot.

    The driver works out the slot of every key of every call, and a take has a hundred.
    """

    def determine_slot(self, *args: Any) -> int | None:
        """The slot of a command's keys."""
        if args[0] in ("BRPOP", "EVALSHA"):
            return _slot(_first_key(args))
        slot: int | None = super().determine_slot(*args)
        return slot


def _first_key(words: Sequence[Any]) -> Any:
    return words[3 if words[0] == "EVALSHA" else 1]


@lru_cache(4096)
def _slot(key: str) -> int:
    return int(key_slot(key.encode()))


def _cluster(target: Target, options: dict[str, Any]) -> Any:
    nodes = [ClusterNode(*host) for host in target.hosts]  # type: ignore[no-untyped-call]
    try:
        return _Cluster(startup_nodes=nodes, require_full_coverage=False, **options)
    except IndexError:
        raise driver.ClusterError("the cluster has no slots yet") from None


def _primary(target: Target, options: dict[str, Any]) -> Any:
    """The primary that the sentinels name, now and after each failover."""
    login = {"username", "password", "db", "client_name"}
    asked = {name: value for name, value in options.items() if name not in login}
    # One that does not answer is not asked again, but the next one, and all of them later.
    asked |= {"socket_timeout": CONNECT_S, "retry": Retry(NoBackoff(), 0)}
    sentinel = Sentinel(target.hosts, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    _refuse_strange(sentinel, target.service)
    return sentinel.master_for(target.service, **options)  # type: ignore[no-untyped-call]


def _refuse_strange(sentinel: Sentinel, service: str) -> None:
    """Raise if no sentinel answers, or none watches the service: waiting helps neither."""
    silent: Exception | None = None
    known: set[str] = set()
    for each in sentinel.sentinels:
        try:
            known |= {str(name) for name in each.sentinel_masters()}
        except driver.NoPermissionError:
            raise
        except driver.ResponseError as error:
            silent = driver.InvalidResponse(f"it is no sentinel: {error}")
        except (driver.ConnectionError, driver.TimeoutError) as error:
            silent = error
    if service not in known:
        others = f"; they watch {', '.join(sorted(known))}" if known else ""
        raise silent or driver.ConnectionError(f"no sentinel watches {service!r}{others}")
