"""What all adapters share: a job's payload, a tally of jobs run, and the actions.

An adapter is a module with ``enqueue(n)``, ``work()``, ``one()`` and, if the peer has batches,
``batch(n)``; each may be a coroutine. The interpreter of the peer's own environment runs it as
``NAME.py ACTION [NUMBER]``, and it prints one JSON object.
"""

import asyncio
import inspect
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import uvloop
except ImportError:  # streamq and the bare loop do not need it
    uvloop = None

URL = os.environ["BENCH_URL"]
PAYLOAD = "x" * 100
FOLDER = Path(os.environ["BENCH_TALLY"])
#: Number of jobs, when the last one began, when a batch's callback ran. Each process has a file.
FORMAT = "<qqq"
SIZE = struct.calcsize(FORMAT)


class Tally:
    """Counts the jobs of this process in a file that other processes can read at any time."""

    def __init__(self) -> None:
        self._pid = 0
        self._lock = threading.Lock()

    def job(self, count: int = 1) -> None:
        """Count one job that begins, or so many."""
        now = time.monotonic_ns()
        with self._lock:
            if self._pid != os.getpid():
                self._open()
            self._count += count
            struct.pack_into("<qq", self._map, 0, self._count, now)

    def callback(self) -> None:
        """Note that the callback of a batch runs."""
        with self._lock:
            if self._pid != os.getpid():
                self._open()
            struct.pack_into("<q", self._map, 16, time.monotonic_ns())

    def _open(self) -> None:
        self._pid = os.getpid()
        # Renamed when it is complete, so that a reader never sees half a row.
        new = FOLDER.parent / f"new{self._pid}"
        new.write_bytes(bytes(SIZE))
        path = new.rename(FOLDER / str(self._pid))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._count = 0


def read() -> tuple[int, int, int]:
    """Return the jobs of all processes, when the last began, and when a callback ran."""
    found = [struct.unpack(FORMAT, path.read_bytes()[:SIZE]) for path in FOLDER.iterdir()]
    return (
        sum(each[0] for each in found),
        max((each[1] for each in found), default=0),
        max((each[2] for each in found), default=0),
    )


def _cpu() -> float:
    return time.process_time()


async def _call(function: Callable[..., Any], *args: Any) -> Any:
    result = function(*args)
    return await result if inspect.isawaitable(result) else result


async def _enqueue(adapter: Any, n: int) -> dict[str, Any]:
    await _call(adapter.enqueue, 1)  # so that connections and scripts exist already
    begun, cpu = time.perf_counter(), _cpu()
    await _call(adapter.enqueue, n)
    return {"s": time.perf_counter() - begun, "cpu_s": _cpu() - cpu}


async def _latency(adapter: Any, times: int) -> dict[str, Any]:
    waits = []
    for _ in range(times + 10):
        before = read()[0]
        begun = time.monotonic_ns()
        await _call(adapter.one)
        deadline = time.monotonic() + 20
        while read()[0] == before:
            if time.monotonic() > deadline:
                raise SystemExit("a job did not run within 20 s")
            await asyncio.sleep(0.0005)
        waits.append((read()[1] - begun) / 1e6)
        await asyncio.sleep(0.004)
    return {"ms": waits[10:]}


async def _batch(adapter: Any, n: int) -> dict[str, Any]:
    before = read()[2]
    begun = time.monotonic_ns()
    await _call(adapter.batch, n)
    deadline = time.monotonic() + 90
    while read()[2] == before:
        if time.monotonic() > deadline:
            raise SystemExit("the callback did not run within 90 s")
        await asyncio.sleep(0.001)
    return {"s": (read()[2] - begun) / 1e9}


def main(adapter: Any) -> None:
    """Run the action that the command line names."""
    action = sys.argv[1]
    if action == "work":
        adapter.work()
        return
    actions = {"enqueue": _enqueue, "latency": _latency, "batch": _batch}
    print(json.dumps(run(actions[action](adapter, int(sys.argv[2])))), flush=True)
    os._exit(0)  # whatever connections and tasks are still open


def run(coroutine: Any) -> Any:
    """Run a coroutine, with uvloop where it is installed."""
    with asyncio.Runner(loop_factory=uvloop and uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


tally = Tally()
