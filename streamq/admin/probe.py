"""Reads the state of a server, and of a request in it, for the doctor. Changes nothing."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from streamq.driver.connection import Connection
from streamq.driver.errors import translating_driver_errors
from streamq.errors import ServerRefused, damaged_if_unreadable
from streamq.model import PREFIX
from streamq.protocol.keys import QueueKeys, token_list_of
from streamq.protocol.protocol import Protocol
from streamq.protocol.script_cache import ScriptCache
from streamq.protocol.snapshot import Snapshot


class ProbedClock(msgspec.Struct, frozen=True):
    """A server's clock beside ours."""

    #: How far the server's clock is ahead of ours, and how long the answer took.
    ahead_s: float
    trip_s: float


class ProbedBooks(msgspec.Struct, frozen=True):
    """What is stored about a request, in its own keys and in its queue's."""

    request: Snapshot
    #: Entries of the stream, and how many of them are pending under a consumer.
    entries: int
    pending: int
    #: Consumers that have pending entries and no lease.
    without_lease: list[str]
    #: Holders whose lease has expired, and for how long (ms).
    expired: dict[str, int]
    #: Parts in ``retry`` whose time has come.
    retry_due: int
    tokens: int
    #: When a janitor is to look at the request next (ms); None if it is not in ``due``.
    look_ms: float | None


