"""The faults, one function each. All of them go on while the request runs, but not for ever."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from redis.exceptions import RedisError

from streamq import Client
from streamq.protocol.keys import QueueKeys, RequestKeys
from tests.faults.sites import Cluster, Single, Site
from tests.faults.subjects import GRACE_S, LEASE_S, Command, Streamq, Subject
from tests.support.waiting import wait_until

#: Faults are injected for so long at most; then it must come to its end.
WINDOW_S = 8.0
#: Longer than a lease stands, and the grace after it.
STALL_S = LEASE_S + GRACE_S + 1.0
#: All parts together take so long at best. Each takes between half and one and a half of its share.
WORK_S = 5.0
NAP_MS = 5_000
#: A slot whose process dies may have run so many parts that it had not told of: a batch.
BATCH = 13
#: How long a server that died is away, in turn. Drivers repeat a call for some 4 s by themselves.
AWAY_S = (0.5, 5.0)


class Run:
    """One scenario on its way."""

    def __init__(self, site: Site, subject: Subject, folder: Path, seed: int) -> None:
        self.site = site
        self.subject = subject
        self.folder = folder
        self.chance = random.Random(seed)
        self.faults = 0
        #: How many slots were stalled beyond their lease at once.
        self.stalled = 0
        self.began = 0.0

    def goes_on(self, pause_s: float) -> bool:
        """After a pause: whether there is still something to disturb."""
        if not self.began:
            self.began = time.monotonic()
        time.sleep(pause_s)
        return time.monotonic() - self.began < WINDOW_S and not self.subject.is_ended()

    @property
    def single(self) -> Single:
        """The site, if it is one server."""
        assert isinstance(self.site, Single)
        return self.site

    @property
    def cluster(self) -> Cluster:
        """The site, if it is a cluster."""
        assert isinstance(self.site, Cluster)
        return self.site

    def places(self) -> tuple[str, str]:
        """A key of the queue and one of the request, as the subject has them."""
        if isinstance(self.subject, Streamq):
            return QueueKeys(self.subject.queue).open, RequestKeys(self.subject.id).meta
        return "{req}:50", f"sub:{{{self.subject.id}}}"


class Scenario(NamedTuple):
    """A fault, and what is allowed to follow from it."""

    name: str
    says: str
    inject: Callable[[Run], None]
    #: How many parts may run again, by the number of faults.
    again: Callable[[int], float] = lambda _: 0
    sites: tuple[str, ...] = ("single",)
    fsync: str = ""
    has_baseline: bool = True
    #: Whether it begins while parts are still being loaded.
    is_early: bool = False
    #: Half of the slots, so that there is somebody to break it.
    limit: int = 4
    level: int = 50
    #: Whether the server has a clock of its own, that jumps.
    own_clock: bool = False
    #: Whether the old design gets the recovery that its text proposes: else nobody takes over.
    old_recovers: bool = False
    #: A share of the usual number of parts, and how many of them kill their process.
    share: float = 1.0
    deadly: int = 0
    #: Whether every result reaches the server, and every answer its door: then they can be counted.
    is_seen: bool = False
    #: Crashes that may be charged beyond those of who died, by the number of faults: where a server
    #: has to believe that somebody is dead.
    charges: Callable[[int], float] = lambda _: 0
    #: Instead so many parts that take long.
    naps: int = 0

    def payloads(self, chance: random.Random, usual: int) -> list[str]:
        """What its parts are told: how many milliseconds to take, or to die."""
        if self.naps:
            return [f"{NAP_MS}"] * self.naps
        each_ms = WORK_S * 1e3 * self.limit / usual
        count = round(usual * self.share)
        found = [f"{each_ms * (0.5 + chance.random()):.2f}" for _ in range(count)]
        for number in chance.sample(range(count), self.deadly):
            found[number] = "die"
        return found


def nothing(run: Run) -> None:
    while run.goes_on(0.2):
        pass


def kill_process(run: Run) -> None:
    while run.goes_on(0.2):
        run.faults += run.subject.kill_process(run.chance)


def kill_pool(run: Run) -> None:
    while run.goes_on(1.0):
        run.faults += run.subject.kill_pool(run.chance)


def stall(run: Run) -> None:
    """A whole pool sleeps for so long that it is taken for dead."""
    while run.goes_on(0.5):
        pids = run.chance.choice(run.subject.pools())
        _signal(pids, signal.SIGSTOP)
        time.sleep(STALL_S)
        _signal(pids, signal.SIGCONT)
        run.faults += 1
        run.stalled = run.subject.slots // 2


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_client(run: Run) -> None:
    while run.goes_on(0.2):
        key = run.chance.choice(run.places())
        with suppress(RedisError, OSError), run.site.admin(key) as redis:
            own = redis.client_id()
            kinds = ("normal", "pubsub")
            ids = [c["id"] for kind in kinds for c in redis.client_list(_type=kind)]
            others = [each for each in ids if int(each) != own]
            run.faults += bool(redis.client_kill_filter(_id=run.chance.choice(others)))


def lose_replies(run: Run) -> None:
    for proxy in run.site.proxies:
        proxy.lose = 0.01
    while run.goes_on(0.2):
        pass
    run.site.calm()
    run.faults = sum(proxy.lost for proxy in run.site.proxies)


def reset(run: Run) -> None:
    while run.goes_on(0.5):
        for proxy in run.site.proxies:
            proxy.reset()
        run.faults += 1


def black_hole(run: Run) -> None:
    """For a second nothing arrives; connections of that time stay dead and say nothing."""
    while run.goes_on(2.0):
        proxy = run.site.proxies[0]
        if isinstance(run.site, Cluster):
            proxy = run.site.door(run.site.owner(run.chance.choice(run.places())))
        proxy.open_hole()
        time.sleep(1.0)
        proxy.close_hole()
        run.faults += 1


def delay(run: Run) -> None:
    while run.goes_on(0.5):
        for proxy in run.site.proxies:
            proxy.delay_s = run.chance.choice((0.05, 0.2, 0.4))
        time.sleep(1.0)
        run.site.calm()
        run.faults += 1


def fill_memory(run: Run) -> None:
    """From the first moment, so that it meets the loader too."""
    pause_s = 0.0
    while run.goes_on(pause_s):
        pause_s = 1.0
        for key in reversed(run.places()):
            with run.site.admin(key) as redis:
                redis.config_set("maxmemory", 1)
                time.sleep(1.5)
                redis.config_set("maxmemory", 0)
            run.faults += 1


def kill_server(run: Run) -> None:
    while run.goes_on(1.5):
        run.single.kill()
        time.sleep(AWAY_S[run.faults % 2])
        run.single.start_again()
        run.faults += 1


def lose_power(run: Run) -> None:
    while run.goes_on(1.0):
        moment = run.folder / f"disk{run.faults}"
        run.single.saved_at(moment)
        time.sleep(1.0)
        run.single.lose_power(moment)
        run.faults += 1
        run.stalled = run.subject.slots


def fail_over(run: Run) -> None:
    if run.goes_on(1.0):
        run.single.fail_over(behind_s=1.0, away_s=AWAY_S[1])
        run.faults += 1
        run.stalled = run.subject.slots


def fill_disk(run: Run) -> None:
    filler = run.folder / "disk" / "filler"
    while run.goes_on(1.0):
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        time.sleep(2.0)
        filler.unlink()
        run.faults += 1
        if not run.goes_on(1.5):
            break


def kill_loader(run: Run) -> None:
    assert isinstance(run.subject, Streamq)
    while run.goes_on(run.chance.random() * 0.8) and not run.subject.loader.is_done:
        run.faults += run.subject.loader.kill()


def kill_collector(run: Run) -> None:
    assert isinstance(run.subject, Streamq)
    while run.goes_on(run.chance.random() * 1.5):
        run.faults += run.subject.collector.kill()


def expire_all(run: Run) -> None:
    """Every lease is over at once; three janitors look on."""
    leases, due = RequestKeys(run.subject.id).leases, QueueKeys(run.subject.queue).due
    run.stalled = run.subject.slots
    with _janitors(run, 3):
        while run.goes_on(1.0):
            with run.site.admin(leases) as redis:
                for holder in redis.zrange(leases, 0, -1):
                    redis.zadd(leases, {holder: 1}, xx=True)
            with run.site.admin(due) as redis:
                redis.zadd(due, {run.subject.id: 1})
            run.faults += 1


def jump(run: Run) -> None:
    """The server's clock jumps an hour ahead, and back; three janitors look on."""
    run.stalled = run.subject.slots
    with _janitors(run, 3):
        for hours in (1, 0):
            if run.goes_on(1.5):
                run.single.set_clock(hours * 3600.0)
                run.faults += 1


