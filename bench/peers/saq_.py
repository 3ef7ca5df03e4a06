"""SAQ: 100 jobs at once, uvloop; ``map`` tells its caller when all have ended."""

import asyncio
import sys

import common
from saq import Queue, Worker

queue = Queue.from_url(common.URL, max_concurrent_ops=100)


async def job(_context: dict, *, payload: str) -> None:
    common.tally.job()


async def enqueue(n: int) -> None:
    for start in range(0, n, 1000):
        many = range(min(1000, n - start))
        await asyncio.gather(*(queue.enqueue("job", payload=common.PAYLOAD, ttl=-1) for _ in many))


async def one() -> None:
    await queue.enqueue("job", payload=common.PAYLOAD, ttl=-1)


async def batch(n: int) -> None:
    given = [{"payload": common.PAYLOAD} for _ in range(n)]
    await queue.map("job", given, timeout=80, poll_interval=0.05)
    common.tally.callback()


async def _work() -> None:
    await Worker(queue, functions=[("job", job)], concurrency=100).start()


def work() -> None:
    common.run(_work())


if __name__ == "__main__":
    common.main(sys.modules[__name__])