class Probe:
    """Asks one server, or every primary of a cluster."""

    def __init__(self, connection: Connection, prefix: str = PREFIX) -> None:
        self._connection = connection
        self.prefix = prefix
        self._protocol = Protocol(connection, prefix)
        self.scripts = ScriptCache(connection)
        self._lengths: dict[str, int] = {}

    def primaries(self) -> list[Any]:
        """Return the nodes to ask. None stands for the only server."""
        return self._connection.primaries()

    def name(self, node: Any) -> str:
        """Return the name of a node for messages."""
        return self._connection.where.partition("?")[0] if node is None else str(node.name)

    def ask(self, node: Any, *words: Any) -> Any:
        """Send a command to a node and return the answer."""
        with translating_driver_errors(self.name(node)):
            redis = self._connection.redis
            client = redis if node is None else redis.get_redis_connection(node)
            return client.execute_command(*words)

    def info(self, node: Any, section: str) -> dict[str, Any]:
        """Return a section of a node's INFO."""
        found: dict[str, Any] = self.ask(node, "INFO", section)
        return found

    def clock(self, node: Any) -> ProbedClock:
        """Compare a node's clock with ours: the quickest of three answers counts."""
        seen = []
        for _ in range(3):
            begun, before = time.monotonic(), time.time()
            seconds, micros = self.ask(node, "TIME")
            trip_s = time.monotonic() - begun
            seen.append(ProbedClock(int(seconds) + int(micros) / 1e6 - before - trip_s / 2, trip_s))
        return min(seen, key=lambda clock: clock.trip_s)

    def slots(self) -> list[tuple[int, int]]:
        """Return the ranges of slots that primaries say they serve themselves.

        A node may know only an old state of the slots of other nodes.
        """
        ranges = []
        for node in self.primaries():
            lines = self.ask(node, "CLUSTER", "NODES").decode().splitlines()
            (own,) = (line.split() for line in lines if "myself" in line.split()[2])
            for word in own[8:]:
                first, _, last = word.partition("-")
                if first.isdecimal():  # words in brackets are slots on their way in or out
                    ranges.append((int(first), int(last or first)))
        return sorted(ranges)

    def may(self, node: Any, user: str, calls: Iterable[tuple[Sequence[str], str]]) -> list[bool]:
        """Return of each call whether a user may make it, in one round trip.

        A call is its words, and what is repeated as its missing arguments. ACL DRYRUN only
        checks; the call itself is not made.

        Raises:
            ServerError: we may not ask, or the server does not know ACL DRYRUN.
        """
        with translating_driver_errors(self.name(node)):
            redis = self._connection.redis
            client = redis if node is None else redis.get_redis_connection(node)
            with client.pipeline(transaction=False) as pipe:
                for words, filling in calls:
                    missing = self._length("|".join(words)) - len(words) if filling else 0
                    pipe.execute_command("ACL", "DRYRUN", user, *words, *[filling] * missing)
                replies = pipe.execute(raise_on_error=False)
        for each in replies:
            if isinstance(each, Exception):
                raise ServerRefused(f"ACL DRYRUN: {each}")
        return [reply in (b"OK", "OK") for reply in replies]

    def _length(self, command: str) -> int:
        """Return the least number of words that a command takes."""
        if command not in self._lengths:
            reply = self.ask(self.primaries()[0], "COMMAND INFO", command)
            self._lengths[command] = abs(int(reply[0][1])) if reply and reply[0] else 1
        return self._lengths[command]

    def names(self, kind: str, last: str) -> Iterator[str]:
        """Yield the names of the requests (``r``) or queues (``q``) that have such a key."""
        head = f"{self.prefix}:{{{kind}:"
        for node in self.primaries():
            cursor: Any = 0
            while True:
                words = ("SCAN", cursor, "MATCH", f"{head}*}}:{last}", "COUNT", 1000)
                cursor, keys = self.ask(node, *words)
                for key in keys:
                    yield key.decode().removeprefix(head).partition("}")[0]
                if int(cursor) == 0:
                    break

    def indexed(self, queue: str, request_id: str) -> bool:
        """Return whether a request is in one of its queue's indexes."""
        keys = QueueKeys(queue, self.prefix)
        with translating_driver_errors(self._connection.where):
            redis = self._connection.redis
            return any(
                redis.zscore(key, request_id) is not None for key in (keys.open, keys.closed)
            )

    def overdue_ms(self, queue: str, now_ms: int) -> float:
        """Return for how long the queue's first look has been due; 0 if none is."""
        with translating_driver_errors(self._connection.where):
            key = QueueKeys(queue, self.prefix).due
            first = self._connection.redis.zrange(key, 0, 0, withscores=True)
        return max(0.0, now_ms - float(first[0][1])) if first else 0.0

    def books(self, request_id: str) -> ProbedBooks:
        """Read what is stored about a request.

        It is read in several steps, so the numbers of a live request may not add up.

        Raises:
            RequestUnknown: there is no such request.
            Damaged: a value cannot be read.
        """
        with damaged_if_unreadable(f"what the server has of {request_id}"):
            return self._books(request_id)

    def _books(self, request_id: str) -> ProbedBooks:
        found = self._protocol.inspect(request_id)
        now_ms = found.count("now_ms")
        own = self._protocol.keys(request_id)
        tokens_of = token_list_of(found.text("handler"), found.known_count("level"))
        queue = QueueKeys(found.text("queue"), self.prefix, tokens_of)
        with translating_driver_errors(self._connection.where):
            redis = self._connection.redis
            with redis.pipeline(transaction=False) as pipe:
                pipe.zrange(own.leases, 0, -1, withscores=True)
                pipe.execute_command("XPENDING", own.parts, "w")
                pipe.execute_command(
                    "LPOS", queue.tokens, request_id, "COUNT", found.known_count("limit")
                )
                pipe.zscore(queue.due, request_id)
                pipe.xlen(own.parts)
                pipe.zcount(own.retry, "-inf", now_ms)
                held, pending, tokens, look_ms, entries, due = pipe.execute()
        leases = {name.decode(): at for name, at in held}
        holders = dict(_probed_pending_by_holder(pending))
        return ProbedBooks(
            request=found,
            entries=entries,
            pending=sum(holders.values()),
            without_lease=sorted(set(holders) - set(leases) - {"-"}),
            expired={name: round(now_ms - at) for name, at in leases.items() if at < now_ms},
            retry_due=due,
            tokens=len(tokens or ()),
            look_ms=look_ms,
        )


def _probed_pending_by_holder(reply: Any) -> Iterable[tuple[str, int]]:
    """Return the number of pending entries of each consumer, from the reply to XPENDING."""
    if isinstance(reply, dict):
        return [(each["name"].decode(), int(each["pending"])) for each in reply["consumers"]]
    return [(name.decode(), int(count)) for name, count in reply[3] or ()]
