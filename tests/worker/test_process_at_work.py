"""One process of a pool, in a thread of the test: what it takes, runs, tells and gives back."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from streamq import App, Client, Context, Protocol, Retry
from streamq.model import MAX_PART
from streamq.queue.pace import MOST_PARTS, Pace
from streamq.worker.channel import (
    Channel,
    Command,
    CommandWord,
    FirstRecords,
    IdleFor,
    Message,
    ProcessConfig,
    VisitAt,
)
from streamq.worker.process import WorkerProcess
from streamq.worker.slot_table import SlotTable
from tests.conftest import ONE_KIND
from tests.support.by_hand import RequestByHand
from tests.support.waiting import wait_until
from tests.worker.common import keep_alive, put_away

QUANTUM_MS = 100


class TestPace:
    def test_asks_for_one_while_nothing_is_known(self) -> None:
        pace = Pace(0.25)
        assert pace.most() == 1
        pace.observe(0, 5.0)
        assert pace.most() == 1

    def test_asks_for_what_takes_a_quantum_or_so_long(self) -> None:
        pace = Pace(0.25)
        pace.observe(10, 0.5)
        assert (pace.most(), pace.most(1.0), pace.most(0.001)) == (5, 20, 1)

    def test_asks_for_no_more_than_a_slot_can_hold(self) -> None:
        pace = Pace(0.25)
        pace.observe(10, 0.0)
        assert pace.most() == MOST_PARTS

    def test_believes_at_once_that_it_slows_down_and_by_degrees_that_it_speeds_up(self) -> None:
        pace = Pace(1.0)
        pace.observe(1, 0.1)
        pace.observe(10, 0.1)
        assert pace.most() == 40
        pace.observe(1, 0.5)
        assert pace.most() == 2


class Line(Channel):
    """A process's end of its line. When it is cut, threads that use it rest until the tests end.

    The process would end then, and here it is the test's.
    """

    def send(self, message: Any) -> bool:
        return super().send(message) or threading.Event().wait()

    def messages(self) -> Iterator[Message]:
        yield from super().messages()
        threading.Event().wait()


class Shop:
    """A process at work, and the other end of its line."""

    def __init__(self, url: str, queue: str, app: App, slots: int) -> None:
        config = ProcessConfig(
            url=url,
            prefix="sq",
            queue=queue,
            target="",
            slots=slots,
            levels=tuple(range(100)),
            quantum_ms=QUANTUM_MS,
            lease_ms=20_000,
            max_result=MAX_PART,
            log_level="info",
            log_format="text",
        )
        ours, theirs = socket.socketpair()
        self.table, _ = SlotTable.create(slots)
        self.slots = slots
        self.channel, self._line = Channel(ours), Line(theirs)
        self.process = WorkerProcess(config, app, self.table, self._line)
        keep_alive(self.process)
        self.heard: list[Any] = []
        self._thread = threading.Thread(target=self.process.run)
        self._thread.start()

    def said(self, kind: type) -> list[Any]:
        """Words of a kind that the process has said."""
        words, _ = self.channel.ready_messages()
        self.heard += words
        return [word for word in self.heard if isinstance(word, kind)]

    def tell(self, word: CommandWord) -> None:
        """Give the process an order."""
        self.channel.send(Command(word))

    def is_over(self) -> bool:
        """Whether the process has come to its end."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Let it end."""
        self.tell("stop")
        self._thread.join(20)

    def put_away(self) -> None:
        """Let it end, and close what it has open."""
        self.close()
        put_away(self.process)
        self.channel.close()
        self._line.close()


def lists(protocol: Protocol, queue: str) -> list[bytes]:
    """Lists of the queue that have tokens."""
    return list(protocol.connection.redis.scan_iter(f"*{{q:{queue}}}:tokens:*", count=10_000))


class Ledger:
    """What handlers noted, and a gate that some of them wait at."""

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.gate = threading.Event()


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    ledger.gate.set()


@pytest.fixture
def app(ledger: Ledger) -> App:
    app = App()

    @app.map
    def note(payload: str, context: Context) -> str:
        ledger.ran.append((context.request, context.part))
        time.sleep(float(payload))
        return f"{context.part} {context.attempt}"

    @app.map
    def wait(_: str, context: Context) -> str:
        ledger.ran.append((context.request, context.part))
        ledger.gate.wait(20)
        return "waited"

    @app.map(retries=2)
    def stumble(payload: str, context: Context) -> str:
        ledger.ran.append(context.attempt)
        if context.attempt < 3:
            raise Retry("not yet", after=payload)
        return f"after {context.attempt}"

    @app.map
    def listening(_: str, context: Context) -> str:
        context.progress(40)
        ledger.ran.append("listens")
        while not context.should_stop():
            time.sleep(0.005)
        return "heard"

    _add_coroutines(app, ledger)
    return app


