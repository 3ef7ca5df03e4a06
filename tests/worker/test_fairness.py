"""Fair and safe under load: order by level, turns within a level, limits, kills, idleness."""

import os
import random
import signal
import time
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from streamq import Client, Request
from tests.conftest import FIRST_KIND, ONE_KIND
from tests.support.fleet import Fleet, most_at_once
from tests.support.waiting import allowed_s, wait_until

#: STREAMQ_TEST_KILL_S=30 is a longer one, with 20,000 parts.
KILL_S = float(os.environ.get("STREAMQ_TEST_KILL_S", "4"))


@pytest.fixture
def submit(client: Client, queue: str) -> Any:
    """Submit to the test's own queue."""

    def submit(payloads: Any, handler: str, **options: Any) -> Request:
        return client.submit(payloads, handler=handler, queue=queue, **options)

    return submit


class TestOrder:
    @ONE_KIND
    def test_better_level_comes_first_whatever_waits(self, fleet: Fleet, submit: Any) -> None:
        levels = [90, 0, 50, 7]
        by_id = {submit([0.001] * 30, "nap", level=level, limit=1).id: level for level in levels}

        fleet.start("--burst").wait(30)

        order = [by_id[note.request] for note in fleet.notes("S")]
        assert [level for level, _ in groupby(order)] == sorted(levels)

    @ONE_KIND
    def test_requests_of_one_level_take_turns(self, fleet: Fleet, submit: Any) -> None:
        ids = [submit([0.03] * 20, "nap", limit=1).id for _ in range(3)]

        fleet.start("--burst").wait(30)

        first = [note.request for note in fleet.notes("S")][:30]
        shares = Counter(first)
        assert set(shares) == set(ids)
        assert min(shares.values()) >= 5

    @ONE_KIND
    def test_a_weight_of_4_beside_an_8_gets_a_third_of_the_turns(
        self, fleet: Fleet, submit: Any
    ) -> None:
        small = submit([0.005] * 200, "nap", limit=40, weight=4).id
        submit([0.005] * 200, "nap", limit=40)

        # With this quantum each lease is one part.
        fleet.start("--burst", "-c", "2", "--quantum", "1ms", audit_ms=60_000).wait(60)

        # The first turns bring the tokens out; at the end one of the two is done.
        turns = [note.request for note in fleet.notes("S")][30:270]
        share = turns.count(small) / len(turns)
        print("share", share)
        assert 0.28 <= share <= 0.39

    @ONE_KIND
    def test_idle_workers_of_another_app_take_no_token_of_ours(
        self, fleet: Fleet, submit: Any
    ) -> None:
        fleet.ready()
        fleet.ready("-p", "2", target="soaked:app")
        crowd = submit([0.01] * 20_000, "nap_async", level=90, limit=1)
        wait_until(lambda: fleet.notes("S"))
        begun = time.monotonic()

        for _ in range(10):
            assert submit([0.0], "nap_async", level=0).wait(20).parts.done == 1

        # A token that is eaten comes back a second later, to be eaten again.
        assert time.monotonic() - begun < allowed_s(8)
        crowd.cancel()

    @ONE_KIND
    def test_requests_of_one_level_take_turns_whatever_their_handlers(
        self, fleet: Fleet, submit: Any
    ) -> None:
        ids = [submit([0.03] * 20, "nap", limit=1).id for _ in range(2)]
        ids += [submit([0.03] * 20, "nap_async", limit=1).id]

        fleet.start("--burst").wait(60)

        shares = Counter([note.request for note in fleet.notes("S")][:30])
        assert set(shares) == set(ids)
        assert min(shares.values()) >= 5

    @ONE_KIND
    def test_level_0_starts_soon_on_a_fleet_full_of_level_90(
        self, fleet: Fleet, submit: Any
    ) -> None:
        fleet.ready("-c", "4")
        crowd = submit([0.01] * 20_000, "nap", level=90, limit=4)
        wait_until(lambda: len(fleet.notes("S", crowd.id)) > 50)

        waits = []
        for _ in range(20):
            begun = time.monotonic()
            urgent = submit([0.0], "nap", level=0)
            urgent.wait(10)
            waits.append(fleet.notes("S", urgent.id)[0].time - begun)
        crowd.cancel()

        print("waits", sorted(round(wait * 1e3) for wait in waits))
        assert sorted(waits)[len(waits) // 2] < 0.15


class TestLimit:
    @ONE_KIND
    def test_limits_of_three_requests_on_64_slots(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("-p", "4", "-c", "8")
        fleet.ready("-p", "4", "-c", "8")

        sizes = {1: 10, 3: 30, 17: 170}
        requests = {n: submit([0.1] * size, "nap", limit=n) for n, size in sizes.items()}

        for limit, request in requests.items():
            request.wait(60)
            assert most_at_once(fleet.notes(request=request.id)) == limit


@FIRST_KIND
class TestKills:
    def test_parts_are_done_once_whoever_is_killed(
        self, fleet: Fleet, submit: Any, kind: str
    ) -> None:
        """kill -9 of processes and of parents, every 200 ms."""
        parts = int(KILL_S / 30 * 20_000)
        request = submit([0.002] * parts, "nap", limit=8)
        pools = [fleet.start("-p", "2", "-c", "2", "--lease", "1s") for _ in range(2)]
        chance = random.Random(kind)
        kills = 0
        end = time.monotonic() + KILL_S
        while time.monotonic() < end and request.status().state.is_live:
            index = chance.randrange(len(pools))
            pool = pools[index]
            children = fleet.children(pool) if pool.poll() is None else []
            if pool.poll() is not None or not children or chance.random() < 0.2:
                pool.kill()
                pool.wait()
                pools[index] = fleet.start("-p", "2", "-c", "2", "--lease", "1s")
            else:
                os.kill(chance.choice(children), signal.SIGKILL)
            kills += 1
            time.sleep(0.2)

        status = request.wait(60)

        assert kills > 0
        assert (status.parts.done, status.parts.failed) == (parts, 0)
        assert sum(1 for _ in request.raw_results()) == parts
        finished = Counter(note.part for note in fleet.notes("E"))
        assert set(finished) == set(range(1, parts + 1))
        print(f"{kind}: {kills} kills, {parts} parts, {finished.total() - parts} run twice")


class TestIdle:
    @ONE_KIND
    def test_idle_pool_costs_next_to_nothing(self, fleet: Fleet) -> None:
        pool = fleet.ready("-p", "2", "-c", "8", audit_ms=5_000)
        pids = [pool.pid, *fleet.children(pool)]
        before = sum(_wakings(pid) for pid in pids)

        time.sleep(4)

        each_s = (sum(_wakings(pid) for pid in pids) - before) / 4
        print(f"idle: {each_s:.0f} wakings a second")
        assert each_s < 40, "it was 15, which is less than 1 % of a core"


class TestUpkeep:
    @ONE_KIND
    def test_workers_tells_what_runs(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready("-p", "1", "-c", "3")
        request = submit([5.0], "nap")
        wait_until(lambda: fleet.notes("S"))

        (worker,) = wait_until(lambda: [w for w in fleet.command("workers") if w["running"]], 10)

        assert (worker["pid"], worker["slots"], worker["busy"]) == (pool.pid, 3, 1)
        assert "nap" in worker["handlers"]
        (running,) = worker["running"]
        assert (running["request"], running["part"], running["handler"]) == (request.id, 1, "nap")
        assert running["progress"] == 25

    @ONE_KIND
    @pytest.mark.long
    def test_worker_that_leaves_is_not_shown(self, fleet: Fleet) -> None:
        pool = fleet.ready()
        wait_until(lambda: fleet.command("workers"))

        pool.send_signal(signal.SIGTERM)
        pool.wait(10)

        assert fleet.command("workers") == []

    @ONE_KIND
    @pytest.mark.long
    def test_code_that_changes_is_reloaded(self, fleet: Fleet, submit: Any, tmp_path: Path) -> None:
        code = "from streamq import App\napp = App()\n@app.map\ndef f(x: int):\n    return x + {}\n"
        file = tmp_path / "changing.py"
        file.write_text(code.format(1))
        pool = fleet.start("--reload", target="changing:app", cwd=tmp_path)
        assert [value for _, value in submit([1], "f").results(timeout=20)] == [2]

        file.write_text(code.format(100))

        wait_until(lambda: "changed" in fleet.errors(pool), 10)
        wait_until(
            lambda: [value for _, value in submit([1], "f").results(timeout=20)] == [101], 20
        )

    @ONE_KIND
    @pytest.mark.long
    def test_process_that_grows_is_replaced(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready("--max-memory", "150MiB")
        (before,) = fleet.children(pool)

        submit([200], "grow").wait(20)

        wait_until(lambda: fleet.children(pool) and before not in fleet.children(pool), 15)
        assert submit([0.0], "nap").wait(10).parts.done == 1

    @ONE_KIND
    def test_usr1_takes_nothing_more_and_hup_replaces_processes(
        self, fleet: Fleet, submit: Any
    ) -> None:
        pool = fleet.ready()
        (before,) = fleet.children(pool)

        pool.send_signal(signal.SIGHUP)
        wait_until(lambda: fleet.children(pool) and before not in fleet.children(pool), 15)
        assert submit([0.0], "nap").wait(10).parts.done == 1

        pool.send_signal(signal.SIGUSR1)
        wait_until(lambda: "quiet" in fleet.errors(pool))
        wait_until(lambda: _is_quiet(submit), 10)


def _is_quiet(submit: Any) -> bool:
    """Whether a request is left alone for longer than a take blocks."""
    request = submit([0.0], "nap")
    time.sleep(1.5)
    is_left = bool(request.status().parts.waiting == 1)
    if is_left:
        request.cancel()
    return is_left


def _wakings(pid: int) -> int:
    """How often its threads went to sleep, as they do after each thing they did."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_"))
