"""What a keeper says to the server for its pool, and when: real classes, a real server."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from streamq.errors import Damaged, RequestUnknown, ServerBusy, ServerUnreachable
from streamq.model import State
from streamq.protocol.keys import QueueKeys
from streamq.protocol.replies import Beaten, Outcome, Tokens
from streamq.queue import lease_keeper
from streamq.queue.fleet import Running, WorkerDetails
from streamq.queue.lease_keeper import LeaseKeeper, most_between_beats_ms
from streamq.queue.outages import OutageLog, Outages
from streamq.queue.renewals import Holding, Renewals, _renewal_batches
from streamq.queue.rounds import Rounds
from tests.conftest import ONE_KIND
from tests.support.by_hand import RequestByHand
from tests.support.waiting import allowed_s, wait_until
from tests.worker.test_pool import holding, keeper_of

LEASE_MS = 20_000
#: An answer that asks for nothing.
NOTHING = Outcome("ok", Tokens())


@pytest.fixture
def keeper(driver: RequestByHand, url: str) -> Iterator[LeaseKeeper]:
    """Nobody has started it: the test does the rounds."""
    keeper = keeper_of(driver, slots=6, levels=(50,), levels_text="50")
    yield keeper
    if keeper._hasty_protocol:
        keeper._hasty_protocol.connection.close()


def claimed(driver: RequestByHand, parts: int = 3, **changes: Any) -> Holding:
    """What a slot holds that has claimed parts and runs the first of them."""
    driver.load(parts, **changes)
    holder, _ = driver.claim(parts)
    driver.set_meta(out=0)  # whoever was invited has come
    return holding(driver.id, holder)


def details(driver: RequestByHand, keeper: LeaseKeeper) -> WorkerDetails:
    """What the worker says of itself."""
    text = driver.protocol.workers(driver.queue)[keeper.name]
    return msgspec.json.decode(text, type=WorkerDetails)


@ONE_KIND
class TestErrands:
    def test_dead_holder_is_released_charged_counted_and_others_are_invited(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        held = claimed(driver)

        keeper.release(held, 7, 1)
        assert driver.leases(), "it is said by a thread"
        assert keeper._do_errands() is None

        assert driver.leases() == {}
        assert {number: text.split()[1] for number, text in driver.tries().items()} == {1: "1"}
        assert dict(keeper.counts) == {("h", "crashed"): 1}
        assert set(driver.retry()) == {1, 2, 3}
        assert driver.tokens() != []

    def test_holder_that_ran_nothing_is_released_without_a_charge(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        keeper.release(claimed(driver), 7, None)
        keeper._do_errands()

        assert (driver.leases(), driver.tries()) == ({}, {})
        assert +keeper.counts == {}

    def test_parts_that_wait_are_handed_back_and_others_are_invited(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        held = claimed(driver)

        keeper.hand_back(held, 7, (2, 3))
        keeper._do_errands()

        assert (driver.held(held.holder), set(driver.retry())) == ([1], {2, 3})
        assert driver.tokens() != []

    @pytest.mark.parametrize(("number", "late"), [(7, 1), (8, 0)])
    def test_call_that_came_behind_one_of_the_holder_is_told(
        self, keeper: LeaseKeeper, driver: RequestByHand, number: int, late: int
    ) -> None:
        held = claimed(driver)
        driver.keep(held.holder, 1, b"outcomes", call=7)
        told: list[str] = []

        keeper.hand_back(held, number, (2, 3), lambda: told.append("late"))
        keeper._do_errands()

        assert len(told) == late
        assert set(driver.retry()) == (set() if late else {2, 3})

    def test_part_over_its_time_is_failed_with_what_is_known_of_it(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        held = claimed(driver, retries=0, max_failures=10)

        keeper.time_out(msgspec.structs.replace(held, timeout_ms=1_500, attempt=2), 7)
        keeper._do_errands()

        ((number, text),) = driver.failed().items()
        assert number == 1
        assert b"Timeout" in text
        assert b"it took longer than 1.5 s" in text
        assert driver.meta("records_failed") == "1"

    def test_part_over_its_time_that_is_to_run_again_waits_as_long_as_is_said(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        held = claimed(driver)

        keeper.time_out(msgspec.structs.replace(held, retry_ms=60_000), 7)
        keeper._do_errands()

        (at_ms,) = [score for score in driver.retry().values() if score > 1e6]
        assert 50_000 < at_ms - driver.now_ms() <= 60_000

    def test_moment_to_look_again_is_not_slept_over(
        self, keeper: LeaseKeeper, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected: list[int] = []
        monkeypatch.setattr(keeper, "expect", expected.append)
        held = claimed(driver, 1)

        keeper.time_out(msgspec.structs.replace(held, retry_ms=60_000), 7)
        keeper._do_errands()

        (at_ms,) = expected
        assert 50_000 < at_ms - driver.now_ms() <= 60_000

    def test_those_of_a_node_that_is_away_are_kept_in_their_order(
        self, keeper: LeaseKeeper, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver.protocol, "node_of", lambda request_id: request_id[:1])
        said: list[str] = []
        away = {"a1"}

        def say(text: str, request_id: str) -> None:
            def errand() -> Outcome:
                said.append(text)
                if request_id in away:
                    raise ServerUnreachable("it is away")
                return NOTHING

            keeper._send(holding(request_id, "h"), errand)

        for text, request_id in (("1", "a1"), ("2", "b1"), ("3", "a2"), ("4", "a1"), ("5", "b2")):
            say(text, request_id)

        with pytest.raises(ServerUnreachable):
            keeper._do_errands()

        assert said == ["1", "2", "5"], "others of the node would wait as long"
        assert keeper._outages.left_s("a") > 0
        assert keeper._outages.left_s("b") == 0
        said.clear()
        away.clear()
        assert keeper._do_errands() is None
        assert said == ["1", "3", "4"]

    def test_those_of_a_request_keep_their_order_though_it_moves_to_another_node(
        self, keeper: LeaseKeeper, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nodes = iter("ab")
        monkeypatch.setattr(driver.protocol, "node_of", lambda _: next(nodes))
        said: list[int] = []

        def first() -> Outcome:
            said.append(1)
            raise ServerBusy("it moves")

        def second() -> Outcome:
            said.append(2)
            return NOTHING

        held = holding("r", "h")
        keeper._send(held, first)
        keeper._send(held, second)

        with pytest.raises(ServerBusy):
            keeper._do_errands()

        assert said == [1]

    def test_one_that_comes_meanwhile_is_said_at_once(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        held = holding(driver.id, "h")

        def first() -> Outcome:
            keeper._send(held, lambda: NOTHING)
            return NOTHING

        keeper._send(held, first)

        assert keeper._do_errands() == 0.0
        assert keeper._do_errands() is None

    def test_one_that_the_server_refuses_is_dropped(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        keeper.release(holding("nobody", "h"), 1, None)

        assert keeper._do_errands() is None
        assert not keeper._errands

    def test_whether_the_server_is_there_is_asked_after_one_that_found_nobody(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        def refuse() -> Outcome:
            raise ServerUnreachable("it is away")

        keeper._speaking._due[keeper._beat] = time.monotonic() + 60
        keeper._send(holding(driver.id, "h"), refuse)
        with pytest.raises(ServerUnreachable):
            keeper._do_errands()

        assert keeper._speaking._due[keeper._beat] == 0.0
        keeper._beat()
        assert not keeper.is_server_up, "something is still to be said"
        keeper._errands.clear()
        keeper._beat()
        assert keeper.is_server_up

    def test_one_is_said_before_the_next_round_is_due(
        self, keeper: LeaseKeeper, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = claimed(driver)
        monkeypatch.setattr("streamq.queue.rounds.LONGEST_WAIT_S", 600.0)
        hour = {chore: time.monotonic() + 3_600 for chore in keeper._speaking._due}
        keeper._speaking._due |= hour
        keeper._speaking._chores = [(chore, 3_600.0) for chore in hour]
        keeper._speaking.start()

        keeper.release(held, 7, None)

        wait_until(lambda: driver.leases() == {})
        keeper._speaking.end()
        keeper._speaking.join(5)

    def test_lease_is_unwanted_when_the_renewals_say_so(
        self, keeper: LeaseKeeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(keeper._renewals, "is_unwanted", lambda holder: holder == "lost")

        assert (keeper.is_unwanted("lost"), keeper.is_unwanted("held")) == (True, False)

    def test_last_ones_are_said_before_it_leaves(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        held = claimed(driver)
        keeper.announce(["h"])
        keeper.start()
        wait_until(lambda: keeper.name in driver.protocol.workers(driver.queue))

        keeper.release(held, 7, None)
        keeper.stop()

        assert driver.leases() == {}
        assert driver.protocol.workers(driver.queue) == {}
        assert not keeper._speaking._thread.is_alive()
        assert not keeper._sweeping._thread.is_alive()

    def test_it_leaves_quietly_where_the_index_of_workers_is_damaged(
        self,
        keeper: LeaseKeeper,
        driver: RequestByHand,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        raised: list[threading.ExceptHookArgs] = []
        monkeypatch.setattr(threading, "excepthook", raised.append)
        keeper.announce(["h"])
        keeper.start()
        wait_until(lambda: keeper.name in driver.protocol.workers(driver.queue))
        workers = QueueKeys(driver.queue).workers
        driver.redis.delete(workers)
        driver.redis.set(workers, "no index")

        keeper.stop()

        assert raised == []
        assert "left without a word" in caplog.text


@ONE_KIND
class TestBeat:
    def test_it_tells_what_the_worker_is_and_what_runs(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        driver.load(2)
        running = msgspec.structs.replace(
            holding(driver.id, "h1"), since_ms=round(time.monotonic() * 1e3) - 5_000
        )
        ended = msgspec.structs.replace(holding(driver.id, "h2"), running=None)
        keeper.handlers = ["h", "g"]
        keeper._renewals.holdings = [
            msgspec.structs.replace(running, pid=77, progress=40),
            msgspec.structs.replace(ended, pid=78),
        ]

        keeper._beat()

        told = details(driver, keeper)
        assert (told.name, told.pid, told.queue) == (keeper.name, os.getpid(), driver.queue)
        assert (told.handlers, told.slots, told.busy, told.levels) == (["h", "g"], 6, 2, "50")
        assert abs(told.beat_ms - time.time() * 1e3) < 20_000
        assert told.started_ms <= told.beat_ms
        (part,) = told.running
        assert part == Running(
            request=driver.id, part=1, since_ms=part.since_ms, handler="h", pid=77, progress=40
        )
        assert abs(told.beat_ms - 5_000 - part.since_ms) < 1_000

    def test_it_counts_for_three_beats_and_measures_the_way(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        keeper._beat()

        key = next(driver.redis.scan_iter(f"*{{q:{driver.queue}}}:*{keeper.name}*", count=10_000))
        assert 170_000 < driver.redis.pttl(key) <= 180_000
        spread = keeper._renewals.trips.spread()
        assert sum(spread.counts) == 1
        assert 0 < spread.total < 10

    def test_requests_that_it_holds_are_due_when_the_lease_would_be_over(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        held = claimed(driver)
        key = f"sq:{{q:{driver.queue}}}:due"
        driver.redis.zadd(key, {driver.id: 2**50})
        keeper._renewals.holdings = [msgspec.structs.replace(held, pid=pid) for pid in (1, 2)]

        keeper._beat()

        left_ms = driver.redis.zscore(key, driver.id) - driver.now_ms()
        assert LEASE_MS - 10_000 < left_ms <= LEASE_MS

    def test_new_handlers_are_told_at_once_and_the_same_are_not(self, keeper: LeaseKeeper) -> None:
        due = keeper._speaking._due
        due[keeper._beat] = later = time.monotonic() + 60
        keeper.announce([])
        assert due[keeper._beat] == later

        keeper.announce(["h"])

        assert (due[keeper._beat], keeper.handlers) == (0.0, ["h"])

    def test_another_number_of_busy_slots_is_told_a_second_after_the_last_heartbeat(
        self, keeper: LeaseKeeper, driver: RequestByHand
    ) -> None:
        held = claimed(driver)
        due = keeper._speaking._due

        def after(holdings: list[Holding]) -> float:
            """When the next heartbeat is due, in seconds after the last one, which was in time."""
            keeper._beat()
            begun = keeper._told_at
            due[keeper._beat] = begun + 60
            keeper.hold(holdings)
            return round(due[keeper._beat] - begun, 6)

        try:
            assert after([]) == 60, "nothing has changed: an idle pool says no more than before"
            assert after([held]) == pytest.approx(1.0)
            assert after([held]) == 60
            assert after([held, held]) == pytest.approx(1.0)
            keeper._beat()
            assert details(driver, keeper).busy == 2
            assert after([]) == pytest.approx(1.0)
        finally:
            keeper._renewals.stop()

    def test_a_pool_whose_slots_come_and_go_beats_once_a_second(
        self, keeper: LeaseKeeper, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = claimed(driver)
        beats: list[float] = []
        said = keeper._hasty().beat

        def beat(*of: Any) -> Beaten:
            beats.append(time.monotonic())
            return said(*of)

        monkeypatch.setattr(keeper._hasty(), "beat", beat)
        keeper.start()
        try:
            begun = time.monotonic()
            while time.monotonic() - begun < 2.5:
                for holdings in ([held], []):
                    keeper.hold(holdings)
                    time.sleep(0.005)
        finally:
            keeper.stop()

        pauses = [later - earlier for earlier, later in pairwise(beats[:-1])]  # the last says bye
        assert 2 <= len(beats) - 1 <= 4
        assert min(pauses) > 0.95


@ONE_KIND
@pytest.mark.parametrize(("host", "told"), [("h" * 70, "h" * 64), ("", "node")])
def test_host_is_told_as_far_as_there_is_room(
    driver: RequestByHand, url: str, monkeypatch: pytest.MonkeyPatch, host: str, told: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    monkeypatch.setattr("platform.node", lambda: "node")

    keeper = keeper_of(driver)

    assert keeper._details([]).host == told
    assert keeper.name.startswith(told[:10])


@ONE_KIND
class TestLooking:
    @pytest.mark.parametrize(
        ("change", "is_left"),
        [
            ({"state": "open"}, True),
            ({"handler": "g"}, False),
            ({"level": 51}, False),
            ({"paused": 1}, False),
            ({"state": "cancelled"}, False),
            ({"state": "loading"}, True),
        ],
    )
    def test_only_a_request_that_it_could_run_is_left_to_do(
        self, keeper: LeaseKeeper, driver: RequestByHand, change: dict[str, Any], is_left: bool
    ) -> None:
        keeper.handlers = ["h"]
        assert keeper._look_for_work(), "there is no request"
        driver.load(1)
        driver.redis.zadd(f"sq:{{q:{driver.queue}}}:open", {"gone": 1, driver.id: 2})
        driver.set_meta(**change)

        assert keeper._look_for_work() is not is_left

    def test_nobody_looks_before_somebody_asks(self, keeper: LeaseKeeper) -> None:
        keeper._look()
        assert not keeper._is_empty
        assert not keeper.is_nothing_left()

        keeper._look()

        assert keeper.is_nothing_left()

    def test_sweep_comes_when_the_next_request_is_due(
        self, keeper: LeaseKeeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits = iter((400, 5_000, 0))
        monkeypatch.setattr(keeper.janitor, "sweep", lambda: next(waits))

        assert [keeper._sweep() for _ in range(3)] == [0.4, 1.0, 0.01]
        assert keeper.is_server_up

    def test_nothing_is_swept_while_the_server_was_away_just_now(
        self, keeper: LeaseKeeper, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> int:
            raise ServerUnreachable("it is away")

        monkeypatch.setattr(keeper.janitor, "sweep", fail)

        with pytest.raises(ServerUnreachable):
            keeper._sweep()

        left_s = keeper._sweep()
        assert 1 < left_s <= 5

    def test_what_falls_due_is_swept_then(self, keeper: LeaseKeeper, driver: RequestByHand) -> None:
        keeper._sweep()
        driver.load(1)
        due = keeper._sweeping._due
        due[keeper._sweep] = time.monotonic() + 60

        keeper.expect(driver.now_ms() + 10_000)

        assert 8 < due[keeper._sweep] - time.monotonic() < 12

    def test_metrics_tell_how_the_server_answers(self, keeper: LeaseKeeper) -> None:
        keeper._availability.failed("keeper", ServerBusy("not now"))
        keeper._availability.failed("sweeper", ServerBusy("not now"))

        samples = keeper.samples()

        assert samples["streamq_worker_slots"] == [({}, 6)]
        assert samples["streamq_server_up"] == [({}, 0)]
        assert samples["streamq_server_errors_total"] == [({"kind": "ServerBusy"}, 2)]
        keeper._availability.worked("keeper")
        keeper._availability.worked("sweeper")
        assert keeper.samples()["streamq_server_up"] == [({}, 1)]

    @pytest.mark.parametrize(("lease_ms", "reply_s"), [(400, 0.25), (4_000, 1.0), (60_000, 3.0)])
    def test_answers_are_waited_for_for_a_quarter_of_a_lease(
        self,
        driver: RequestByHand,
        url: str,
        lease_ms: int,
        reply_s: float,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        keeper = keeper_of(driver, lease_ms=lease_ms)
        asked: list[float] = []
        hasty = driver.protocol.hasty

        def note(seconds: float) -> Any:
            asked.append(seconds)
            return hasty(seconds)

        monkeypatch.setattr(driver.protocol, "hasty", note)

        assert keeper._hasty() is keeper._hasty()

        assert asked == [reply_s]
        keeper._hasty().connection.close()


class TestRounds:
    def rounds(self, *chores: Callable[[], float | None], every_s: float = 60.0) -> Rounds:
        return Rounds("r", [(chore, every_s) for chore in chores], OutageLog())

    def test_chore_is_done_again_when_it_says_or_when_it_is_due(self) -> None:
        said = iter((5.0, 120.0, None, 0.0))
        rounds = self.rounds(lambda: next(said))

        waits = []
        for _ in range(4):
            waits.append(rounds._round())
            rounds._due = dict.fromkeys(rounds._due, 0.0)

        assert waits == pytest.approx([5.0, 60.0, 60.0, 0.0], abs=2)

    def test_chore_that_is_not_due_is_left(self) -> None:
        done: list[str] = []
        rounds = self.rounds(lambda: done.append("a"), lambda: done.append("b"))
        rounds._round()
        rounds._round()
        assert done == ["a", "b"]

        rounds.want(rounds._chores[1][0])
        rounds._round()

        assert done == ["a", "b", "b"]

    def test_chore_that_is_asked_for_while_it_is_done_is_done_again(self) -> None:
        done: list[int] = []

        def chore() -> None:
            done.append(1)
            if len(done) == 1:
                rounds.hurry(chore)

        rounds = self.rounds(chore)

        assert rounds._round() <= 0
        rounds._round()

        assert done == [1, 1]

    def test_who_is_in_a_hurry_delays_nothing(self) -> None:
        def chore() -> None:
            pass

        rounds = self.rounds(chore)
        rounds._due[chore] = 100.0

        rounds.hurry(chore, 150.0)
        assert (rounds._due[chore], rounds._wake.is_set()) == (100.0, False)
        rounds.hurry(chore, 50.0)
        assert (rounds._due[chore], rounds._wake.is_set()) == (50.0, True)

    def test_thread_sleeps_until_somebody_is_in_a_hurry(self) -> None:
        done: list[float] = []

        def chore() -> None:
            done.append(time.monotonic())

        rounds = self.rounds(chore)
        rounds.start()
        wait_until(lambda: done)
        rounds.hurry(chore)
        wait_until(lambda: len(done) == 2)
        begun = time.process_time()
        time.sleep(0.3)
        rounds.end()
        rounds.join(5)

        assert len(done) == 2
        assert time.process_time() - begun < allowed_s(0.2), "it is not awake all the time"
        assert not rounds._thread.is_alive()

    def test_thread_outlives_whatever_a_chore_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lease_keeper, "SWEEP_EVERY_S", 0.01)
        errors = iter((ServerBusy("a"), KeyError("b"), Damaged("c")))
        ended = threading.Event()

        def chore() -> float:
            for error in errors:
                raise error
            ended.set()
            return 60.0

        rounds = self.rounds(chore, every_s=0.0)
        rounds.start()

        assert ended.wait(10)
        assert rounds._availability.errors == {"ServerBusy": 1}
        rounds.end()
        rounds.join(5)
        assert not rounds._thread.is_alive()

    def test_at_the_end_it_tries_four_times_more_and_leaves(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lease_keeper, "SWEEP_EVERY_S", 0.01)
        tries: list[int] = []
        left: list[int] = []

        def chore() -> None:
            tries.append(1)
            raise ServerUnreachable("it is away")

        rounds = self.rounds(chore)
        rounds.at_the_end(lambda: True, lambda: left.append(len(tries)))
        rounds.end()
        rounds.start()
        rounds.join(10)

        assert left == [4]

    def test_at_the_end_what_is_closed_is_not_used_again(self) -> None:
        tries: list[int] = []

        def chore() -> None:
            tries.append(1)
            raise ValueError("the connection is closed")

        rounds = self.rounds(chore)
        rounds.at_the_end(lambda: True, lambda: tries.append(2))
        rounds.end()
        rounds.start()
        rounds.join(10)

        assert tries == [1, 2]

    def test_without_more_to_do_it_leaves_at_once(self) -> None:
        left: list[int] = []
        rounds = self.rounds(lambda: left.append(0))
        rounds.at_the_end(lambda: False, lambda: left.append(1))
        rounds.end()
        rounds.start()
        rounds.join(10)

        assert left == [1]


class TestWord:
    def test_server_is_up_when_everybody_was_answered(self) -> None:
        word = OutageLog()
        assert not word.is_server_up, "nobody has asked it"
        word.worked("a")
        assert word.is_server_up

        word.failed("a", ServerBusy("no"))
        word.failed("b", ServerUnreachable("no"))
        assert not word.is_server_up
        word.worked("a")
        assert not word.is_server_up
        word.worked("c")
        assert not word.is_server_up
        word.worked("b")

        assert word.is_server_up
        assert word.errors == {"ServerBusy": 1, "ServerUnreachable": 1}

    def test_it_is_said_once_that_the_server_is_waited_for_and_once_that_it_answers(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        word = OutageLog()
        for who in ("a", "b", "a"):
            word.failed(who, ServerBusy("no"))
        for who in ("a", "b", "b"):
            word.worked(who)

        assert [record.message for record in caplog.records] == [
            "waiting for the server: no",
            "the server answers again",
        ]


@ONE_KIND
class TestRenewals:
    @pytest.fixture
    def renewals(self, driver: RequestByHand) -> Iterator[Renewals]:
        renewals = Renewals(
            driver.protocol, lambda: driver.protocol, LEASE_MS, Outages(), OutageLog()
        )
        yield renewals
        renewals.stop()

    def test_leases_are_renewed_often_enough(self, driver: RequestByHand) -> None:
        paces = [
            Renewals(driver.protocol, lambda: driver.protocol, ms, Outages(), OutageLog())._every_s
            for ms in (400, 2_000, 60_000)
        ]
        assert paces == [0.1, 0.5, 1.0]

    def test_what_is_held_is_told_by_request(
        self, renewals: Renewals, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver.protocol, "node_of", lambda _: "")
        ended = msgspec.structs.replace(holding("r1", "h2"), running=None)
        renewals.holdings = [holding("r1", "h1"), ended, holding("r2", "h3")]

        assert renewals._share("") == {"r1": {"h1": 1, "h2": None}, "r2": {"h3": 1}}
        assert renewals._share("another node") == {}

    def test_lost_lease_is_unwanted_until_it_is_seen_to_stand(
        self, renewals: Renewals, driver: RequestByHand
    ) -> None:
        driver.load(2)
        holder, _ = driver.claim()

        failed = renewals._renew("", {driver.id: {holder: 1, "lost": 1}}, set(), "t")

        assert failed == set()
        assert (renewals.is_unwanted(holder), renewals.is_unwanted("lost")) == (False, True)
        assert renewals._availability.is_server_up
        assert sum(renewals.trips.spread().counts) == 1
        renewals._renew("", {driver.id: {holder: 1}}, set(), "t")
        assert not renewals.is_unwanted("lost")

    @pytest.mark.parametrize("is_purged", [False, True])
    def test_every_lease_of_a_request_that_is_over_is_unwanted(
        self, renewals: Renewals, driver: RequestByHand, is_purged: bool
    ) -> None:
        driver.load(2)
        holder, _ = driver.claim()
        driver.protocol.cancel(driver.id)
        if is_purged:
            driver.redis.delete(driver.keys.meta)
            with pytest.raises(RequestUnknown):
                driver.protocol.inspect(driver.id)

        assert renewals._renew("", {driver.id: {holder: 1, "other": None}}, set(), "t") == set()

        assert renewals._unwanted == {"": {holder, "other"}}

    def test_those_that_failed_come_last_and_an_outage_ends_the_round(
        self, renewals: Renewals, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []
        trouble: dict[str, Exception] = {"a": ServerBusy("no"), "c": ServerUnreachable("no")}

        def ask(batch: list[tuple[str, Any]]) -> list[Any]:
            ((request_id, _),) = batch
            asked.append(request_id)
            return [trouble.get(request_id, (State.OPEN, False, {}))]

        monkeypatch.setattr("streamq.queue.renewals.MOST_CALLS", 1)
        monkeypatch.setattr(renewals, "_ask", ask)
        share: dict[str, dict[str, int | None]] = {name: {"h": 1} for name in "abcd"}

        failed = renewals._renew("", share, {"a", "gone"}, "t")

        assert asked == ["b", "c"]
        assert failed == {"a", "c"}
        assert not renewals._availability.is_server_up
        assert renewals._outages.left_s("") > 0
        asked.clear()
        del trouble["c"]
        assert renewals._renew("", share, failed, "t") == {"a"}
        assert asked == ["b", "d", "a", "c"]
        assert renewals._availability.errors == {"ServerUnreachable": 1, "ServerBusy": 1}
        trouble.clear()
        assert renewals._renew("", share, {"a"}, "t") == set()
        assert renewals._availability.is_server_up

    def test_error_of_a_whole_round_trip_is_that_of_each_request_and_counted_once(
        self, renewals: Renewals, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def renew_all(*_: Any) -> Any:
            raise ServerBusy("not now")

        monkeypatch.setattr(driver.protocol, "renew_all", renew_all)
        share: dict[str, dict[str, int | None]] = {name: {"h": 1} for name in "abc"}

        assert renewals._renew("", share, set(), "t") == {"a", "b", "c"}

        assert renewals._availability.errors == {"ServerBusy": 1}
        assert sum(renewals.trips.spread().counts) == 0

    def test_round_trip_has_so_many_holders_and_requests_at_most(
        self, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        monkeypatch.setattr("streamq.queue.renewals.MOST_HOLDERS", 3)
        monkeypatch.setattr("streamq.queue.renewals.MOST_CALLS", 2)
        share: dict[str, dict[str, int | None]] = {
            name: {f"{name}{n}": n for n in range(holders)}
            for name, holders in (("a", 4), ("b", 1), ("c", 1), ("d", 1), ("e", 1))
        }

        found = [
            [(request_id, list(running)) for request_id, running in batch]
            for batch in _renewal_batches(share, share)
        ]

        assert found == [
            [("a", ["a0", "a1", "a2"])],
            [("a", ["a3"]), ("b", ["b0"])],
            [("c", ["c0"]), ("d", ["d0"])],
            [("e", ["e0"])],
        ], kind
        assert list(_renewal_batches({}, [])) == []

    def test_thread_goes_on_after_an_error_and_ends_when_told(
        self, renewals: Renewals, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        renewals._every_s = 0.01
        driver.load(1)
        holder, _ = driver.claim(lease_ms=1_000)
        renew = renewals._renew
        errors = iter((KeyError("something is wrong"),))

        def renew_in_vain(*words: Any) -> set[str]:
            for error in errors:
                raise error
            return renew(*words)

        monkeypatch.setattr(renewals, "_renew", renew_in_vain)
        renewals.hold([holding(driver.id, holder)])
        (thread,) = renewals._threads.values()

        wait_until(lambda: driver.leases()[holder] - driver.now_ms() > 10_000)
        assert thread.daemon
        renewals.stop()
        thread.join(5)
        assert not thread.is_alive()

    def test_thread_without_a_lease_stays_for_a_while(
        self, renewals: Renewals, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver.protocol, "node_of", lambda _: "")
        monkeypatch.setattr("streamq.queue.renewals.LINGER_ROUNDS", 3)
        renewals._every_s = 0.01
        looks: list[bool] = []
        is_left = renewals._is_left

        def look(node: str) -> bool:
            looks.append(is_left(node))
            return looks[-1]

        shares: list[int] = []
        share = renewals._share

        def note(node: str) -> Any:
            found = share(node)
            shares.append(len(found))
            return found

        monkeypatch.setattr(renewals, "_share", note)
        monkeypatch.setattr(renewals, "_is_left", look)
        driver.load(1)
        holder, _ = driver.claim()
        renewals._unwanted[""] = {"h"}
        renewals.hold([holding(driver.id, holder)])
        (thread,) = renewals._threads.values()
        wait_until(lambda: 1 in shares)
        renewals.hold([])
        thread.join(5)

        assert looks == [True]
        assert shares[-6:] == [1, 0, 0, 0, 0, 0], "three rounds, one more, and a last look"
        assert (renewals._threads, renewals._unwanted) == ({}, {})

    def test_node_has_one_thread_however_often_it_is_told(
        self, renewals: Renewals, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver.protocol, "node_of", lambda _: "")
        for _ in range(3):
            renewals.hold([holding(driver.id, "h"), holding("other", "h")])

        assert len(renewals._threads) == 1
        assert len(renewals.holdings) == 2
        assert not renewals._is_left("")
        assert len(renewals._threads) == 1


@pytest.mark.parametrize(
    ("lease_ms", "beat_ms"), [(1_000, 250), (8_000, 2_000), (20_000, 4_000), (3_600_000, 6_500)]
)
def test_pool_is_heard_twice_in_the_grace_of_its_leases(lease_ms: int, beat_ms: int) -> None:
    assert most_between_beats_ms(lease_ms) == beat_ms
