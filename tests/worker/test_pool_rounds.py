"""A pool, round by round: the test plays its processes, which do nothing."""

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from streamq.errors import AppLoadError
from streamq.queue.lease_keeper import LeaseKeeper
from streamq.queue.renewals import Holding
from streamq.telemetry.metrics import Samples
from streamq.telemetry.systemd import Notifier
from streamq.worker import counters
from streamq.worker import pool as pools
from streamq.worker.channel import (
    Channel,
    Command,
    FirstRecords,
    IdleFor,
    LoadFailed,
    PoolOptions,
    Ready,
    VisitAt,
)
from streamq.worker.file_watch import FileWatch
from streamq.worker.pool import Pool
from streamq.worker.process_handle import ProcessHandle
from streamq.worker.slot_table import VERSION, SlotTable
from streamq.worker.spawning import SpawnedProcess, Spawner
from tests.support.waiting import allowed_s, wait_until
from tests.worker.test_pool import Heard, config_of


class Ear(Heard):
    """Takes the keeper's place, and notes what a whole pool asks of it."""

    name = "worker"

    def __init__(self) -> None:
        super().__init__()
        self.handlers: list[str] = []
        self.holdings: list[Holding] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.is_server_up = True
        self.is_empty = False
        self.rounds = 0

    def start(self) -> None:
        self.words.append(("start",))

    def stop(self) -> None:
        self.words.append(("stop",))

    def announce(self, handlers: list[str]) -> None:
        self.handlers = handlers

    def expect(self, at_ms: int) -> None:
        self.words.append(("expect", at_ms))

    def tell_soon(self) -> None:
        self.words.append(("tell_soon",))

    def hold(self, holdings: list[Holding]) -> None:
        self.holdings = holdings
        self.rounds += 1

    def is_nothing_left(self) -> bool:
        return self.is_empty

    def samples(self) -> Samples:
        return {}


class Played:
    """A process that does nothing; the test has its end of the line and of the table."""

    def __init__(self, slots: int) -> None:
        self.slot, fd = SlotTable.create(slots)
        ours, theirs = socket.socketpair()
        self.channel = Channel(theirs)
        self.popen = subprocess.Popen(["cat"], stdin=subprocess.PIPE, process_group=0)
        self.spawned = SpawnedProcess(self.popen, Channel(ours), SlotTable(fd, slots))
        os.close(fd)
        self._told: list[str] = []

    def orders(self) -> list[str]:
        """What it was told so far, after its configuration."""
        words, _ = self.channel.ready_messages()
        self._told += [word.word for word in words if isinstance(word, Command)]
        return self._told

    def begin(self, slot: int, numbers: list[int], ran_ms: int = 0, **about: Any) -> None:
        """A batch whose first part has run for so long."""
        given = {"timeout_ms": 0, "is_async": False} | about
        self.slot.hold(slot, f"h{slot}", f"r{slot}")
        self.slot.describe(slot, "nap", **given)
        self.slot.deal(slot, numbers)
        assert self.slot.start(slot, 0, int(time.monotonic() * 1e3) - ran_ms)

    def end(self, number: int = signal.SIGKILL) -> None:
        """Let it be gone: by a signal, or with 0 by itself."""
        assert self.popen.stdin is not None
        if number:
            self.popen.send_signal(number)
        # After the signal: to send one to a process that has ended would wait for it.
        self.popen.stdin.close()
        with suppress(ChildProcessError):  # A pool that runs beside may have waited for it.
            os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOWAIT)
        self.channel.close()


class Scene:
    """A pool whose processes the test plays."""

    def __init__(self, **options: Any) -> None:
        self.cast: list[Played] = []
        self.ear = Ear()
        self.error: OSError | None = None
        self.config = config_of(quantum_ms=options.pop("quantum_ms", 50))
        self.told: list[str] = []
        notifier = Notifier({})
        cast("Any", notifier)._send = self.told.append
        self.pool = Pool(
            self.config,
            PoolOptions(**options),
            cast("LeaseKeeper", self.ear),
            notifier,
            cast("Spawner", self),
        )

    def take(self) -> SpawnedProcess:
        if self.error:
            raise self.error
        self.cast.append(Played(self.config.slots))
        return self.cast[-1].spawned

    def fill(self) -> list[Played]:
        """Let the pool start what it wants to have. Returns those that are new."""
        before = len(self.cast)
        self.pool._fill()
        return self.cast[before:]

    def open(self) -> list[Played]:
        """Let it start all, and hear that they are ready."""
        played = self.fill()
        for each in played:
            each.channel.send(Ready(["parts nap", "map shout"], [__file__]))
        self.hear()
        return played

    def hear(self) -> None:
        self.pool._read_messages(0)

    def members(self) -> list[ProcessHandle]:
        return self.pool._handles

    def look_around(self) -> None:
        """Let the time between two looks have passed."""
        self.pool._looked = time.monotonic() - 60
        self.pool._look_around()

    def signal(self, number: int) -> None:
        self.pool._signals.note(number)
        self.pool._obey_signals()

    def close(self) -> None:
        for handle in self.members():
            handle.channel.close()
            handle.table.close()
        for played in self.cast:
            played.popen.kill()
            played.popen.wait()
            if played.popen.stdin:
                played.popen.stdin.close()
            played.channel.close()
            played.slot.close()
        self.pool._bell.close()
        self.pool._button.close()
        self.pool._selector.close()


