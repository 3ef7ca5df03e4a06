"""RQ: ``SimpleWorker`` (no fork for each job), ``enqueue_many``; a job that depends on all."""

import sys

import common
from redis import Redis
from rq import Queue, SimpleWorker

redis = Redis.from_url(common.URL)
queue = Queue(connection=redis)


def job(_: str) -> None:
    common.tally.job()


def callback() -> None:
    common.tally.callback()


def enqueue(n: int) -> list:
    jobs = []
    for start in range(0, n, 1000):
        data = [
            Queue.prepare_data("rq_.job", (common.PAYLOAD,), result_ttl=0)
            for _ in range(min(1000, n - start))
        ]
        jobs += queue.enqueue_many(data)
    return jobs


def one() -> None:
    enqueue(1)


def batch(n: int) -> None:
    data = [Queue.prepare_data("rq_.job", (common.PAYLOAD,)) for _ in range(n)]
    queue.enqueue("rq_.callback", depends_on=queue.enqueue_many(data))


def work() -> None:
    SimpleWorker([queue], connection=redis, log_job_description=False).work(logging_level="WARNING")


if __name__ == "__main__":
    common.main(sys.modules[__name__])
