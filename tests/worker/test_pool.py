"""What a parent says for its processes, when, and under which numbers."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from streamq import units
from streamq.driver.connection import Connection
from streamq.errors import Damaged, ServerBusy, ServerUnreachable
from streamq.model import LAST_LEVEL, MAX_RESULT
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Outcome, Tokens
from streamq.protocol.scripts import Scripts
from streamq.queue.lease_keeper import LeaseKeeper, _name_of_worker
from streamq.queue.outages import OutageLog, Outages
from streamq.queue.renewals import MOST_CALLS, Holding, Renewals
from streamq.queue.rounds import Rounds
from streamq.servers.local import LocalServer
from streamq.worker.channel import Channel, PoolOptions, ProcessConfig
from streamq.worker.pool import Pool
from streamq.worker.process_handle import ProcessHandle
from streamq.worker.slot_table import SlotTable
from streamq.worker.spawning import SpawnedProcess
from tests.conftest import ANY_KIND, ONE_KIND
from tests.faults.proxy import Proxy
from tests.support.by_hand import RequestByHand
from tests.support.fleet import APPS, Fleet
from tests.support.waiting import allowed_s, wait_until


def config_of(url: str = "redis://127.0.0.1:1", queue: str = "q", **changes: Any) -> ProcessConfig:
    """What the processes of a pool are told."""
    given: dict[str, Any] = {
        "url": url,
        "prefix": "sq",
        "queue": queue,
        "target": "tasks:app",
        "slots": 2,
        "levels": tuple(range(LAST_LEVEL + 1)),
        "quantum_ms": 50,
        "lease_ms": 20_000,
        "max_result": MAX_RESULT,
        "log_level": "info",
        "log_format": "text",
    }
    return ProcessConfig(**(given | changes))


class Heard:
    """Takes the keeper's place: notes what it is asked to say."""

    def __init__(self) -> None:
        self.words: list[tuple[Any, ...]] = []
        self.unwanted: set[str] = set()

    def release(self, held: Holding, call: int, crashed: int | None) -> None:
        self.words.append(("release", held.holder, call, crashed))

    def hand_back(
        self, held: Holding, call: int, numbers: tuple[int, ...], came_late: Callable[[], None]
    ) -> None:
        self.words.append(("handback", held.holder, call, numbers))
        self.came_late = came_late

    def time_out(self, held: Holding, call: int) -> None:
        self.words.append(("timeout", held.holder, call, held.running))

    def is_unwanted(self, holder: str) -> bool:
        return holder in self.unwanted


class Stage:
    """A pool with one process, whose table is written to by the test."""

    def __init__(self) -> None:
        config = config_of()
        self.heard = Heard()
        self.pool = Pool(config, PoolOptions(), cast("LeaseKeeper", self.heard))
        self.slot, fd = SlotTable.create(config.slots)
        ours, self.theirs = socket.socketpair()
        popen = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0
        )
        self.handle = ProcessHandle(
            config, SpawnedProcess(popen, Channel(ours), SlotTable(fd, config.slots))
        )
        os.close(fd)
        self.pool._handles.append(self.handle)

    def begin(self, numbers: list[int], ran_ms: int, timeout_ms: int = 0) -> None:
        """A batch whose first part has run for so long."""
        self.slot.hold(0, "h", "r")
        self.slot.describe(0, "nap", timeout_ms=timeout_ms, is_async=False)
        self.slot.deal(0, numbers)
        assert self.slot.start(0, 0, int(time.monotonic() * 1e3) - ran_ms)

    def look(self) -> None:
        self.pool._look_after_all()

    def bury(self) -> None:
        """The process is gone: take back what it held."""
        self.handle.popen.kill()
        wait_until(self.handle.has_ended)
        self.pool._forget(self.handle)
        self.pool._take_back(self.handle)

    def close(self) -> None:
        self.handle.popen.kill()
        self.handle.popen.wait()
        if self.handle.popen.stdin:
            self.handle.popen.stdin.close()
        self.slot.close()
        self.theirs.close()
        self.handle.channel.close()
        self.pool._bell.close()
        self.pool._button.close()
        self.pool._selector.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


