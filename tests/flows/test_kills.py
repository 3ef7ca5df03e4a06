"""Workers are killed at each point of a join: every join is made, and made once.

The worker kills itself (``support/apps/dying.py``): before and after each call that it makes for
one of the three stages, and in each handler.
"""

import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from streamq import App, Client, Request
from tests.conftest import FIRST_KIND
from tests.support.fleet import Fleet

pytestmark = [FIRST_KIND]
POINTS = {
    *(
        f"{when} {call} of a {stage}"
        for when in ("before", "after")
        for stage in ("spread", "map", "join")
        for call in ("claim", "pass_on")
    ),
    *(f"in the handler of a {stage}" for stage in ("spread", "map", "join")),
    "before inbox_of_group of a join",
    "after inbox_of_group of a join",
    "before push of a spread",
    "before push of a map",
}
INPUTS = 30
JOINED = App().flow("joined").spread("split").map("work").join("merge")


def children(number: int) -> int:
    """How many children an input has: some have none."""
    return number * 7 % 5


@pytest.fixture
def deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with a file for each death."""
    folder = tmp_path / "deaths"
    folder.mkdir()
    monkeypatch.setenv("STREAMQ_TEST_POINTS", str(folder))
    return folder


def submit(client: Client, queue: str, count: int) -> Request:
    inputs = [[number, children(number)] for number in range(1, count + 1)]
    return client.submit(inputs, flow=JOINED, queue=queue, poison=100_000, retries=100_000)


def assert_every_join_once(request: Request, inputs: int) -> None:
    status = request.status()
    stages = [
        (each.parts.total, each.parts.done, each.parts.failed) for each in status.stages or []
    ]
    count = sum(map(children, range(1, inputs + 1)))
    assert status.state == "done"
    assert stages == [(inputs, inputs, 0), (count, count, 0), (inputs, inputs, 0)]
    assert list(request.results(5)) == [
        (number, [number, *(number * 1_000 + child for child in range(children(number)))])
        for number in range(1, inputs + 1)
    ]


def points_of(deaths: Path) -> Counter[str]:
    return Counter(each.name.rpartition(".")[0] for each in deaths.iterdir())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stages", "kills"),
    [
        ("join", 1),
        pytest.param("spread,map,join", 2, marks=pytest.mark.long),
        pytest.param("join", 25, marks=pytest.mark.long),
    ],
)
def test_process_is_killed_at_each_point(
    client: Client,
    fleet: Fleet,
    queue: str,
    deaths: Path,
    stages: str,
    kills: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STREAMQ_TEST_STAGES", stages)
    monkeypatch.setenv("STREAMQ_TEST_KILLS", str(kills))
    inputs = INPUTS + 5 * kills
    request = submit(client, queue, inputs)
    fleet.start("-p", "2", "-c", "1", target="dying:app")

    request.wait(800)

    assert_every_join_once(request, inputs)
    points = {point for point in POINTS if point.rpartition(" ")[2] in stages}
    found = points_of(deaths)
    print({point: found[point] for point in sorted(points)})
    # Joins are handed over in batches, so a worker comes to that more seldom.
    assert min(found[point] for point in points) >= (kills if kills < 10 else kills // 4)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_whole_worker_is_killed_at_each_point(
    client: Client, fleet: Fleet, queue: str, deaths: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody gives its parts back: they are taken from it when its lease is over."""
    request = submit(client, queue, INPUTS)
    monkeypatch.setenv("STREAMQ_TEST_STAGES", "spread,map,join")
    monkeypatch.setenv("STREAMQ_TEST_KILLS", "1")
    monkeypatch.setenv("STREAMQ_TEST_WHOLE", "1")
    pools: list[subprocess.Popen[bytes]] = []
    until = time.monotonic() + 250
    while request.status().state == "open" and time.monotonic() < until:
        pools = [pool for pool in pools if pool.poll() is None]
        while len(pools) < 2:
            pools.append(fleet.start("-p", "1", "-c", "1", "--lease", "1s", target="dying:app"))
        time.sleep(0.05)

    assert_every_join_once(request, INPUTS)
    assert points_of(deaths).keys() >= POINTS