@pytest.fixture
def scene() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def scene(**options: Any) -> Scene:
        made.append(Scene(**options))
        return made[-1]

    yield scene
    for each in made:
        each.close()


def words(scene: Scene, kind: str) -> list[tuple[Any, ...]]:
    """What of a kind the keeper was asked to say, without the kind."""
    return [word[1:] for word in scene.ear.words if word[0] == kind]


class TestFilling:
    def test_as_many_are_started_as_are_wanted_and_told_what_to_do(self, scene: Any) -> None:
        stage = scene(processes=3)

        played = stage.fill()

        assert len(played) == 3
        assert stage.fill() == []
        assert stage.pool.processes() == [each.popen.pid for each in played]
        assert [each.channel.read_config() for each in played] == [stage.config] * 3

    def test_one_that_leaves_is_replaced_before_it_is_gone(self, scene: Any) -> None:
        stage = scene(processes=2)
        stage.open()

        stage.members()[0].order("stop")

        assert len(stage.fill()) == 1

    def test_few_are_started_at_a_time(self, scene: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(pools, "MOST_STARTING", 2)
        stage = scene(processes=5)

        first = stage.fill()
        assert len(first) == 2
        assert stage.fill() == []
        first[0].channel.send(Ready([], []))
        stage.hear()

        assert len(stage.fill()) == 1

    def test_where_none_can_be_started_it_is_tried_again_later_and_later(
        self, scene: Any, monkeypatch: Any
    ) -> None:
        stage = scene(processes=2)
        stage.error = OSError("too many processes")
        pauses: list[tuple[int, int, int]] = []

        def delay_ms(*given: int) -> int:
            pauses.append(cast("Any", given))
            return 1_000

        monkeypatch.setattr("streamq.backoff.delay_ms", delay_ms)
        assert stage.fill() == []
        left_s = stage.pool._start_at - time.monotonic()
        assert 0.5 < left_s <= 1.0
        stage.error = None
        assert stage.fill() == [], "it is too soon"
        stage.pool._start_at = 0.0
        stage.error = OSError("too many processes")
        stage.fill()
        stage.error = None
        stage.pool._start_at = 0.0

        assert len(stage.fill()) == 2
        assert pauses == [(1, 200, 5_000), (2, 200, 5_000)]

    def test_none_is_started_by_a_pool_that_ends(self, scene: Any) -> None:
        stage = scene(processes=2)
        stage.signal(signal.SIGTERM)

        assert stage.fill() == []

    def test_pool_that_is_quiet_says_so_to_new_ones(self, scene: Any) -> None:
        stage = scene(processes=2)
        first, second = stage.open()
        stage.signal(signal.SIGUSR1)
        assert [first.orders(), second.orders()] == [["quiet"], ["quiet"]]
        assert stage.pool.unready() == "quiet: it takes nothing more"

        first.end()
        stage.pool._replace_dead()
        stage.pool._start_at = 0.0
        (third,) = stage.fill()

        third.channel.read_config()
        assert third.orders() == ["quiet"]


class TestHearing:
    def test_pool_is_ready_with_its_first_process(self, scene: Any) -> None:
        stage = scene(processes=2)
        assert stage.pool.unready() == "no process is ready"
        first, second = stage.fill()
        first.channel.send(Ready(["parts nap", "map shout"], [__file__]))
        stage.hear()

        assert stage.ear.handlers == ["nap", "shout"]
        assert stage.pool.unready() == ""
        assert stage.told == ["READY=1\nSTATUS=4 slots"]
        assert stage.pool.samples()["streamq_worker_processes"] == [({}, 1)]
        second.channel.send(Ready(["parts nap", "map shout"], []))
        stage.hear()
        assert stage.pool.samples()["streamq_worker_processes"] == [({}, 2)]
        assert len(stage.told) == 1, "that is said once"
        stage.ear.is_server_up = False
        assert stage.pool.unready() == "the server does not answer"

    def test_module_that_cannot_be_loaded_ends_a_pool_that_never_worked(self, scene: Any) -> None:
        stage = scene()
        (played,) = stage.fill()
        played.channel.send(LoadFailed("no such module", "its trace"))

        with pytest.raises(AppLoadError, match="no such module") as raised:
            stage.hear()
        assert raised.value.trace == "its trace"

    def test_module_that_cannot_be_loaded_any_more_does_not_end_it(
        self, scene: Any, caplog: Any
    ) -> None:
        stage = scene()
        (played,) = stage.open()
        played.channel.send(LoadFailed("no such module", "its trace"))
        stage.hear()

        assert "no such module\nits trace" in caplog.text

    def test_what_processes_say_is_passed_on(self, scene: Any) -> None:
        stage = scene()
        (played,) = stage.open()
        played.channel.send(VisitAt(123))
        played.channel.send(IdleFor(4.5))
        stage.hear()

        assert words(stage, "expect") == [(123,)]
        assert stage.members()[0].idle_s == 4.5

    def test_first_records_of_a_handler_are_told_with_the_next_heartbeat(self, scene: Any) -> None:
        stage = scene(processes=2)
        for process, handler in zip(stage.open() * 2, ("a", "a", "b", "a"), strict=True):
            process.channel.send(FirstRecords(handler))

        stage.hear()

        assert words(stage, "tell_soon") == [(), ()], "once for each handler"

    def test_process_that_hangs_up_is_about_to_end(self, scene: Any) -> None:
        stage = scene()
        (played,) = stage.open()
        assert stage.pool._pause_s() == pools.IDLE_TICK_S
        played.channel.send(IdleFor(4.5))
        played.channel.close()

        stage.hear()

        assert stage.members()[0].idle_s == 4.5
        assert stage.pool._pause_s() == pools.END_TICK_S
        stage.hear()  # nobody listens to it any more

    def test_pool_looks_more_often_while_something_runs(self, scene: Any) -> None:
        stage = scene()
        (played,) = stage.open()
        played.begin(0, [1])
        stage.ear.hold(stage.pool._look_after_all())

        assert stage.pool._pause_s() == pools.TICK_S
        assert stage.pool.busy == 1
        assert stage.pool.samples()["streamq_worker_slots_busy"] == [({}, 1)]

    def test_bell_ends_the_wait_once(self, scene: Any) -> None:
        stage = scene()
        stage.pool._ring()
        begun = time.monotonic()

        stage.pool._read_messages(30)

        assert time.monotonic() - begun < allowed_s(20)
        assert stage.pool._selector.select(0) == []


class TestBurying:
    def test_what_a_dead_one_held_is_released_and_another_is_started(self, scene: Any) -> None:
        stage = scene(processes=2)
        first, _ = stage.open()
        first.begin(1, [1, 2])
        first.channel.send(VisitAt(77))
        first.slot.counters.count(0, 0, counters.DONE, 5)
        first.slot.counters.count(0, 1, counters.RETRIED, 2)
        first.end()

        stage.pool._replace_dead()

        assert words(stage, "release") == [("h1", pools.LAST_CALL, 1)]
        assert words(stage, "expect") == [(77,)], "its last words count"
        assert first.popen.pid not in stage.pool.processes()
        assert stage.pool.samples()["streamq_process_deaths_total"] == [({}, 1)]
        assert len(stage.fill()) == 1, "one that was busy is replaced at once"
        stage.ear.counts["nap", "retried"] += 3
        stage.ear.counts["nap", "failed"] += 9
        assert stage.pool.retried == 5
        done = {
            (at["handler"], at["state"]): n for at, n in stage.pool.samples()["streamq_parts_total"]
        }
        assert done["nap", "done"] == 5

    def test_live_ones_are_left(self, scene: Any) -> None:
        stage = scene(processes=2)
        stage.open()

        stage.pool._replace_dead()

        assert len(stage.members()) == 2

    def test_young_one_that_held_nothing_is_replaced_after_a_pause(self, scene: Any) -> None:
        stage = scene()
        (played,) = stage.open()
        played.end(signal.SIGSEGV)
        stage.pool._replace_dead()

        assert stage.pool._start_at > time.monotonic()
        assert stage.fill() == []

    @pytest.mark.parametrize("how", ["old", "killed", "leaving"])
    def test_others_are_replaced_at_once(self, scene: Any, how: str, caplog: Any) -> None:
        stage = scene()
        (played,) = stage.open()
        (handle,) = stage.members()
        if how == "old":
            handle.began -= pools.SETTLED_S + 1
        elif how == "killed":
            handle.kill("it is not wanted")
        else:
            handle.order("stop")
        played.end()
        stage.pool._replace_dead()

        assert len(stage.fill()) == 1
        deaths = stage.pool.samples()["streamq_process_deaths_total"]
        assert deaths == [({}, int(how != "leaving"))]
        said = (
            "was stopped: it is not wanted" if how == "killed" else "was killed by SIGKILL; it is"
        )
        assert said in caplog.text

    def test_pauses_begin_anew_after_one_that_has_done_something(self, scene: Any) -> None:
        stage = scene()
        for _ in range(2):
            (played,) = stage.open()
            played.end(signal.SIGTERM)
            stage.pool._replace_dead()
            stage.pool._start_at = 0.0
        assert stage.pool._pauses == 2
        (played,) = stage.open()
        stage.members()[0].order("stop")
        played.end()
        stage.pool._replace_dead()
        assert stage.pool._pauses == 2, "it has done nothing"
        (played,) = stage.open()
        played.slot.counters.count(0, 0, counters.DONE)
        stage.members()[0].order("stop")
        played.end()

        stage.pool._replace_dead()

        assert stage.pool._pauses == 0

    def test_three_that_end_by_themselves_before_the_first_is_ready_end_the_pool(
        self, scene: Any
    ) -> None:
        stage = scene(processes=1)
        for number in (signal.SIGSEGV, signal.SIGTERM, 0):
            (played,) = stage.fill()
            played.end(number)
            stage.pool._replace_dead()
            stage.pool._start_at = 0.0
        (played,) = stage.fill()
        played.end(signal.SIGBUS)

        with pytest.raises(AppLoadError, match="tasks:app: its process was killed by SIGBUS"):
            stage.pool._replace_dead()

    def test_pool_that_was_ready_goes_on_whatever_ends(self, scene: Any) -> None:
        stage = scene(processes=1)
        stage.open()[0].end(signal.SIGSEGV)
        stage.pool._replace_dead()
        for _ in range(4):
            stage.pool._start_at = 0.0
            (played,) = stage.fill()
            played.end(signal.SIGSEGV)
            stage.pool._replace_dead()

        assert stage.pool._stillborn == 5

    def test_lease_without_a_part_that_runs_is_released_without_a_charge(self, scene: Any) -> None:
        stage = scene()
        (played,) = stage.open()
        played.begin(0, [1])
        played.slot.end(0, 0)
        played.begin(1, [2], ran_ms=9_000, timeout_ms=500)
        # One look may have been torn; after the second the process is to end, and dies of itself.
        for _ in range(2):
            stage.pool._look_after_all()
        played.end()
        stage.pool._replace_dead()

        assert words(stage, "release") == [
            ("h0", pools.LAST_CALL, None),
            ("h1", pools.LAST_CALL, None),
        ]
        assert words(stage, "timeout") == [("h1", pools.LAST_CALL - 1, 2)]


class TestLooking:
    def test_every_slot_that_has_parts_is_held(self, scene: Any) -> None:
        stage = scene(processes=2)
        first, second = stage.open()
        first.begin(0, [1])
        first.slot.hold(1, "claims", "r")
        second.begin(1, [2, 3])

        holdings = stage.pool._look_after_all()

        assert [(held.pid, held.holder) for held in holdings] == [
            (first.popen.pid, "h0"),
            (second.popen.pid, "h1"),
        ]

    def test_one_that_runs_nothing_keeps_no_other_from_being_looked_at(self, scene: Any) -> None:
        stage = scene()
        (played,) = stage.open()
        played.begin(0, [1, 2], ran_ms=9_000)
        played.slot.end(0, 0)
        played.begin(1, [3, 4], ran_ms=9_000)

        stage.pool._look_after_all()

        assert words(stage, "handback") == [("h1", 1, (4,))]

    def test_pool_that_ends_hands_back_at_once(self, scene: Any) -> None:
        stage = scene(quantum_ms=60_000)
        (played,) = stage.open()
        played.begin(0, [1, 2])
        stage.pool._look_after_all()
        assert words(stage, "handback") == []
        stage.signal(signal.SIGTERM)

        stage.pool._look_after_all()

        assert words(stage, "handback") == [("h0", 1, (2,))]

    def test_last_part_of_a_batch_is_not_struck(self, scene: Any) -> None:
        stage = scene()
        (played,) = stage.open()
        played.begin(0, [1], ran_ms=9_000)

        stage.pool._look_after_all()

        assert (words(stage, "handback"), stage.members()[0].handed_back) == ([], {})

    def test_call_that_came_behind_one_of_the_slot_is_made_again(self, scene: Any) -> None:
        stage = scene()
        (played,) = stage.open()
        played.begin(0, [1, 2, 3], ran_ms=9_000)
        stage.pool._look_after_all()
        stage.pool._look_after_all()
        assert words(stage, "handback") == [("h0", 1, (2, 3))], "until the server has answered"
        stage.ear.came_late()
        stage.pool._look_after_all()
        played.slot.answered(0)  # as a keep is
        stage.ear.came_late()
        stage.pool._look_after_all()
        stage.pool._look_after_all()

        assert words(stage, "handback") == [
            ("h0", 1, (2, 3)),
            ("h0", 2, (2, 3)),
            ("h0", 1_003, (2, 3)),
        ]

    def test_next_batch_may_be_handed_back_too(self, scene: Any) -> None:
        stage = scene()
        (played,) = stage.open()
        for _ in range(2):
            played.begin(0, [1, 2], ran_ms=9_000)
            stage.pool._look_after_all()
            stage.pool._look_after_all()

        assert words(stage, "handback") == [("h0", 1, (2,))] * 2

    @pytest.mark.parametrize(
        ("ran_ms", "is_async", "is_stopped"),
        [(400, False, False), (900, False, True), (1_900, True, False), (3_000, True, True)],
    )
    def test_part_over_its_time_is_stopped_and_a_coroutine_a_while_later(
        self, scene: Any, ran_ms: int, is_async: bool, is_stopped: bool
    ) -> None:
        stage = scene()
        (played,) = stage.open()
        played.begin(0, [1], ran_ms, timeout_ms=700, is_async=is_async)

        # One look may have been torn.
        for _ in range(2):
            stage.pool._look_after_all()

        (handle,) = stage.members()
        assert bool(handle.why_killed) is is_stopped
        assert ("took longer than 0.7 s" in handle.why_killed) is is_stopped

    def test_part_without_a_limit_is_never_stopped(self, scene: Any) -> None:
        stage = scene()
        (played,) = stage.open()
        played.begin(0, [1], 10**9)

        stage.pool._look_after_all()

        assert stage.members()[0].why_killed == ""

    def test_unwanted_lease_is_told_and_stopped_after_its_grace(self, scene: Any) -> None:
        stage = scene(cancel_grace_s=5.0)
        (played,) = stage.open()
        (handle,) = stage.members()
        played.begin(0, [1])
        played.begin(1, [2])
        stage.pool._look_after_all()
        assert not played.slot.is_asked_to_stop(0)
        stage.ear.unwanted = {"h0"}

        stage.pool._look_after_all()

        assert (played.slot.is_asked_to_stop(0), played.slot.is_asked_to_stop(1)) == (True, False)
        assert handle.why_killed == ""
        version, since = handle.asked_to_stop[0]
        handle.asked_to_stop[0] = (version, since - 6)
        stage.pool._look_after_all()
        assert handle.why_killed == "it would not stop part 1 of r0"

    def test_grace_of_one_lease_is_not_that_of_the_next(self, scene: Any) -> None:
        stage = scene(cancel_grace_s=5.0)
        (played,) = stage.open()
        (handle,) = stage.members()
        played.begin(0, [1])
        stage.ear.unwanted = {"h0"}
        stage.pool._look_after_all()
        version, since = handle.asked_to_stop[0]
        handle.asked_to_stop[0] = (version, since - 6)
        played.begin(0, [1])  # another batch
        stage.pool._look_after_all()
        assert handle.why_killed == ""
        stage.ear.unwanted = set()

        stage.pool._look_after_all()

        assert handle.asked_to_stop == {}


class TestLookingAround:
    def test_process_that_has_run_enough_is_replaced(self, scene: Any) -> None:
        stage = scene(max_parts=10)
        (played,) = stage.open()
        played.slot.counters.count(0, 0, counters.DONE, 9)
        stage.look_around()
        assert played.orders() == []
        played.slot.counters.count(0, 0, counters.DONE)

        stage.pool._look_around()
        assert played.orders() == [], "not before it is time"
        stage.look_around()
        stage.look_around()

        assert played.orders() == ["stop"]

    def test_process_that_has_grown_is_replaced_after_its_first_part(self, scene: Any) -> None:
        stage = scene(max_memory=1)
        (played,) = stage.open()
        stage.look_around()
        assert played.orders() == []
        played.slot.counters.count(0, 0, counters.DONE)

        stage.look_around()

        assert played.orders() == ["stop"]

    def test_process_within_its_memory_stays(self, scene: Any) -> None:
        stage = scene(max_memory=2**40)
        (played,) = stage.open()
        played.slot.counters.count(0, 0, counters.DONE)
        stage.look_around()

        assert played.orders() == []

    @pytest.mark.parametrize("is_reloading", [True, False])
    def test_files_that_change_replace_all(
        self, scene: Any, tmp_path: Path, is_reloading: bool
    ) -> None:
        file = tmp_path / "tasks.py"
        file.touch()
        stage = scene(is_reloading=is_reloading, processes=2)
        played = stage.fill()
        for each in played:
            each.channel.send(Ready(["parts nap"], [str(file)]))
        stage.hear()
        stage.look_around()
        assert [each.orders() for each in played] == [[], []]
        os.utime(file, (1, 1))

        stage.look_around()
        stage.look_around()

        assert [each.orders() for each in played] == [["stop"] * is_reloading] * 2

    def test_files_that_come_and_go_have_changed(self, tmp_path: Path) -> None:
        file = tmp_path / "tasks.py"
        watch = FileWatch()
        watch.add([str(file)])
        assert watch.changed() == []

        file.touch()

        assert watch.changed() == [str(file)]
        assert watch.changed() == [], "it was told"
        watch.add([str(file)])
        file.unlink()
        assert watch.changed() == [str(file)]

    def test_pool_ends_when_all_were_idle_for_long_enough(self, scene: Any) -> None:
        stage = scene(processes=2, max_idle_s=3.0)
        assert not stage.pool._is_finished(), "it has no process yet"
        first, second = stage.open()
        first.channel.send(IdleFor(9.0))
        second.channel.send(IdleFor(2.9))
        stage.hear()
        stage.look_around()
        assert stage.pool.unready() == ""
        second.channel.send(IdleFor(3.0))
        stage.hear()
        first.begin(0, [1])
        stage.look_around()
        assert stage.pool.unready() == "", "one holds something"
        first.slot.drop(0)

        stage.look_around()

        assert stage.pool.unready() == "stopping"
        assert stage.pool.stopped_by == 0
        assert first.orders() == ["stop"]

    def test_pool_with_one_that_is_not_ready_does_not_end(self, scene: Any) -> None:
        stage = scene(processes=2, max_idle_s=3.0)
        first, _ = stage.fill()
        first.channel.send(Ready(["parts nap"], []))
        first.channel.send(IdleFor(9.0))
        stage.hear()

        assert not stage.pool._is_finished()

    @pytest.mark.parametrize(
        ("is_burst", "idle_s", "is_empty", "ends"),
        [
            (True, 1.0, True, True),
            (True, 1.0, False, False),
            (True, 0.0, True, False),
            (False, 1.0, True, False),
        ],
    )
    def test_burst_ends_when_nothing_is_left(
        self, scene: Any, is_burst: bool, idle_s: float, is_empty: bool, ends: bool
    ) -> None:
        stage = scene(is_burst=is_burst)
        (played,) = stage.open()
        played.channel.send(IdleFor(idle_s))
        stage.hear()
        stage.ear.is_empty = is_empty

        stage.look_around()

        assert (stage.pool.unready() == "stopping") is ends


class TestStopping:
    def test_term_lets_all_end_within_the_grace(self, scene: Any) -> None:
        stage = scene(processes=2, grace_s=20.0)
        first, second = stage.open()
        stage.signal(signal.SIGTERM)
        stage.signal(signal.SIGTERM)
        assert [first.orders(), second.orders()] == [["stop"], ["stop"]]
        assert stage.pool.stopped_by == signal.SIGTERM
        assert stage.told[1:] == ["STOPPING=1\nSTATUS=told to stop"]

        stage.pool._look_around()
        assert [handle.why_killed for handle in stage.members()] == ["", ""]
        assert first.orders() == ["stop"], "it is told once"
        assert 15 < stage.pool._stop_at - time.monotonic() <= 20
        stage.pool._stop_at = time.monotonic() - 1
        stage.pool._look_around()

        assert {handle.why_killed for handle in stage.members()} == {
            "it did not end within the grace time"
        }
        wait_until(lambda: all(handle.has_ended() for handle in stage.members()))

    def test_one_that_was_just_being_started_is_stopped_at_once(self, scene: Any) -> None:
        stage = scene()
        stage.fill()
        stage.signal(signal.SIGTERM)

        stage.pool._look_around()

        assert stage.members()[0].why_killed == "it was not ready yet"
        assert stage.members()[0].is_leaving

    def test_one_that_came_while_the_pool_was_told_is_told_too(self, scene: Any) -> None:
        stage = scene()
        stage.fill()
        stage.pool._is_stopping = True
        stage.pool._stop_at = time.monotonic() + 60
        (played,) = stage.cast
        played.channel.read_config()

        stage.pool._look_around()

        assert played.orders() == ["stop"]

    def test_second_int_stops_now(self, scene: Any) -> None:
        stage = scene()
        stage.open()
        stage.signal(signal.SIGINT)
        assert (stage.members()[0].why_killed, stage.pool._cold) == ("", 0)
        assert stage.pool.stopped_by == signal.SIGINT

        stage.signal(signal.SIGINT)

        assert stage.members()[0].why_killed == "stopped now"
        assert stage.pool._cold == signal.SIGINT

    def test_quit_stops_now(self, scene: Any) -> None:
        stage = scene()
        stage.open()

        stage.signal(signal.SIGQUIT)

        assert stage.members()[0].why_killed == "stopped now"
        assert (stage.pool.stopped_by, stage.pool._cold) == (signal.SIGQUIT, signal.SIGQUIT)
        assert stage.pool.unready() == "stopping"
        assert stage.told[1:] == ["STOPPING=1\nSTATUS=stopped now"]

    def test_who_stopped_it_first_is_told(self, scene: Any) -> None:
        stage = scene()
        stage.open()
        stage.signal(signal.SIGTERM)
        stage.signal(signal.SIGQUIT)

        assert (stage.pool.stopped_by, stage.pool._cold) == (signal.SIGTERM, signal.SIGQUIT)

    def test_hup_replaces_all(self, scene: Any, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "streamq")
        stage = scene(processes=2)
        played = stage.open()

        stage.signal(signal.SIGHUP)

        assert "HUP: every process is replaced when it has finished what it runs" in caplog.text
        assert [each.orders() for each in played] == [["stop"], ["stop"]]
        assert stage.pool.unready() == ""
        assert len(stage.fill()) == 2

    def test_hup_stops_a_pool_that_is_to_be_stopped_by_it(self, scene: Any) -> None:
        stage = scene(stops_on_hup=True)
        (played,) = stage.open()

        stage.signal(signal.SIGHUP)

        assert (played.orders(), stage.pool.unready()) == (["stop"], "stopping")
        assert stage.pool.stopped_by == signal.SIGHUP

    def test_whoever_stops_it_from_another_thread_is_heard_at_once(self, scene: Any) -> None:
        stage = scene()
        (played,) = stage.open()

        stage.pool.stop()

        stage.pool._read_messages(30)
        stage.pool._obey_signals()
        assert played.orders() == ["stop"]

    def test_usr2_tells_what_runs_and_has_those_that_are_ready_tell_it_too(
        self, scene: Any, caplog: Any
    ) -> None:
        caplog.set_level("INFO")
        stage = scene(processes=1)
        (played,) = stage.open()
        stage.pool._options = PoolOptions(processes=2)
        stage.fill()
        played.begin(0, [4, 5], ran_ms=3_000)

        stage.signal(signal.SIGUSR2)

        assert "slot 0: part 4 of r0 in nap for 3." in caplog.text
        assert "2 in hand" in caplog.text
        first, second = stage.members()
        wait_until(first.has_ended)  # this one ends by it
        assert not second.has_ended(), "it does not know the signal yet"


class TestRun:
    def run(self, stage: Scene, beside: Callable[[], None]) -> int:
        """Run the pool here, as only here signals come, and something beside it."""
        thread = threading.Thread(target=beside)
        thread.start()
        try:
            return stage.pool.run()
        finally:
            thread.join(10)

    def test_until_told_to_stop(self, scene: Any) -> None:
        stage = scene(processes=2)
        before = signal.getsignal(signal.SIGTERM)
        began = stage.pool.ticked_at

        def beside() -> None:
            wait_until(lambda: stage.ear.rounds > 1)
            for played in list(stage.cast):
                played.channel.send(Ready(["parts nap"], []))
            wait_until(lambda: stage.pool.unready() == "")
            os.kill(os.getpid(), signal.SIGTERM)
            for played in list(stage.cast):
                wait_until(lambda played=played: played.orders() == ["stop"])  # type: ignore[misc]
                played.end()

        assert self.run(stage, beside) == 0

        assert signal.getsignal(signal.SIGTERM) is before
        assert stage.ear.words[0] == ("start",)
        assert stage.ear.words[-1] == ("stop",)
        assert stage.pool.processes() == []
        assert stage.pool.stopped_by == signal.SIGTERM
        assert stage.pool.ticked_at > began
        assert stage.pool._bell.fileno() == stage.pool._button.fileno() == -1, "it is closed"
        assert stage.pool._selector.get_map() is None, "it is closed"

    def test_until_stopped_now(self, scene: Any) -> None:
        stage = scene()

        def beside() -> None:
            wait_until(lambda: stage.ear.rounds > 1)
            os.kill(os.getpid(), signal.SIGQUIT)

        assert self.run(stage, beside) == 128 + signal.SIGQUIT
        assert stage.pool.processes() == []

    def test_until_its_work_is_not_wanted(self, scene: Any) -> None:
        stage = scene()

        def beside() -> None:
            wait_until(lambda: stage.ear.rounds > 1)
            stage.cast[0].channel.send(Ready(["parts nap"], []))
            wait_until(lambda: stage.pool.unready() == "")
            stage.pool.end()

        assert self.run(stage, beside) == 0

        assert stage.pool.samples()["streamq_process_deaths_total"] == [({}, 0)]

    def test_what_is_left_when_it_fails_is_killed_and_released(self, scene: Any) -> None:
        stage = scene(processes=2)

        def beside() -> None:
            wait_until(lambda: len(stage.cast) == 2)
            first, second = stage.cast
            first.begin(0, [1, 2])
            second.channel.send(LoadFailed("no such module", ""))

        with pytest.raises(AppLoadError):
            self.run(stage, beside)

        assert words(stage, "release") == [("h0", pools.LAST_CALL, None)]
        assert stage.ear.words[-1] == ("stop",)
        assert [played.popen.returncode for played in stage.cast] == [-signal.SIGKILL] * 2
        assert stage.pool.processes() == []
        stage.pool.end()  # nobody hears it any more

    @pytest.mark.parametrize(
        ("number", "stops_on_hup", "is_heeded"),
        [(signal.SIGINT, False, False), (signal.SIGHUP, True, False), (signal.SIGHUP, False, True)],
    )
    def test_signal_that_is_ignored_stays_so_if_it_would_stop_the_pool(
        self, scene: Any, number: int, stops_on_hup: bool, is_heeded: bool
    ) -> None:
        stage = scene(stops_on_hup=stops_on_hup)
        before = signal.signal(number, signal.SIG_IGN)
        try:
            signals = stage.pool._signals
            signals.install(stops_on_hup=stops_on_hup)
            previous = signals._previous
            assert (signal.getsignal(number) is not signal.SIG_IGN) is is_heeded
            assert (number in previous) is is_heeded
            assert signal.SIGTERM in previous
            signals.restore()
        finally:
            signal.signal(number, before)

    def test_pool_in_another_thread_leaves_signals_alone(self, scene: Any) -> None:
        stage = scene()
        signals = stage.pool._signals
        thread = threading.Thread(target=lambda: signals.install(stops_on_hup=False))
        thread.start()
        thread.join()

        assert signals._previous == {}


@pytest.mark.parametrize(("processes", "tick_s"), [(1, pools.TICK_S), (500, 0.1)])
def test_very_many_slots_are_looked_through_less_often(
    scene: Any, processes: int, tick_s: float
) -> None:
    assert scene(processes=processes).pool._tick_s == tick_s


class TestPaces:
    def test_are_those_of_each_handler_of_a_pool_that_is_ready(self, scene: Any) -> None:
        stage = scene(processes=2)
        assert stage.pool._work.paces() == {}
        first, _ = stage.open()
        first.slot.counters.count(0, 1, counters.RECORDS_DONE, 40)
        first.slot.counters.observe(0, 1, counters.RAN, [0.1])

        paces = stage.pool._work.paces()

        assert list(paces) == ["nap", "shout"]
        assert stage.pool._work.measured()["shout"].records == 40
        slots = stage.config.slots
        assert {(each.slots, each.at_once) for each in paces.values()} == {(slots, 2 * slots)}


def test_slot_that_is_just_changing_is_read_of_a_dead_process_only(scene: Any) -> None:
    stage = scene()
    (played,) = stage.open()
    played.begin(0, [1, 2])
    (handle,) = stage.members()
    played.slot._words[VERSION] += 1

    assert handle.held() == []
    assert [held.numbers for _, held in handle.held(is_dead=True)] == [(1, 2)]
