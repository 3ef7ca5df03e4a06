"""huey: one thread, no results kept; a chord, which needs them."""

import logging
import os
import sys

import common
from huey import RedisHuey
from huey.api import chord

HAS_RESULTS = os.environ.get("BENCH_RESULTS") == "1" or "batch" in sys.argv
huey = RedisHuey("bench", url=common.URL, results=HAS_RESULTS)


@huey.task()
def job(_: str) -> None:
    common.tally.job()


@huey.task()
def job_with_result(_: str) -> int:
    common.tally.job()
    return 1


@huey.task()
def callback(_: list) -> None:
    common.tally.callback()


def enqueue(n: int) -> None:
    for _ in range(n):
        job(common.PAYLOAD)


def one() -> None:
    job(common.PAYLOAD)


def batch(n: int) -> None:
    huey.enqueue(chord([job_with_result.s(common.PAYLOAD) for _ in range(n)], callback.s()))


def work() -> None:
    logging.getLogger("huey").setLevel(logging.ERROR)
    huey.create_consumer(workers=1, worker_type="thread", periodic=False).run()


if __name__ == "__main__":
    sys.modules["huey_"] = sys.modules[__name__]
    common.main(sys.modules[__name__])
