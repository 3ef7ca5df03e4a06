"""Celery: 10,000 chains of three tasks in a chord, whose body is their sum. The solo pool."""

import os

import flow_common
from celery import Celery, chain, chord

app = Celery("flow_celery", broker=flow_common.URL, backend=flow_common.URL)
app.conf.update(
    worker_prefetch_multiplier=128,
    worker_enable_remote_control=False,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
)


@app.task(name="one")
def one(n: int) -> int:
    return n + 1


@app.task(name="two")
def two(n: int) -> int:
    return n * 2


@app.task(name="three")
def three(n: int) -> int:
    return n + 3


@app.task(name="total")
def total(found: list) -> int:
    return sum(found)


def flow(n: int) -> int:
    items = (chain(one.s(i), two.s(), three.s()) for i in range(n))
    return chord(list(items))(total.s()).get(timeout=flow_common.WAIT_S)


def work() -> None:
    options = ["--pool=solo", "--concurrency=1", "--loglevel=ERROR"]
    options += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["worker", *options, f"--hostname=w{os.getpid()}@bench"])


if __name__ == "__main__":
    flow_common.main(flow, work)
