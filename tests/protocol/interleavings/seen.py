"""What a server holds of a request and of a queue, each read at one moment, and moving its clock.

Time is moved by taking it off every moment that is stored: for the server nothing else happened.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from math import ceil
from typing import Any

from streamq.protocol.keys import QueueKeys, RequestKeys, token_list_of


def constant(file: str, name: str) -> int:
    """A number that the scripts share."""
    text = (files("streamq.lua") / "lib" / f"{file}.lua").read_text("utf-8")
    found = re.search(rf"^local {name} = (\d+)$", text, re.MULTILINE)
    assert found
    return int(found[1])


#: Tokens of one request are never more than this out at once.
MOST_OUT = constant("most_out", "MOST_OUT")
RATE_AHEAD_MS = constant("tokens", "RATE_AHEAD_MS")
CLOCK_OFF_MS = constant("tokens", "CLOCK_OFF_MS")
#: Suspects are looked at so often, and a longer time between two looks starts their grace anew.
LOOK_EVERY_MS = constant("suspicion", "LOOK_EVERY_MS")
MOST_BETWEEN_MS = constant("suspicion", "MOST_BETWEEN_MS")

# A part put off is scored by a moment, one at the front by its number, far below.
EPOCH = 10**9

_READ = """
local clock = redis.call("TIME")
local keys = KEYS
local entries, pending, consumers, last = {}, {}, {}, "0-0"
if redis.call("EXISTS", keys[2]) == 1 then
  for i, entry in ipairs(redis.call("XRANGE", keys[2], "-", "+")) do
    entries[i] = entry[1]
  end
  for _, entry in ipairs(redis.call("XPENDING", keys[2], "w", "-", "+", 10000)) do
    pending[#pending + 1] = entry[1]
    pending[#pending + 1] = entry[2]
  end
  for i, consumer in ipairs(redis.call("XINFO", "CONSUMERS", keys[2], "w")) do
    consumers[i] = consumer[2]
  end
  local group = redis.call("XINFO", "GROUPS", keys[2])[1]
  for i = 1, #group, 2 do
    if group[i] == "last-delivered-id" then
      last = group[i + 1]
    end
  end
end
return {
  clock[1] * 1000 + math.floor(clock[2] / 1000),
  redis.call("EXISTS", unpack(keys)),
  redis.call("HGETALL", keys[1]),
  redis.call("GET", keys[3]),
  redis.call("ZRANGE", keys[4], 0, -1, "WITHSCORES"),
  redis.call("ZRANGE", keys[5], 0, -1, "WITHSCORES"),
  redis.call("HGETALL", keys[6]),
  redis.call("HGETALL", keys[7]),
  redis.call("HGETALL", keys[8]),
  redis.call("HGETALL", keys[9]),
  redis.call("HGETALL", keys[10]),
  entries, pending, consumers, last,
  redis.call("ZRANGE", keys[11], 0, -1),
}
"""

_READ_QUEUE = """
local reply = {}
for i = 1, 3 do
  reply[i] = redis.call("ZRANGE", KEYS[i], 0, -1, "WITHSCORES")
end
for i = 4, #KEYS do
  reply[i] = redis.call("LRANGE", KEYS[i], 0, -1)
end
return reply
"""

# What is far below any time is a part's number, or a lease that was made to expire.
_MOVE = """
local ms = tonumber(ARGV[1])
local function move(key)
  for _, member in ipairs(redis.call("ZRANGEBYSCORE", key, 1000000000, "+inf")) do
    redis.call("ZINCRBY", key, -ms, member)
  end
end
"""
_MOVE_REQUEST = (
    _MOVE
    + """
for i = 2, #ARGV do
  local at = tonumber(redis.call("HGET", KEYS[1], ARGV[i]) or 0)
  if at > 1000000000 then
    redis.call("HSET", KEYS[1], ARGV[i], string.format("%.3f", at - ms))
  end
end
move(KEYS[4])
move(KEYS[5])
"""
    + _READ
)
_MOVE_QUEUE = (
    _MOVE
    + """
for _, key in ipairs(KEYS) do
  move(key)
end
"""
)

_POP = """
for i, key in ipairs(KEYS) do
  local found = redis.call("RPOP", key)
  if found then
    return { found, i }
  end
end
return nil
"""

# Not when it was created: that is a part of the request's name.
_MOMENTS = (
    *("hold_ms", "rate_at_ms", "due_ms", "started_ms", "finished_ms"),
    *("suspected_ms", "looked_ms"),
)


def _pairs(flat: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _texts(flat: Sequence[bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in _pairs(flat)}


def _scores(flat: Sequence[bytes]) -> dict[str, float]:
    return {member.decode(): float(score) for member, score in _pairs(flat)}


def _by_part(flat: Sequence[bytes]) -> dict[int, bytes]:
    return {int(number): value for number, value in _pairs(flat)}


def _number(id_: bytes) -> int:
    return int(id_.partition(b"-")[0])


@dataclass(frozen=True)
class Seen:
    """Everything the server holds of a request."""

    now: int
    #: How many of its keys exist.
    keys: int = 0
    meta: dict[str, str] = field(default_factory=dict)
    left: int | None = None
    leases: dict[str, float] = field(default_factory=dict)
    retry: dict[int, float] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    tries: dict[int, tuple[int, ...]] = field(default_factory=dict)
    partial: dict[int, bytes] = field(default_factory=dict)
    results: dict[str, bytes] = field(default_factory=dict)
    failed: dict[int, bytes] = field(default_factory=dict)
    #: Parts that have an entry in the stream.
    entries: frozenset[int] = frozenset()
    #: Parts in the group's pending list, and the consumer each is under.
    pending: dict[int, str] = field(default_factory=dict)
    consumers: frozenset[str] = frozenset()
    #: The last part that was delivered.
    last: int = 0
    #: Holders that were released without a lease.
    gone: frozenset[str] = frozenset()

    def number(self, name: str) -> float:
        """A number in meta, 0 when it is not there."""
        return float(self.meta.get(name) or 0)

    def blocked_until(self) -> float:
        """The moment from which a part may start, as the rate and a hold allow."""
        hold = self.number("hold_ms")
        if not self.number("rate_ms"):
            return hold
        at, charge = self.number("rate_at_ms"), self.number("rate_charge_ms")
        if charge and at - self.now > charge + CLOCK_OFF_MS:
            return hold
        return max(hold, ceil(at) - RATE_AHEAD_MS)

    def limit(self, now: float) -> int:
        """How many leases there may be: fewer than the limit after a hold, for a while."""
        limit, eased = self.number("limit"), self.number("eased")
        if not eased:
            return int(limit)
        steps = max(0, (now - self.number("eased_ms")) // 10_000)
        return int(min(limit, eased + steps * max(1, eased // 50)))

    def overdue(self, now: float) -> set[str]:
        """Holders whose lease is past its deadline."""
        return {holder for holder, deadline in self.leases.items() if deadline <= now}

    def grace_ms(self) -> float:
        """How long a holder must be silent."""
        return 3_000 + max(1_000, min(10_000, self.number("lease_ms") / 4))

    def suspected_since(self, now: float) -> float:
        """Since when leases past their deadline were seen at every look, or 0."""
        since, looked = self.number("suspected_ms"), self.number("looked_ms")
        lasts = 0 < since <= looked <= now <= looked + MOST_BETWEEN_MS
        return since if lasts else 0

    def reapable(self, now: float) -> set[str]:
        """Holders that are known to be dead."""
        latest, since = now - self.grace_ms(), self.suspected_since(now)
        return self.overdue(latest) if 0 < since <= latest else set()

    def due(self, now: float) -> list[int]:
        """Parts in retry that may run, in the order in which they are handed out."""
        found = [(score, str(number)) for number, score in self.retry.items() if score <= now]
        return [int(number) for _, number in sorted(found)]


@dataclass(frozen=True)
class QueueSeen:
    """Everything the server holds of a queue."""

    due: dict[str, float]
    open: dict[str, float]
    closed: dict[str, float]
    #: Tokens by level, as request ids.
    tokens: dict[int, list[str]]


def _keys(keys: RequestKeys) -> list[str]:
    return [
        keys.meta,
        keys.parts,
        keys.left,
        keys.leases,
        keys.retry,
        keys.holders,
        keys.tries,
        keys.partial,
        keys.results,
        keys.failed,
        keys.gone,
    ]


class Eye:
    """Reads from one server, and moves its clock."""

    def __init__(self, redis: Any, queue: str, levels: Sequence[int]) -> None:
        self._redis = redis
        self._levels = levels
        keys = QueueKeys(queue)
        self._indexes = [keys.due, keys.open, keys.closed]
        self._lists = [QueueKeys(queue, to=token_list_of("h", level)).tokens for level in levels]

    def _eval(self, script: str, keys: Sequence[str], *args: object) -> Any:
        return self._redis.execute_command("EVAL", script, len(keys), *keys, *args)

    def request(self, keys: RequestKeys) -> Seen:
        """The request now."""
        return self._seen(self._eval(_READ, _keys(keys)))

    def move(self, keys: RequestKeys, ms: int) -> Seen:
        """Let time pass for a request."""
        return self._seen(self._eval(_MOVE_REQUEST, _keys(keys), ms, *_MOMENTS))

    def _seen(self, reply: list[Any]) -> Seen:
        now, count, meta, left, leases, retry, holders, tries, partial, results, failed = reply[:11]
        entries, pending, consumers, last, gone = reply[11:]
        return Seen(
            now=now,
            keys=count,
            meta={name.decode(): value.decode(errors="replace") for name, value in _pairs(meta)},
            left=None if left is None else int(left),
            leases=_scores(leases),
            retry={int(number): score for number, score in _scores(retry).items()},
            holders=_texts(holders),
            tries={n: tuple(map(int, text.split())) for n, text in _by_part(tries).items()},
            partial=_by_part(partial),
            results={name.decode(): value for name, value in _pairs(results)},
            failed=_by_part(failed),
            entries=frozenset(map(_number, entries)),
            pending={_number(id_): consumer.decode() for id_, consumer in _pairs(pending)},
            consumers=frozenset(consumer.decode() for consumer in consumers),
            last=_number(last),
            gone=frozenset(holder.decode() for holder in gone),
        )

    def request_of(self, request_id: str) -> Seen:
        """The same by id."""
        return self.request(RequestKeys(request_id))

    def queue(self) -> QueueSeen:
        """The queue now."""
        due, opened, closed, *lists = self._eval(_READ_QUEUE, [*self._indexes, *self._lists])
        tokens = {
            level: [request_id.decode() for request_id in found]
            for level, found in zip(self._levels, lists, strict=True)
        }
        return QueueSeen(_scores(due), _scores(opened), _scores(closed), tokens)

    def move_queue(self, ms: int, *, registered: bool = False) -> None:
        """Let time pass for the queue; for what is registered as open, only when asked."""
        due, opened, closed = self._indexes
        self._eval(_MOVE_QUEUE, [due, closed, *([opened] if registered else [])], ms)

    def expire(self, keys: RequestKeys, holder: str) -> None:
        """Let one lease be over."""
        self._redis.zadd(keys.leases, {holder: 1}, xx=True)

    def suspect(self, keys: RequestKeys, now: int) -> None:
        """Somebody has looked all the while: whose lease is over is dead."""
        self._redis.hset(keys.meta, mapping={"suspected_ms": 1, "looked_ms": now})

    def pop(self) -> tuple[str, int] | None:
        """The next token, best level first, without waiting: a request id and the level."""
        found = self._eval(_POP, self._lists)
        return found and (found[0].decode(), self._levels[found[1] - 1])

    def lose(self, request_id: str) -> int:
        """Take one token of the request away. Returns how many there were to take."""
        for name in self._lists:
            if self._redis.lrem(name, 1, request_id):
                return 1
        return 0

    def double(self, request_id: str, level: int) -> None:
        """Add a token nobody asked for."""
        self._redis.lpush(self._lists[self._levels.index(level)], request_id)

    def forget(self, more: Sequence[str]) -> None:
        """Remove the queue itself."""
        for key in [*self._indexes, *self._lists, *more]:
            self._redis.unlink(key)
