"""The steps of a process, one at a time: what each takes, tells and gives back."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamq import App, Client, Context
from streamq.errors import Damaged, RequestUnknown, ServerBusy, ServerUnreachable
from streamq.model import Failure, Part
from streamq.protocol.keys import QueueKeys
from streamq.protocol.replies import Grant, PassedPart, Token, Tokens
from streamq.queue import held_lease, taker
from streamq.queue.held_lease import HeldLease, LeaseGone
from streamq.queue.outcomes import PartDone, PartNotDone
from streamq.queue.pace import Pace
from streamq.queue.taker import Claimed, Invitation, KnownRequest
from streamq.worker import batches, counters, process, slot_watch
from streamq.worker.batches import BatchLease
from streamq.worker.channel import Channel, Command, IdleFor, VisitAt
from streamq.worker.process import WorkerProcess
from streamq.worker.slot_table import SlotState, SlotTable
from streamq.worker.spawning import Spawner
from tests.conftest import ONE_KIND
from tests.support.by_hand import HANDLER, RequestByHand
from tests.support.waiting import allowed_s, wait_until
from tests.worker.common import keep_alive, put_away
from tests.worker.test_pool import config_of

QUANTUM_S = 0.5
pytestmark = ONE_KIND


class Desk:
    """A process's own object without the process, and the other end of its line."""

    def __init__(self, url: str, queue: str, slots: int = 2) -> None:
        self.app = App()
        self.contexts: list[Context] = []
        self.run: Callable[[bytes], Any] = bytes
        self.run_later: Callable[[bytes], Any] = lambda _: asyncio.sleep(0)

        @self.app.handler(name=HANDLER)
        def handler(payload: bytes, context: Context) -> bytes:
            self.contexts.append(context)
            return self.run(payload)  # type: ignore[no-any-return]

        @self.app.handler(name="later")
        async def later(payload: bytes) -> bytes:
            await self.run_later(payload)
            return payload

        config = config_of(url, queue, slots=slots, quantum_ms=round(QUANTUM_S * 1e3))
        self.table, self._fd = SlotTable.create(slots)
        ours, theirs = socket.socketpair()
        self.channel = Channel(theirs)
        self.process = WorkerProcess(config, self.app, self.table, Channel(ours))
        keep_alive(self.process)
        self._on_message: list[Any] = []

    def said(self, kind: type) -> list[Any]:
        """Words of a kind that the process has said."""
        self._on_message += self.channel.ready_messages()[0]
        return [word for word in self._on_message if isinstance(word, kind)]

    def lease(
        self, driver: RequestByHand, holder: str, grant: Grant, slot: int = 0, name: str = HANDLER
    ) -> BatchLease:
        """A lease of which a batch has just come."""
        number = list(self.app.handlers).index(name)
        runner = self.process._make_runner(name, grant.spec)
        known = KnownRequest(grant.created_ms, Pace(QUANTUM_S), runner)
        self.table.hold(slot, holder, driver.id)
        held = HeldLease(self.process._taker, self.process._books[slot], holder, driver.id)
        held.handler, held.created_ms = name, grant.created_ms
        self.table.deal(slot, [part.number for part in grant.parts])
        lease = BatchLease(slot, Claimed(held, grant, known), number)
        if slot in self.process._free:
            self.process._free.remove(slot)
        return lease

    def row(self, handler: int = 0) -> counters.Row:
        return self.table.counters.rows(2)[handler]

    def read(self, slot: int = 0) -> SlotState:
        held = self.table.read(slot)
        assert held is not None
        return held

    def close(self) -> None:
        put_away(self.process)
        self.table.close()
        self.channel.close()
        self.process._channel.close()
        os.close(self._fd)


@pytest.fixture
def desks(url: str, queue: str) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def open_desk(slots: int = 2) -> Desk:
        made.append(Desk(url, queue, slots))
        return made[-1]

    yield open_desk
    for desk in made:
        desk.close()


@pytest.fixture
def desk(desks: Callable[..., Desk]) -> Desk:
    return desks()


@pytest.fixture
def claimed(desk: Desk, driver: RequestByHand) -> Callable[..., tuple[BatchLease, Grant]]:
    """A lease of so many parts of a request, more of which wait."""

    def claim(most: int = 3, of: int = 10, **changes: Any) -> tuple[BatchLease, Grant]:
        driver.load(of, **changes)
        holder, grant = driver.claim(most)
        driver.set_meta(out=0)  # whoever was invited has come
        return desk.lease(driver, holder, grant), grant

    return claim


def fails(_: bytes) -> bytes:
    raise ValueError("no")


class TestLease:
    def test_others_have_a_turn_after_a_quantum_and_what_was_asked_for_a_little_later(
        self, claimed: Any
    ) -> None:
        lease, _ = claimed()

        assert lease.late_at - lease.part_began == pytest.approx(QUANTUM_S)
        assert lease.stop_at - lease.late_at == pytest.approx(QUANTUM_S / 4)

    def test_batch_says_how_long_it_took_and_waited(self, claimed: Any) -> None:
        lease, grant = claimed()
        lease.asked_at, lease.waiting_since = 100.0, 90.0

        lease.held.handed_at = 101.5
        lease.handed(msgspec.structs.replace(grant, retried=2))

        assert (lease.call_s, lease.waited_s, lease.retried) == (1.5, 11.5, 2)
        assert not lease.is_single
        lease.handed(msgspec.structs.replace(grant, parts=grant.parts[:1]))
        assert lease.is_single

    def test_results_are_kept_with_their_numbers_and_sizes(self, claimed: Any) -> None:
        lease, grant = claimed()
        lease.held.record(grant.parts[0], PartDone(b"abc", 2))
        lease.held.record(grant.parts[1], PartDone(b"de", 1))

        assert (lease.held.results, lease.held.records, lease.held.size) == (
            [1, b"abc", 2, b"de"],
            3,
            5,
        )


