"""The soak: requests of every kind come and go for an hour, and nothing may grow or remain.

``python -m tests.faults.soak --seconds 3600 --report docs/soak.md``. Two pools work: one lives
from the beginning to the end and is measured, the other is killed, stopped and restarted.
Everything runs within a share of one core, so that the figures are of a machine at ease.
"""

import argparse
import itertools
import os
import platform
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from redis import Redis

from streamq import Client, Request, Status
from streamq.protocol.keys import QueueKeys
from streamq.servers.local import LocalServer
from tests.faults.gauges import (
    COUNT,
    MEMORY,
    MIB,
    Gauges,
    Row,
    Throttle,
    children,
    descriptors,
    mebibytes,
    peak_mebibytes,
    threads,
)
from tests.faults.report import replaced
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

#: Requests that are followed at the same time.
ACTORS = 6
#: How many parts a request has: a range, and how often of a hundred.
SIZES = (((0, 0), 4), ((1, 1), 16), ((2, 20), 40), ((21, 500), 28), ((501, 5_000), 10))
LARGE = (20_000, 40_000)
#: Beyond this nothing takes as long by right.
PATIENCE_S = 240.0
#: The measured pool takes no requests that kill processes; they come at the levels beyond.
CALM_LEVELS = 89
ENVIRONMENT = {"STREAMQ_LEASE_MS": "5000", "STREAMQ_BEAT_MS": "1000"}


class Plan(NamedTuple):
    """A request to make."""

    handler: str
    size: int
    level: int
    options: dict[str, Any]

    def payloads(self) -> Iterable[Any]:
        """Its parts."""
        if self.handler == "turned":
            return (f"line {number} of {self.size}" for number in range(self.size))
        return iter(range(self.size))

    def result(self, number: int) -> Any:
        """What a part yields."""
        if self.handler == "turned":
            return f"line {number} of {self.size}"[::-1]
        return number * 2

    def failing(self) -> set[int]:
        """The parts that cannot succeed, by their payload."""
        if self.handler == "flaky":
            return set(range(3, self.size, 10))
        return {0} if self.handler == "deadly" and self.size else set()


def planned(chance: random.Random, large: bool) -> Plan:
    """Any request."""
    sizes = [size for size, _ in SIZES]
    often = [weight for _, weight in SIZES]
    size = chance.randint(*(LARGE if large else chance.choices(sizes, often)[0]))
    handlers = ["turned"] if size > 5_000 else ["turned", "nap", "later", "flaky", "flaky"]
    handler = chance.choice(handlers)
    level = chance.randint(0, CALM_LEVELS)
    options: dict[str, Any] = {"limit": chance.choice([1, 2, 4, 8, 50]), "keep": "15s"}
    options |= {"poison": 1_000, "backoff": "20ms"}
    if size < 200 and chance.random() < 0.04:
        handler, level, options["poison"] = "deadly", CALM_LEVELS + 5, 2
    if size < 100 and chance.random() < 0.2:
        options["rate"] = "100/s"
    if chance.random() < 0.1:
        options["delay"] = chance.random() * 2
    if handler == "flaky" and chance.random() < 0.3:
        options["max_failures"] = chance.choice([0, 5, "2%"])
    return Plan(handler, size, level, options)


