"""The subjects of the faults: streamq by its commands, and the design that it grew from."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from streamq import Client
from streamq.errors import StreamqError
from streamq.protocol.keys import QueueKeys, RequestKeys, token_list_of
from streamq.queue.loading import forget_request
from tests.faults import baseline
from tests.faults.sites import Cluster, Site
from tests.support.fleet import Fleet, Note, read_notes
from tests.support.waiting import wait_until

HERE = Path(__file__).parent
LEASE_S = 2.0
#: How long holders of such leases must be silent after the deadline, to be taken for dead.
GRACE_S = 4.0
WAITERS = 3
#: What a pool must never say.
_BAD_WORDS = ("Traceback", "stumbled", "goes on after", "the process ends")


def complaints(
    fleet: Fleet,
    pools: "list[subprocess.Popen[bytes]]",
    ended: "list[subprocess.Popen[bytes]]",
    deaths: Collection[int],
    *,
    may_die: bool,
) -> list[str]:
    """What pools did and said of themselves that they must not. Who was killed is excused."""
    found = [
        f"A8 a pool ended by itself with code {pool.returncode}"
        for pool in pools
        if pool.poll() is not None
    ]
    for pool in pools + ended:
        for line in fleet.errors(pool).splitlines():
            said = next((int(word) for word in line.split() if word.isdecimal()), 0)
            is_dead = "it is replaced" in line and said not in deaths and not may_die
            if is_dead or any(bad in line for bad in _BAD_WORDS):
                found.append(f"A8 {line}")
    return found


class Command:
    """A command that is started again until it succeeds, as whoever needs it would do."""

    def __init__(self, words: list[str], env: dict[str, str], log: Path, good: set[int]) -> None:
        self._words = [sys.executable, "-m", "streamq.cli", *words]
        self._env = os.environ | env
        self._log = log
        self._good = good
        self._is_over = False
        self.runs = 0
        self.codes: list[int] = []
        self.ended = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has succeeded."""
        return self.ended > 0

    def _run(self) -> None:
        while not self._is_over and not self.is_done:
            with self._log.open("ab") as log:
                self.process = subprocess.Popen(
                    self._words, env=self._env, stdout=log, stderr=log, cwd=HERE
                )
            self.runs += 1
            code = self.process.wait()
            self.codes.append(code)
            if code in self._good:
                # Its last words; what Python does between them and its exit is not looked at.
                self.ended = self._log.stat().st_mtime
            else:
                time.sleep(0.2)

    def kill(self) -> bool:
        """Kill it on its way; it is started again. Returns whether it was there."""
        if self.process is None or self.process.poll() is not None:
            return False
        self.process.kill()
        return True

    def stop(self) -> None:
        """End it for good."""
        self._is_over = True
        self.kill()
        self._thread.join(10)


class Subject:
    """Workers on a site, one request, and those who wait for its end."""

    name: str
    #: So long without any part ending, it will never end.
    patience_s: float
    #: Parts that its workers run at once.
    slots = 8

    def __init__(self, site: Site, folder: Path, limit: int) -> None:
        self.site = site
        self.folder = folder
        self.limit = limit
        self.queue, self.id = site.names()
        self.log = folder / "notes"
        #: Who was killed, and when.
        self.deaths: dict[int, float] = {}
        #: Whether handlers end their processes, so that this is no fault of ours.
        self.may_die = False
        #: How soon after the end a waiter must have been told.
        self.told_within_s = 3.0
        self.level = 50
        self.parts = 0
        self.broken: list[str] = []

    def start(self) -> None:
        """Start the workers."""
        raise NotImplementedError

    def submit(self, payloads: list[str]) -> None:
        """Submit a request of these payloads, and let somebody wait for it and its results."""
        raise NotImplementedError

    def await_waiters(self) -> None:
        """Until everybody who waits is listening."""

    def kill_process(self, chance: random.Random) -> bool:
        """Kill a process that runs parts, with signal 9. Somebody starts another."""
        raise NotImplementedError

    def kill_pool(self, chance: random.Random) -> bool:
        """Kill a whole pool, unless it is not ready yet. Somebody starts another."""
        raise NotImplementedError

    def pools(self) -> list[list[int]]:
        """Process ids of each pool."""
        raise NotImplementedError

    def is_ended(self) -> bool:
        """Whether the request has ended, by the server's own word. False while nobody knows."""
        raise NotImplementedError

    def settle(self) -> tuple[int, list[float]]:
        """After the end, or what is left of it: how many were counted wrong; when who was told."""
        raise NotImplementedError

    def stop(self) -> None:
        """End everything."""
        raise NotImplementedError

    def progress(self) -> int:
        """Grows with every part that starts or ends."""
        return self.log.stat().st_size if self.log.exists() else 0

    def notes(self) -> list[Note]:
        """What the handlers noted."""
        return [note for note in read_notes(self.log) if note.request == self.id]