class TestMayStart:
    def may_start(self, desk: Desk, lease: BatchLease, index: int, now: float) -> bool:
        part = Part(index + 1, b"", b"1")
        return desk.process._batches._may_start(lease, index, part, now)

    def test_first_part_is_run_however_late_it_is(self, desk: Desk, claimed: Any) -> None:
        lease, _ = claimed()
        lease.held.size = batches._MOST_UNSENT + 1

        assert self.may_start(desk, lease, 0, lease.stop_at + 60)

        assert (desk.read().running, lease.part_began) == (1, lease.stop_at + 60)
        assert desk.read().since_ms == int(lease.part_began * 1e3)

    def test_next_is_not_after_its_time(self, desk: Desk, claimed: Any) -> None:
        lease, _ = claimed()

        assert self.may_start(desk, lease, 1, lease.stop_at)
        assert not self.may_start(desk, lease, 1, lease.stop_at + 0.001)
        assert desk.read().running == 2

    def test_next_is_not_while_much_is_to_be_sent(self, desk: Desk, claimed: Any) -> None:
        lease, _ = claimed()
        lease.held.size = batches._MOST_UNSENT

        assert self.may_start(desk, lease, 1, lease.part_began)
        lease.held.size += 1
        assert not self.may_start(desk, lease, 1, lease.part_began)

    def test_next_is_not_while_many_children_are_to_be_sent(self, desk: Desk, claimed: Any) -> None:
        lease, _ = claimed()
        held = lease.held
        most = batches._MOST_CHILDREN_UNSENT
        held.record(Part(1, b"", b"1"), PartDone(b"", 1, PassedPart(1, "1", [], [b""] * most, 1)))

        assert self.may_start(desk, lease, 1, lease.part_began)
        held.record(Part(2, b"", b"1"), PartDone(b"", 1, PassedPart(2, "2", [], [b""], 1)))
        assert not self.may_start(desk, lease, 1, lease.part_began)

    def test_none_is_by_a_process_that_stops(self, desk: Desk, claimed: Any) -> None:
        lease, _ = claimed()
        desk.process._batches.is_stopping = True

        assert not self.may_start(desk, lease, 0, lease.part_began)

    def test_none_is_that_was_struck(self, desk: Desk, claimed: Any) -> None:
        lease, _ = claimed()
        assert desk.table.strike(0, desk.read()) == (1, 2, 3)

        assert not self.may_start(desk, lease, 0, lease.part_began)

    @pytest.mark.parametrize("timeout_ms", [0, 700])
    def test_parent_knows_what_to_say_should_it_take_too_long(
        self, desk: Desk, claimed: Any, timeout_ms: int
    ) -> None:
        lease, _ = claimed()
        lease.runner.timeout_ms = timeout_ms
        part = Part(1, b"", b"1", attempt=2)

        assert desk.process._batches._may_start(lease, 0, part, lease.part_began)

        assert desk.read().attempt == (2 if timeout_ms else 0)
        assert (desk.read().retry_ms > 0) is bool(timeout_ms)

    def test_wait_of_a_single_part_is_counted_when_it_begins(
        self, desk: Desk, claimed: Any
    ) -> None:
        lease, _ = claimed()
        self.may_start(desk, lease, 0, lease.part_began)
        assert sum(counters.times_counted(desk.row(), counters.WAITED)[0]) == 0
        lease.is_single = True

        self.may_start(desk, lease, 0, lease.part_began)

        assert sum(counters.times_counted(desk.row(), counters.WAITED)[0]) == 1


class TestNextMost:
    def test_as_many_as_fit_into_what_is_left_of_the_quantum(
        self, desk: Desk, claimed: Any
    ) -> None:
        lease, _ = claimed()
        now = time.monotonic()
        lease.late_at, lease.call_s = now + 100.0, 50.0

        most = desk.process._batches._next_most(lease, now - 10.0, 10, 10)

        assert 45 <= most <= 50, "a second each, and the call takes 50"
        assert desk.process._taker._paces == {HANDLER: lease.pace}
        assert abs(lease.asked_at - time.monotonic()) < 5

    def test_none_where_not_all_were_run(self, desk: Desk, claimed: Any) -> None:
        lease, _ = claimed()
        lease.late_at = time.monotonic() + 60

        assert desk.process._batches._next_most(lease, time.monotonic(), 2, 3) == 0

    def test_none_by_a_process_that_stops(self, desk: Desk, claimed: Any) -> None:
        lease, _ = claimed()
        lease.late_at = time.monotonic() + 60
        desk.process._batches.is_stopping = True

        assert desk.process._batches._next_most(lease, time.monotonic(), 3, 3) == 0

    @pytest.mark.parametrize(("late_s", "call_s"), [(-1, 0), (1, 2)])
    def test_none_that_would_come_too_late(
        self, desk: Desk, claimed: Any, late_s: int, call_s: int
    ) -> None:
        lease, _ = claimed()
        lease.late_at, lease.call_s = time.monotonic() + late_s, call_s

        assert desk.process._batches._next_most(lease, time.monotonic(), 3, 3) == 0

    def test_waits_are_those_of_first_attempts_that_were_begun(
        self, desk: Desk, claimed: Any
    ) -> None:
        lease, _ = claimed()
        lease.retried, lease.waited_s = 2, 3.0

        desk.process._batches._next_most(lease, time.monotonic(), 2, 5)
        assert sum(counters.times_counted(desk.row(), counters.WAITED)[0]) == 0
        desk.process._batches._next_most(lease, time.monotonic(), 5, 5)
        classes, total_s = counters.times_counted(desk.row(), counters.WAITED)
        assert sum(classes) == 3
        assert total_s == pytest.approx(9.0)
        lease.is_single, lease.retried = True, 0
        desk.process._batches._next_most(lease, time.monotonic(), 1, 1)

        assert sum(counters.times_counted(desk.row(), counters.WAITED)[0]) == 3, (
            "it was counted before"
        )


