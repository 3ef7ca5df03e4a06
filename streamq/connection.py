"""From a URL to a server: one server, a cluster, a primary behind sentinels, or an embedded one.

Every error of the driver that a caller can act on is translated here, and nowhere else.
"""

from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from redis import Redis, RedisCluster
from redis import exceptions as driver
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.client import PubSub
from redis.cluster import ClusterNode
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from redis.sentinel import Sentinel

from streamq.errors import (
    InvalidValue,
    ServerBusy,
    ServerError,
    ServerFull,
    ServerRefused,
    ServerUnreachable,
    ServerUnsafe,
)
from streamq.server import LocalServer

SCHEMES = (
    "redis:// rediss:// valkey:// valkeys:// unix:// redis+cluster:// rediss+cluster:// "
    "redis+sentinel:// local://"
)
#: Seconds to wait for a reply to an ordinary command, and for a connection.
REPLY_S = 10.0
CONNECT_S = 5.0
#: How often an ordinary call is sent again. All of them are scripts that bear repetition.
RETRIES = 3

# What the driver raises, and what it means to a caller; the first that fits counts.
_KINDS: tuple[tuple[type[Exception], type[ServerError], str], ...] = (
    (driver.AuthenticationError, ServerRefused, "does not let us in"),
    (driver.AuthorizationError, ServerRefused, "does not let us in"),
    (driver.NoPermissionError, ServerRefused, "does not let us do this"),
    (driver.OutOfMemoryError, ServerFull, "is out of memory: let workers drain it"),
    (driver.ReadOnlyError, ServerBusy, "is not ready"),
    (driver.BusyLoadingError, ServerBusy, "is not ready"),
    (driver.ClusterError, ServerBusy, "is not ready"),
    (driver.AskError, ServerBusy, "is not ready"),
    (driver.MasterDownError, ServerBusy, "is not ready"),
    (driver.TryAgainError, ServerBusy, "is not ready"),
    (driver.SlotNotCoveredError, ServerBusy, "is not ready"),
    (driver.ConnectionError, ServerUnreachable, "does not answer"),
    (driver.TimeoutError, ServerUnreachable, "does not answer"),
    (driver.RedisClusterException, ServerUnreachable, "does not answer as a cluster"),
    (OSError, ServerUnreachable, "does not answer"),
)
# The same by the first word of a reply that the driver has no class for.
_WORDS: dict[str, tuple[type[ServerError], str]] = {
    "OOM": (ServerFull, "is out of memory: let workers drain it"),
    "NOAUTH": (ServerRefused, "does not let us in"),
    "WRONGPASS": (ServerRefused, "does not let us in"),
    "NOPERM": (ServerRefused, "does not let us do this"),
} | dict.fromkeys(
    ("UNBLOCKED", "MISCONF", "BUSY", "NOREPLICAS", "LOADING", "CLUSTERDOWN", "TRYAGAIN"),
    (ServerBusy, "is not ready"),
)


def mask(url: str) -> str:
    """The URL without its password, fit to be shown."""
    split = urlsplit(url)
    if "@" not in split.netloc:
        return url
    user, _, host = split.netloc.rpartition("@")
    name = user.partition(":")[0]
    return urlunsplit(split._replace(netloc=f"{name}:***@{host}"))


def _ours(error: Exception, where: str) -> ServerError | None:
    """The driver's error as one of ours, if a caller can act on it."""
    for kind, ours, says in _KINDS:
        if isinstance(error, kind):
            return ours(f"{where} {says}: {error}")
    word = str(error).partition(" ")[0]
    if word in _WORDS:
        ours, says = _WORDS[word]
        return ours(f"{where} {says}: {error}")
    return None


@contextmanager
def translated(where: str) -> Generator[None]:
    """Driver errors become ours. Refusals of scripts pass: ``scripts`` knows them."""
    try:
        yield
    except (driver.RedisError, OSError) as error:
        ours = _ours(error, where)
        if ours is None:
            raise
        raise ours from None


