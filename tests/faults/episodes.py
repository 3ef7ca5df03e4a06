"""Stories of several requests, where a scenario has one: what is done, and what must come of it.

Each makes its requests through ``Client`` and the commands. After each: nobody is charged a crash
who did not crash (A11), and every line of output is accounted for (A12).
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from streamq import Client
from streamq.protocol.keys import QueueKeys
from streamq.queue.request import Request
from tests.faults import flows
from tests.faults.kept import IN_A_PART, KILLS, frozen, records
from tests.faults.ledger import Ledger
from tests.faults.sites import Cluster, Single, Site
from tests.faults.subjects import HERE, LEASE_S, Command, complaints
from tests.faults.verdict import Figures, missing, repeated
from tests.support.fleet import Fleet, Note
from tests.support.waiting import wait_until

#: Longer than a lease stands, and than a pool that comes back may need to say so.
OUTAGE_S = 8.0
#: Between two outages: a pool asks again after 2 s at most, and then it has to be heard.
PAUSE_S = 3.0
#: One part sits through all of them: 3 * (OUTAGE_S + PAUSE_S), and the starts of the server.
LONG_MS = 40_000
#: How soon a request must start that is alone in its level, beside whatever else.
SOON_S = 3.0
#: The same where everybody is idle, in the middle of all.
AT_ONCE_S = 0.5
#: Tokens in a long list: some times what a look reads of one (``READ_AT_MOST`` in mint.lua). With
#: so many open requests the next look comes after 13 s: who got no token by the first has none.
LONG_LIST = 10_400
INVITED_S = 11.0


class Stage:
    """One episode on its way: servers, pools, a client, and what was found wrong."""

    def __init__(self, site: Site, folder: Path, seed: int, url: str = "") -> None:
        self.site = site
        self.url = url or site.url
        self.folder = folder
        self.chance = random.Random(seed)
        self.queue, self.id = site.names()
        self.fleet = Fleet(self.url, self.queue, folder)
        self.client = Client(self.url)
        self.pools: list[subprocess.Popen[bytes]] = []
        self.requests: list[Request] = []
        #: How many processes died, or were killed, that ran a part.
        self.deaths = 0
        self.figures = Figures(
            scenario="", subject="streamq", server="", seed=seed, parts=0, limit=0
        )

    def pool(self, *options: str, target: str = "handlers:app", lease_s: float = LEASE_S) -> None:
        """Start a pool, and wait until it takes parts."""
        words = (*options, "--lease", f"{lease_s:g}s")
        pool = self.fleet.start(*words, target=target, cwd=HERE, audit_ms=1_000)
        self.pools.append(pool)
        wait_until(lambda: "ready" in self.fleet.errors(pool) or pool.poll() is not None, 60)

    def submit(self, payloads: list[str], **options: object) -> Request:
        """Submit a request to the queue."""
        self.figures.parts += len(payloads)
        request = self.client.submit(payloads, queue=self.queue, **options)  # type: ignore[arg-type]
        self.requests.append(request)
        return request

    def command(self, *words: str) -> bytes:
        """Run a command to its end. Returns what it printed."""
        env = os.environ | {"STREAMQ_URL": self.url, "STREAMQ_QUEUE": self.queue}
        done = subprocess.run(
            [sys.executable, "-m", "streamq.cli", *words],
            env=env,
            capture_output=True,
            cwd=self.folder,
            timeout=120,
            check=False,
        )
        # 1 is what wait and results say of a request that has failures.
        if done.returncode not in (0, 1):
            said = done.stderr.decode(errors="replace").strip()[-200:]
            self.breaks(f"A8 streamq {words[0]}: code {done.returncode}, {said}")
        return done.stdout

    def breaks(self, what: str) -> None:
        """Something is not as promised."""
        self.figures.broken.append(what)

    def begun(self, request: Request) -> int:
        """How many starts of its parts were noted."""
        return len(self.fleet.notes("S", request.id))

    def ends(self, *requests: Request, within_s: float) -> bool:
        """Wait until they have ended, all together no longer than this. Says it if they do not."""
        deadline = time.monotonic() + within_s
        late = []
        for request in requests:
            try:
                request.wait(max(0.1, deadline - time.monotonic()))
            except Exception as error:  # noqa: BLE001  the others are to be looked at
                late.append(f"{request.id}: {error}")
        if late:
            self.figures.is_ended = False
            self.breaks(
                f"A6 {len(late)} of {len(requests)} did not end in {within_s:g} s: {late[0]}"
            )
        return not late

    def accounts(self, what: str, lines: Iterable[str], expected: Iterable[str]) -> None:
        """Each expected line is there once, and nothing else (A12)."""
        wanted, found = Counter(expected), Counter(lines)
        lacking, surplus = wanted - found, found - wanted
        twice = {line: count for line, count in surplus.items() if line in wanted}
        strange = surplus.total() - sum(twice.values())
        self.figures.wrong += lacking.total() + surplus.total()
        if lacking or surplus:
            self.breaks(
                f"A12 {what}: of {wanted.total()} lines {lacking.total()} are missing, "
                f"{sum(twice.values())} too often, {strange} are not its own"
            )

    def counts(self, request: Request, done: int, failed: int = 0) -> None:
        """Done and failed are what they must be, by the request's own count (A12)."""
        status = request.status()
        found = (status.records.done, status.records.failed, status.records.total)
        if found != (done, failed, done + failed):
            self.figures.wrong += abs(done - found[0])
            self.breaks(f"A12 {request.id}: done, failed, all are {found}, not {(done, failed)}")

    def results(self, request: Request) -> list[str]:
        """What ``streamq results`` prints of it, line by line."""
        return self.command("results", request.id).decode().splitlines()

    def notes(self) -> dict[str, list[Note]]:
        """What handlers noted, by request."""
        found: dict[str, list[Note]] = {request.id: [] for request in self.requests}
        for note in self.fleet.notes():
            found.setdefault(note.request, []).append(note)
        return found

    def settle(self) -> None:
        """Look at what pools said of themselves (A8)."""
        self.figures.broken += complaints(self.fleet, self.pools, [], {}, may_die=self.deaths > 0)

    def stop(self) -> None:
        """End everything."""
        self.client.close()
        self.fleet.end()