class TestBatch:
    def test_all_are_run_finished_and_the_next_are_dealt(
        self, desk: Desk, driver: RequestByHand, claimed: Any
    ) -> None:
        lease, grant = claimed()
        lease.late_at = lease.stop_at = time.monotonic() + 60
        desk.run = lambda payload: payload * 2

        most = desk.process._batches._run_batch(lease, grant.parts)
        assert most > 0
        assert desk.read().running is None, "the last has ended"
        assert [context.part for context in desk.contexts] == [1, 2, 3]
        classes, total_s = counters.times_counted(desk.row(), counters.RAN)
        assert (sum(classes), total_s < 20) == (3, True)
        again = desk.process._batches._finish(lease, 2)

        assert [part.number for part in again.parts] == [4, 5]
        assert set(driver.results()) == {"1", "2", "3"}
        assert desk.read().numbers == (4, 5)
        assert (lease.held.results, lease.held.records, lease.held.size, lease.held.part) == (
            [],
            0,
            0,
            None,
        )
        assert (desk.row()[counters.DONE], desk.row()[counters.RECORDS_DONE]) == (3, 3)
        assert desk.table.next_call(0) == 2 * 1_000
        assert driver.tokens() != [], "others are invited to the rest"

    def test_contexts_reach_the_table(self, desk: Desk, claimed: Any) -> None:
        lease, grant = claimed()
        desk.process._batches._run_batch(lease, grant.parts[:1])
        (context,) = desk.contexts

        context.progress(40)
        assert desk.read().progress == 40
        assert not context.should_stop()
        desk.table.ask_to_stop(0, desk.read())
        assert context.should_stop()
        assert (context.request, context.part, context.attempt) == (lease.held.request_id, 1, 1)

    def test_one_that_fails_is_told_and_the_next_is_run(
        self, desk: Desk, driver: RequestByHand, claimed: Any
    ) -> None:
        lease, grant = claimed()
        desk.run = lambda payload: fails(payload) if payload == b"2" else payload
        lease.late_at = lease.stop_at = time.monotonic() + 60

        assert desk.process._batches._run_batch(lease, grant.parts) > 0

        assert desk.row()[counters.RETRIED] == 1
        assert set(driver.tries()) == {2}
        assert [context.part for context in desk.contexts] == [1, 2, 3]
        assert lease.held.results[::2] == [1, 3]

    def test_last_one_of_a_request_ends_it_here(
        self, desk: Desk, driver: RequestByHand, claimed: Any
    ) -> None:
        lease, grant = claimed(3, of=3)
        desk.process._batches._run_batch(lease, grant.parts)

        assert desk.process._batches._finish(lease, 5).parts == []

        left_s = desk.process._taker._ended[driver.id] - time.monotonic()
        assert 0 < left_s <= taker.LEFT_OVER_S

    def test_request_that_goes_on_is_not_left_alone(self, desk: Desk, claimed: Any) -> None:
        lease, grant = claimed()
        desk.process._batches._run_batch(lease, grant.parts)
        desk.process._batches._finish(lease, 0)

        assert desk.process._taker._ended == {}

    @pytest.mark.parametrize(
        ("retries", "counts"),
        [(3, (0, 1, 0, 0)), (0, (1, 0, 2, 5))],
    )
    def test_trouble_is_counted(
        self,
        desk: Desk,
        claimed: Any,
        retries: int,
        counts: tuple[int, ...],
    ) -> None:
        lease, grant = claimed(retries=retries, max_failures=10)
        trouble = PartNotDone("retry", 0, [Failure(error="E", message="m")], (2, 5))
        if not retries:
            trouble.kind = "abandon"

        assert lease.held.fail(grant.parts[0], trouble)

        kinds = ("FAILED", "RETRIED", "RECORDS_DONE", "RECORDS_FAILED")
        assert tuple(desk.row()[getattr(counters, kind)] for kind in kinds) == counts
        assert desk.table.next_call(0) == 2 * 1_000

    @pytest.mark.parametrize(("about", "failed"), [(b"4 rest", 4), (b"", 1)])
    def test_all_records_of_a_part_that_failed_as_a_whole_are_counted(
        self, desk: Desk, about: bytes, failed: int
    ) -> None:
        trouble = PartNotDone("abandon", 0, [], (0, -1))
        for word in ("failed", "ended", "done", "late"):
            desk.process._books[1].count_failed("later", Part(1, b"", about), trouble, word)

        row = desk.row(1)
        assert (row[counters.FAILED], row[counters.RECORDS_FAILED]) == (3, 3 * failed)
        none = msgspec.structs.replace(trouble, records=(2, 0))
        desk.process._books[1].count_failed("later", Part(1, b"", about), none, "failed")
        assert desk.row(1)[counters.RECORDS_FAILED] == 3 * failed
        assert desk.row(1)[counters.RECORDS_DONE] == 2

    def test_late_answer_ends_the_lease(
        self, desk: Desk, driver: RequestByHand, claimed: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease, grant = claimed()
        desk.process._batches._run_batch(lease, grant.parts)
        driver.redis.hset(driver.keys.holders, lease.held.holder, 10**6)
        released: list[int] = []
        monkeypatch.setattr(lease.held, "release", lambda: released.append(1))

        assert desk.process._batches._finish(lease, 2).parts == []

        assert released == [1]

    @pytest.mark.parametrize("is_alone", [True, False])
    def test_part_that_is_to_run_alone_goes_back_from_a_slot_that_has_neighbours(
        self, desk: Desk, driver: RequestByHand, claimed: Any, is_alone: bool
    ) -> None:
        lease, grant = claimed(1)
        other, _ = driver.claim()
        driver.release(other)
        driver.redis.hset(driver.keys.tries, "2", "0 1 1 0 0")
        desk.process._batches._run_batch(lease, grant.parts)
        desk.process._exclusive = 0 if is_alone else -1

        again = desk.process._batches._finish(lease, 1)

        assert [part.number for part in again.parts] == ([2] if is_alone else [])
        assert set(driver.leases()) == ({lease.held.holder} if is_alone else set())

    def test_slot_that_runs_alone_is_not_shared(self, desk: Desk, claimed: Any) -> None:
        lease, _ = claimed()
        assert not desk.process._is_alone(lease.slot)
        desk.process._exclusive = 1
        assert not desk.process._is_alone(lease.slot)
        desk.process._exclusive = 0
        assert desk.process._is_alone(lease.slot)

    def test_only_slot_is_not_shared(self, desks: Any, claimed: Any) -> None:
        lease, _ = claimed()
        assert desks(1).process._is_alone(lease.slot)


class TestServing:
    def test_until_nothing_is_left(self, desk: Desk, driver: RequestByHand, claimed: Any) -> None:
        lease, grant = claimed()
        lease.late_at = lease.stop_at = time.monotonic() + 60

        desk.process._batches.serve(lease, grant)

        assert (len(driver.results()), driver.leases()) == (10, {})
        assert desk.table.read(0) is None
        assert sorted(desk.process._free) == [0, 1]

    def test_lease_of_a_request_that_is_gone_is_let_go(
        self, desk: Desk, driver: RequestByHand, claimed: Any
    ) -> None:
        lease, grant = claimed()
        desk.run = lambda payload: driver.redis.unlink(*driver.keys.all().values()) and payload

        desk.process._batches.serve(lease, grant)

        assert desk.table.read(0) is None
        assert sorted(desk.process._free) == [0, 1]

    def test_what_it_stumbles_over_is_tried_again_later(
        self, desk: Desk, driver: RequestByHand, claimed: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease, grant = claimed()

        def run(*_: Any) -> Any:
            raise KeyError("something is wrong with us")

        monkeypatch.setattr(lease.runner, "run", run)

        desk.process._batches.serve(lease, grant)

        assert driver.leases() == {}
        assert set(driver.retry()) == {1, 2, 3}
        assert set(driver.tries()) == {1}
        assert 0 < driver.retry()[1] - driver.now_ms() <= 1_000
        assert sorted(desk.process._free) == [0, 1]

    def test_lost_lease_leaves_the_request_alone(
        self, desk: Desk, driver: RequestByHand, claimed: Any
    ) -> None:
        lease, grant = claimed()

        def lose(payload: bytes) -> bytes:
            driver.expire(lease.held.holder)
            driver.reap()
            return fails(payload)

        desk.run = lose

        desk.process._batches.serve(lease, grant)

        assert len(desk.contexts) == 1, "the rest is not run"
        assert desk.table.read(0) is None

    @pytest.mark.parametrize("slots", [1, 2])
    def test_single_slot_serves_by_itself_and_others_in_threads(
        self, desks: Any, driver: RequestByHand, slots: int
    ) -> None:
        desk = desks(slots)
        threads: list[str] = []

        def note(payload: bytes) -> bytes:
            threads.append(threading.current_thread().name)
            return payload

        desk.run = note
        driver.load(1)
        holder, grant = driver.claim()

        desk.process._begin(desk.lease(driver, holder, grant), grant)
        wait_until(lambda: driver.leases() == {})

        assert (threads[0] == threading.current_thread().name) is (slots == 1)


class TestCoroutines:
    def begin(self, desk: Desk, driver: RequestByHand, **spec: Any) -> BatchLease:
        driver.load(2)
        holder, grant = driver.claim(2)
        lease = desk.lease(driver, holder, grant, name="later")
        lease.late_at = lease.stop_at = time.monotonic() + 60
        lease.runner.timeout_ms = spec.get("timeout_ms", 0)
        desk.process._begin(lease, grant)
        return lease

    def test_all_are_run(self, desk: Desk, driver: RequestByHand) -> None:
        desk.run_later = lambda _: asyncio.sleep(0)
        self.begin(desk, driver)
        wait_until(lambda: sorted(desk.process._free) == [0, 1])

        assert set(driver.results()) == {"1", "2"}
        assert desk.process._batches._watches == {}
        assert sum(counters.times_counted(desk.row(1), counters.RAN)[0]) == 2
        assert desk.process._batches._event_loop() is desk.process._batches._event_loop()

    def test_one_that_has_ended_does_not_run(self, desk: Desk, driver: RequestByHand) -> None:
        driver.load(2)
        holder, grant = driver.claim(2)
        lease = desk.lease(driver, holder, grant, name="later")
        lease.late_at = lease.stop_at = time.monotonic() + 60

        assert asyncio.run(desk.process._batches._run_batch_async(lease, grant.parts)) > 0

        assert desk.read().running is None
        assert counters.times_counted(desk.row(1), counters.RAN)[1] < 20

    def test_one_over_its_time_is_stopped_and_the_next_is_run(
        self, desk: Desk, driver: RequestByHand
    ) -> None:
        desk.run_later = lambda payload: asyncio.sleep(60 if payload == b"1" else 0)
        lease = self.begin(desk, driver, timeout_ms=300)
        wait_until(lambda: sorted(desk.process._free) == [0, 1])

        assert (set(driver.results()), set(driver.tries())) == ({"2"}, {1})
        assert lease.watch is not None
        assert lease.watch.task is None

    def test_one_that_is_not_wanted_is_stopped(self, desk: Desk, driver: RequestByHand) -> None:
        desk.run_later = lambda _: asyncio.sleep(60)
        lease = self.begin(desk, driver)
        wait_until(lambda: lease.watch and lease.watch.task)
        desk.table.ask_to_stop(0, desk.read())
        wait_until(lambda: sorted(desk.process._free) == [0, 1])

        assert (driver.results(), driver.leases()) == ({}, {})
        assert [part.attempt for part in driver.claim(2)[1].parts] == [1, 1], "none was spent"

    def test_one_that_cancels_itself_has_failed(self, desk: Desk, driver: RequestByHand) -> None:
        async def cancel() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(60)

        desk.run_later = lambda payload: cancel() if payload == b"1" else asyncio.sleep(0)
        self.begin(desk, driver)
        wait_until(lambda: sorted(desk.process._free) == [0, 1])

        assert (set(driver.results()), set(driver.tries())) == ({"2"}, {1})

    def test_what_it_stumbles_over_is_tried_again_later(
        self, desk: Desk, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run_async(*_: Any) -> Any:
            raise KeyError("something is wrong with us")

        monkeypatch.setattr("streamq.worker.runner.Runner.run_async", run_async)
        self.begin(desk, driver)
        wait_until(lambda: sorted(desk.process._free) == [0, 1])

        assert (set(driver.tries()), driver.leases()) == ({1}, {})


class TestSlots:
    def test_slot_is_waited_for(self, desk: Desk) -> None:
        running = desk.process
        assert {running._await_slot() for _ in range(2)} == {0, 1}
        found: list[int | None] = []
        thread = threading.Thread(target=lambda: found.append(running._await_slot()))
        thread.start()
        running._give_slot(1)
        thread.join(5)
        assert found == [1]
        running._is_stopping = True
        running._free = [0]

        assert running._await_slot() is None

    @pytest.mark.parametrize("why", ["quiet", "exclusive"])
    def test_none_is_taken_while_it_is_quiet_or_a_part_runs_alone(
        self, desk: Desk, why: str
    ) -> None:
        running = desk.process
        running._is_quiet, running._exclusive = why == "quiet", 1 if why == "exclusive" else -1
        running._free = [0]
        found: list[int | None] = []
        thread = threading.Thread(target=lambda: found.append(running._await_slot()))
        thread.start()
        with running._changed:
            running._changed.notify_all()
        thread.join(0.1)
        assert found == []
        running._is_quiet = False

        running._give_slot(1)
        thread.join(5)

        assert len(found) == 1
        assert running._exclusive == -1

    def test_slot_of_another_does_not_end_the_time_alone(self, desk: Desk) -> None:
        desk.process._exclusive = 0
        desk.process._give_slot(1)
        assert desk.process._exclusive == 0

    def test_room_is_made_at_once_where_there_is_some(self, desk: Desk, claimed: Any) -> None:
        lease, _ = claimed()

        assert desk.process._make_room(lease, 1)

        assert (desk.process._exclusive, desk.process._suspects) == (0, {})
        assert desk.process._taker._ended == {}

    def test_part_that_finds_no_room_goes_back_and_is_left_to_others(
        self, desk: Desk, driver: RequestByHand, claimed: Any
    ) -> None:
        lease, grant = claimed()
        desk.process._free = []
        for part in grant.parts[:1]:
            part.is_suspect = True
        begun = time.monotonic()

        desk.process._begin(lease, msgspec.structs.replace(grant, retried=1))

        assert QUANTUM_S <= time.monotonic() - begun < allowed_s(10)
        assert driver.leases() == {}
        assert desk.table.read(0) is None
        assert desk.process._free == [0]
        assert desk.process._exclusive == -1
        assert list(desk.process._suspects) == [(driver.id, 1)]
        assert 0 < desk.process._taker._ended[driver.id] - time.monotonic() <= 19 * QUANTUM_S
        assert desk.contexts == []

    def test_longer_it_has_waited_the_longer_room_is_waited_for(
        self, desk: Desk, driver: RequestByHand, claimed: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease, _ = claimed()
        waits: list[float] = []

        def wait(but: int, timeout_s: float) -> bool:
            waits.append(timeout_s)
            return bool(but) and len(waits) > 1

        monkeypatch.setattr(desk.process, "_await_all_free", wait)
        monkeypatch.setattr(process, "KNOWN_REQUESTS", 2)
        now = time.monotonic()
        since = {("x", 1): now, ("x", 2): now, (driver.id, 1): now - 100}
        desk.process._suspects = {part: (at, now) for part, at in since.items()}

        assert not desk.process._make_room(lease, 1)
        assert list(desk.process._suspects) == [("x", 2), (driver.id, 1)], "the oldest goes"
        assert desk.process._make_room(lease, 1)

        assert waits == pytest.approx([5.0, 5.0], abs=0.5)
        assert list(desk.process._suspects) == [("x", 2)]

    def test_requests_left_alone_are_forgotten_before_they_are_too_many(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(taker, "KNOWN_REQUESTS", 2)
        for name in "abc":
            desk.process._taker._leave_alone(name, 5.0)

        assert list(desk.process._taker._ended) == ["c"]


def test_outcomes_of_a_part_are_to_be_kept_when_it_has_run_for_a_while(
    desk: Desk, claimed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, _ = claimed(1)
    watch = desk.process._batches._look_on(lease)

    watch.begin_part()
    assert not watch.is_due()
    monkeypatch.setattr(slot_watch, "KEEP_EVERY_S", 0.0)
    watch.begin_part()
    assert watch.is_due()


def test_coroutine_is_not_cancelled_while_its_outcomes_are_kept(
    desk: Desk, claimed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, _ = claimed(1)
    watch = desk.process._batches._look_on(lease)
    begun, go_on = threading.Event(), threading.Event()

    def keep(*_: bytes, must: bool) -> bool:
        begun.set()
        return go_on.wait(10) or must

    async def run() -> None:
        watch.begin_part()
        task = watch.start(watch.keep_later(b"x", b""))  # type: ignore[arg-type]
        await asyncio.to_thread(begun.wait, 10)
        desk.table.ask_to_stop(0, desk.read())
        watch.cancel_if_due()
        go_on.set()
        await task

    monkeypatch.setattr(lease.held, "keep", keep)
    asyncio.run(run())


class TestNextStage:
    """A slot whose lease is over may have a token for the next stage of the flow."""

    @pytest.mark.parametrize(
        ("name", "was_waiting"), [(HANDLER, False), (HANDLER, True), ("later", False)]
    )
    def test_token_may_be_kept_where_nothing_waited_and_no_loop_is_held_up(
        self, desk: Desk, client: Client, queue: str, name: str, was_waiting: bool
    ) -> None:
        token = Token(client.submit([b"a"], handler=name, queue=queue).id, name, 50)

        claimed = desk.process._claim(0, Invitation(token, was_waiting=was_waiting))

        assert claimed is not None
        may_keep = claimed[0].held.keep_one is not None
        assert may_keep == (name == HANDLER and not was_waiting)

    def test_slot_goes_on_or_is_given_back(
        self, desk: Desk, driver: RequestByHand, claimed: Callable[..., tuple[BatchLease, Grant]]
    ) -> None:
        lease, _ = claimed(1, 2, limit=2)
        lease.held.follow = Token(driver.id, HANDLER, 50)

        desk.process._end(lease)
        wait_until(lambda: driver.meta("done") == "1")
        wait_until(lambda: 0 in desk.process._free)
        # There is nothing more to claim.
        desk.process._free.remove(0)
        desk.process._end(lease)
        assert 0 in desk.process._free

    @pytest.mark.parametrize("why", ["stopping", "quiet", "exclusive"])
    def test_process_that_takes_nothing_leaves_the_token_to_others(
        self,
        desk: Desk,
        driver: RequestByHand,
        claimed: Callable[..., tuple[BatchLease, Grant]],
        why: str,
    ) -> None:
        lease, _ = claimed(1)
        lease.held.follow = Token(driver.id, HANDLER, 50)
        if why == "exclusive":
            desk.process._exclusive = 1
        else:
            setattr(desk.process, f"_is_{why}", True)

        desk.process._end(lease)

        assert 0 in desk.process._free
        tokens = f"{driver.protocol.queue_keys(driver.queue).tokens}{HANDLER}:50"
        assert driver.protocol.connection.call("LRANGE", tokens, 0, -1) == [driver.id.encode()]

    def test_turn_that_is_over_is_not_begun_anew(
        self, desk: Desk, driver: RequestByHand, claimed: Callable[..., tuple[BatchLease, Grant]]
    ) -> None:
        lease, _ = claimed(1, 2, limit=2)
        lease.held.follow = Token(driver.id, HANDLER, 50)
        lease.late_at = time.monotonic()

        desk.process._end(lease)

        assert 0 in desk.process._free
        tokens = f"{driver.protocol.queue_keys(driver.queue).tokens}{HANDLER}:50"
        assert driver.protocol.connection.call("LRANGE", tokens, 0, -1) == [driver.id.encode()]
        assert driver.meta("delivered") == "1", "nothing more was claimed"

    def test_stages_that_a_slot_runs_have_one_turn(
        self,
        desk: Desk,
        driver: RequestByHand,
        claimed: Callable[..., tuple[BatchLease, Grant]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        begun: list[BatchLease] = []
        monkeypatch.setattr(desk.process, "_begin", lambda lease, _: begun.append(lease))
        lease, _ = claimed(1, 2, limit=2)
        lease.held.follow = Token(driver.id, HANDLER, 50)
        time.sleep(0.01)  # two leases that begin at one moment tell nothing

        desk.process._end(lease)

        (after,) = begun
        assert (after.late_at, after.stop_at) == (lease.late_at, lease.stop_at)

    @pytest.mark.parametrize("slots", [1, 2])
    def test_part_that_is_to_run_alone_goes_back_unless_there_is_but_one_slot(
        self,
        desks: Callable[..., Desk],
        driver: RequestByHand,
        monkeypatch: pytest.MonkeyPatch,
        slots: int,
    ) -> None:
        """Two slots that make room at once may end each other's time alone."""
        desk = desks(slots)
        driver.load(2, limit=2)
        holder, grant = driver.claim(1)
        other, _ = driver.claim(1)
        driver.release(other)
        driver.redis.hset(driver.keys.tries, "2", "0 1 1 0 0")
        driver.set_meta(out=0)
        begun: list[Grant] = []
        monkeypatch.setattr(desk.process, "_begin", lambda _, grant: begun.append(grant))
        lease = desk.lease(driver, holder, grant)
        lease.held.follow = Token(driver.id, HANDLER, 50)

        desk.process._end(lease)

        if slots == 1:
            assert [part.number for part in begun[0].parts] == [2]
            return
        assert begun == []
        assert set(driver.leases()) == {holder}, "and the lease of part 2 is over"
        assert (desk.table.read(0), 0 in desk.process._free) == (None, True)
        tokens = f"{driver.protocol.queue_keys(driver.queue).tokens}{HANDLER}:50"
        assert driver.protocol.connection.call("LRANGE", tokens, 0, -1) == [driver.id.encode()]


class TestClaiming:
    def claim(self, desk: Desk, driver: RequestByHand, first: int = 2) -> Grant | None:
        self.lease = HeldLease(desk.process._taker, desk.process._books[0], "holder", driver.id)
        grant = desk.process._taker._claim(self.lease, 50, first)
        if grant:
            self.lease.handler, self.lease.created_ms = grant.handler, grant.created_ms
        return grant

    def test_of_a_new_request_so_many_are_claimed_as_are_said(
        self, desk: Desk, driver: RequestByHand
    ) -> None:
        driver.load(10)
        grant = self.claim(desk, driver)

        assert grant is not None
        assert [part.number for part in grant.parts] == [1, 2]
        assert (desk.read().holder, desk.read().request_id) == ("holder", driver.id)
        left_ms = driver.leases()["holder"] - driver.now_ms()
        assert 10_000 < left_ms <= 20_000

    def test_of_a_known_one_so_many_as_take_a_quantum(
        self, desk: Desk, driver: RequestByHand
    ) -> None:
        driver.load(10)
        grant = self.claim(desk, driver)
        assert grant is not None
        known = desk.process._taker._know(driver.id, grant)
        assert desk.process._taker._know(driver.id, grant) is known
        known.pace.observe(5, QUANTUM_S)

        other = HeldLease(desk.process._taker, desk.process._books[1], "other", driver.id)
        again = desk.process._taker._claim(other, 50, 1)

        assert again is not None
        assert len(again.parts) == 5
        assert again.spec == b"", "it is known"

    def test_another_request_of_the_same_id_is_learnt_anew(
        self, desk: Desk, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(taker, "KNOWN_REQUESTS", 2)
        driver.load(10)
        grant = self.claim(desk, driver)
        assert grant is not None
        known = desk.process._taker._know(driver.id, grant)
        other = msgspec.structs.replace(grant, created_ms=grant.created_ms + 1)

        assert desk.process._taker._know(driver.id, other) is not known
        desk.process._taker._know("b", grant)
        desk.process._taker._know("c", grant)
        assert list(desk.process._taker._known) == ["b", "c"]
        assert known.pace.quantum_s == QUANTUM_S

    @pytest.mark.parametrize("error", [Damaged("broken"), ServerUnreachable("the answer is lost")])
    def test_claim_that_may_have_been_granted_is_released(
        self, desk: Desk, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        driver.load(10)
        claim = desk.process._protocol.claim

        def claim_in_vain(*words: Any, **options: Any) -> Any:
            claim(*words, **options)
            raise error

        monkeypatch.setattr(desk.process._protocol, "claim", claim_in_vain)

        assert self.claim(desk, driver) is None
        assert driver.leases() == {}

    def test_request_that_is_not_there_yet_is_claimed_a_moment_later(
        self, desk: Desk, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        protocol = desk.process._protocol
        claim = protocol.claim
        tries: list[int] = []

        def claim_late(*words: Any, **options: Any) -> Any:
            tries.append(1)
            if len(tries) == 3:
                driver.load(3)
            return claim(*words, **options)

        monkeypatch.setattr(protocol, "claim", claim_late)
        driver.redis.zadd(f"sq:{{q:{driver.queue}}}:open", {driver.id: 1})

        assert self.claim(desk, driver) is not None
        assert len(tries) == 3

    @pytest.mark.parametrize(("is_registered", "times"), [(False, 1), (True, 6)])
    def test_request_that_never_comes_is_given_up(
        self,
        desk: Desk,
        driver: RequestByHand,
        monkeypatch: pytest.MonkeyPatch,
        is_registered: bool,
        times: int,
    ) -> None:
        tries: list[int] = []

        def claim(*_: Any, **__: Any) -> Any:
            tries.append(1)
            raise RequestUnknown("it is not there")

        monkeypatch.setattr(desk.process._protocol, "claim", claim)
        if is_registered:
            driver.redis.zadd(f"sq:{{q:{driver.queue}}}:open", {driver.id: 1})

        assert self.claim(desk, driver) is None
        assert len(tries) == times

    def test_handler_that_is_new_is_asked_for_one_part(self, desk: Desk) -> None:
        assert desk.process._taker._first_most() == 1
        paces = [Pace(QUANTUM_S) for _ in range(2)]
        for number, pace in enumerate(paces):
            pace.observe(10 * (number + 1), QUANTUM_S)
        desk.process._taker._paces[HANDLER] = paces[0]
        assert desk.process._taker._first_most() == 1
        desk.process._taker._paces["later"] = paces[1]

        assert desk.process._taker._first_most() == 10

    def test_parts_that_cannot_be_begun_are_failed_and_others_are_invited(
        self, desk: Desk, driver: RequestByHand
    ) -> None:
        driver.load(10, max_failures=100)
        driver.set_meta(out=0)
        grant = self.claim(desk, driver)
        assert grant is not None

        desk.process._taker._refuse(self.lease, grant, TypeError("no such type"))

        assert set(driver.failed()) == {1, 2}
        assert b"no such type" in driver.failed()[1]
        assert desk.row()[counters.FAILED] == desk.row()[counters.RECORDS_FAILED] == 2
        assert desk.row()[counters.RECORDS_DONE] == 0
        assert (driver.leases(), desk.table.read(0)) == ({}, None)
        assert driver.tokens() != []

    def test_rest_of_a_request_that_has_failed_is_left(
        self, desk: Desk, driver: RequestByHand
    ) -> None:
        driver.load(10, max_failures=0)
        grant = self.claim(desk, driver)
        assert grant is not None

        desk.process._taker._refuse(self.lease, grant, TypeError("no such type"))

        assert set(driver.failed()) == {1}
        assert driver.leases() == {}


class TestTaking:
    def test_part_is_taken_with_all_that_the_parent_wants_to_know(
        self, desk: Desk, client: Client, queue: str
    ) -> None:
        request = client.submit(
            [b"a"] * 3, handler=HANDLER, queue=queue, timeout="7s", limit=3, id=f"{queue}-1"
        )

        taken = desk.process._take(1)

        assert taken is not None
        lease, grant = taken
        assert (lease.slot, lease.held.request_id) == (1, request.id)
        assert desk.process._protocol.holders(request.id) == [lease.held.holder]
        held = desk.read(1)
        assert (held.handler, held.timeout_ms, held.is_async) == (HANDLER, 7_000, False)
        assert held.numbers == tuple(part.number for part in grant.parts) == (1,)
        now = time.monotonic()
        assert lease.part_began - 10 < lease.waiting_since <= lease.part_began
        assert 0 <= lease.call_s < now - lease.asked_at + 1
        assert 0 <= lease.waited_s < 10

    def test_token_of_a_request_that_is_left_alone_is_dropped(
        self, desk: Desk, client: Client, queue: str, driver: RequestByHand
    ) -> None:
        request = client.submit([b"a"], handler=HANDLER, queue=queue)
        desk.process._taker._leave_alone(request.id, 60)

        assert desk.process._take(0) is None
        assert desk.process._taker._leases == 0
        assert desk.process._protocol.holders(request.id) == []

    def test_token_with_nothing_behind_it_leaves_the_slot_empty(
        self, desk: Desk, client: Client, queue: str
    ) -> None:
        request = client.submit([b"a"], handler=HANDLER, queue=queue)
        request.cancel()

        assert desk.process._take(0) is None
        assert desk.table.read(0) is None
        assert request.id in desk.process._taker._ended

    def test_process_that_stops_or_is_quiet_takes_nothing(
        self, desk: Desk, client: Client, queue: str
    ) -> None:
        client.submit([b"a"], handler=HANDLER, queue=queue)
        desk.process._is_quiet = True
        assert desk.process._take(0) is None
        desk.process._is_quiet, desk.process._is_stopping = False, True
        assert desk.process._take(0) is None
        desk.process._is_stopping = False

        assert desk.process._take(0) is not None
        assert desk.process._taking_since == 0.0


class TestRun:
    @pytest.fixture
    def rests(self, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """After how many outages in a row it rested. Nobody gives it orders."""
        rests: list[int] = []

        def delay_ms(times: int, *_: int) -> int:
            rests.append(times)
            return 1

        monkeypatch.setattr(desk.process, "_obey", lambda: None)
        monkeypatch.setattr(desk.process, "_tick", lambda: None)
        monkeypatch.setattr("streamq.backoff.delay_ms", delay_ms)
        return rests

    def test_it_rests_longer_and_longer_while_the_server_is_away(
        self, desk: Desk, rests: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        outcomes: Iterator[Exception | None] = iter(
            (ServerBusy("a"), Damaged("b"), None, ServerUnreachable("c"))
        )

        def take(slot: int) -> None:
            assert slot not in desk.process._free
            for outcome in outcomes:
                if outcome:
                    raise outcome
                return
            desk.process._is_stopping = True
            raise ServerBusy("d")

        monkeypatch.setattr(desk.process, "_take", take)

        desk.process.run()

        assert rests == [1, 2, 1], "not when it is to stop"
        assert sorted(desk.process._free) == [0, 1]
        assert len(desk.said(IdleFor)) == 1

    def test_it_begins_what_it_took_and_waits_for_it_at_the_end(
        self, desk: Desk, rests: list[int], driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver.load(1)
        holder, grant = driver.claim()
        taken: list[int] = []

        def take(slot: int) -> Any:
            taken.append(slot)
            if len(taken) == 2:
                desk.process._is_stopping = True
                return None
            return desk.lease(driver, holder, grant, slot), grant

        desk.run = lambda payload: wait_until(lambda: len(taken) > 1) and payload
        monkeypatch.setattr(desk.process, "_take", take)
        # What was dealt before the stop is begun.
        monkeypatch.setattr(desk.process._batches, "_may_start", lambda *_: True)

        desk.process.run()

        assert sorted(desk.process._free) == [0, 1]
        assert set(driver.results()) == {"1"}
        assert rests == []


class TestTelling:
    def test_call_is_made_until_it_is_answered(self, desk: Desk) -> None:
        errors = iter((ServerBusy("a"), ServerUnreachable("b")))

        def call() -> str:
            for error in errors:
                raise error
            return "answer"

        begun = time.monotonic()
        assert held_lease.insist_for_lease(call) == "answer"
        assert time.monotonic() - begun > 0.07, "pauses of 50 and 100 ms, each at least half of it"

    @pytest.mark.parametrize("error", [RequestUnknown("gone"), Damaged("broken")])
    def test_call_that_is_refused_ends_what_is_at_hand(self, desk: Desk, error: Exception) -> None:
        def call() -> None:
            raise error

        with pytest.raises(LeaseGone):
            held_lease.insist_for_lease(call)

    def test_tokens_are_pushed_and_moments_told(self, desk: Desk, driver: RequestByHand) -> None:
        driver.load(1)
        desk.process._taker.push(driver.id, Tokens())
        assert driver.tokens() == []

        desk.process._taker.push(driver.id, Tokens(1, "h:50"))
        assert driver.tokens() == [driver.id]
        assert desk.said(VisitAt) == []
        desk.process._taker.push(driver.id, Tokens(0, "", driver.now_ms() + 60_000))

        assert len(desk.said(VisitAt)) == 1

    def test_tokens_that_cannot_be_pushed_are_left_to_the_audit(
        self, desk: Desk, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def push(*_: Any) -> None:
            raise ServerBusy("not now")

        monkeypatch.setattr(desk.process._protocol, "push", push)

        desk.process._taker.push(driver.id, Tokens(1, "h:50", 5))

        assert desk.said(VisitAt) == [VisitAt(5)]

    def test_token_of_a_request_that_is_left_alone_for_a_while_is_kept_and_goes_back(
        self, desk: Desk, driver: RequestByHand
    ) -> None:
        driver.load(1)
        token = Token(driver.id, HANDLER, 50)
        assert not desk.process._taker._is_left_alone(token, desk.process._has_room)
        desk.process._taker._leave_alone(driver.id, 60)
        assert desk.process._taker._is_left_alone(token, desk.process._has_room), "it is of no use"
        desk.process._taker._kept[driver.id] = []
        desk.process._free = []

        assert desk.process._taker._is_left_alone(token, desk.process._has_room)
        desk.process._taker.give_back_tokens()
        assert driver.tokens() == [driver.id]
        assert desk.process._taker._kept == {driver.id: []}, "the next one is kept, too"
        desk.process._taker._ended[driver.id] = time.monotonic()
        desk.process._taker.give_back_tokens()

        assert driver.tokens() == [driver.id]
        assert desk.process._taker._kept == {}

    def test_process_is_idle_with_all_slots_free_or_the_last_one_waiting(self, desk: Desk) -> None:
        running = desk.process
        running._idle_since = time.monotonic() - 100
        running._say_idle()
        assert desk.said(IdleFor) == [], "it has been said just now"
        running._said_idle = time.monotonic() - 2
        running._say_idle()
        running._say_idle()
        running._free = [0]
        running._say_idle(force=True)
        running._taking_since = time.monotonic()
        running._say_idle(force=True)

        said = [word.idle_s for word in desk.said(IdleFor)]
        assert said == pytest.approx([100, 0, 100], abs=10)

    def test_outage_is_told_from_damage(self, desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
        held_lease.report_outage_under_lease(ServerBusy("not now"))
        held_lease.report_outage_under_lease(Damaged("broken"))

        assert [record.message for record in caplog.records] == [
            "waiting for the server: not now",
            "passed over: broken",
        ]

    def test_rest_ends_with_the_time_or_when_it_is_to_stop(self, desk: Desk) -> None:
        begun = time.monotonic()
        desk.process._rest(0.1)
        assert 0.1 <= time.monotonic() - begun < allowed_s(10)
        desk.process._is_stopping = True

        desk.process._rest(60)

        assert time.monotonic() - begun < allowed_s(20)

    @pytest.mark.parametrize("is_leader", [True, False])
    def test_process_without_its_parent_ends_with_all_that_it_started(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch, is_leader: bool
    ) -> None:
        ended: list[Any] = []
        monkeypatch.setattr(os, "killpg", lambda *words: ended.append(words))
        monkeypatch.setattr(os, "_exit", ended.append)
        monkeypatch.setattr(os, "getpgrp", lambda: os.getpid() + (not is_leader))
        woken: list[int] = []

        def wake() -> None:
            woken.append(1)
            if len(woken) == 3:
                desk.process._taking_since = 0.0

        monkeypatch.setattr(desk.process._protocol.connection, "wake", wake)
        desk.process._taking_since = time.monotonic()
        for word in ("quiet", "go", "quiet", "stop", "go"):
            desk.channel.send(Command(word))
        desk.channel.send(IdleFor(1.0))
        desk.channel.close()

        desk.process._obey()

        assert ended == ([(0, signal.SIGKILL)] if is_leader else []) + [1]
        assert desk.process._is_stopping, "that is not taken back"
        assert not desk.process._is_quiet
        assert len(woken) == 3

    def test_server_at_which_it_waits_for_long_is_asked_now_and_then(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Over(Exception):
            pass

        checks: list[int] = []
        ticks: list[float] = []
        now = [1_000.0]

        real_sleep, own = time.sleep, threading.get_ident()

        def sleep(seconds: float) -> None:
            if threading.get_ident() != own:  # the clock of another test's process
                real_sleep(seconds)
                return
            ticks.append(seconds)
            now[0] += 1.0
            desk.process._taking_since = 1_000.0 if len(ticks) > 2 else 0.0
            if len(ticks) == 12:
                raise Over

        desk.process._said_idle = 0.0
        monkeypatch.setattr("streamq.worker.process.time.monotonic", lambda: now[0])
        monkeypatch.setattr("streamq.worker.process.time.sleep", sleep)
        monkeypatch.setattr(
            desk.process._protocol.connection, "check_waits", lambda: checks.append(len(ticks))
        )
        with pytest.raises(Over):
            desk.process._tick()
        monkeypatch.undo()

        assert ticks == [process.IDLE_EVERY_S] * 12
        assert checks == [5, 10], "more than four seconds after the last"
        assert len(desk.said(IdleFor)) == 11


class TestMain:
    def code(self, tmp_path: Path, text: str, **changes: Any) -> int:
        """The exit code of a real process whose module has this text, and whose server is none."""
        (tmp_path / "module.py").write_text(text)
        spawned = Spawner(2).take()
        target = f"{tmp_path / 'module.py'}:app"
        spawned.channel.send(config_of("nonsense", "q", target=target, **changes))
        try:
            return spawned.popen.wait(20)
        finally:
            spawned.popen.kill()
            spawned.channel.close()
            spawned.table.close()

    @pytest.mark.parametrize("keeps_stdout", [True, False])
    def test_process_that_cannot_begin_says_so_by_its_code(
        self, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], keeps_stdout: bool
    ) -> None:
        text = (
            "from streamq import App\nprint('printed')\napp = App()\napp.map(str.upper, name='f')\n"
        )

        assert self.code(tmp_path, text, keeps_stdout=keeps_stdout) == 1, kind

        out, err = capfd.readouterr()
        assert ("printed" in out, "printed" in err) == (keeps_stdout, not keeps_stdout)

    def test_module_that_cannot_be_loaded_has_a_code_of_its_own(
        self, kind: str, tmp_path: Path
    ) -> None:
        assert self.code(tmp_path, "raise ValueError") == 4, kind


class TestSuspects:
    """Parts that are to run alone, where other slots are busy."""

    def make_room(self, desk: Desk, lease: BatchLease, part: int = 1) -> tuple[bool, float]:
        """Whether there was room, and how long the other slots were kept free for it."""
        desk.process._free = []
        begun = time.monotonic()
        has_room = desk.process._make_room(lease, part)
        return has_room, time.monotonic() - begun

    def left_alone_s(self, desk: Desk, driver: RequestByHand) -> float:
        return desk.process._taker._ended[driver.id] - time.monotonic()

    def test_request_is_left_alone_for_nineteen_times_the_wait(
        self, desk: Desk, driver: RequestByHand, claimed: Any
    ) -> None:
        lease, _ = claimed()

        has_room, waited_s = self.make_room(desk, lease)

        assert not has_room
        assert waited_s == pytest.approx(QUANTUM_S, abs=0.4)
        assert self.left_alone_s(desk, driver) == pytest.approx(19 * QUANTUM_S, abs=0.5)

    def test_later_waits_are_a_twentieth_of_all_the_time(
        self, desk: Desk, driver: RequestByHand, claimed: Any
    ) -> None:
        lease, _ = claimed()
        now = time.monotonic()
        desk.process._suspects[driver.id, 1] = now - 16, now

        _, waited_s = self.make_room(desk, lease)

        assert waited_s == pytest.approx(0.8, abs=0.4)
        assert self.left_alone_s(desk, driver) == pytest.approx(19 * 0.8, abs=0.5)

    def test_part_that_was_not_seen_for_minutes_has_not_waited_since(
        self, desk: Desk, driver: RequestByHand, claimed: Any
    ) -> None:
        lease, _ = claimed()
        now = time.monotonic()
        desk.process._suspects[driver.id, 1] = now - 3_600, now - 301

        _, waited_s = self.make_room(desk, lease)

        assert waited_s == pytest.approx(QUANTUM_S, abs=0.4)

    def test_tokens_go_back_each_second_for_other_processes(
        self, desk: Desk, driver: RequestByHand, claimed: Any
    ) -> None:
        lease, _ = claimed()
        self.make_room(desk, lease)
        token = Token(driver.id, HANDLER, 50)

        for _ in range(2):
            assert desk.process._taker._is_left_alone(token, desk.process._has_room)
            assert driver.tokens(50) == []
            desk.process._taker.give_back_tokens()
            assert driver.tokens(50) == [driver.id]
            driver.redis.delete(QueueKeys(driver.queue, to=f"{HANDLER}:50").tokens)

        desk.process._taker.give_back_tokens()
        assert driver.tokens(50) == [], "each goes back once"

    def test_request_is_left_alone_no_more_when_nothing_else_runs(
        self, desk: Desk, driver: RequestByHand, claimed: Any
    ) -> None:
        lease, _ = claimed()
        self.make_room(desk, lease)
        token = Token(driver.id, HANDLER, 50)

        desk.process._free = [1]  # the other slot is that of the token

        assert not desk.process._taker._is_left_alone(token, desk.process._has_room)
        assert self.left_alone_s(desk, driver) > 1

    def test_tokens_go_back_when_the_process_stops(
        self, desk: Desk, driver: RequestByHand, claimed: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease, _ = claimed()
        self.make_room(desk, lease)
        assert desk.process._taker._is_left_alone(
            Token(driver.id, HANDLER, 50), desk.process._has_room
        )
        desk.process._is_stopping = True
        for thread in ("_obey", "_tick"):
            monkeypatch.setattr(desk.process, thread, lambda: None)

        running = threading.Thread(target=desk.process.run, daemon=True)
        running.start()

        wait_until(lambda: driver.tokens(50) == [driver.id])
        assert running.is_alive(), "it waits for what runs"
        desk.process._give_slot(0)
        desk.process._give_slot(1)
        running.join(5)
        assert not running.is_alive()