class Connection:
    """The way to one server or cluster. Threads may share it; processes may not."""

    def __init__(self, url: str) -> None:
        self.where = mask(url)
        self._local = _start_local(url)
        self._url = self._local.url if self._local else url
        self._split = urlsplit(self._url)
        self._kind, self._scheme = _kind_of(self._split)
        self._blocking: dict[float, Any] = {}
        self._lock = Lock()
        with translated(self.where):
            self.redis: Any = self._client(
                socket_timeout=REPLY_S,
                retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), RETRIES),
            )

    def check(self) -> None:
        """Make sure somebody answers who keeps what it is given.

        Raises:
            ServerError: nobody answers, it does not let us in, or it may drop keys.
        """
        with translated(self.where):
            for info in self._infos():
                policy = info.get("maxmemory_policy", "noeviction")
                if policy != "noeviction":
                    raise ServerUnsafe(
                        f"{self.where} may drop keys: its maxmemory-policy is {policy}. "
                        "Set it to noeviction: CONFIG SET maxmemory-policy noeviction, "
                        "and the same in its configuration file"
                    )

    def blocking(self, block_s: float) -> Any:
        """A client for calls that block that long: it waits for the reply and never repeats one."""
        with self._lock:
            if block_s not in self._blocking:
                with translated(self.where):
                    self._blocking[block_s] = self._client(
                        socket_timeout=block_s + CONNECT_S, retry=Retry(NoBackoff(), 0)
                    )
            return self._blocking[block_s]

    def subscribe(self, channel: str) -> PubSub:
        """A subscription to a sharded channel; the caller closes it."""
        with translated(self.where):
            pubsub: PubSub = self.redis.pubsub()
            pubsub.ssubscribe(channel)
            return pubsub

    def close(self) -> None:
        """Drop every connection, and the embedded server if there is one."""
        for client in [self.redis, *self._blocking.values()]:
            client.close()
        if self._local:
            self._local.stop()

    def _infos(self) -> list[dict[str, Any]]:
        if isinstance(self.redis, RedisCluster):
            reply = self.redis.info("memory", target_nodes=RedisCluster.PRIMARIES)
            return list(reply.values()) if "maxmemory_policy" not in reply else [reply]
        return [self.redis.info("memory")]

    def _client(self, **changes: Any) -> Any:
        options: dict[str, Any] = {
            "socket_connect_timeout": CONNECT_S,
            "protocol": 2,
            # Valkey knows no such notifications and would refuse the connection.
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
            **changes,
        }
        if self._scheme != "unix":
            options["socket_keepalive"] = True
        if self._kind == "single":
            return self._single(options)
        options |= _credentials(self._split) | dict(parse_qsl(self._split.query))
        if self._scheme == "rediss":
            options["ssl"] = True
        return self._cluster(options) if self._kind == "cluster" else self._primary(options)

    def _single(self, options: dict[str, Any]) -> Any:
        try:
            url = self._scheme + self._url[self._url.index(":") :]
            return Redis.from_url(url, **options)
        except ValueError as error:
            raise InvalidValue(f"bad URL {self.where}: {error}") from None

    def _cluster(self, options: dict[str, Any]) -> Any:
        nodes = [ClusterNode(host, port) for host, port in _hosts(self._split, 6379)]
        return RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)

    def _primary(self, options: dict[str, Any]) -> Any:
        """The primary that the sentinels name, now and after each failover."""
        service, _, db = self._split.path.strip("/").partition("/")
        asked = {"socket_timeout": CONNECT_S, "socket_connect_timeout": CONNECT_S}
        hosts = _hosts(self._split, 26379)
        sentinel = Sentinel(hosts, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
        return sentinel.master_for(  # type: ignore[no-untyped-call]
            service, db=int(db or 0), **options
        )


def _start_local(url: str) -> LocalServer | None:
    """The embedded server that ``local://`` asks for; with a path it keeps its data there."""
    split = urlsplit(url)
    if split.scheme != "local":
        return None
    path = unquote(split.netloc + split.path)
    return LocalServer.start(path or None, persist=bool(path))


def _kind_of(split: SplitResult) -> tuple[str, str]:
    """How to connect, and the driver's own scheme."""
    scheme, plus, way = split.scheme.partition("+")
    own = {"valkey": "redis", "valkeys": "rediss"}.get(scheme, scheme)
    if not plus and own in ("redis", "rediss", "unix"):
        return "single", own
    if own in ("redis", "rediss") and way in ("cluster", "sentinel"):
        if way == "sentinel" and not split.path.strip("/").partition("/")[0]:
            raise InvalidValue("redis+sentinel:// wants a service: redis+sentinel://host/service")
        return way, own
    raise InvalidValue(f"no such URL scheme {split.scheme!r}; known are {SCHEMES}")


def _hosts(split: SplitResult, default_port: int) -> list[tuple[str, int]]:
    hosts = []
    for address in split.netloc.rpartition("@")[2].split(","):
        parsed = urlsplit(f"//{address}")
        try:
            hosts.append((parsed.hostname or "localhost", parsed.port or default_port))
        except ValueError as error:
            raise InvalidValue(f"bad address {address!r} in the URL: {error}") from None
    return hosts


def _credentials(split: SplitResult) -> dict[str, str]:
    user, at, _ = split.netloc.rpartition("@")
    if not at:
        return {}
    name, _, password = user.partition(":")
    found = {"username": unquote(name), "password": unquote(password)}
    return {key: value for key, value in found.items() if value}
