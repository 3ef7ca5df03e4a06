"""The design streamq grew from, as it was published: its three scripts and its loop.

Tokens alone keep the limit: a request has as many of them as parts may run at once, and a
worker takes one, reads a part, and gives it back. A counter alone knows the end, and a
published message alone tells of it. Run as a program this is one worker:
``python -m tests.faults.baseline NAME HOST PORT [cluster]``.
"""

import sys
import time
from typing import Any

from redis import Redis, RedisCluster
from redis.exceptions import RedisError

from tests.faults.handlers import do, note

LEVEL = 50
LISTS = [f"{{req}}:{level}" for level in range(100)]

INSERT = """
local req_stream = string.format("sub:{%s}", KEYS[1])
redis.call("SET", string.format("counter:{%s}", KEYS[1]), #ARGV)
redis.call("XADD", req_stream, "*", "req", "0")
redis.call("XTRIM", req_stream, "MAXLEN", "0")
redis.call("XGROUP", "CREATE", req_stream, req_stream, "$")
for _, r in ipairs(ARGV) do
  redis.call("XADD", req_stream, "*", "req", r)
end
return redis.status_reply("OK")
"""
PUSH = """
for i = 1, ARGV[2] do
  redis.call("LPUSH", KEYS[1], ARGV[1])
end
return redis.status_reply("OK")
"""
DONE = """
local req_stream = string.format("sub:{%s}", KEYS[1])
local counter = string.format("counter:{%s}", KEYS[1])
local remaining = redis.call("DECR", counter)
if remaining == 0 then
  redis.call("XGROUP", "DESTROY", req_stream, req_stream)
  redis.call("DEL", req_stream)
  redis.call("DEL", counter)
  redis.call("PUBLISH", KEYS[1], "1")
else
  redis.call("XACK", req_stream, req_stream, ARGV[1])
end
return redis.status_reply("OK")
"""


def connect(host: str, port: int, *, is_cluster: bool) -> Any:
    """A client as the driver makes it, but for the time it waits for a reply."""
    kind = RedisCluster if is_cluster else Redis
    return kind(host=host, port=port, socket_timeout=6, socket_connect_timeout=1)


def submit(redis: Any, name: str, payloads: list[str], limit: int) -> None:
    """Insert a request and its tokens."""
    redis.eval(INSERT, 1, name, *(f"{n} {text}" for n, text in enumerate(payloads, 1)))
    redis.eval(PUSH, 1, LISTS[LEVEL], name, limit)


def recover(redis: Any, name: str, silent_s: float) -> None:
    """What the text proposes for workers that are gone: put their parts into the stream again.

    The text forgets the token that such a worker holds; it is put back, too, or each would be
    one less for ever.
    """
    stream = f"sub:{{{name}}}"
    idle_ms = int(silent_s * 1e3)
    for pending in redis.xpending_range(stream, stream, "-", "+", 100, idle=idle_ms):
        entry = pending["message_id"]
        for _, fields in redis.xclaim(stream, stream, "recovery", idle_ms, [entry]):
            redis.xadd(stream, fields)
            redis.xack(stream, stream, entry)
            redis.lpush(LISTS[LEVEL], name)


def work(redis: Any, worker: str) -> None:
    """Take a token, read a part, run it, count it, give the token back; for ever."""
    while True:
        try:
            popped = redis.brpop(LISTS, timeout=1)
            if popped is None:
                continue
            place, name = popped[0], popped[1].decode()
            stream = f"sub:{{{name}}}"
            found = redis.xreadgroup(stream, worker, {stream: ">"}, count=1)
            if found:
                [[_, [[entry, fields]]]] = found
                number, payload = fields[b"req"].decode().split(" ", 1)
                note("S", name, int(number))
                do(payload)
                note("E", name, int(number))
                redis.eval(DONE, 1, name, entry)
            redis.lpush(place, name)
        except (RedisError, OSError):
            time.sleep(0.1)


def main() -> None:
    """One worker, until it is killed."""
    worker, host, port, *rest = sys.argv[1:]
    while True:
        try:
            redis = connect(host, int(port), is_cluster=bool(rest))
            redis.ping()
            break
        except (RedisError, OSError):
            time.sleep(0.1)
    work(redis, worker)


if __name__ == "__main__":
    main()
