"""streaq: ``enqueue_many``, 256 jobs at once, uvloop; a task after all others."""

import os
import sys

import common
from streaq import Worker

worker = Worker(
    redis_url=common.URL, concurrency=256, anyio_kwargs={"use_uvloop": True}, handle_signals=True
)


# A task that comes after another one reads its result.
@worker.task(ttl=300 if os.environ.get("BENCH_RESULTS") else 0)
async def job(_: str) -> None:
    common.tally.job()


@worker.task
async def callback() -> None:
    common.tally.callback()


_is_open = False


async def _connect() -> None:
    """Make the client once for the process, as a program that submits would."""
    global _is_open
    if not _is_open:
        await worker.__aenter__()
        _is_open = True


async def enqueue(n: int) -> None:
    await _connect()
    for start in range(0, n, 1000):
        many = [job.enqueue(common.PAYLOAD) for _ in range(min(1000, n - start))]
        await worker.enqueue_many(many)


async def one() -> None:
    await _connect()
    await job.enqueue(common.PAYLOAD)


async def batch(n: int) -> None:
    await _connect()
    many = [job.enqueue(common.PAYLOAD) for _ in range(n)]
    last = callback.enqueue().start(after=[each.id for each in many])
    await worker.enqueue_many(many)
    await last


def work() -> None:
    worker.run_sync()


if __name__ == "__main__":
    common.main(sys.modules[__name__])
