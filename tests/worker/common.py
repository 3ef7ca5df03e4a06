"""What several tests of pools need: results, a pool's end, a process in a thread of the test."""

import asyncio
import signal
import subprocess
from typing import Any

import pytest

from streamq import Request
from streamq.worker import forks
from streamq.worker.process import WorkerProcess
from tests.conftest import KINDS
from tests.support.waiting import wait_until

#: Where the server matters little; but routing to nodes must do what one server does.
TWO_KINDS = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "redis"], indirect=True
)


def values(request: Request) -> list[Any]:
    """Results in input order."""
    return [result for _, result in request.results(timeout=20)]


def stop(pool: "subprocess.Popen[bytes]", number: int = signal.SIGTERM) -> int:
    pool.send_signal(number)
    return pool.wait(15)


def keep_alive(process: WorkerProcess) -> None:
    """Let the event loop end without the process, which is the test's own."""
    process._batches._run_loop = _run_loop  # type: ignore[method-assign]


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()


def put_away(process: WorkerProcess) -> None:
    """Close what a process has open, apart from its line: its event loop, its connections."""
    loop = process._batches._loop
    if loop:
        forks.loop = None
        loop.call_soon_threadsafe(loop.stop)
        wait_until(loop.is_closed)
    process._protocol.connection.close()
