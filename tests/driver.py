"""Moving a request through the protocol by hand, and looking at what it left in the server."""

import secrets
from collections.abc import Sequence
from typing import Any

from streamq import Protocol
from streamq.keys import QueueKeys, RequestKeys
from streamq.model import Failure, Grant, Opened, Outcome, Policy, Spec, Terms, Tokens

HANDLER = "h"
CAN_RUN = ("parts h",)


def policy(queue: str, **changes: Any) -> Policy:
    """A request's policy with as little in it as can be."""
    spec = Spec(retries=changes.pop("retries", 3))
    return Policy(handler=HANDLER, queue=queue, spec=spec, **changes)


class Driver:
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

    def append(self, count: int, *, first: int = 1, cursor: str | None = None) -> Tokens:
        """Parts with the payloads ``b"1"``, ``b"2"``, ... of one record each."""
        numbers = range(first, first + count)
        entries = [value for n in numbers for value in (str(n).encode(), b"1")]
        at = f"c{first + count - 1}" if cursor is None else cursor
        _, _, tokens = self.protocol.append(self.id, first, at, count, entries)
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
        self, holder: str, numbers: Sequence[int], most: int = 0, *, call: int | None = None
    ) -> Grant:
        """Finish parts with the results ``b"r1"``, ``b"r2"``, ..."""
        results = [value for n in numbers for value in (n, f"r{n}".encode())]
        number = self.call(holder) if call is None else call
        terms = Terms(most)
        return self.protocol.finish(self.id, holder, number, results, len(numbers), terms)

    def fail(self, holder: str, number: int, *, call: int | None = None, **changes: Any) -> Outcome:
        call = self.call(holder) if call is None else call
        failure = Failure(error="ValueError", message="no")
        return self.protocol.fail(self.id, holder, call, number, failure, **changes)

    def release(
        self, holder: str, crashed: int | None = None, *, call: int | None = None
    ) -> Outcome:
        call = self.call(holder) if call is None else call
        return self.protocol.release(self.id, holder, call, crashed)

    def handback(self, holder: str, numbers: Sequence[int], *, call: int | None = None) -> Outcome:
        call = self.call(holder) if call is None else call
        return self.protocol.handback(self.id, holder, call, numbers)

    def expire(self, holder: str) -> None:
        """Let a lease be over: the clock is moved by rewriting the deadline."""
        assert self.redis.zadd(self.keys.leases, {holder: 1}, xx=True, ch=True) == 1

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

    def tokens(self, level: int = 50) -> list[str]:
        """The tokens of one level of the queue, newest first."""
        found = self.redis.lrange(QueueKeys(self.queue, level=level).tokens, 0, -1)
        return [request_id.decode() for request_id in found]

    def existing_keys(self) -> set[str]:
        """Which of the request's keys exist."""
        names = {name: key for name, key in vars(self.keys).items() if name != "events"}
        return {name for name, key in names.items() if self.redis.exists(key)}