class Streamq(Subject):
    """Two pools of two processes with two slots, a loader, a collector, waiters."""

    name = "streamq"
    patience_s = 60.0

    def __init__(self, site: Site, folder: Path, limit: int) -> None:
        super().__init__(site, folder, limit)
        self._env = {"STREAMQ_URL": site.url, "STREAMQ_QUEUE": self.queue}
        self._fleet = Fleet(site.url, self.queue, folder)
        self._pools: list[subprocess.Popen[bytes]] = []
        self._ended_pools: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self._pools = [self._pool(), self._pool()]
        wait_until(lambda: all("ready" in self._fleet.errors(pool) for pool in self._pools), 60)

    def _pool(self) -> "subprocess.Popen[bytes]":
        lease = f"{LEASE_S:g}s"
        words = ("-p", "2", "-c", "2", "--lease", lease)
        return self._fleet.start(*words, target="handlers:app", cwd=HERE, audit_ms=1_000)

    def submit(self, payloads: list[str]) -> None:
        source = self.folder / "in.txt"
        source.write_text("".join(f"{payload}\n" for payload in payloads))
        self.parts = len(payloads)
        words = ["load", str(source), "--handler", "work", "--lines", "1"]
        words += ["--id", self.id, "--limit", str(self.limit), "--queue", self.queue]
        words += ["--level", str(self.level)]
        self.loader = self._command("load", words, {0})
        wait_until(self._is_there, 60)
        self.waiters = [
            self._command(f"wait{n}", ["wait", self.id], {0, 1}) for n in range(WAITERS)
        ]
        out = str(self.folder / "out.txt")
        self.collector = self._command("results", ["results", self.id, "-o", out, "-f"], {0})

    def await_waiters(self) -> None:
        """Until everybody who waits is listening: who finds no server at first gives up."""
        key = RequestKeys(self.id).meta
        with self.site.admin(key) as redis:
            wait_until(lambda: len(redis.client_list(_type="pubsub")) >= WAITERS, 60)
        wait_until(lambda: self._meta("committed"), 60)

    def _command(self, name: str, words: list[str], good: set[int]) -> Command:
        return Command(words, self._env, self.folder / f"{name}.log", good)

    def _meta(self, field: str) -> str:
        key = RequestKeys(self.id).meta
        try:
            with self.site.admin(key) as redis:
                value: Any = redis.hget(key, field)
        except (RedisError, OSError):
            return ""
        return value.decode() if value else ""

    def _is_there(self) -> bool:
        return self._meta("state") != ""

    def is_ended(self) -> bool:
        return self._meta("state") in ("done", "failed", "cancelled")

    def kill_process(self, chance: random.Random) -> bool:
        pids = [pid for pool in self._pools for pid in self._children(pool)]
        if chance.random() < 0.8:
            # Mostly one that works: else a slow machine would only ever start processes.
            working = {note.pid for note in self.notes()}
            pids = [pid for pid in pids if pid in working]
        if not pids:
            return False
        pid = chance.choice(pids)
        os.kill(pid, signal.SIGKILL)
        self.deaths[pid] = time.monotonic()
        return True

    def kill_pool(self, chance: random.Random) -> bool:
        index = chance.randrange(len(self._pools))
        pool = self._pools[index]
        if "ready" not in self._fleet.errors(pool):
            return False
        pids = [pool.pid, *self._children(pool)]
        pool.kill()
        pool.wait()
        self.deaths |= dict.fromkeys(pids, time.monotonic())
        self._ended_pools.append(pool)
        self._pools[index] = self._pool()
        return True

    def _children(self, pool: "subprocess.Popen[bytes]") -> list[int]:
        with suppress(OSError):
            return self._fleet.children(pool)
        return []

    def pools(self) -> list[list[int]]:
        return [[pool.pid, *self._children(pool)] for pool in self._pools]

    def settle(self) -> tuple[int, list[float]]:
        self._check_workers()
        if not self.is_ended():
            return 0, []
        end_s = int(self._meta("finished_ms")) / 1e3 - self.site.ahead_s
        told = self._told(end_s)
        with suppress(AssertionError):
            wait_until(lambda: self.collector.is_done, 30)
        with Client(self.site.url) as client:
            status = client.get(self.id).status()
            wrong = abs(status.parts.total - self.parts)
            wrong += abs(status.parts.done + status.parts.failed - self.parts)
            failed = [failure.part for failure in client.get(self.id).errors()]
            self._account(status.records.done, status.records.failed, len(failed))
            wrong += self._output_errors(failed)
            self._check_left_over(client)
        return wrong, told

    def _told(self, end_s: float) -> list[float]:
        """How long after the end each waiter was told."""
        with suppress(AssertionError):
            wait_until(lambda: all(w.is_done for w in self.waiters), self.told_within_s + 10)
        for waiter in self.waiters:
            if waiter.runs > 1:
                self.broken.append(f"A7 a waiter gave up: exit codes {waiter.codes}")
        return [waiter.ended - end_s for waiter in self.waiters if waiter.is_done]

    def _account(self, done: int, failed: int, told: int) -> None:
        """Every record is done or failed, and every failure is told of."""
        if done + failed != self.parts or failed != told:
            self.broken.append(
                f"A12 {done} records done and {failed} failed of {self.parts}, {told} errors"
            )

    def _output_errors(self, failed: list[int]) -> int:
        """Lines of the collected output that are missing, repeated, strange or out of order."""
        path = self.folder / "out.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        if not self.collector.is_done:
            self.broken.append("A2 the collector did not come to its end")
        expected = [str(n) for n in range(1, self.parts + 1) if n not in set(failed)]
        lacking = (Counter(expected) - Counter(lines)).total()
        surplus = (Counter(lines) - Counter(expected)).total()
        if lacking or surplus:
            self.broken.append(f"A12 {lacking} lines are missing, {surplus} are too many")
        elif lines != expected:
            self.broken.append("A12 lines are out of order")
        return lacking + surplus + (sorted(lines) == sorted(expected) and lines != expected)

    def _check_workers(self) -> None:
        self.broken += complaints(
            self._fleet, self._pools, self._ended_pools, self.deaths, may_die=self.may_die
        )

    def _check_left_over(self, client: Client) -> None:
        """After the end nothing waits, nothing is held, no token is out; then no key is left."""
        protocol = client._protocol
        tokens = [
            QueueKeys(self.queue, to=token_list_of("work", level)).tokens for level in range(100)
        ]
        with self.site.admin(tokens[0]) as redis:
            try:
                wait_until(lambda: not any(redis.llen(key) for key in tokens), 10)
            except AssertionError:
                self.broken.append("A3 tokens are left")
        found = protocol.inspect(self.id).fields
        for name in ("left", "leases", "retry"):
            if found[name] != "0":
                self.broken.append(f"A3 {name} is {found[name]}")
        with suppress(StreamqError):
            forget_request(protocol, self.queue, self.id)
        with self.site.admin(RequestKeys(self.id).meta) as redis:
            if left := list(redis.scan_iter(f"*{{r:{self.id}}}*", count=1000)):
                self.broken.append(f"A3 keys are left: {left}")

    def stop(self) -> None:
        for pids in self.pools():
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
        commands = [getattr(self, name, None) for name in ("loader", "collector")]
        for command in [*commands, *getattr(self, "waiters", [])]:
            if command:
                command.stop()
        self._fleet.end()