class Soak:
    """One run: what was done, what is wrong, and what was measured."""

    def __init__(self, server: LocalServer, folder: Path, seconds: float, share: float) -> None:
        self.server = server
        self.folder = folder
        self.seconds = seconds
        self.queue = f"soak-{secrets.token_hex(4)}"
        self.fleet = Fleet(server.url, self.queue, folder)
        self.redis = Redis(unix_socket_path=server.url.removeprefix("unix://"))
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.seen: dict[str, int] = {}
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.calm = self._start_pool("--levels", f"0-{CALM_LEVELS}")
        self.victim = self._start_pool()
        self._await_ready(self.calm)
        self._await_ready(self.victim)
        self.throttle = Throttle(share, self._pids)
        self.gauges = Gauges()
        self.at_start = self._used_memory()

    def _start_pool(self, *options: str) -> "subprocess.Popen[bytes]":
        return self.fleet.start("-p", "2", "-c", "2", *options, target="soaked:app")

    def _await_ready(self, pool: "subprocess.Popen[bytes]") -> None:
        wait_until(lambda: "ready" in self.fleet.errors(pool), PATIENCE_S)

    def _pids(self) -> list[int]:
        pools = [self.calm.pid, self.victim.pid]
        return [self.server.pid, *pools, *itertools.chain(*map(children, pools))]

    def _used_memory(self) -> float:
        return float(self.redis.info("memory")["used_memory"]) / MIB

    def run(self) -> None:
        """All of it, until the time is over and everything has gone its way."""
        roles: list[Callable[[random.Random], None]] = [self._request] * ACTORS
        roles += [self._command, self._fault, self._sample]
        running = [
            threading.Thread(target=self._repeat, args=(role, random.Random(seed)), daemon=True)
            for seed, role in enumerate(roles)
        ]
        for thread in running:
            thread.start()
        self._ended.wait(self.seconds)
        self._ended.set()
        for thread in running:
            thread.join(2 * PATIENCE_S)
            if thread.is_alive():
                self.wrong(f"a role did not end: {thread.name}")

    def _repeat(self, role: Callable[[random.Random], None], chance: random.Random) -> None:
        while not self._ended.is_set():
            if role != self._sample:
                self.throttle.wait(self._ended.is_set)
            try:
                role(chance)
            except Exception:  # noqa: BLE001  it is told at the end
                self.wrong(traceback.format_exc(limit=-3))
                time.sleep(1)

    def count(self, what: str, number: int = 1) -> None:
        """Something was done."""
        with self._lock:
            self.counts[what] += number

    def wrong(self, what: str) -> None:
        """Something is not as it must be, and when, and how busy the machine was then."""
        since = time.monotonic() - self._began
        told = f"after {since:,.0f} s (load {os.getloadavg()[0]:.1f}): {what}"
        print(f"WRONG {told}", file=sys.stderr, flush=True)
        self.problems.append(told)

    # Requests

    def _request(self, chance: random.Random) -> None:
        plan = planned(chance, large=chance.random() < 0.01)
        with Client(self.server.url) as client:
            request = client.submit(
                plan.payloads(),
                handler=plan.handler,
                queue=self.queue,
                level=plan.level,
                **plan.options,
            )
            self.count("requests")
            self.count("parts", plan.size)
            is_cancelled = self._meddle(request, chance)
            status = request.wait(PATIENCE_S)
            if is_cancelled or status.state == "cancelled":
                self.count("cancelled")
            else:
                self._check(plan, request, status)
                self._retry(plan, request, chance)
            if chance.random() < 0.3:
                with suppress(Exception):
                    request.purge()

    def _meddle(self, request: Request, chance: random.Random) -> bool:
        """Steer it a little. Returns whether it was cancelled."""
        dice = chance.random()
        with suppress(Exception):  # it may have ended already
            if dice < 0.1:
                request.pause()
                self.count("pauses")
                time.sleep(chance.random() * 2)
                request.resume()
            elif dice < 0.25:
                request.set(level=chance.randint(0, CALM_LEVELS), limit=chance.randint(1, 10))
                self.count("changes of level and limit")
            elif dice < 0.32:
                request.cancel()
                return True
        return False

    def _check(self, plan: Plan, request: Request, status: Status) -> None:
        parts = status.parts
        failing = plan.failing()
        if status.state == "failed" and failing and "max_failures" in plan.options:
            self.count("failed as wished")
            return
        if status.state != "done" or parts.total != plan.size:
            self.wrong(f"{request.id} {plan}: {status}")
        self._check_parts(plan, request, status)
        self.count("done")

    def _check_parts(self, plan: Plan, request: Request, status: Status) -> None:
        failing = plan.failing()
        done = 0
        for part, value in request.results(timeout=30):
            done += 1
            if value != plan.result(part - 1) or part - 1 in failing:
                self.wrong(f"{request.id} {plan}: part {part} yielded {value!r}")
        failed = {failure.part - 1 for failure in request.errors()}
        # Beside a part that kills processes others may be charged, when the pool is killed too.
        is_exact = plan.handler == "deadly" or failed == failing
        counted = (status.parts.done, status.parts.failed)
        if not is_exact or done + len(failed) != plan.size or counted != (done, len(failed)):
            self.wrong(
                f"{request.id} {plan}: {done} results, failed {sorted(failed)[:9]}, {counted}"
            )
        self.count("results checked", done)
        self.count("failures as wished", len(failed))

    def _retry(self, plan: Plan, request: Request, chance: random.Random) -> None:
        if plan.handler != "flaky" or chance.random() > 0.3:
            return
        again = request.retry()
        status = request.wait(PATIENCE_S)
        self.count("retries of what failed")
        if again and status.state == "done" and status.parts.failed != len(plan.failing()):
            self.wrong(f"{request.id} {plan}: after a retry {status}")

    # Commands

    def _command(self, chance: random.Random) -> None:
        """A file through ``streamq load`` and ``results``; each may be killed on its way."""
        name = f"f{secrets.token_hex(6)}"
        source, output = self.folder / name, self.folder / f"{name}.out"
        lines = [f"{number} {'x' * (number % 60)}" for number in range(chance.randint(0, 60_000))]
        source.write_text("".join(f"{line}\n" for line in lines))
        words = ["load", str(source), "--handler", "turned", "--id", name, "--bytes", "16KiB"]
        words += ["--keep", "30s", "--level", str(chance.randint(0, CALM_LEVELS))]
        if chance.random() < 0.3:
            self._killed(words, chance, "loader")
        peak = self._finished(words)
        self.gauges.note("loader, at most", peak, MEMORY)
        collect = ["results", name, "-o", str(output), "--follow"]
        if chance.random() < 0.3:
            self._killed(collect, chance, "collector")
        self.gauges.note("collector, at most", self._finished(collect), MEMORY)
        if output.read_text().splitlines() != [line[::-1] for line in lines]:
            self.wrong(f"{name}: the output is not the input turned: {output}")
        else:
            self.count("files loaded and collected")
            self.count("lines of them", len(lines))
            source.unlink()
            output.unlink()
        self._ended.wait(5 + chance.random() * 10)

    def _start(self, words: list[str]) -> "subprocess.Popen[bytes]":
        environment = os.environ | {"STREAMQ_URL": self.server.url, "STREAMQ_QUEUE": self.queue}
        command = [sys.executable, "-m", "streamq.cli", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe)

    def _finished(self, words: list[str]) -> float:
        """Run a command to its end. Returns its memory at most."""
        with self._start(words) as running:
            peak = peak_mebibytes(running)
            _, errors = running.communicate()
            if running.returncode:
                self.wrong(f"{' '.join(words)}: {running.returncode} {errors.decode()}")
        return peak

    def _killed(self, words: list[str], chance: random.Random, what: str) -> None:
        with self._start(words) as running:
            peak_mebibytes(running, time.monotonic() + 0.3 + chance.random())
            if running.poll() is None:
                running.kill()
                self.count(f"{what}s killed")
            running.communicate()

    # Faults

    def _fault(self, chance: random.Random) -> None:
        longest = min(40.0, self.seconds / 6)
        if self._ended.wait(longest * (0.3 + 0.7 * chance.random())):
            return
        act = chance.choice([self._kill_process, self._kill_pool, self._stop_pool, self._renew])
        act(chance)

    def _kill_process(self, chance: random.Random) -> None:
        found = children(self.victim.pid)
        if found:
            os.kill(chance.choice(found), signal.SIGKILL)
            self.count("processes killed")

    def _kill_pool(self, _: random.Random) -> None:
        self.victim.kill()
        self.victim.wait()
        self.count("pools killed")
        self.victim = self._start_pool()
        self._await_ready(self.victim)

    def _stop_pool(self, _: random.Random) -> None:
        self.victim.terminate()
        if self.victim.wait(60) != 0:
            self.wrong(f"a pool ended with {self.victim.returncode}")
        self.count("pools stopped politely")
        self.victim = self._start_pool()
        self._await_ready(self.victim)

    def _renew(self, _: random.Random) -> None:
        self.victim.send_signal(signal.SIGHUP)
        self.count("pools told to replace their processes")

    # Measuring

    def _sample(self, _: random.Random) -> None:
        info = self.redis.info()
        note = self.gauges.note
        note("server, used_memory", info["used_memory"] / MIB, MEMORY)
        note("server, RSS", info["used_memory_rss"] / MIB, MEMORY)
        note("server, connections", info["connected_clients"], COUNT._replace(share=0.5))
        note("keys", self.redis.dbsize(), COUNT._replace(share=1.0, room=100.0))
        note("pool's parent, RSS", mebibytes(self.calm.pid), MEMORY)
        note("pool's parent, open files", descriptors(self.calm.pid), COUNT)
        note("pool's parent, threads", threads(self.calm.pid), COUNT)
        members = children(self.calm.pid)
        if members:
            note("pool's largest process, RSS", max(map(mebibytes, members)), MEMORY)
            note("pool's process, open files", max(map(descriptors, members)), COUNT)
            note("pool's process, threads", max(map(threads, members)), COUNT)
        note("client, RSS", mebibytes(os.getpid()), MEMORY)
        self._ended.wait(min(5.0, self.seconds / 60))

    # The end

    def settle(self) -> None:
        """When all is over nothing may be left but what is named here."""
        standing = self.standing_keys()
        deadline = time.monotonic() + 90
        while (left := self._keys() - standing) and time.monotonic() < deadline:
            time.sleep(0.5)
        if left:
            self.wrong(f"{len(left)} keys are left: {sorted(left)[:20]}")
        self.grown = self._used_memory() - self.at_start
        if self.grown > 4:
            self.wrong(f"the server has {self.grown:.1f} MiB more than at the start, and no key")
        self._end_pools()
        if after := self._keys() - {QueueKeys(self.queue).workers, QueueKeys(self.queue).used}:
            self.wrong(f"keys are left after the pools: {sorted(after)[:20]}")
        self._read_logs()

    def _end_pools(self) -> None:
        for pool in (self.calm, self.victim):
            if pool.poll() is not None:
                self.wrong(f"a pool ended by itself with {pool.returncode}")
            pool.terminate()
            pool.wait(60)

    def _read_logs(self) -> None:
        """No pool may have met anything that it has no name for."""
        for path in self.folder.glob("pool*.err"):
            log = path.read_text()
            for word in ("stumbled", "the process ends", "goes on after"):
                if word in log:
                    self.wrong(f"a pool's log has {word!r}: {log[log.index(word) :][:500]}")

    def standing_keys(self) -> set[str]:
        """The index of workers (those killed are known for a day), each live pool's card, and the
        lists in use, which janitors forget an hour after the last token.
        """
        names = [f"{socket.gethostname()[:64]}.{pool.pid}" for pool in (self.calm, self.victim)]
        cards = {QueueKeys(self.queue, worker=name).worker for name in names}
        return {QueueKeys(self.queue).workers, QueueKeys(self.queue).used} | cards

    def _keys(self) -> set[str]:
        return {key.decode() for key in self.redis.scan_iter(count=1_000)}


