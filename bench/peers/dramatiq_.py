"""dramatiq: eight threads, no results; a group with a completion callback."""

import sys
import threading

import common
import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import GroupCallbacks
from dramatiq.rate_limits.backends import RedisBackend

broker = RedisBroker(url=common.URL)
broker.add_middleware(GroupCallbacks(RedisBackend(url=common.URL)))
dramatiq.set_broker(broker)


@dramatiq.actor
def job(_: str) -> None:
    common.tally.job()


@dramatiq.actor
def callback() -> None:
    common.tally.callback()


def enqueue(n: int) -> None:
    for _ in range(n):
        job.send(common.PAYLOAD)


def one() -> None:
    job.send(common.PAYLOAD)


def batch(n: int) -> None:
    group = dramatiq.group([job.message(common.PAYLOAD) for _ in range(n)])
    group.add_completion_callback(callback.message())
    group.run()


def work() -> None:
    dramatiq.Worker(broker, worker_threads=8).start()
    threading.Event().wait()


if __name__ == "__main__":
    common.main(sys.modules[__name__])
