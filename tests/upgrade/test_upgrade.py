"""A rolling upgrade: workers of an earlier package and of this one on the same requests.

``make test-upgrade`` runs it. ``STREAMQ_UPGRADE_FROM`` says which commit is the earlier
one; without it the one before this.
"""

import os
import signal
import subprocess
import sys
import tarfile
import venv
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from tests.conftest import KINDS
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
EARLIER = os.environ.get("STREAMQ_UPGRADE_FROM", "HEAD~1")
NEW = Path(sys.executable).with_name("streamq")
PARTS = 300
APP = """
import sys, time
from pathlib import Path
from streamq import App

app = App()

@app.map
def where(line: str) -> str:
    # Nobody goes on alone: both packages have a part of each request in hand at once.
    Path(f"{line.split()[0]}-{Path(sys.prefix).name}").touch()
    deadline = time.monotonic() + 60
    while len(list(Path().glob(f"{line.split()[0]}-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    return f"{line} {sys.prefix}"
"""


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of the earlier package, installed from its wheel in an environment of its own."""
    archived = subprocess.run(
        ["git", "-C", str(ROOT), "archive", EARLIER], capture_output=True, check=False
    )
    if archived.returncode:
        pytest.skip(f"no earlier package can be made: {archived.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=BytesIO(archived.stdout)) as archive:
        archive.extractall(folder / "src", filter="data")
    subprocess.run(
        [sys.executable, "-m", "build", "-q", "--wheel", "-o", str(folder), str(folder / "src")],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "venv/bin/python")]
    constraints = str(folder / "src/constraints.txt")
    subprocess.run([*pip, "install", "-q", "-c", constraints, str(wheel)], check=True)
    return folder / "venv/bin/streamq"


@pytest.fixture(params=[kind for kind in KINDS if kind != "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Fleet:
    """Commands of either package, on one queue, in one folder."""

    def __init__(self, url: str, queue: str, folder: Path) -> None:
        self._folder = folder
        self._environment = os.environ | {
            "STREAMQ_URL": url,
            "STREAMQ_QUEUE": queue,
            "STREAMQ_AUDIT_MS": "500",
        }
        self._pools: list[subprocess.Popen[bytes]] = []
        (folder / "tasks.py").write_text(APP)

    def run(self, command: Path, *words: str) -> str:
        done = subprocess.run(
            [str(command), *words],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pool(self, command: Path) -> "subprocess.Popen[bytes]":
        """A pool that is ready."""
        log = self._folder / f"pool{len(self._pools)}.log"
        with log.open("wb") as errors:
            words = [str(command), "worker", "tasks:app", "-p", "2"]
            pool = subprocess.Popen(words, cwd=self._folder, env=self._environment, stderr=errors)
        self._pools.append(pool)
        wait_until(lambda: "ready" in log.read_text() or pool.poll() is not None, 30)
        assert pool.poll() is None, log.read_text()
        return pool

    def load(self, command: Path, request: str) -> None:
        """A request with one record in each part."""
        file = self._folder / f"{request}.txt"
        file.write_text("".join(f"{request} {number}\n" for number in range(PARTS)))
        words = ("--lines", "1", "--limit", "20", "--handler", "where", "--id", request)
        self.run(command, "load", str(file), *words)

    def end(self) -> None:
        for pool in self._pools:
            pool.kill()
            pool.wait()


@pytest.fixture
def fleet(url: str, queue: str, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(url, queue, tmp_path)
    yield fleet
    fleet.end()


def test_both_packages_work_on_requests_of_both(old: Path, fleet: Fleet, request_id: str) -> None:
    of_old, of_new = f"{request_id}o", f"{request_id}n"
    earlier = fleet.pool(old)
    fleet.load(old, of_old)
    fleet.pool(NEW)
    fleet.load(NEW, of_new)
    both: Counter[str] = Counter()
    for reader, request in ((NEW, of_old), (old, of_new)):
        fleet.run(reader, "wait", request, "--timeout", "90s")
        lines = [line.split() for line in fleet.run(reader, "results", request).splitlines()]

        assert [(name, int(number)) for name, number, _ in lines] == [
            (request, number) for number in range(PARTS)
        ]
        ran = Counter(where for _, _, where in lines)
        print(f"{request}: {dict(ran)}")
        both += ran
    # Who runs how much of which request is chance; that both run some is not.
    assert both.keys() == {str(old.parents[1]), sys.prefix}

    # The earlier pool is stopped, as an upgrade does, and the newer goes on alone.
    earlier.send_signal(signal.SIGTERM)
    assert earlier.wait(60) == 0


@pytest.mark.parametrize("kind", KINDS[:1])
def test_what_the_earlier_left_is_done_by_this(old: Path, fleet: Fleet, request_id: str) -> None:
    """The last pool of the earlier package ends politely amid a request that it loaded."""
    earlier = fleet.pool(old)
    fleet.load(old, request_id)
    newer = fleet.pool(NEW)
    wait_until(lambda: '"done":0' not in fleet.run(NEW, "status", request_id, "--json"), 60)
    earlier.send_signal(signal.SIGTERM)

    fleet.run(NEW, "wait", request_id, "--timeout", "90s")

    assert earlier.wait(60) == 0
    assert newer.poll() is None
    assert len(fleet.run(NEW, "results", request_id).splitlines()) == PARTS