@contextmanager
def _janitors(run: Run, count: int) -> Iterator[None]:
    assert isinstance(run.subject, Streamq)
    words = ["janitor", "--queue", run.subject.queue]
    env = {"STREAMQ_URL": run.site.url, "STREAMQ_AUDIT_MS": "500"}
    janitors = [Command(words, env, run.folder / f"janitor{n}.log", {0}) for n in range(count)]
    try:
        yield
    finally:
        for janitor in janitors:
            janitor.stop()


def crowd(run: Run) -> None:
    """A steady stream of level 0: first it could fill every slot, then half of them."""
    for limit in (run.subject.slots, run.subject.slots // 2):
        end = time.monotonic() + WINDOW_S / 2
        while time.monotonic() < end and run.goes_on(0.0):
            _be_better(run, limit)


def _be_better(run: Run, limit: int) -> None:
    """A request of level 0, nearly to its end."""
    parts, queue = [b"20"] * 8 * limit, run.subject.queue
    with Client(run.site.url) as client:
        request = client.submit(parts, handler="work", queue=queue, limit=limit, level=0)
        run.faults += 1
        wait_until(lambda: request.status().parts.waiting < 2 * limit, 60)


def fail_over_each(run: Run) -> None:
    for how in ("", "FORCE", "TAKEOVER"):
        for key in run.places():
            if run.goes_on(0.5):
                run.cluster.fail_over(run.cluster.owner(key), how)
                run.faults += 1


def kill_primaries(run: Run) -> None:
    for primary in run.cluster.primaries():
        if not run.subject.is_ended():
            run.goes_on(0.5)
            run.cluster.kill(primary)
            run.faults += 1
            run.stalled = run.subject.slots


def kill_primary_ahead(run: Run) -> None:
    """The request's primary, then the queue's, dies when its replica has missed a second."""
    for key in reversed(run.places()):
        run.goes_on(0.5)
        primary = run.cluster.owner(key)
        run.cluster.door(primary).cut_replicas()
        time.sleep(1.0)
        run.cluster.kill(primary, is_behind=True)
        run.cluster.door(primary).calm()
        run.faults += 1
        run.stalled = run.subject.slots


def move_slots(run: Run) -> None:
    while run.goes_on(0.5):
        for key in run.places():
            with run.cluster.moving(key):
                time.sleep(1.5)
            run.faults += 1


ANYWHERE = ("single", "cluster")
CLUSTER = ("cluster",)
SCENARIOS = [
    Scenario("none", "nothing at all", nothing, sites=ANYWHERE, is_seen=True),
    Scenario(
        "kill-process",
        "kill -9 of a process every 200 ms",
        kill_process,
        lambda n: n * 2 * BATCH,
        sites=ANYWHERE,
    ),
    Scenario(
        "kill-pool",
        "kill -9 of a pool of half the slots every second",
        kill_pool,
        lambda n: n * 4 * BATCH,
    ),
    Scenario(
        "stall",
        f"a pool stopped for {STALL_S:g} s, taken for dead after {LEASE_S + GRACE_S:g} s",
        stall,
        lambda n: n * 4 * BATCH,
        is_seen=True,
        old_recovers=True,
        charges=lambda n: n * 4,
    ),
    Scenario("client-kill", "CLIENT KILL of a client every 200 ms", kill_client, sites=ANYWHERE),
    Scenario(
        "lost-replies",
        "1 % of replies lost after execution",
        lose_replies,
        sites=ANYWHERE,
        is_seen=True,
    ),
    Scenario("reset", "every connection reset every 500 ms", reset, sites=ANYWHERE),
    Scenario(
        "black-hole",
        "1 s in 3 nothing arrives, and its connections stay dead",
        black_hole,
        lambda n: n * 8 * BATCH,
        sites=ANYWHERE,
    ),
    Scenario("delay", "everything 50 to 400 ms late, 1 s in 1.5", delay, is_seen=True),
    Scenario(
        "server-kill",
        "kill -9 of the server, away 0.5 s and 5 s in turn, AOF synced every second",
        kill_server,
        lambda n: n * 8 * BATCH,
        fsync="everysec",
    ),
    Scenario(
        "server-kill-always",
        "the same, AOF synced always",
        kill_server,
        lambda n: n * 8 * BATCH,
        fsync="always",
    ),
    Scenario(
        "power-loss",
        "the server falls back by 1 s, every 2 s",
        lose_power,
        lambda n: n * 2_000,
        fsync="everysec",
    ),
    Scenario(
        "failover-tail",
        "after 5 s a replica takes over that misses the last second",
        fail_over,
        lambda n: n * 2_000,
    ),
    Scenario(
        "out-of-memory",
        "maxmemory reached for 1.5 s at a time",
        fill_memory,
        sites=ANYWHERE,
        is_early=True,
        is_seen=True,
    ),
    Scenario(
        "disk-full",
        "the disk full for 2 s at a time, AOF every second",
        fill_disk,
        again=lambda n: n * 8 * BATCH,
        fsync="everysec",
    ),
    Scenario(
        "loader-kill",
        "kill -9 of the loader, again and again",
        kill_loader,
        has_baseline=False,
        is_early=True,
        is_seen=True,
    ),
    Scenario(
        "collector-kill",
        "kill -9 of the collector, again and again",
        kill_collector,
        has_baseline=False,
        is_seen=True,
    ),
    Scenario(
        "leases-over",
        "every lease over at once, every second; 3 janitors more",
        expire_all,
        lambda n: n * 8 * BATCH,
        has_baseline=False,
        is_seen=True,
        charges=lambda n: n * 8,
    ),
    Scenario(
        "clock-jump",
        "the server's clock jumps an hour ahead, and back; 3 janitors more",
        jump,
        lambda n: n * 8 * BATCH,
        has_baseline=False,
        is_seen=True,
        own_clock=True,
        charges=lambda n: n * 8,
    ),
    Scenario(
        "crowd",
        "level 99 beside a steady stream of level 0",
        crowd,
        has_baseline=False,
        level=99,
    ),
    Scenario(
        "poison",
        "10 parts that kill their process each time",
        nothing,
        lambda _: 10 * 3 * 2 * BATCH,
        has_baseline=False,
        share=0.2,
        deadly=10,
    ),
    Scenario(
        "spin",
        "4 parts of 5 s, a limit of 50: who is idle",
        nothing,
        limit=50,
        naps=4,
        is_seen=True,
    ),
    Scenario(
        "cluster-failover",
        "CLUSTER FAILOVER, FORCE, TAKEOVER, of queue and request",
        fail_over_each,
        lambda n: n * 2_000,
        sites=CLUSTER,
    ),
    Scenario(
        "primary-kill",
        "kill -9 of each primary in turn",
        kill_primaries,
        lambda n: n * 2_000,
        sites=CLUSTER,
    ),
    Scenario(
        "primary-kill-tail",
        "the same, of queue and request, with 1 s not replicated",
        kill_primary_ahead,
        lambda n: n * 2_000,
        sites=CLUSTER,
    ),
    Scenario(
        "slot-move",
        "slots of queue and request moved, half done for 1.5 s",
        move_slots,
        sites=CLUSTER,
    ),
]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of few MB. Only who may mount one can have it."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