def table(rows: list[Row]) -> str:
    """The gauges as a table."""
    headers = ["median of each quarter", "1st", "2nd", "3rd", "4th", "most", "flat"]
    lines = [headers, ["---"] * len(headers), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(soak: Soak, seconds: float, rows: list[Row]) -> str:
    """What was done and measured."""
    info = soak.redis.info("server")
    server = (
        f"{info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}"
    )
    done = "\n".join(f"* {name}: {number:,}" for name, number in sorted(soak.counts.items()))
    wrong = "\n".join(f"* {each}" for each in soak.problems[:20]) or "Nothing was wrong."
    return f"""{seconds:,.0f} seconds, within {soak.throttle.share():.2f} of one core \
({server}, Python {platform.python_version()}).

{done}

{wrong}

{table(rows)}

At the end the server's used_memory was {soak.grown:+.2f} MiB against the start.
"""


def summary(soak: Soak, seconds: float, rows: list[Row]) -> str:
    """The same in three lines."""
    counts = soak.counts
    deaths = sum(
        counts[f"{name} killed"] for name in ("pools", "processes", "loaders", "collectors")
    )
    flat = sum(row.is_flat for row in rows)
    return f"""In {seconds:,.0f} seconds {counts["requests"]:,} requests of \
{counts["parts"]:,} parts came and went, and {counts["files loaded and collected"]:,} files; \
{deaths:,} kills.
{counts["results checked"]:,} results were compared with what they must be. Wrong: \
{len(soak.problems)}. Flat: {flat} of {len(rows)} gauges. Keys left: \
{"none but the standing ones" if not soak.problems else "see there"}.
"""


def main() -> int:
    """Run it, print the figures, and say whether all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3_600.0)
    parser.add_argument("--share", type=float, default=0.25, help="of one core, at most")
    parser.add_argument("--report", type=Path, help="write the figures into this page")
    parser.add_argument("--summary", type=Path, help="write three lines of them into this page")
    options = parser.parse_args()
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, LocalServer.start() as server:
        soak = Soak(server, Path(folder), options.seconds, options.share)
        try:
            soak.run()
            soak.settle()
            rows = soak.gauges.rows(options.seconds)
            soak.problems += [f"not flat: {row}" for row in rows if not row.is_flat]
            text = report(soak, options.seconds, rows)
            short = summary(soak, options.seconds, rows)
        finally:
            soak.fleet.end()
    print(text)
    if options.report:
        options.report.write_text(replaced(options.report.read_text(), "soak", text))
    if options.summary:
        options.summary.write_text(replaced(options.summary.read_text(), "soak", short))
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
