"""BullMQ's port to Python: ``addBulk``, 50 jobs at once, uvloop; a flow with a parent."""

import asyncio
import sys

import common
from bullmq import FlowProducer, Queue, Worker

OPTIONS = {"connection": common.URL}
KEEP = {"removeOnComplete": True}
queue = None


async def enqueue(n: int) -> None:
    global queue
    queue = queue or Queue("bench", OPTIONS)
    for start in range(0, n, 1000):
        many = range(min(1000, n - start))
        await queue.addBulk([{"name": "job", "data": common.PAYLOAD, "opts": KEEP} for _ in many])


async def one() -> None:
    global queue
    queue = queue or Queue("bench", OPTIONS)
    await queue.add("job", common.PAYLOAD, KEEP)


async def batch(n: int) -> None:
    children = [{"name": "job", "queueName": "bench", "data": common.PAYLOAD} for _ in range(n)]
    flow = {"name": "callback", "queueName": "bench", "data": "", "children": children}
    await FlowProducer(OPTIONS).add(flow)


async def _job(job: object, _token: str) -> None:
    if job.name == "callback":
        common.tally.callback()
    else:
        common.tally.job()


async def _work() -> None:
    Worker("bench", _job, OPTIONS | {"concurrency": 50})
    await asyncio.Event().wait()


def work() -> None:
    common.run(_work())


if __name__ == "__main__":
    common.main(sys.modules[__name__])
