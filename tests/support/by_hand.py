"""Moving a request through the protocol by hand, and looking at what it left in the server."""

import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from redis import RedisCluster

from streamq import Protocol
from streamq.model import Failure, Policy, Spec, State
from streamq.protocol.keys import QueueKeys, RequestKeys, token_list_of
from streamq.protocol.replies import Grant, Opened, Outcome, Reaped, Terms, Tokens

HANDLER = "h"
CAN_RUN = ("parts h",)
HOUR_MS = 3_600_000


def policy(queue: str, **changes: Any) -> Policy:
    """A request's policy with as little in it as can be."""
    spec = Spec(retries=changes.pop("retries", 3))
    return Policy(handler=HANDLER, queue=queue, spec=spec, **changes)


class RequestByHand:
    """One request. ``holder`` names are fresh unless given; calls are numbered unless given."""

    def __init__(self, protocol: Protocol, queue: str, request_id: str) -> None:
        self.protocol = protocol
        self.queue = queue
        self.id = request_id
        self.keys = RequestKeys(request_id)
        self.redis: Any = protocol.connection.redis
        self.calls: dict[str, int] = {}

    def open(self, digest: str = "d", **changes: Any) -> Opened:
        return self.protocol.open(self.id, digest, policy(self.queue, **changes))

    def append(
        self,
        count: int,
        *,
        first: int = 1,
        after: str | None = None,
        cursor: str | None = None,
        records: int = 1,
        size: int = 0,
    ) -> Tokens:
        """Parts with the payloads ``b"1"``, ``b"2"``, ... of one record and the least size."""
        numbers = range(first, first + count)
        about = str(records).encode()
        entries = [value for n in numbers for value in (str(n).encode().ljust(size), about)]
        at = f"c{first + count - 1}" if cursor is None else cursor
        after = self.meta("cursor") if after is None else after
        _, _, tokens = self.protocol.append(self.id, first, after, at, count * records, entries)
        return tokens

    def load(self, count: int, **changes: Any) -> Tokens:
        """A whole request of so many parts, sealed. Returns the tokens of its only chunk."""
        self.open(**changes)
        tokens = self.append(count) if count else Tokens()
        self.protocol.seal(self.id, count, f"c{count}" if count else "")
        return tokens

    def claim(
        self, most: int = 1, *, holder: str | None = None, **changes: Any
    ) -> tuple[str, Grant]:
        """A lease for a fresh holder, and what it was handed."""
        holder = holder or f"w{secrets.token_hex(6)}"
        terms = Terms(most, changes.pop("max_bytes", 2**22), changes.pop("lease_ms", 20_000))
        handlers: Sequence[str] = changes.pop("handlers", CAN_RUN)
        return holder, self.protocol.claim(self.id, holder, terms, handlers, **changes)

    def call(self, holder: str) -> int:
        """The next call number of a holder."""
        self.calls[holder] = self.calls.get(holder, 0) + 1
        return self.calls[holder]

    def finish(
        self,
        holder: str,
        numbers: Sequence[int],
        most: int = 0,
        *,
        call: int | None = None,
        records: int | None = None,
        created_ms: int | None = None,
    ) -> Grant:
        """Finish parts of one record with the results ``b"r1"``, ``b"r2"``, ..."""
        results = [value for n in numbers for value in (n, f"r{n}".encode())]
        number = self.call(holder) if call is None else call
        count = len(numbers) if records is None else records
        made = int(self.meta("created_ms") or 0) if created_ms is None else created_ms
        return self.protocol.finish(self.id, holder, number, results, count, Terms(most), made)

    def fail(self, holder: str, number: int, *, call: int | None = None, **changes: Any) -> Outcome:
        call = self.call(holder) if call is None else call
        failure = [Failure(error="ValueError", message="no")]
        return self.protocol.fail(self.id, holder, call, number, failure, **changes)

    def keep(
        self,
        holder: str,
        number: int,
        partial: bytes = b"",
        mark: bytes = b"",
        *,
        call: int | None = None,
        created_ms: int | None = None,
    ) -> str:
        """Keep outcomes of a part that runs."""
        call = self.call(holder) if call is None else call
        made = int(self.meta("created_ms") or 0) if created_ms is None else created_ms
        return self.protocol.keep(self.id, holder, call, number, partial, mark, made)

    def release(
        self, holder: str, crashed: int | None = None, *, call: int | None = None
    ) -> Outcome:
        call = self.call(holder) if call is None else call
        return self.protocol.release(self.id, holder, call, crashed)

    def handback(self, holder: str, numbers: Sequence[int], *, call: int | None = None) -> Outcome:
        call = self.call(holder) if call is None else call
        return self.protocol.handback(self.id, holder, call, numbers)

    def give_up(self, *numbers: int) -> None:
        """Claim the next parts, which have these numbers, and abandon each."""
        for number in numbers:
            holder, grant = self.claim()
            assert [part.number for part in grant.parts] == [number]
            self.fail(holder, number, kind="abandon")
            self.release(holder)

    def reap(self, limit: int = 100) -> Reaped:
        return self.protocol.reap(self.id, limit)

    def redrive(self, *numbers: int) -> tuple[int, State, Tokens]:
        return self.protocol.redrive(self.id, numbers)

    def expire(self, holder: str) -> None:
        """Let a lease be over, and its holder silent for longer than any grace: the clock is
        moved by rewriting moments."""
        self.pass_deadline(holder)
        self.suspect(HOUR_MS)

    def pass_deadline(self, holder: str, ago_ms: int = HOUR_MS) -> None:
        """Let the deadline of a lease have passed so long ago."""
        deadline = {holder: self.now_ms() - ago_ms}
        assert self.redis.zadd(self.keys.leases, deadline, xx=True, ch=True) == 1

    def suspect(self, since_ms: int, looked_ms: int = 0) -> None:
        """Leases past their deadline were seen for so long, the last time so long ago."""
        now = self.now_ms()
        self.set_meta(suspected_ms=now - since_ms, looked_ms=now - looked_ms)

    def set_meta(self, **fields: Any) -> None:
        """Rewrite fields of meta: a count, a belief, or a time that is to have passed."""
        self.redis.hset(self.keys.meta, mapping=fields)

    def meta(self, field: str) -> str:
        """A field of meta as text, "" when it is not there."""
        value = self.redis.hget(self.keys.meta, field)
        return "" if value is None else value.decode()

    def left(self) -> int:
        return int(self.redis.get(self.keys.left))

    def retry(self) -> dict[int, float]:
        """Parts in retry and their scores."""
        found = self.redis.zrange(self.keys.retry, 0, -1, withscores=True)
        return {int(number): score for number, score in found}

    def results(self) -> dict[str, bytes]:
        found = self.redis.hgetall(self.keys.results)
        return {field.decode(): value for field, value in found.items()}

    def failed(self) -> dict[int, bytes]:
        """Parts that were given up, and what is kept of each."""
        found = self.redis.hgetall(self.keys.failed)
        return {int(number): text for number, text in found.items()}

    def tries(self) -> dict[int, str]:
        """Parts that had trouble: "errors crashes alone run records"."""
        found = self.redis.hgetall(self.keys.tries)
        return {int(number): text.decode() for number, text in found.items()}

    def partial(self) -> dict[int, bytes]:
        found = self.redis.hgetall(self.keys.partial)
        return {int(number): text for number, text in found.items()}

    def leases(self) -> dict[str, int]:
        """Holders and the deadlines of their leases."""
        found = self.redis.zrange(self.keys.leases, 0, -1, withscores=True)
        return {holder.decode(): int(deadline) for holder, deadline in found}

    def holders(self) -> dict[str, str]:
        """What is noted of leases: call numbers, and under ``holder#`` what it runs."""
        found = self.redis.hgetall(self.keys.holders)
        return {field.decode(): value.decode() for field, value in found.items()}

    def held(self, holder: str) -> list[int]:
        """Parts pending under a holder."""
        found = self.redis.xpending_range(self.keys.parts, "w", "-", "+", 5_000, holder)
        return [int(entry["message_id"][:-2]) for entry in found]

    def consumers(self) -> set[str]:
        """Names in the group that are holders; parked parts are under another."""
        found = self.redis.xinfo_consumers(self.keys.parts, "w")
        return {consumer["name"].decode() for consumer in found} - {"-"}

    def entries(self) -> list[int]:
        """Parts that still have an entry in the stream."""
        return [int(id_[:-2]) for id_, _ in self.redis.xrange(self.keys.parts)]

    def now_ms(self) -> int:
        """The server's clock."""
        return self.protocol.inspect(self.id).count("now_ms")

    def snapshot(self) -> dict[str, bytes]:
        """Every key of the request as the server stores it, to see that nothing changed."""
        names = {name: key for name, key in self.keys.all().items() if name != "events"}
        with self.redis.pipeline(transaction=False) as pipeline:
            for key in names.values():
                pipeline.dump(key)
            found = zip(names, pipeline.execute(), strict=True)
        return {name: text for name, text in found if text is not None}

    def commands(self, names: Sequence[str]) -> dict[str, int]:
        """How often the request's server has run each of the commands."""
        is_cluster = isinstance(self.redis, RedisCluster)
        at = {"target_nodes": self.redis.get_node_from_key(self.keys.meta)} if is_cluster else {}
        stats = self.redis.info("commandstats", **at)
        return {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names}

    @contextmanager
    def published(self) -> Generator[list[str]]:
        """What was published in the block: in the list once the block is left."""
        heard: list[str] = []
        channel = self.protocol.connection.subscribe(self.keys.events)
        try:
            assert channel.get_sharded_message(timeout=5)["type"] == "ssubscribe"
            yield heard
            self.redis.execute_command("SPUBLISH", self.keys.events, "last")
            while (text := channel.get_sharded_message(timeout=5)["data"].decode()) != "last":
                heard.append(text)
        finally:
            channel.close()

    @contextmanager
    def full_server(self) -> Generator[None]:
        """The server is out of memory in the block."""
        at = {"target_nodes": "primaries"} if isinstance(self.redis, RedisCluster) else {}
        self.redis.config_set("maxmemory", 1, **at)
        try:
            yield
        finally:
            self.redis.config_set("maxmemory", 0, **at)

    def tokens(self, level: int = 50) -> list[str]:
        """The tokens of one level of the queue, newest first."""
        found = self.redis.lrange(QueueKeys(self.queue, to=token_list_of("h", level)).tokens, 0, -1)
        return [request_id.decode() for request_id in found]

    def existing_keys(self) -> set[str]:
        """Which of the request's keys exist."""
        return set(self.snapshot())


# How a request of one part, which bears no failure, comes to an end; by the state it is in then.


def done(driver: RequestByHand) -> None:
    """Its part is finished."""
    holder, _ = driver.claim()
    driver.finish(holder, [1])


def failed(driver: RequestByHand) -> None:
    """Its part is given up."""
    driver.give_up(1)


def cancelled(driver: RequestByHand) -> None:
    """Somebody cancels it."""
    driver.protocol.cancel(driver.id)
