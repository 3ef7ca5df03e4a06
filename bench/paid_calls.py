"""Paid calls through ``streamq run``: how much of a slow API is used, and which calls are lost?

    python bench/paid_calls.py rate [--calls 20000] [--bare 10000] [--slots 30] [--json]
    python bench/paid_calls.py stops [--calls 2000] [--stops 10] [--kills 10] [--slots 30]
                                     [--with-server] [--json]

``rate``: a local API answers in 50 to 300 ms, fails 1 call of 20, and refuses calls above
``--slots`` with 429. ``streamq run prompts.jsonl --map llm:ask -c SLOTS`` makes the calls, with no
other option. Its time is that of the whole command, from its start to its end. The ceiling is what
the API could have answered meanwhile: so many calls at every moment, divided by the mean of what
calls took, also those that failed. A bare loop of asyncio then does the same work: it calls again
at once what has failed, and keeps all answers in memory.

``stops``: the API answers in 50 to 120 ms, and notes which call was made how often. The same
command is run again and again. During the first half of the calls it is stopped with Ctrl-C, after
a random number of calls each time. During the second half it is killed with ``kill -9``, with every
worker process that it started. In the end the output is compared with what it should be. No call
may be made twice because of a polite stop, and at most as many as there are slots because of a
kill. ``--with-server`` kills the embedded server, too. It writes its file at once, unless the disk
is busy: then up to two seconds of calls more may be made twice.
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
from streamq import Snooze
PORT = int(open("port").read())
idle = []
async def ask(prompt: dict) -> dict:
    reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(b"%d\\n" % prompt["n"])
    status, answer = (await reader.readline()).split()
    idle.append((reader, writer))
    if status == b"429":
        raise Snooze(after="1s", scope="request")
    if status != b"200":
        raise RuntimeError("the API is not well")
    return {"n": prompt["n"], "answer": int(answer)}
"""

BARE = """
import asyncio, json, sys
from llm import ask
async def work(left, answers):
    for at, prompt in left:
        while answers[at] is None:
            try:
                answers[at] = await ask(prompt)
            except RuntimeError:
                pass
async def main():
    prompts = [json.loads(line) for line in open("prompts.jsonl")]
    answers = [None] * len(prompts)
    left = iter(enumerate(prompts))
    await asyncio.gather(*(work(left, answers) for _ in range(int(sys.argv[1]))))
    with open("bare.jsonl", "w") as out:
        out.writelines(json.dumps(each) + "\\n" for each in answers)
asyncio.run(main())
"""


class Api:
    """Answers a number with its square, and counts."""

    def __init__(self, shortest_s: float, longest_s: float, fails: float, most: int) -> None:
        self._takes = (shortest_s, longest_s)
        self._fails = fails
        self._most = most
        self._now = 0
        self.peak = self.refused = self.failed = self.total = 0
        self.busy_s = 0.0
        self.begun: list[float] = []
        self.calls: Counter[int] = Counter()
        self._loop = asyncio.new_event_loop()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1_000)
        self.port = self._loop.run_until_complete(starting).sockets[0].getsockname()[1]
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, ValueError):
            while line := await reader.readline():
                number = int(line)
                writer.write(b"%d %d\n" % (await self._answer(number), number**2))
                await writer.drain()
        writer.close()

    async def _answer(self, number: int) -> int:
        if self._now >= self._most:
            self.refused += 1
            return 429
        self.calls[number] += 1
        self.total += 1
        self._now += 1
        self.peak = max(self.peak, self._now)
        begun = time.monotonic()
        self.begun.append(begun)
        await asyncio.sleep(random.uniform(*self._takes))
        self._now -= 1
        self.busy_s += time.monotonic() - begun
        if random.random() < self._fails:
            self.failed += 1
            return 500
        return 200

    def twice(self) -> int:
        """Return how many calls were made more often than once, each time counted."""
        return sum(count - 1 for count in self.calls.values())


def prepare(folder: Path, api: Api, calls: int) -> None:
    """Write what the command needs: its input, and the code."""
    (folder / "port").write_text(str(api.port))
    (folder / "llm.py").write_text(CODE)
    (folder / "bare.py").write_text(BARE)
    (folder / "prompts.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(calls)))


def is_exact(output: Path, calls: int) -> bool:
    """Return whether an output has every answer once, in input order."""
    found = [json.loads(line) for line in output.read_text().splitlines()]
    return found == [{"n": n, "answer": n * n} for n in range(calls)]


def begin(folder: Path, slots: int) -> "subprocess.Popen[bytes]":
    """Start the command, or go on with it: it is the same."""
    words = ["run", "prompts.jsonl", "--map", "llm:ask", "-c", str(slots), "-o", "out.jsonl"]
    errors = (folder / "errors.txt").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "streamq.cli", *words], cwd=folder, stderr=errors
    )