class TestHandback:
    def test_its_number_is_above_the_last_call_of_the_slot_and_below_the_next(
        self, stage: Stage
    ) -> None:
        stage.begin([1, 2, 3], ran_ms=1_000)
        answered = stage.slot.next_call(0)
        stage.slot.answered(0)

        stage.look()
        stage.look()

        ((word, _, call, numbers),) = stage.heard.words
        assert (word, numbers) == ("handback", (2, 3))
        assert answered < call < stage.slot.next_call(0)

    def test_parts_within_their_quantum_stay(self, stage: Stage) -> None:
        stage.begin([1, 2, 3], ran_ms=0)

        stage.look()

        assert stage.heard.words == []
        assert stage.slot.start(0, 1, 0)


class TestDeath:
    def test_part_that_ran_when_its_process_died_is_charged(self, stage: Stage) -> None:
        stage.begin([1, 2, 3], ran_ms=0)

        stage.bury()

        ((word, _, _, crashed),) = stage.heard.words
        assert (word, crashed) == ("release", 1)

    def test_part_that_had_ended_is_not(self, stage: Stage) -> None:
        stage.begin([1, 2, 3], ran_ms=0)
        stage.slot.end(0, 0)

        stage.bury()

        assert stage.heard.words[-1][-1] is None

    def test_no_part_is_charged_for_a_process_that_was_ended_on_purpose(self, stage: Stage) -> None:
        stage.begin([1, 2, 3], ran_ms=0)
        stage.handle.kill("it is not wanted")

        stage.bury()

        ((word, _, _, crashed),) = stage.heard.words
        assert (word, crashed) == ("release", None)

    def test_part_over_its_time_is_failed_and_not_charged(self, stage: Stage) -> None:
        stage.begin([1, 2], ran_ms=1_000, timeout_ms=500)
        stage.look()
        assert not stage.handle.why_killed, "one look may have been torn"
        stage.look()

        stage.bury()

        words = [(word, *rest[1:]) for word, *rest in stage.heard.words if word != "handback"]
        assert [(word, last) for word, *_, last in words] == [("timeout", 1), ("release", None)]
        assert words[0][1] < words[1][1], "the lease ends after it"

    def test_next_part_does_not_answer_for_the_one_that_was_over_its_time(
        self, stage: Stage
    ) -> None:
        patient = msgspec.structs.replace(stage.pool._config, quantum_ms=60_000)
        stage.pool._config = patient
        stage.begin([1, 2], ran_ms=1_000, timeout_ms=500)
        stage.look()
        assert not stage.handle.why_killed, "one look may have been torn"
        stage.look()
        assert "part 1 of r took longer" in stage.handle.why_killed
        # Between the look and the kill the part ends, and the next begins.
        stage.slot.end(0, 0)
        assert stage.slot.start(0, 1, 0)

        stage.bury()

        assert [word for word, *_ in stage.heard.words] == ["release"]


class TestRounds:
    def test_chore_that_fails_does_not_end_the_round(self) -> None:
        done: list[str] = []

        def fails() -> None:
            done.append("fails")
            raise ServerBusy("not now")

        def damaged() -> None:
            done.append("damaged")
            raise Damaged("broken")

        rounds = Rounds(
            "r", [(fails, 1.0), (damaged, 1.0), (lambda: done.append("last"), 1.0)], OutageLog()
        )

        with pytest.raises(ServerBusy):
            rounds._round()

        assert done == ["fails", "damaged", "last"]
        with pytest.raises(ServerBusy):
            rounds._round()
        assert done[3:] == ["fails"], "only what failed is due again"


def holding(request_id: str, holder: str) -> Holding:
    """What a holder has that runs part 1."""
    return Holding(request_id=request_id, holder=holder, handler="h", running=1)


def keeper_of(driver: RequestByHand, **changes: Any) -> LeaseKeeper:
    """A keeper that hardly does anything by itself."""
    given: dict[str, Any] = {
        "slots": 1,
        "lease_ms": 20_000,
        "beat_ms": 60_000,
        "audit_ms": 60_000,
        "levels": range(LAST_LEVEL + 1),
    }
    return LeaseKeeper(driver.protocol, driver.queue, "pool", **(given | changes))


@pytest.fixture
def far() -> Iterator[tuple[Proxy, Protocol]]:
    """A door to a server of the test's own, and a protocol that goes through it."""
    with LocalServer.start(port=0) as server:
        proxy = Proxy(int(server.url.rpartition(":")[2]))
        with closing(Connection(f"redis://127.0.0.1:{proxy.port}")) as connection:
            yield proxy, Protocol(connection)
        proxy.close()