def _add_coroutines(app: App, ledger: Ledger) -> None:
    @app.map
    async def later(payload: str, context: Context) -> str:
        ledger.ran.append((context.request, context.part))
        await asyncio.sleep(float(payload))
        return f"{context.part} later"

    @app.map
    async def endless(_: str) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def shop(url: str, queue: str, app: App) -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def open_shop(slots: int = 2) -> Shop:
        made.append(Shop(url, queue, app, slots))
        return made[-1]

    yield open_shop
    for each in made:
        each.put_away()


@pytest.fixture
def submit(client: Client, queue: str) -> Callable[..., Any]:
    def submit(handler: str, payloads: list[str], **options: Any) -> Any:
        return client.submit(payloads, handler=handler, queue=queue, **options)

    return submit


@ONE_KIND
class TestRunning:
    @pytest.mark.parametrize("slots", [1, 3])
    def test_every_part_once_whatever_the_slots(
        self, shop: Any, submit: Any, ledger: Ledger, slots: int
    ) -> None:
        request = submit("note", ["0"] * 40, limit=3)
        shop(slots)

        assert request.wait(20).parts.done == 40
        assert sorted(part for _, part in ledger.ran) == list(range(1, 41))
        assert dict(request.results()) == {n: f"{n} 1" for n in range(1, 41)}

    def test_coroutines_too(self, shop: Any, submit: Any, ledger: Ledger) -> None:
        request = submit("later", ["0.01"] * 10, limit=4)
        shop(4)

        assert request.wait(20).parts.done == 10
        assert sorted(part for _, part in ledger.ran) == list(range(1, 11))

    def test_what_is_to_be_run_again_is_with_its_attempt(
        self, shop: Any, submit: Any, ledger: Ledger
    ) -> None:
        request = submit("stumble", ["0s"])
        shop()

        assert request.wait(20).parts.done == 1
        assert ledger.ran == [1, 2, 3]
        assert dict(request.results()) == {1: "after 3"}

    def test_what_falls_due_later_is_told_to_the_pool(
        self, shop: Any, submit: Any, ledger: Ledger
    ) -> None:
        request = submit("stumble", ["60s"])
        opened = shop()
        wait_until(lambda: ledger.ran)

        look = wait_until(lambda: opened.said(VisitAt))[-1]

        assert 50_000 < look.at_ms - time.time() * 1e3 < 61_000
        assert request.status().state.is_live

    def test_first_records_of_a_handler_are_told_to_the_pool_once(
        self, shop: Any, submit: Any
    ) -> None:
        opened = shop()
        for _ in range(3):
            submit("note", ["1", "2"]).wait(20)

        assert [word.handler for word in opened.said(FirstRecords)] == ["note"]

    def test_coroutine_over_its_time_is_stopped_and_fails(self, shop: Any, submit: Any) -> None:
        request = submit("endless", [""], timeout="0.2s", retries=0)
        shop()

        assert request.wait(20).parts.failed == 1
        assert [failure.error for failure in request.errors()] == ["Timeout"]

    def test_nothing_is_held_and_no_slot_is_taken_after_it(self, shop: Any, submit: Any) -> None:
        request = submit("note", ["0"] * 5)
        opened = shop()
        request.wait(20)

        wait_until(lambda: all(opened.table.read(slot) is None for slot in range(opened.slots)))
        assert request._protocol.inspect(request.id).count("leases") == 0

    def test_the_pool_can_see_what_runs_and_how_far_it_is(
        self, shop: Any, submit: Any, ledger: Ledger
    ) -> None:
        request = submit("listening", [""])
        opened = shop(1)
        wait_until(lambda: ledger.ran)

        held = wait_until(lambda: opened.table.read(0))

        assert (held.request_id, held.running, held.handler) == (request.id, 1, "listening")
        opened.table.ask_to_stop(0, held)
        assert request.wait(20).parts.done == 1


