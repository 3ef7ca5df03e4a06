"""Paid calls through ``streamq run``, stopped politely and killed: how many are made twice?

    python bench/paid_calls.py [--calls 2000] [--stops 10] [--kills 10] [--slots 30]
                               [--with-server] [--json]

A local API answers in 50 to 120 ms, and notes which call was made how often. The same command is
run again and again. During the first half of the calls it is stopped with Ctrl-C, after a random
number of calls each time. During the second half it is killed with ``kill -9``, with every worker
process that it started. In the end the output is compared with what it should be. No call may be
made twice because of a polite stop, and at most as many as there are slots because of a kill.

``--with-server`` kills the embedded server, too. It writes its file at once, unless the disk is
busy: then up to two seconds of calls more may be made twice.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

CODE = """
import asyncio
PORT = int(open("port").read())
async def ask(prompt: dict) -> dict:
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(b"%d\\n" % prompt["n"])
    answer = int(await reader.readline())
    writer.close()
    return {"n": prompt["n"], "answer": answer}
"""


class Api:
    """Answers a number with its square, and counts."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.total = 0
        self._loop = asyncio.new_event_loop()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1_000)
        self.port = self._loop.run_until_complete(starting).sockets[0].getsockname()[1]
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, ValueError):
            number = int(await reader.readline())
            self.calls[number] += 1
            self.total += 1
            await asyncio.sleep(random.uniform(0.05, 0.12))
            writer.write(b"%d\n" % number**2)
            await writer.drain()
        writer.close()

    def twice(self) -> int:
        """Return how many calls were made more often than once, each time counted."""
        return sum(count - 1 for count in self.calls.values())


def descendants(pid: int) -> list[int]:
    """Return the ids of the processes below one."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def is_of_server(pid: int) -> bool:
    """Return whether a process is a server, or looks after one."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"-server" in words or b"supervisor.py" in words


def kill(running: "subprocess.Popen[bytes]", *, with_server: bool) -> None:
    """Kill a command and what it started, at one moment."""
    pids = [running.pid, *descendants(running.pid)]
    if not with_server:
        pids = [pid for pid in pids if not is_of_server(pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    running.wait()


def begin(folder: Path, slots: int) -> "subprocess.Popen[bytes]":
    """Start the command, or go on with it: it is the same."""
    words = ["run", "prompts.jsonl", "--map", "llm:ask", "-c", str(slots), "-o", "out.jsonl"]
    errors = (folder / "errors.txt").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "streamq.cli", *words], cwd=folder, stderr=errors
    )


def run_until(
    api: Api, running: "subprocess.Popen[bytes]", total: int, end: Callable[[], None]
) -> None:
    """Let the command run until the API has had so many calls, and end it."""
    while running.poll() is None and api.total < total:
        time.sleep(0.005)
    if running.poll() is None:
        end()
        running.wait(300)


def tell(
    folder: Path, calls: int, stops: int, kills: int, slots: int, *, with_server: bool
) -> dict[str, Any]:
    """Run the whole story. Returns what came of it."""
    api = Api()
    (folder / "port").write_text(str(api.port))
    (folder / "llm.py").write_text(CODE)
    lines = [f'{{"n": {n}}}\n' for n in range(calls)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    half = calls // 2 if stops and kills else calls * 9 // 10
    for at in sorted(random.sample(range(1, half), stops)):
        running = begin(folder, slots)
        run_until(api, running, at, partial(running.send_signal, signal.SIGINT))
    by_stops, done = api.twice(), api.total
    for at in sorted(random.sample(range(half if stops else 1, calls - slots), kills)):
        running = begin(folder, slots)
        total = max(at, done + 1) + api.twice()
        run_until(api, running, total, partial(kill, running, with_server=with_server))
    while (code := begin(folder, slots).wait(600)) != 0:
        raise SystemExit(f"it ended with {code}: {(folder / 'errors.txt').read_text()[-2000:]}")
    wanted = [{"n": n, "answer": n * n} for n in range(calls)]
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return {
        "calls": calls,
        "slots": slots,
        "stops": stops,
        "twice_by_stops": by_stops,
        "kills": kills,
        "twice_by_kills": api.twice() - by_stops,
        "allowed_by_kills": slots * kills,
        "exact": found == wanted,
    }


def main() -> None:
    """Print what came of it."""
    parser = argparse.ArgumentParser()
    for name, default in (("calls", 2_000), ("stops", 10), ("kills", 10), ("slots", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--with-server", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        numbers = (asked.calls, asked.stops, asked.kills, asked.slots)
        told = tell(Path(folder), *numbers, with_server=asked.with_server)
    if asked.json:
        print(json.dumps(told))
        return
    print(
        f"{told['calls']:,} calls, {told['slots']} at once: "
        f"{told['stops']} polite stops made {told['twice_by_stops']} calls twice; "
        f"{told['kills']} kills made {told['twice_by_kills']} calls twice, of at most "
        f"{told['allowed_by_kills']}; the output is {'exact' if told['exact'] else 'WRONG'}"
    )


if __name__ == "__main__":
    main()
