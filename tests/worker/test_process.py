"""One process of a pool, and what it does when a call or a part goes wrong."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamq import Abandon, App, Client
from streamq.errors import ServerUnreachable
from streamq.protocol.keys import RequestKeys
from streamq.protocol.replies import Grant, Token
from streamq.queue.held_lease import HeldLease
from streamq.queue.pace import MOST_PARTS, Pace
from streamq.queue.taker import Claimed, Invitation, KnownRequest
from streamq.worker.batches import BatchLease
from streamq.worker.channel import Channel
from streamq.worker.process import WorkerProcess
from streamq.worker.slot_table import SlotTable
from tests.conftest import ANY_KIND, ONE_KIND
from tests.support.by_hand import HANDLER, RequestByHand
from tests.support.fleet import Fleet
from tests.support.waiting import allowed_s, wait_until
from tests.worker.test_pool import config_of


class Bench:
    """A process's own object, without the process."""

    def __init__(self, url: str, queue: str) -> None:
        self.app = App()
        self.run: Callable[[bytes], bytes] = bytes
        self.app.handler(name=HANDLER)(lambda payload: self.run(payload))
        self.table, self._fd = SlotTable.create(2)
        ours, self._theirs = socket.socketpair()
        self._channel = Channel(ours)
        self.process = WorkerProcess(config_of(url, queue), self.app, self.table, self._channel)

    def lease(self, driver: RequestByHand, holder: str, grant: Grant) -> BatchLease:
        runner = self.process._make_runner(HANDLER, grant.spec)
        known = KnownRequest(grant.created_ms, Pace(0.05), runner)
        self.table.hold(0, holder, driver.id)
        held = HeldLease(self.process._taker, self.process._books[0], holder, driver.id)
        held.handler, held.created_ms = HANDLER, grant.created_ms
        return BatchLease(0, Claimed(held, grant, known), 0)

    def close(self) -> None:
        self.process._protocol.connection.close()
        self.table.close()
        self._channel.close()
        self._theirs.close()
        os.close(self._fd)


@pytest.fixture
def bench(url: str, queue: str) -> Iterator[Bench]:
    bench = Bench(url, queue)
    yield bench
    bench.close()


