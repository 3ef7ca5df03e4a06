"""Parts sized by time: runs without ``--lines`` and ``--bytes``, and loads that differ."""

import json
import random
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streamq import Protocol, cpus
from streamq.driver.connection import Connection
from streamq.errors import InvalidValue, RequestExists
from streamq.model import Policy, Spec, State
from streamq.protocol.replies import Terms
from streamq.records.sizes import PartSize, Step
from streamq.runs.load import Load
from streamq.runs.options import capacity_options
from tests.conftest import ONE_KIND
from tests.runs.running import Streamq

CODE = """
import asyncio, os, time
from streamq import App
app = App()
def busy(line: str) -> int:
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end:
        pass
    return os.getpid()
def same(line: bytes) -> bytes:
    return line
here = 0
async def waits(line: str) -> int:
    global here
    here += 1
    seen = here
    await asyncio.sleep(0.1)
    here -= 1
    return seen
most = end = 0
async def nine(line: str) -> int:
    # Waits until nine run at once, if they ever do, and then a little.
    global here, most, end
    here += 1
    most = max(most, here)
    end = end or time.monotonic() + 5
    while most < 9 and time.monotonic() < end:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    here -= 1
    return most
def large(line: str) -> str:
    return "x" * 1_000_000
@app.handler
def whole(part: bytes) -> int:
    return len(part.splitlines())
"""


@pytest.fixture
def run(streamq: Streamq, tmp_path: Path) -> Any:
    """Runs a function of the code above on so many lines. Returns the summary."""
    (tmp_path / "work.py").write_text(CODE)

    def run(function: str, lines: int, *words: object) -> Any:
        (tmp_path / "in.txt").write_text("".join(f"line {n}\n" for n in range(lines)))
        words = ("in.txt", "--map", f"work:{function}", "-o", "out.jsonl", "--json", *words)
        done = streamq("run", *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def values(folder: Path) -> list[int]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


@pytest.mark.commands
class TestRun:
    @pytest.mark.long
    def test_small_file_keeps_all_processes_busy(self, run: Any, tmp_path: Path) -> None:
        summary = run("busy", 400, "-p", 2)

        # A part of 25 records takes a quarter of a second, on a machine with nothing else to do.
        assert 400 / 25 <= summary["parts"]["total"] < 400
        shares = Counter(values(tmp_path))
        assert len(shares) == 2
        assert min(shares.values()) >= 50

    @pytest.mark.long
    def test_results_of_a_megabyte_all_find_room(self, run: Any, tmp_path: Path) -> None:
        # 16 of them are more than the results of a part may have.
        summary = run("large", 50, "-p", 1, "--output-format", "raw")

        assert summary["records"] == {"total": 50, "done": 50, "failed": 0}
        assert (tmp_path / "out.jsonl").stat().st_size == 50 * 1_000_001

    def test_cheap_records_make_large_parts(self, run: Any, tmp_path: Path) -> None:
        summary = run("same", 300_000, "-p", 2, "--output-format", "raw")

        assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "in.txt").read_bytes()
        # 3.7 MB are 15 parts of the largest size. There are a few smaller ones before them.
        assert summary["parts"]["total"] < 60

    def test_coroutines_that_wait_run_beside_each_other(self, run: Any, tmp_path: Path) -> None:
        summary = run("nine", 90, "-p", 1, "-c", 9)

        assert summary["parts"]["total"] == 90
        assert max(values(tmp_path)) == 9

    def test_without_p_so_many_run_at_once_in_all(self, run: Any, tmp_path: Path) -> None:
        run("waits", 60, "-c", 5)

        room = capacity_options(0, 5)
        assert max(values(tmp_path)) <= room.slots <= 5

    def test_handler_of_whole_parts_gets_as_much_as_before(self, run: Any, tmp_path: Path) -> None:
        summary = run("whole", 1_000)

        assert summary["parts"]["total"] == 1
        assert values(tmp_path) == [1_000]

    def test_rate_is_not_used_up_by_one_part(self, run: Any) -> None:
        summary = run("same", 60, "-p", 1, "--rate", "100/s")

        assert summary["parts"]["total"] > 3