def _unharmed(stage: Stage, requests: list[Request], allowed: float = 0) -> None:
    """All of it was done, at the first go, and nobody lost anything on the way."""
    notes = stage.notes()
    for request in requests:
        status = request.status()
        stage.counts(request, status.parts.total)
        stage.figures.lost += missing(notes[request.id], status.parts.total)
        stage.figures.again += repeated(notes[request.id])
        expected = [str(number + 1) for number in range(status.parts.total)]
        stage.accounts(request.id, stage.results(request), expected)
    if stage.figures.lost:
        stage.breaks(f"A1 {stage.figures.lost} parts never ran to their end")
    if stage.figures.again > allowed:
        stage.breaks(f"A4 {stage.figures.again} starts too many")


def outage(stage: Stage) -> None:
    """The server is away for longer than the leases stand, three times; five pools wait for it."""
    assert isinstance(stage.site, Single)
    for _ in range(5):
        stage.pool("-p", "1", "-c", "1")
    request = stage.submit([f"{LONG_MS}"] * 5, handler="work", limit=5)
    wait_until(lambda: stage.begun(request) == 5, 30)
    for _ in range(3):
        stage.site.kill()
        time.sleep(OUTAGE_S)
        stage.site.start_again()
        stage.figures.faults += 1
        time.sleep(PAUSE_S)
    stage.ends(request, within_s=LONG_MS / 1e3 + 30)
    _unharmed(stage, [request])


