"""No queue at all: the writes that a part costs, in pipelines of one client, and nothing else.

Reads a batch of a stream as one consumer of a group, acknowledges it, deletes it, keeps a
result for each part and counts down. No lease, limit, level, request, retry or handler.
"""

import sys

import common
from redis import Redis

BATCH = 512
redis = Redis.from_url(common.URL)
RESULT = b"null"


def enqueue(n: int) -> None:
    number = int(redis.get("left") or 0)
    for start in range(0, n, BATCH):
        pipe = redis.pipeline(transaction=False)
        for _ in range(min(BATCH, n - start)):
            number += 1
            pipe.execute_command("XADD", "parts", f"{number}-0", "p", common.PAYLOAD)
        pipe.execute()
    redis.set("left", number)


def one() -> None:
    enqueue(1)


def work() -> None:
    redis.execute_command("XGROUP", "CREATE", "parts", "w", "0", "MKSTREAM")
    read = ("XREADGROUP", "GROUP", "w", "me", "COUNT", BATCH, "STREAMS", "parts", ">")
    reply = redis.execute_command(*read)
    while reply:
        ((_, entries),) = reply.items() if isinstance(reply, dict) else reply
        ids = [entry[0] for entry in entries]
        common.tally.job(len(ids))
        results = [value for id_ in ids for value in (id_, RESULT)]
        pipe = redis.pipeline(transaction=False)
        pipe.execute_command("XACK", "parts", "w", *ids)
        pipe.execute_command("XDEL", "parts", *ids)
        pipe.execute_command("HSET", "results", *results)
        pipe.execute_command("DECRBY", "left", len(ids))
        pipe.execute_command(*read)
        *_, reply = pipe.execute()


if __name__ == "__main__":
    common.main(sys.modules[__name__])
