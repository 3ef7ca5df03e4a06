"""arq: 1,000 jobs at once, uvloop, no results. It polls. It has no batches."""

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
    for _ in range(n):
        await pool.enqueue_job("job", common.PAYLOAD)


async def one() -> None:
    await enqueue(1)


async def _work() -> None:
    worker = Worker([job], redis_settings=settings, max_jobs=1000, keep_result=0, log_results=False)
    await worker.async_run()


def work() -> None:
    common.run(_work())


if __name__ == "__main__":
    common.main(sys.modules[__name__])
