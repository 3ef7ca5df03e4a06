"""Clients of redis-py for what a URL names: one server, a socket, a cluster, sentinels."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from redis import Redis, RedisCluster
from redis import exceptions as driver
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.crc import key_slot
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from redis.sentinel import Sentinel

from streamq.driver.patience import Patience
from streamq.driver.url import ServerURL

#: Seconds to wait for a reply to an ordinary command, and for a connection.
REPLY_S = 10.0
CONNECT_S = 5.0


def make_client(url: ServerURL, **changes: Any) -> Any:
    """Return a client for what the URL names; ``changes`` win over the options of the URL.

    A client of a cluster or of sentinels asks a server before it is returned.
    """
    options = client_options(url, **changes)
    if url.kind == "unix":
        return _SingleClient(unix_socket_path=url.path, **options)
    options["socket_keepalive"] = True
    if url.kind == "cluster":
        return _cluster_client(url, options)
    if url.kind == "sentinel":
        return _sentinel_client(url, options)
    host, port = url.hosts[0]
    return _SingleClient(host=host, port=port, **options)


def client_options(url: ServerURL, **changes: Any) -> dict[str, Any]:
    """Return the arguments that every client is made with; ``changes`` win over the URL."""
    return {
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": REPLY_S,
        "protocol": 2,
        # Valkey does not know these notifications and would refuse the connection.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        **url.options,
        # redis-py would count the connections that lanes keep, and at its limit refuse to make
        # more.
        "max_connections": 2**31,
        **changes,
    }


class _PatientClient:
    """Makes every command of a client consult the ``patience`` of its connection, if it has one."""

    patience: Patience | None = None

    def execute_command(self, *words: Any, **options: Any) -> Any:
        """Send a command. A thread inside a block of patience repeats it until a server answers."""
        send: Callable[..., Any] = super().execute_command  # type: ignore[misc]
        if self.patience is None:
            return send(*words, **options)
        return self.patience.ask(send, *words, **options)


class _SingleClient(_PatientClient, Redis):
    """One server: by its host, by its socket, or the primary that sentinels name."""


class _ClusterClient(_PatientClient, RedisCluster):
    """A cluster, where the first key of a call tells the node.

    redis-py works out the slot of every key, and a take has a hundred keys or more. All keys of
    one of our calls have the same slot.
    """

    def determine_slot(self, *args: Any) -> int | None:
        """Return the slot of a command's keys."""
        if args[0] in ("BRPOP", "EVALSHA"):
            return cluster_slot_of_key(first_key_of_command(args))
        slot: int | None = super().determine_slot(*args)
        return slot


def first_key_of_command(words: Sequence[Any]) -> Any:
    """Return the first key of a BRPOP or EVALSHA."""
    return words[3 if words[0] == "EVALSHA" else 1]


@lru_cache(4096)
def cluster_slot_of_key(key: str) -> int:
    """Return the slot of a cluster that has the key."""
    return int(key_slot(key.encode()))


def _cluster_client(url: ServerURL, options: dict[str, Any]) -> Any:
    nodes = [ClusterNode(*host) for host in url.hosts]  # type: ignore[no-untyped-call]
    try:
        return _ClusterClient(startup_nodes=nodes, require_full_coverage=False, **options)
    except IndexError:
        raise driver.ClusterError("the cluster has no slots yet") from None


def _sentinel_client(url: ServerURL, options: dict[str, Any]) -> Any:
    """Return a client of the primary that the sentinels name, now and after each failover."""
    login = {"username", "password", "db", "client_name"}
    asked = {name: value for name, value in options.items() if name not in login}
    # A sentinel that does not answer is not asked twice in a row: the next one is asked instead.
    asked |= {"socket_timeout": CONNECT_S, "retry": Retry(NoBackoff(), 0)}
    sentinel = Sentinel(url.hosts, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    _check_sentinels(sentinel, url.service)
    return sentinel.master_for(url.service, _SingleClient, **options)  # type: ignore[no-untyped-call]


def _check_sentinels(sentinel: Sentinel, service: str) -> None:
    """Raise if no sentinel answers, or if none watches the service: waiting would not help."""
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