def hang(stage: Stage) -> None:
    """Each node of a cluster stands still in turn, with a part at work on every one of them."""
    assert isinstance(stage.site, Cluster)
    for _ in range(2):
        stage.pool("-p", "1", "-c", "3")
    requests = [
        stage.submit([f"{LONG_MS}"], handler="work", id=name) for name in stage.site.spread()
    ]
    wait_until(lambda: all(map(stage.begun, requests)), 30)
    for node in stage.site.primaries():
        with _stopped(node.pid):
            time.sleep(OUTAGE_S)
        stage.figures.faults += 1
        time.sleep(PAUSE_S)
    stage.ends(*requests, within_s=LONG_MS / 1e3 + 30)
    _unharmed(stage, requests)


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def apart(stage: Stage) -> None:
    """Of two nodes one falls back in time: it forgets requests; or that a request has ended."""
    site = stage.site
    assert isinstance(site, Cluster)
    home = site.owner(f"{{q:{stage.queue}}}")
    names = site.elsewhere(stage.queue, 3)
    payloads = ["20"] * 10
    options = {"handler": "work", "limit": 2}
    with _forgotten(stage, home):
        # Nobody works yet: what is forgotten was acknowledged, and had not begun.
        waited, sent_again = (stage.submit(payloads, id=name, **options) for name in names[:2])
    stage.pool("-p", "1", "-c", "2")
    stage.client.submit(payloads, id=sent_again.id, queue=stage.queue, **options)  # type: ignore[arg-type]
    stage.ends(waited, sent_again, within_s=60)
    ended = stage.submit(["1000"] * 4, id=names[2], **options)
    wait_until(lambda: stage.begun(ended) >= 2, 30)
    with _forgotten(stage, site.owner(f"{{r:{ended.id}}}")):
        stage.ends(ended, within_s=30)
        wait_until(lambda: ended.id in stage.client._protocol.ids(stage.queue, closed=True), 30)
    if ended.status().state.is_live:
        stage.ends(ended, within_s=60)
    _unharmed(stage, [waited, sent_again, ended], allowed=4)


@contextmanager
def _forgotten(stage: Stage, node: object) -> Iterator[None]:
    """What happens in the block on this node no replica learns; then one takes its place."""
    site = stage.site
    assert isinstance(site, Cluster)
    wait_until(lambda: site.replica_of(node), 30)  # type: ignore[arg-type]
    time.sleep(0.5)  # a replica that lags is not to lack what was before
    site.door(node).cut_replicas()  # type: ignore[arg-type]
    yield
    site.kill(node, is_behind=True)  # type: ignore[arg-type]
    site.door(node).calm()  # type: ignore[arg-type]
    stage.figures.faults += 1


def apps(stage: Stage) -> None:
    """Idle workers of another app on the same queue: who has the handler gets the requests."""
    stage.pool("-p", "1", "-c", "2")
    for _ in range(2):
        stage.pool("-p", "1", "-c", "1", target="handlers:other")
    idle = []
    for _ in range(10):
        at = time.monotonic()
        request = stage.submit(["0"], handler="work")
        stage.ends(request, within_s=20)
        idle.append(_start(stage, request) - at)
    crowd = stage.submit(["50"] * 1_000, handler="work", level=99, limit=2)
    wait_until(lambda: stage.begun(crowd) > 10, 30)
    sent = []
    for _ in range(6):
        at = time.monotonic()
        sent.append((at, stage.submit(["0"], handler="work", level=0)))
        time.sleep(0.3)
    stage.ends(*(request for _, request in sent), within_s=15)
    crowd.cancel()
    busy = [_start(stage, request) - at for at, request in sent]
    stage.figures.start_s = round(max(idle + busy), 2)
    if statistics.median(idle) > AT_ONCE_S:
        stage.breaks(f"A9 beside idle pools a request waited {statistics.median(idle):.2f} s")
    if max(busy) > SOON_S:
        slow = sum(each > SOON_S for each in busy)
        stage.breaks(f"A9 {slow} of {len(busy)} requests of level 0 waited over {SOON_S:g} s")


def _start(stage: Stage, request: Request) -> float:
    """When its first part started; what has not, starts now."""
    return min((note.time for note in stage.fleet.notes("S", request.id)), default=time.monotonic())