# rate


def begin_bare(folder: Path, slots: int) -> "subprocess.Popen[bytes]":
    """Start the bare loop."""
    return subprocess.Popen([sys.executable, "bare.py", str(slots)], cwd=folder)


def measure(
    calls: int, slots: int, output: str, start: Callable[[Path, int], "subprocess.Popen[bytes]"]
) -> dict[str, Any]:
    """Make so many calls. Returns how long it took, and how much of the API was used."""
    api = Api(0.05, 0.3, 0.05, slots)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, api, calls)
        begun = time.monotonic()
        code = start(folder, slots).wait()
        ended = time.monotonic()
        if code:
            raise SystemExit(f"it ended with {code}: {(folder / 'errors.txt').read_text()[-2000:]}")
        exact = is_exact(folder / output, calls)
    seconds, made = ended - begun, len(api.begun)
    ceiling = slots * made / api.busy_s
    fresh = api.begun[min(calls, made) - slots]
    return {
        "answers": calls,
        "calls": made,
        "failed": api.failed,
        "refused": api.refused,
        "peak": api.peak,
        "seconds": round(seconds, 1),
        "start_s": round(api.begun[0] - begun, 2),
        "end_s": round(ended - api.begun[-1], 2),
        "calls_per_s": round(made / seconds, 1),
        "ceiling_per_s": round(ceiling, 1),
        "share": round(made / seconds / ceiling, 4),
        "share_before_tail": round((calls - slots) / (fresh - api.begun[0]) / ceiling, 4),
        "exact": exact,
    }


def say_rate(who: str, told: dict[str, Any]) -> None:
    """Print a line about one who made the calls."""
    print(
        f"{who:<12} {told['calls']:,} calls for {told['answers']:,} answers in "
        f"{told['seconds']:.1f} s: {told['calls_per_s']:.1f} of {told['ceiling_per_s']:.1f} a "
        f"second, {told['share']:.1%} of the ceiling; most at once {told['peak']}, "
        f"{told['refused']} times 429, first call after {told['start_s']:.2f} s, end "
        f"{told['end_s']:.2f} s after the last; output {'exact' if told['exact'] else 'WRONG'}",
        flush=True,
    )


def rate(asked: argparse.Namespace) -> None:
    """Print what share of the API's ceiling streamq and a bare loop reach."""
    told = {"streamq run": measure(asked.calls, asked.slots, "out.jsonl", begin)}
    if not asked.json:
        say_rate("streamq run", told["streamq run"])
    if asked.bare:
        told["bare loop"] = measure(asked.bare, asked.slots, "bare.jsonl", begin_bare)
        if not asked.json:
            say_rate("bare loop", told["bare loop"])
    if asked.json:
        print(json.dumps(told))


# stops


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
    # Calls of those who were killed may still be under way.
    api = Api(0.05, 0.12, 0.0, 20 * slots)
    prepare(folder, api, calls)
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
    return {
        "answers": calls,
        "calls": api.total,
        "slots": slots,
        "stops": stops,
        "twice_by_stops": by_stops,
        "kills": kills,
        "twice_by_kills": api.twice() - by_stops,
        "allowed_by_kills": slots * kills,
        "exact": is_exact(folder / "out.jsonl", calls),
    }


def stops(asked: argparse.Namespace) -> None:
    """Print how many calls were made twice because of stops and kills."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = (asked.calls, asked.stops, asked.kills, asked.slots)
        told = tell(Path(folder), *numbers, with_server=asked.with_server)
    if asked.json:
        print(json.dumps(told))
        return
    print(
        f"{told['calls']:,} calls for {told['answers']:,} answers, {told['slots']} at once: "
        f"{told['stops']} polite stops made {told['twice_by_stops']} calls twice; "
        f"{told['kills']} kills made {told['twice_by_kills']} calls twice, of at most "
        f"{told['allowed_by_kills']}; the output is {'exact' if told['exact'] else 'WRONG'}"
    )


def main() -> None:
    """Carry out one of the two measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_subparsers(required=True)
    numbers: dict[Callable[[argparse.Namespace], None], dict[str, int]] = {
        rate: {"calls": 20_000, "bare": 10_000, "slots": 30},
        stops: {"calls": 2_000, "stops": 10, "kills": 10, "slots": 30},
    }
    for do, options in numbers.items():
        of = what.add_parser(do.__name__, help=do.__doc__)
        for name, default in options.items():
            of.add_argument(f"--{name}", type=int, default=default)
        if do is stops:
            of.add_argument("--with-server", action="store_true")
        of.add_argument("--json", action="store_true")
        of.set_defaults(do=do)
    asked = parser.parse_args()
    # A shell starts what runs in the background with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asked.do(asked)


if __name__ == "__main__":
    main()
