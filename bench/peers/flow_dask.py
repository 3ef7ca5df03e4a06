"""Dask: three maps of futures and a sum, on a scheduler and one worker of one thread.

Its state is in the memory of the scheduler and the worker, and no server keeps it.
"""

import asyncio
import os

import flow_common
from distributed import Client, Scheduler, Worker

ADDRESS = f"tcp://127.0.0.1:{os.environ.get('BENCH_PORT', '8786')}"


def one(n: int) -> int:
    return n + 1


def two(n: int) -> int:
    return n * 2


def three(n: int) -> int:
    return n + 3


def flow(n: int) -> int:
    client = Client(ADDRESS, timeout=30)
    found = client.map(three, client.map(two, client.map(one, range(n))))
    return client.submit(sum, found).result(timeout=flow_common.WAIT_S)


async def _work() -> None:
    port = int(ADDRESS.rpartition(":")[2])
    async with (
        Scheduler(host="127.0.0.1", port=port, dashboard=False) as scheduler,
        Worker(scheduler.address, nthreads=1, dashboard=False) as worker,
    ):
        await worker.finished()


def work() -> None:
    asyncio.run(_work())


if __name__ == "__main__":
    flow_common.main(flow, work)