class Seed(Subject):
    """Workers of the old design, one part each at a time."""

    name = "seed"
    patience_s = 10.0

    def __init__(self, site: Site, folder: Path, limit: int) -> None:
        super().__init__(site, folder, limit)
        self._is_cluster = isinstance(site, Cluster)
        self._port = site.proxies[0].port
        self._count = 0
        self._workers: list[subprocess.Popen[bytes]] = []
        self._told: list[float] = []
        self._is_over = False

    def recover(self) -> None:
        """Let somebody take over from workers that are silent; with many of them."""
        self.slots = 16
        threading.Thread(target=self._recover, daemon=True).start()

    def _recover(self) -> None:
        while not self._is_over:
            time.sleep(0.5)
            self._direct(lambda redis: baseline.recover(redis, self.id, LEASE_S), self.id)

    def start(self) -> None:
        self._workers = [self._worker() for _ in range(self.slots)]
        if self.parts:
            wanted = min(self.limit, self.parts)
            wait_until(lambda: len({note.pid for note in self.notes()}) >= wanted, 60)

    def _worker(self) -> "subprocess.Popen[bytes]":
        self._count += 1
        words = [f"w{self._count}", "127.0.0.1", str(self._port)]
        words += ["cluster"] if self._is_cluster else []
        return subprocess.Popen(
            [sys.executable, "-m", "tests.faults.baseline", *words],
            env=os.environ | {"STREAMQ_TEST_LOG": str(self.log)},
            cwd=HERE.parents[1],
            stderr=(self.folder / "seed.err").open("ab"),
        )

    def submit(self, payloads: list[str]) -> None:
        self.parts = len(payloads)
        redis = baseline.connect("127.0.0.1", self._port, is_cluster=self._is_cluster)
        for _ in range(WAITERS):
            threading.Thread(target=self._wait, daemon=True).start()
        baseline.submit(redis, self.id, payloads, self.limit)
        redis.close()

    def _wait(self) -> None:
        redis = baseline.connect("127.0.0.1", self._port, is_cluster=self._is_cluster)
        events = redis.pubsub()
        events.subscribe(self.id)
        while not self._is_over:
            try:
                message = events.get_message(ignore_subscribe_messages=True, timeout=1)
            except (RedisError, OSError):
                time.sleep(0.2)
                continue
            if message:
                self._told.append(0.0)  # when it ended nobody knows
                return

    def _direct(self, ask: Callable[[Any], Any], key: str) -> Any:
        try:
            with self.site.admin(key) as redis:
                return ask(redis)
        except (RedisError, OSError):
            return None

    def is_ended(self) -> bool:
        key = f"sub:{{{self.id}}}"
        return bool(self._direct(lambda redis: redis.exists(key) == 0, key))

    def kill_process(self, chance: random.Random) -> bool:
        working = {note.pid for note in self.notes()}
        found = [n for n, worker in enumerate(self._workers) if worker.pid in working]
        if not found:
            return False
        index = chance.choice(found)
        worker = self._workers[index]
        worker.kill()
        worker.wait()
        self.deaths[worker.pid] = time.monotonic()
        self._workers[index] = self._worker()
        return True

    def kill_pool(self, chance: random.Random) -> bool:
        killed = [self.kill_process(chance) for _ in range(self.slots // 2)]
        return any(killed)

    def pools(self) -> list[list[int]]:
        pids = [worker.pid for worker in self._workers]
        return [pids[: self.slots // 2], pids[self.slots // 2 :]]

    def settle(self) -> tuple[int, list[float]]:
        key = f"counter:{{{self.id}}}"
        left = int(self._direct(lambda redis: redis.get(key), key) or 0)
        done = len({note.part for note in self.notes() if note.word == "E"})
        return abs(left - (self.parts - done)), self._told

    def stop(self) -> None:
        self._is_over = True
        for worker in self._workers:
            worker.send_signal(signal.SIGCONT)
            worker.kill()
            worker.wait()
