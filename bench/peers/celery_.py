"""Celery: the solo pool, prefetch 128, no results; a chord, which needs them."""

import os
import sys

import common
from celery import Celery, chord

HAS_RESULTS = os.environ.get("BENCH_RESULTS") == "1" or "batch" in sys.argv
app = Celery("celery_", broker=common.URL, backend=common.URL if HAS_RESULTS else None)
app.conf.update(
    task_ignore_result=not HAS_RESULTS,
    worker_prefetch_multiplier=128,
    worker_enable_remote_control=False,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
)


@app.task(name="job")
def job(_: str) -> None:
    common.tally.job()


@app.task(name="callback")
def callback(_: list) -> None:
    common.tally.callback()


def enqueue(n: int) -> None:
    with app.producer_pool.acquire() as producer:
        for _ in range(n):
            job.apply_async((common.PAYLOAD,), producer=producer)


def one() -> None:
    job.delay(common.PAYLOAD)


def batch(n: int) -> None:
    chord([job.s(common.PAYLOAD) for _ in range(n)])(callback.s())


def work() -> None:
    options = ["--pool=solo", "--concurrency=1", "--loglevel=ERROR"]
    options += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["worker", *options, f"--hostname=w{os.getpid()}@bench"])


if __name__ == "__main__":
    common.main(sys.modules[__name__])