def redrive(stage: Stage) -> None:
    """A request fails early and is collected, then mended, run again and collected again."""
    stage.pool("-p", "1", "-c", "2")
    count = 200
    payloads = ["bad" if number % 10 == 0 else "good" for number in range(count)]
    options: dict[str, object] = {"handler": "fussy", "max_failures": 3, "limit": 2}
    written, shown = stage.submit(payloads, **options), stage.submit(payloads, **options)
    stage.ends(written, shown, within_s=60)
    out = stage.folder / "out.txt"
    stage.command("results", written.id, "-o", str(out))
    early = len(out.read_text().splitlines())
    Path(f"{stage.fleet.log}.mended").touch()
    for request in (written, shown):
        stage.command("retry", request.id)
        stage.figures.faults += 1
    stage.ends(written, shown, within_s=60)
    stage.command("results", written.id, "-o", str(out), "--follow")
    expected = [str(number + 1) for number in range(count)]
    for request in (written, shown):
        stage.counts(request, count)
    name = f"the file, which had {early} lines before the retry"
    stage.accounts(name, out.read_text().splitlines(), expected)
    stage.accounts("what is shown", stage.results(shown), expected)


def id_again(stage: Stage) -> None:
    """An id is used again while a worker still runs parts of the request that had it before."""
    # Leases stand for long, so that nobody tells the worker in between.
    stage.pool("-p", "1", "-c", "8", lease_s=60)
    options = {"handler": "slow_then_late", "limit": 4, "id": "again"}
    former = stage.submit(["old"] * 3, **options)
    wait_until(lambda: stage.begun(former) == 3, 30)
    former.cancel()
    former.purge()
    stage.figures.faults += 1
    latter = stage.submit(["new"] * 3, **options)
    stage.ends(latter, within_s=60)
    stage.counts(latter, 3)
    stage.accounts("results", stage.results(latter), [f"new {number}" for number in (1, 2, 3)])