@ONE_KIND
class TestTurns:
    def test_requests_of_a_level_take_turns(self, shop: Any, submit: Any, ledger: Ledger) -> None:
        first, second = (submit("note", ["0.02"] * 30, limit=1) for _ in range(2))
        shop(1)
        first.wait(20)
        second.wait(20)

        order = [request for request, _ in ledger.ran]
        changes = sum(a != b for a, b in pairwise(order))
        # A quantum has five of them, so each has six turns; some are shorter at the beginning.
        assert 6 <= changes <= 30

    def test_better_level_comes_with_the_next_turn(
        self, shop: Any, submit: Any, ledger: Ledger
    ) -> None:
        crowd = submit("note", ["0.02"] * 100, level=60, limit=1)
        shop(1)
        wait_until(lambda: len(ledger.ran) > 5)
        begun = len(ledger.ran)
        better = submit("note", ["0"], level=10)
        better.wait(20)

        place = [request for request, _ in ledger.ran].index(better.id)
        assert place - begun < 20
        crowd.cancel()

    def test_token_of_a_request_that_has_just_ended_is_dropped(
        self, shop: Any, submit: Any, protocol: Protocol, queue: str
    ) -> None:
        request = submit("note", ["0"])
        [key] = lists(protocol, queue)
        shop()
        request.wait(20)
        protocol.connection.redis.lpush(key, *[request.id] * 3)
        other = submit("note", ["0"])

        assert other.wait(20).parts.done == 1
        wait_until(lambda: lists(protocol, queue) == [])

    def test_token_of_nothing_is_dropped(
        self, shop: Any, submit: Any, protocol: Protocol, queue: str
    ) -> None:
        request = submit("note", ["0"])
        [key] = lists(protocol, queue)
        protocol.connection.redis.rpush(key, "nobody", "nobody")
        shop()

        assert request.wait(20).parts.done == 1
        wait_until(lambda: lists(protocol, queue) == [])


@ONE_KIND
class TestSuspect:
    def test_part_that_found_no_room_comes_again_without_a_janitor(
        self, shop: Any, submit: Any, ledger: Ledger, protocol: Protocol, queue: str
    ) -> None:
        busy = submit("wait", [""])
        opened = shop(2)
        wait_until(lambda: ledger.ran)
        # Nobody is told of it before its part is one that is to run alone.
        suspect = submit("note", ["0"], delay="1h")
        driver = RequestByHand(protocol, queue, suspect.id)
        driver.set_meta(hold_ms=1)
        holder, _ = driver.claim(handlers=["map note"])
        driver.redis.hset(driver.keys.tries, "1", "0 1 1 0 0")
        protocol.push(queue, suspect.id, driver.release(holder).tokens)
        wait_until(lambda: opened.process._taker._ended.get(suspect.id))
        wait_until(lambda: lists(protocol, queue) == [])

        ledger.gate.set()

        assert busy.wait(20).parts.done == 1
        assert suspect.wait(4).parts.done == 1
        assert ledger.ran == [(busy.id, 1), (suspect.id, 1)]


@ONE_KIND
class TestOrders:
    def test_told_to_stop_it_ends_what_runs_and_hands_back_the_rest(
        self, shop: Any, submit: Any, ledger: Ledger
    ) -> None:
        request = submit("wait", [""] * 3, limit=1)
        opened = shop(1)
        wait_until(lambda: ledger.ran)
        opened.tell("stop")
        wait_until(lambda: opened.process._is_stopping)
        assert not opened.is_over()
        ledger.gate.set()
        wait_until(opened.is_over, 20)

        status = request.status()
        assert (status.parts.done, status.parts.waiting + status.parts.retry) == (1, 2)
        assert request._protocol.inspect(request.id).count("leases") == 0

    def test_told_to_be_quiet_it_takes_nothing_until_told_otherwise(
        self, shop: Any, submit: Any, ledger: Ledger
    ) -> None:
        opened = shop(1)
        opened.tell("quiet")
        wait_until(lambda: opened.process._is_quiet)
        # It may be waiting for a token at this moment, and says so when none came.
        heard = len(opened.said(IdleFor))
        wait_until(lambda: len(opened.said(IdleFor)) > heard + 1, 10)
        request = submit("note", ["0"])
        heard = len(opened.said(IdleFor))
        wait_until(lambda: len(opened.said(IdleFor)) > heard + 1, 10)

        assert ledger.ran == []
        opened.tell("go")
        assert request.wait(20).parts.done == 1

    def test_says_how_long_it_is_idle(self, shop: Any, submit: Any, ledger: Ledger) -> None:
        opened = shop(1)
        idle = wait_until(lambda: [word for word in opened.said(IdleFor) if word.idle_s > 0.5], 10)
        assert idle[-1].idle_s < 10
        request = submit("note", ["0"])
        request.wait(20)
        opened.close()

        assert opened.said(IdleFor)[-1].idle_s < idle[-1].idle_s + 5
