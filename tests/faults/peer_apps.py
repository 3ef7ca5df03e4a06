"""The same work for other queues, each by its own ways and with time-outs of about two seconds.

Run with the interpreter of the environment that has them: ``peer_apps.py PEER submit N``. The
workers are started by their own commands, with this file as their module.
"""

import asyncio
import os
import sys
import time

URL = os.environ.get("PEERS_URL", "")
LOG = os.environ.get("STREAMQ_TEST_LOG", os.devnull)
PEER = os.environ.get("PEERS_NAME", "")
WORK_S = 0.008


def note(word: str, number: int) -> None:
    line = f"{word} {time.monotonic():.6f} {os.getpid()} {PEER} {number}\n"
    descriptor = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def work(number: int) -> None:
    note("S", number)
    time.sleep(WORK_S)
    note("E", number)


async def work_async(_: object, number: int) -> None:
    note("S", number)
    await asyncio.sleep(WORK_S)
    note("E", number)


if PEER == "rq":
    import redis
    import rq

    def submit(count: int) -> None:
        queue = rq.Queue(connection=redis.Redis.from_url(URL))
        retry = rq.Retry(max=10)
        jobs = [
            rq.Queue.prepare_data(work, (n,), retry=retry, timeout=2) for n in range(1, count + 1)
        ]
        queue.enqueue_many(jobs)


elif PEER == "celery":
    import celery

    app = celery.Celery("peer_apps", broker=URL)
    app.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        broker_transport_options={"visibility_timeout": 2},
        broker_connection_retry_on_startup=True,
    )
    task = app.task(work, name="work")

    def submit(count: int) -> None:
        for n in range(1, count + 1):
            task.delay(n)


elif PEER == "dramatiq":
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    # Maintenance, which takes back what the dead have, is a matter of chance by default.
    broker = RedisBroker(url=URL, heartbeat_timeout=2_000, maintenance_chance=1_000_000)
    dramatiq.set_broker(broker)
    actor = dramatiq.actor(work, max_retries=10)

    def submit(count: int) -> None:
        for n in range(1, count + 1):
            actor.send(n)


elif PEER == "arq":
    import arq
    from arq.connections import RedisSettings

    class Settings:
        functions = (work_async,)
        redis_settings = RedisSettings.from_dsn(URL)
        job_timeout = 2  # its claim on a job stands ten seconds longer
        max_jobs = 4
        max_tries = 10
        poll_delay = 0.1

    def submit(count: int) -> None:
        async def go() -> None:
            pool = await arq.create_pool(Settings.redis_settings)
            for n in range(1, count + 1):
                await pool.enqueue_job("work_async", n)

        asyncio.run(go())


elif PEER == "streaq":
    import streaq

    worker = streaq.Worker(redis_url=URL, concurrency=4, idle_timeout=2)

    @worker.task(max_tries=10)
    async def work_streaq(number: int) -> None:
        await work_async(None, number)

    def submit(count: int) -> None:
        async def go() -> None:
            async with worker:
                for n in range(1, count + 1):
                    await work_streaq.enqueue(n)

        asyncio.run(go())


if __name__ == "__main__":
    submit(int(sys.argv[1]))
