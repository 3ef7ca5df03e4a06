"""Stories of flows: joins and reduces while workers die, replies are lost and servers fail over."""

import os
import signal
import time
import typing
from collections.abc import Callable
from contextlib import ExitStack, suppress

from redis.exceptions import RedisError

from tests.faults import flow_handlers
from tests.faults.sites import Cluster, Single
from tests.support.waiting import wait_until

if typing.TYPE_CHECKING:
    from streamq.queue.request import Request
    from tests.faults.episodes import Stage

#: Inputs of each flow, and the most children that one has.
INPUTS = 250
MOST_CHILDREN = 12
#: For so long faults happen, one after another.
FAULTS_S = 12.0
KILL_EVERY_S = 0.25


def _children(number: int) -> int:
    """How many children an input has: some have none."""
    return number * 7 % (MOST_CHILDREN + 1)


def _play(stage: "Stage", fault: Callable[["Stage", float], None]) -> None:
    """Run three flows beside a fault, and account for every item, join and sum (A12)."""
    for _ in range(2):
        stage.pool("-p", "2", "-c", "2", target="flow_handlers:app")
    inputs = [[number, _children(number)] for number in range(1, INPUTS + 1)]
    flows = (flow_handlers.joined, flow_handlers.summed, flow_handlers.totalled)
    joined, *sums = [
        stage.submit(inputs, flow=flow, poison=1_000, retries=1_000)  # type: ignore[arg-type]
        for flow in flows
    ]
    fault(stage, time.monotonic() + FAULTS_S)
    if not stage.ends(joined, *sums, within_s=90):
        return
    _account(stage, joined)
    for request in sums:
        found = [value for _, value in request.results(20)]
        if found != [sum(range(1, INPUTS + 1))]:
            stage.figures.wrong += 1
            stage.breaks(f"A12 the sum of {request.id} is {found}, state {request.status().state}")


def _account(stage: "Stage", joined: "Request") -> None:
    expected = {
        number: [number, count, sum(number * 1_000 + child for child in range(count))]
        for number in range(1, INPUTS + 1)
        for count in (_children(number),)
    }
    found = list(joined.results(20))
    lines = [f"{part} {value}" for part, value in found]
    stage.accounts("joins", lines, [f"{part} {value}" for part, value in expected.items()])
    status = joined.status()
    told = [(each.parts.total, each.parts.done, each.parts.failed) for each in status.stages or []]
    children = sum(map(_children, range(1, INPUTS + 1)))
    wanted = [(n, n, 0) for n in (INPUTS, children, INPUTS)]
    if told != wanted:
        stage.breaks(f"A12 the stages of {joined.id} count {told}, not {wanted}")


def kills(stage: "Stage") -> None:
    """A process of a pool is killed four times a second, wherever it is in a join."""

    def kill(stage: "Stage", until: float) -> None:
        while time.monotonic() < until:
            pids = [pid for pool in stage.pools for pid in stage.fleet.children(pool)]
            if pids:
                with suppress(ProcessLookupError):
                    os.kill(stage.chance.choice(pids), signal.SIGKILL)
                stage.figures.faults += 1
            time.sleep(KILL_EVERY_S)

    _play(stage, kill)
    stage.deaths = stage.figures.faults


def lost_replies(stage: "Stage") -> None:
    """One reply in fifty is lost, and its connection with it."""

    def lose(stage: "Stage", until: float) -> None:
        for proxy in stage.site.proxies:
            proxy.lose = 0.02
        while time.monotonic() < until:
            time.sleep(0.2)
        stage.site.calm()
        stage.figures.faults = sum(proxy.lost for proxy in stage.site.proxies)

    _play(stage, lose)


def fail_over(stage: "Stage") -> None:
    """A replica takes over that has missed the last second: on a cluster that of the joins."""

    def fail(stage: "Stage", until: float) -> None:
        del until
        time.sleep(1.0)
        site = stage.site
        if isinstance(site, Cluster):
            owner = site.owner(f"{{r:{stage.requests[0].id}}}")
            wait_until(lambda: site.replica_of(owner), 30)
            site.door(owner).cut_replicas()
            time.sleep(1.0)
            site.kill(owner, is_behind=True)
            site.door(owner).calm()
        else:
            assert isinstance(site, Single)
            site.fail_over(behind_s=1.0, away_s=0.5)
        stage.figures.faults += 1

    _play(stage, fail)


def full_memory(stage: "Stage") -> None:
    """Servers are out of memory for a second and a half at a time, in the middle of spreads."""

    def fill(stage: "Stage", until: float) -> None:
        keys = [f"{{r:{request.id}}}" for request in stage.requests]
        with ExitStack() as opened:
            servers = [opened.enter_context(stage.site.admin(key)) for key in keys]
            while time.monotonic() < until:
                time.sleep(0.5)
                for most, pause_s in ((1, 1.5), (0, 0)):
                    with suppress(RedisError):
                        for redis in servers:
                            redis.config_set("maxmemory", most)
                    time.sleep(pause_s)
                stage.figures.faults += 1

    _play(stage, fill)
