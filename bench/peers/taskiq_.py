"""taskiq on Redis Streams: 100 coroutines, prefetch 100, no parsing. It has no batches."""

import asyncio
import os
import sys
from pathlib import Path

import common
from taskiq_redis import RedisStreamBroker

broker = RedisStreamBroker(url=common.URL, consumer_id="0")


@broker.task(task_name="job")
async def job(_: str) -> None:
    common.tally.job()


_is_started = False


async def enqueue(n: int) -> None:
    global _is_started
    if not _is_started:
        await broker.startup()
        _is_started = True
    for start in range(0, n, 100):
        many = range(min(100, n - start))
        await asyncio.gather(*(job.kiq(common.PAYLOAD) for _ in many))


async def one() -> None:
    await enqueue(1)


def work() -> None:
    options = ["--workers", "1", "--max-async-tasks", "100", "--max-prefetch", "100"]
    options += ["--no-parse", "--log-level", "ERROR", "--app-dir", str(Path(__file__).parent)]
    command = [sys.executable, "-m", "taskiq", "worker", "taskiq_:broker", *options]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    common.main(sys.modules[__name__])
