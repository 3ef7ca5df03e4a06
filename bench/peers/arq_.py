"""arq: 1,000 jobs at once, uvloop, no results. It polls. It has no batches."""

import asyncio
import sys

import common
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker

settings = RedisSettings.from_dsn(common.URL)
pool = None


async def job(_context: dict, _: str) -> None:
    common.tally.job()


async def enqueue(n: int) -> None:
    global pool
    pool = pool or await create_pool(settings)
    for start in range(0, n, 100):
        many = range(min(100, n - start))
        await asyncio.gather(*(pool.enqueue_job("job", common.PAYLOAD) for _ in many))


async def one() -> None:
    await enqueue(1)


async def _work() -> None:
    worker = Worker([job], redis_settings=settings, max_jobs=1000, keep_result=0, log_results=False)
    await worker.async_run()


def work() -> None:
    common.run(_work())


if __name__ == "__main__":
    common.main(sys.modules[__name__])