def long_lists(stage: Stage) -> None:
    """Some requests fall due while the list of their level is long, and nobody takes from it."""
    many = [
        stage.submit(["0"] * 8, handler="work", level=51, limit=8) for _ in range(LONG_LIST // 8)
    ]
    for request in many:
        request.set(level=50)  # with as many tokens as it may have
    env = {"STREAMQ_URL": stage.site.url, "STREAMQ_AUDIT_MS": "1000"}
    words = ["janitor", "--queue", stage.queue]
    janitor = Command(words, env, stage.folder / "janitor.log", {0})
    try:
        wait_until(lambda: _are_looked_at(stage), 60)
        delayed = [stage.submit(["0"], handler="work", delay="1s") for _ in range(40)]
        began = time.monotonic()
        with suppress(AssertionError):
            wait_until(lambda: not _without_token(stage, delayed), INVITED_S)
        stage.figures.start_s = round(time.monotonic() - began, 2)
    finally:
        janitor.stop()
    stage.figures.faults = len(delayed)
    if left := _without_token(stage, delayed):
        stage.breaks(f"A9 {len(left)} of {len(delayed)} requests that are due have no token")
    for request in many:
        request.cancel()
    stage.pool("-p", "1", "-c", "2")
    stage.ends(*delayed, within_s=30)


def _are_looked_at(stage: Stage) -> bool:
    """Whether the janitor has been through: hardly anybody is due."""
    place = QueueKeys(stage.queue).due
    with stage.site.admin(place) as redis:
        seconds, _ = redis.time()
        return int(redis.zcount(place, 0, 1_000 * (seconds - 1))) < 10


def _without_token(stage: Stage, requests: list[Request]) -> list[Request]:
    """Requests of which there is nothing in any list of the queue."""
    place = QueueKeys(stage.queue).open
    with stage.site.admin(place) as redis:
        lists = [key for key in redis.scan_iter("*:tokens:*", count=1000) if redis.llen(key)]
        return [
            request
            for request in requests
            if all(redis.lpos(key, request.id) is None for key in lists)
        ]


def large_results(stage: Stage) -> None:
    """Large results are collected in no order: each is written once.

    What is forgotten on the way makes the server's table smaller, and some of it is read again.
    That is seen in about half of the requests of this size, so there are two of them.
    """
    stage.pool("-p", "2", "-c", "2", lease_s=20)
    for _ in range(2):
        sizes = [stage.chance.randint(400_000, 1_600_000) for _ in range(700)]
        request = stage.submit([str(size) for size in sizes], handler="large", limit=4)
        stage.ends(request, within_s=120)
        out = stage.folder / "out.txt"
        stage.command("results", request.id, "--unordered", "-o", str(out))
        with out.open() as file:
            found = [f"{line.partition(' ')[0]} {len(line) - 1}" for line in file]
        out.unlink()
        stage.counts(request, len(sizes))
        expected = [f"{number + 1} {size}" for number, size in enumerate(sizes)]
        stage.accounts(f"the file of {request.id}", found, expected)
        request.purge()


class Episode(NamedTuple):
    """A story, and the servers that it is about."""

    name: str
    says: str
    play: Callable[[Stage], None]
    servers: tuple[str, ...] = ("valkey", "redis")
    fsync: str = ""
    replicas: int = 1
    #: Whether so many megabytes go through it that there is neither a door in the way nor MONITOR.
    is_large: bool = False
    #: Crashes that may be charged though nobody died: by who can only believe that somebody did.
    charges: int = 0


CLUSTER = ("cluster",)
EVERYWHERE = ("valkey", "redis", "cluster")
EPISODES = [
    Episode(
        "outage",
        f"the server away for {OUTAGE_S:g} s, leases stand {LEASE_S:g} s, three times; five pools",
        outage,
        fsync="always",
    ),
    Episode(
        "apps",
        "idle pools of another app on the same queue; then a crowd at level 99, too",
        apps,
    ),
    Episode("redrive", "failed, collected, run again, collected again", redrive, ("valkey",)),
    Episode("id-again", "an id used again while parts of its former request run", id_again),
    Episode("long-lists", f"40 requests fall due in a level with {LONG_LIST:,} tokens", long_lists),
    Episode(
        "large-results",
        "two requests of 700 results of 0.4 to 1.6 MB, collected in no order",
        large_results,
        is_large=True,
    ),
    Episode(
        "records",
        f"{KILLS} kills of a process that runs parts of {IN_A_PART} records, 2 records deadly",
        records,
    ),
    Episode(
        "frozen",
        "a worker freezes, others fail some of its records, it wakes when these are retried",
        frozen,
        charges=1,
    ),
    Episode(
        "flow-kills",
        "a process killed four times a second beside flows with joins, a reduce and a tree",
        flows.kills,
        EVERYWHERE,
    ),
    Episode(
        "flow-replies", "the same flows, one reply in fifty lost", flows.lost_replies, EVERYWHERE
    ),
    Episode(
        "flow-failover",
        "the same flows, a replica takes over that has missed a second",
        flows.fail_over,
        EVERYWHERE,
        charges=4,
    ),
    Episode(
        "flow-memory",
        "the same flows, out of memory for 1.5 s at a time, also in a spread",
        flows.full_memory,
        EVERYWHERE,
    ),
    Episode(
        "hang",
        f"each node of a cluster stopped for {OUTAGE_S:g} s in turn, parts at work on all",
        hang,
        CLUSTER,
        replicas=0,
    ),
    Episode(
        "apart",
        "a node that misses a moment takes over: the queue's, then the request's",
        apart,
        CLUSTER,
    ),
]


def play(episode: Episode, server: str, seed: int, folder: Path) -> Figures:
    """Put streamq through an episode, and say what came of it."""
    site = _site(episode, server, folder, seed)
    try:
        ledger = None if episode.is_large else Ledger(site.ports())
        if episode.is_large and isinstance(site, Single):
            stage = Stage(site, folder, seed, url=site.server.url)
        else:
            stage = Stage(site, folder, seed)
        figures = stage.figures
        figures.scenario, figures.server, figures.is_ended = episode.name, server, True
        began = time.monotonic()
        try:
            episode.play(stage)
            stage.settle()
        finally:
            stage.stop()
            if ledger:
                figures.charged = ledger.charges
                ledger.close()
        figures.took_s = round(time.monotonic() - began, 1)
        if figures.charged > episode.charges + stage.deaths:
            figures.broken.append(
                f"A11 {figures.charged} crashes were charged, and {stage.deaths} died"
            )
    finally:
        site.stop()
    return figures


def _site(episode: Episode, server: str, folder: Path, seed: int) -> Site:
    if server == "cluster":
        # Without replicas a node that hangs is to be waited for, not voted out.
        timeout_ms = 2_000 if episode.replicas else 60_000
        return Cluster(seed, episode.replicas, timeout_ms)
    return Single(server, folder, seed, episode.fsync)