class TestCapacity:
    @pytest.mark.parametrize(
        ("cpu", "given", "found"),
        [
            (4, (0, 0), (4, 1, 4)),
            (4, (3, 0), (3, 1, 3)),
            (4, (2, 30), (2, 30, 60)),
            (4, (0, 30), (4, 8, 30)),
            (4, (0, 3), (3, 1, 3)),
            (4, (0, 1), (1, 1, 1)),
            (1, (0, 30), (1, 30, 30)),
        ],
    )
    def test_is_in_all_unless_processes_are_given(
        self,
        monkeypatch: pytest.MonkeyPatch,
        cpu: int,
        given: tuple[int, int],
        found: tuple[int, int, int],
    ) -> None:
        monkeypatch.setattr(cpus, "usable_cpus", lambda: cpu)

        assert capacity_options(*given) == found

    def test_more_than_a_pool_looks_after_is_refused(self) -> None:
        with pytest.raises(InvalidValue, match="slots"):
            capacity_options(512, 10_000)


class Cutter:
    """Cuts parts of other sizes each time, and sends each by itself."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._is_turn = False

    def step(self, waiting: int, fitting: float) -> Step:
        self._is_turn = not self._is_turn
        return Step(self._chance.choice([1, 2, 7]), self._is_turn * self._chance.choice([1, 3]))


AUTOMATIC = PartSize(is_automatic=True)


def policy_of(queue: str, file: Path) -> Policy:
    spec = Spec(format="lines", files=(str(file),))
    return Policy(handler="h", queue=queue, limit=50, spec=spec)


def payloads(protocol: Protocol, request_id: str) -> list[bytes]:
    """What all parts hold, in their order."""
    found: list[bytes] = []
    while True:
        holder = f"holder{len(found)}"
        grant = protocol.claim(request_id, holder, Terms(500), ["records h 3"])
        if not grant.parts:
            return found
        found += [part.payload for part in grant.parts]


class TestLoaders:
    @ONE_KIND
    @pytest.mark.parametrize("seed", range(5))
    def test_two_at_once_that_cut_differently_lose_and_double_nothing(
        self, url: str, protocol: Protocol, queue: str, request_id: str, tmp_path: Path, seed: int
    ) -> None:
        file = tmp_path / "in.txt"
        file.write_bytes(b"".join(b"line %d\n" % n for n in range(300)))
        errors: list[BaseException] = []
        begin = threading.Barrier(2)

        def together() -> None:
            begin.wait()

        def load(own: int) -> None:
            try:
                with closing(Connection(url)) as connection:
                    mine = Protocol(connection, protocol.prefix)
                    policy = policy_of(queue, file)
                    loading = Load(mine, request_id, policy, AUTOMATIC, sizing=Cutter(own))
                    loading.run(together)
            except BaseException as error:  # noqa: BLE001  told below
                errors.append(error)

        threads = [threading.Thread(target=load, args=(2 * seed + n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        assert errors == []
        found = protocol.inspect(request_id)
        assert (found.state, found.count("records")) == (State.OPEN, 300)
        assert b"".join(payloads(protocol, request_id)) == file.read_bytes()

    @ONE_KIND
    def test_load_that_was_stopped_goes_on_with_other_sizes(
        self, protocol: Protocol, queue: str, request_id: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "in.txt"
        file.write_bytes(b"".join(b"line %d\n" % n for n in range(300)))
        policy = policy_of(queue, file)
        looks = iter(range(1_000))
        stopped = Load(
            protocol,
            request_id,
            policy,
            AUTOMATIC,
            sizing=Cutter(1),
            should_stop=lambda: next(looks) > 20,
        )
        stopped.run()
        before = protocol.inspect(request_id)
        assert 0 < before.count("records") < 300
        assert not before.is_sealed

        Load(protocol, request_id, policy, AUTOMATIC, sizing=Cutter(2)).run()

        assert protocol.inspect(request_id).count("records") == 300
        assert b"".join(payloads(protocol, request_id)) == file.read_bytes()

    @ONE_KIND
    def test_load_of_an_earlier_version_goes_on_as_it_was(
        self, protocol: Protocol, queue: str, request_id: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "in.txt"
        file.write_bytes(b"a\nb\n")
        policy = policy_of(queue, file)
        Load(protocol, request_id, policy, PartSize()).run()

        Load(protocol, request_id, policy, AUTOMATIC, sizing=Cutter(2)).run()

        assert protocol.inspect(request_id).count("records") == 2
        with pytest.raises(RequestExists, match="other options"):
            Load(protocol, request_id, policy, PartSize(records=1)).run()