@ANY_KIND
def test_claim_without_an_answer_leaves_no_lease(
    bench: Bench, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.load(3)
    protocol = bench.process._protocol
    claim = protocol.claim

    def claim_in_vain(*words: Any, **options: Any) -> Any:
        claim(*words, **options)
        raise ServerUnreachable("the answer is lost")

    monkeypatch.setattr(protocol, "claim", claim_in_vain)

    invitation = Invitation(Token(driver.id, HANDLER, 50), was_waiting=False)
    assert bench.process._taker.claim(invitation, bench.process._books[0]) is None

    assert driver.leases() == {}
    assert set(driver.retry()) == {1}
    assert driver.tries() == {}, "nothing ran"


@ANY_KIND
def test_request_that_is_purged_while_its_parts_are_refused_ends_nothing(
    bench: Bench, driver: RequestByHand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = client.submit(["a", "b"], handler=HANDLER, queue=driver.queue)

    def prepare(*_: Any) -> Any:
        request.cancel()
        request.purge()
        raise TypeError("such a handler cannot be run")

    monkeypatch.setattr(bench.process._taker, "_prepare", prepare)

    assert bench.process._take(0) is None
    assert bench.table.read(0) is None


@ANY_KIND
def test_more_parts_than_a_slot_holds_are_cut_and_the_rest_goes_back(
    bench: Bench, driver: RequestByHand
) -> None:
    """After a rollback and a lost reply ``finish`` tells of all that is pending, up to 1,000."""
    driver.load(1_200)
    holder, grant = driver.claim(500)
    driver.redis.xreadgroup("w", holder, {driver.keys.parts: ">"}, count=500)
    driver.set_meta(delivered=1_000)
    lease = bench.lease(driver, holder, grant)
    bench.table.hold(1, "neighbour", "other")
    bench.table.deal(1, [7])
    driver.redis.hset(driver.keys.holders, holder, bench.table.next_call(0))

    again = bench.process._batches._finish(lease, 500)

    assert [part.number for part in again.parts] == list(range(1, MOST_PARTS + 1))
    other = bench.table.read(1)
    assert other is not None
    assert (other.holder, other.numbers) == ("neighbour", (7,))
    assert bench.process._batches._next_most(lease, time.monotonic(), 500, 500) == 0, (
        "the lease ends"
    )
    bench.process._batches._finish(lease, 0)
    assert (driver.leases(), len(driver.retry())) == ({}, 1_000)


def make_suspect(driver: RequestByHand, client: Client) -> str:
    """A request whose only part was there when a worker died."""
    # Nobody is told of it before it is ready.
    request = client.submit([0.0], handler="nap", queue=driver.queue, delay="1h")
    keys = RequestKeys(request.id)
    mine = RequestByHand(driver.protocol, driver.queue, request.id)
    mine.set_meta(hold_ms=1)
    holder, _ = mine.claim(handlers=["parts nap"])
    released = mine.release(holder)
    driver.redis.hset(keys.tries, "1", "0 1 1 0 0")
    driver.protocol.push(driver.queue, request.id, released.tokens)
    return request.id


class TestSuspect:
    @ANY_KIND
    def test_part_that_is_to_run_alone_keeps_no_slot_from_working(
        self, fleet: Fleet, driver: RequestByHand, client: Client
    ) -> None:
        fleet.ready("-c", "8")
        long = client.submit([6.0], handler="nap", queue=fleet.queue)
        wait_until(lambda: fleet.notes("S", long.id))
        suspect = client.get(make_suspect(driver, client))

        waits = []
        for _ in range(5):
            begun = time.monotonic()
            urgent = client.submit([0.0] * 10, handler="nap", queue=fleet.queue, level=0)
            assert urgent.wait(5).parts.done == 10
            waits.append(time.monotonic() - begun)
            time.sleep(0.2)

        assert long.status().parts.running == 1
        assert sorted(waits)[2] < 0.5, f"nobody waited for the part that runs: {sorted(waits)}"
        assert suspect.wait(20).parts.done == 1
        ended = fleet.notes("E", long.id)[0].time
        assert fleet.notes("S", suspect.id)[0].time > ended, "it ran alone"

    @ANY_KIND
    def test_part_that_another_process_ran_lets_no_later_one_wait_for_longer(
        self, bench: Bench, driver: RequestByHand
    ) -> None:
        driver.load(5, limit=2)
        holder, grant = driver.claim()
        lease = bench.lease(driver, holder, grant)
        bench.process._free = []  # the other slot is busy
        now = time.monotonic()
        bench.process._suspects[driver.id, 1] = now - 3_600, now

        begun = time.monotonic()
        assert not bench.process._make_room(lease, 2)

        assert time.monotonic() - begun < allowed_s(5)

    @ONE_KIND
    def test_part_that_is_to_run_alone_runs_though_slots_are_never_free_by_themselves(
        self, fleet: Fleet, driver: RequestByHand, client: Client
    ) -> None:
        fleet.ready("-c", "6")
        naps = [0.15 + 0.013 * (number * 7 % 17) for number in range(700)]
        crowd = client.submit(naps, handler="nap", queue=fleet.queue, limit=6)
        wait_until(lambda: len(fleet.notes("S", crowd.id)) > 20)

        suspect = client.get(make_suspect(driver, client))

        assert suspect.wait(25).parts.done == 1
        assert crowd.status().state.is_live
        crowd.cancel()

    @ONE_KIND
    def test_part_that_is_to_run_alone_is_left_to_a_process_that_is_free(
        self, fleet: Fleet, driver: RequestByHand, client: Client
    ) -> None:
        fleet.ready("-c", "4")
        long = client.submit([15.0], handler="nap", queue=fleet.queue)
        wait_until(lambda: fleet.notes("S", long.id))
        suspect = client.get(make_suspect(driver, client))
        fleet.ready("-c", "4")

        assert suspect.wait(10).parts.done == 1
        assert long.status().parts.running == 1


@ANY_KIND
def test_rest_of_a_batch_is_not_begun_after_one_failure_too_many(
    bench: Bench, driver: RequestByHand
) -> None:
    called: list[bytes] = []

    def fail_at_the_third(payload: bytes) -> bytes:
        called.append(payload)
        if payload in (b"2", b"3"):
            raise Abandon("no")
        return payload

    bench.run = fail_at_the_third
    driver.load(10, max_failures=1)
    holder, grant = driver.claim(8)
    lease = bench.lease(driver, holder, grant)
    lease.held.begin(grant)

    most = bench.process._batches._run_batch(lease, grant.parts)

    assert (called, most) == ([b"1", b"2", b"3"], 0)
    bench.process._batches._finish(lease, most)
    assert (driver.meta("state"), driver.leases()) == ("failed", {})
    assert set(driver.results()) == {"1"}
    assert set(driver.retry()) == {4, 5, 6, 7, 8}


def test_no_part_is_begun_after_one_failure_too_many(tmp_path: Path) -> None:
    (tmp_path / "tenth.py").write_text(
        "from streamq import Abandon\n"
        "def f(line: str) -> str:\n"
        "    open('ran', 'a').write(line + '\\n')\n"
        "    if int(line) % 10 == 0:\n"
        "        raise Abandon('every tenth')\n"
        "    return line\n"
    )
    (tmp_path / "in.txt").write_text("".join(f"{number}\n" for number in range(1, 201)))
    options = ["--lines", "1", "--limit", "1", "--max-failures", "3", "--retries", "0"]

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "streamq.cli",
            "run",
            "in.txt",
            "--map",
            "tenth:f",
            "-p",
            "1",
            "-o",
            "out.txt",
            *options,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    ran = (tmp_path / "ran").read_text().split()
    print(done.returncode, len(ran), done.stderr)
    assert done.returncode != 0
    assert [line for line in ran if int(line) % 10 == 0] == ["10", "20", "30", "40"]
    assert ran[-1] == "40"