class TestRenewals:
    def renewals(self, protocol: Protocol) -> Renewals:
        return Renewals(protocol, lambda: protocol, 20_000, Outages(), OutageLog())

    def test_request_that_cannot_be_renewed_does_not_cost_the_others(
        self, protocol: Protocol, queue: str, request_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drivers = [RequestByHand(protocol, queue, f"{request_id}{n}") for n in range(3)]
        holders = []
        for driver in drivers:
            driver.load(1)
            holders.append(driver.claim(lease_ms=1_000)[0])
        do_apart = Scripts(protocol.connection).do_apart

        def do_some(calls: Any) -> Any:
            return [ServerBusy("its slot is not covered"), *do_apart(calls[1:])]

        monkeypatch.setattr(protocol, "_do_apart", do_some)
        share: dict[str, dict[str, int | None]] = {
            driver.id: {holder: 1} for driver, holder in zip(drivers, holders, strict=True)
        }

        failed = self.renewals(protocol)._renew("", share, set(), "t")

        assert failed == {drivers[0].id}
        left = [
            driver.leases()[holder] - driver.now_ms()
            for driver, holder in zip(drivers, holders, strict=True)
        ]
        assert [ms > 10_000 for ms in left] == [False, True, True]

    @ONE_KIND
    def test_script_that_fails_is_no_lost_lease(self, driver: RequestByHand) -> None:
        driver.load(1)
        holder, _ = driver.claim()
        driver.redis.unlink(driver.keys.leases)
        driver.redis.set(driver.keys.leases, "no set of leases")
        renewals = self.renewals(driver.protocol)

        assert renewals._renew("", {driver.id: {holder: 1}}, set(), "t") == set()

        assert not renewals.is_unwanted(holder)

    @ONE_KIND
    def test_ten_thousand_holders_of_a_request(self, driver: RequestByHand) -> None:
        driver.load(1)
        holder, _ = driver.claim(lease_ms=1_000)
        running = {f"h{n}": 1 for n in range(10_000)} | {holder: 1}
        renewals = self.renewals(driver.protocol)

        renewals._renew("", {driver.id: dict(running)}, set(), "t")

        assert renewals._unwanted[""] == running.keys() - {holder}
        assert driver.leases()[holder] - driver.now_ms() > 10_000

    def test_each_request_gets_its_own_answer(self, protocol: Protocol, queue: str) -> None:
        """On a cluster most of them are on other nodes than the first: each is found there."""
        share: dict[str, dict[str, int | None]] = {}
        wanted, unwanted = [], set()
        for number in range(MOST_CALLS + 20):
            driver = RequestByHand(protocol, queue, f"{queue}-{number}")
            driver.load(1)
            holder, _ = driver.claim(lease_ms=1_000)
            share[driver.id] = {holder: 1}
            if number % 5 == 0:
                unwanted.add(holder)
                if number % 10:
                    protocol.cancel(driver.id)
                else:
                    driver.redis.unlink(*driver.keys.all().values())
            elif number % 7 == 0:
                share[driver.id] |= {"lost": None}
                unwanted.add("lost")
            if number % 5:
                wanted.append((driver, holder))
        renewals = self.renewals(protocol)

        assert renewals._renew("", share, set(), "t") == set()

        assert renewals._unwanted[""] == unwanted
        for driver, holder in wanted:
            assert driver.leases()[holder] - driver.now_ms() > 10_000

    @ONE_KIND
    def test_server_that_has_forgotten_the_script_gets_it_again(
        self, driver: RequestByHand
    ) -> None:
        driver.load(1)
        holder, _ = driver.claim(lease_ms=1_000)
        driver.redis.script_flush()

        self.renewals(driver.protocol)._renew("", {driver.id: {holder: 1}}, set(), "t")

        assert driver.leases()[holder] - driver.now_ms() > 10_000

    def test_many_requests_on_a_server_far_away_are_renewed_while_their_leases_stand(
        self, far: tuple[Proxy, Protocol], queue: str
    ) -> None:
        proxy, protocol = far
        share: dict[str, dict[str, int | None]] = {}
        for number in range(800):
            driver = RequestByHand(protocol, queue, f"{queue}-{number}")
            driver.load(1)
            share[driver.id] = {driver.claim(lease_ms=1_000)[0]: 1}
        renewals = self.renewals(protocol)
        proxy.delay_s = 0.025  # each way

        begun = time.monotonic()
        assert renewals._renew("", share, set(), "t") == set()

        assert time.monotonic() - begun < allowed_s(5), "one by one they would take 40 s"
        proxy.delay_s = 0.0
        now_ms = driver.now_ms()
        for request_id, running in share.items():
            driver = RequestByHand(protocol, queue, request_id)
            assert driver.leases().keys() == running.keys()
            assert min(driver.leases().values()) - now_ms > 10_000

    def test_node_that_hangs_is_asked_once_in_a_round(
        self, far: tuple[Proxy, Protocol], queue: str
    ) -> None:
        proxy, protocol = far
        share: dict[str, dict[str, int | None]] = {
            f"{queue}-{n}": {"h": 1} for n in range(3 * MOST_CALLS)
        }
        hasty = protocol.hasty(0.5)
        outages, word = Outages(), OutageLog()
        renewals = Renewals(protocol, lambda: hasty, 20_000, outages, word)
        proxy.open_hole()

        begun = time.monotonic()
        failed = renewals._renew("", share, set(), "t")

        assert time.monotonic() - begun < allowed_s(2)
        assert failed == set(list(share)[:MOST_CALLS]), "the others come first in the next round"
        assert outages.left_s("") > 0
        assert word.errors == {"ServerUnreachable": 1}
        hasty.connection.close()

    @ONE_KIND
    def test_thread_comes_with_a_lease_and_goes_without(
        self, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("streamq.queue.renewals.LINGER_ROUNDS", 1)
        monkeypatch.setattr("streamq.queue.renewals.RENEW_EVERY_S", 0.01)
        driver.load(1)
        holder, _ = driver.claim(lease_ms=1_000)
        renewals = self.renewals(driver.protocol)

        renewals.hold([holding(driver.id, holder)])
        wait_until(lambda: driver.leases()[holder] - driver.now_ms() > 10_000)
        assert len(renewals._threads) == 1
        renewals.hold([])

        wait_until(lambda: not renewals._threads)
        renewals.stop()


class TestKeeper:
    @ANY_KIND
    def test_errand_that_finds_nobody_is_tried_again_after_a_rest(
        self, driver: RequestByHand, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keeper = keeper_of(driver)
        tries: list[float] = []

        def refuse() -> Outcome:
            tries.append(time.monotonic())
            raise ServerUnreachable("its node is away")

        keeper.start()
        keeper._send(holding(driver.id, "h"), refuse)
        wait_until(lambda: len(tries) >= 4)
        keeper.stop()

        assert tries[3] - tries[0] > 0.3, "pauses of 0.1, 0.2 and 0.4 s, each at least half of it"

    @ANY_KIND
    def test_errands_of_a_request_keep_their_order_whichever_node_it_is_on(
        self, driver: RequestByHand, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first finds nobody. When it is the second's turn the slot has moved."""
        keeper = keeper_of(driver)
        said: list[str] = []
        nodes = iter(["former", "latter", "latter", "latter"])
        monkeypatch.setattr(keeper._protocol, "node_of", lambda _: next(nodes))

        def say(word: str) -> Outcome:
            if not said and word == "first":
                said.append("nobody")
                raise ServerUnreachable("its node is away")
            said.append(word)
            return Outcome("ok", Tokens())

        held = holding(driver.id, "h")
        for word in ("first", "second"):
            keeper._send(held, partial(say, word))

        with pytest.raises(ServerUnreachable):
            keeper._do_errands()
        assert said == ["nobody"]
        keeper._do_errands()

        assert said == ["nobody", "first", "second"]

    @pytest.mark.parametrize(
        ("retries", "is_lost", "counted"),
        [(3, False, {("h", "retried"): 1}), (0, False, {("h", "failed"): 1}), (0, True, {})],
    )
    @ANY_KIND
    def test_part_over_its_time_is_counted_unless_its_lease_was_lost(
        self,
        driver: RequestByHand,
        url: str,
        retries: int,
        is_lost: bool,
        counted: dict[tuple[str, str], int],
    ) -> None:
        driver.load(1, retries=retries)
        holder, _ = driver.claim()
        if is_lost:
            driver.expire(holder)
            driver.reap()
        keeper = keeper_of(driver)
        keeper.time_out(holding(driver.id, holder), 1)

        keeper._do_errands()

        assert dict(keeper.counts) == counted
        keeper.start()
        keeper.stop()

    @ANY_KIND
    def test_part_whose_process_died_is_counted_once_though_its_tokens_find_nobody(
        self, driver: RequestByHand, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver.load(1)
        holder, _ = driver.claim(level=50)
        keeper = keeper_of(driver)
        hasty = keeper._hasty()
        push, pushes = hasty.push, []

        def push_at_last(*words: Any) -> None:
            pushes.append(words)
            if len(pushes) < 3:
                raise ServerUnreachable("the queue's node is away")
            push(*words)

        monkeypatch.setattr(hasty, "push", push_at_last)
        keeper.release(holding(driver.id, holder), 1, 1)

        for _ in range(2):
            with pytest.raises(ServerUnreachable):
                keeper._do_errands()
        keeper._do_errands()

        assert dict(keeper.counts) == {("h", "crashed"): 1}
        assert len(set(pushes)) == 1, "they are those that the first answer asked for"
        assert driver.tokens() == [driver.id]
        keeper.start()
        keeper.stop()

    @ANY_KIND
    def test_neither_a_sweep_nor_an_errand_that_takes_long_delays_renewals(
        self, driver: RequestByHand, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver.load(1)
        holder, _ = driver.claim(lease_ms=2_000)
        keeper = keeper_of(driver, lease_ms=2_000, audit_ms=500)
        go_on, stuck = threading.Event(), threading.Semaphore(0)

        def take_long(*_: Any) -> int:
            stuck.release()
            go_on.wait(20)
            return 1_000

        monkeypatch.setattr(keeper.janitor, "sweep", take_long)
        keeper.start()
        held = holding(driver.id, holder)
        keeper._send(held, lambda: cast("Outcome", take_long()))
        keeper.hold([held])
        try:
            assert stuck.acquire(timeout=5)
            assert stuck.acquire(timeout=5)
            end = time.monotonic() + 3
            while time.monotonic() < end:
                assert driver.leases()[holder] > driver.now_ms(), "it is renewed"
                time.sleep(0.05)
        finally:
            go_on.set()
            keeper.stop()


class TestStart:
    @ONE_KIND
    def test_very_many_processes_are_started_a_few_at_a_time(
        self, fleet: Fleet, tmp_path: Path
    ) -> None:
        gate = tmp_path / "gate"
        module = f"import pathlib, sys, time\nsys.path.append({str(APPS)!r})\n"
        module += f"while not pathlib.Path({str(gate)!r}).exists():\n    time.sleep(0.01)\n"
        (tmp_path / "gated.py").write_text(module + "from tasks import app\n")
        few = (
            "from streamq import cli; from streamq.worker import pool, spawning; "
            "pool.MOST_STARTING = spawning.MOST_STARTING = 2; cli.main()"
        )
        pool = fleet.start("-p", "5", target=f"{tmp_path / 'gated.py'}:app", program=("-c", few))
        wait_until(lambda: len(fleet.children(pool)) == 2, 15)
        time.sleep(0.5)
        assert len(fleet.children(pool)) == 2

        gate.touch()

        wait_until(lambda: len(fleet.children(pool)) == 5, 15)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (("-p", "5000"), "512"),
            (("-c", "20000"), "10000"),
            (("-p", "100", "-c", "1000"), "50000 at most"),
        ],
    )
    def test_absurd_numbers_are_told_at_once(self, options: tuple[str, ...], says: str) -> None:
        command = [sys.executable, "-m", "streamq.cli", "worker", "tasks:app", *options]

        told = subprocess.run(
            [*command, "--url", "redis://127.0.0.1:1"], capture_output=True, text=True
        )

        assert told.returncode == 2
        assert says in " ".join(told.stderr.split())


def test_name_of_a_worker_fits_whatever_its_host_is_called() -> None:
    name = _name_of_worker("h" * 63, 4_194_304)

    assert units.name(name, "worker") == name
    assert name.endswith(".4194304")
    assert _name_of_worker("host", 7) == "host.7"
