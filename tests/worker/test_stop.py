"""How a pool ends: signals, the grace time, its parent's death."""

import os
import signal
import time
from typing import Any

import pytest

from streamq import Protocol
from streamq.protocol.keys import RequestKeys
from tests.conftest import ANY_KIND
from tests.support.fleet import Fleet
from tests.support.waiting import allowed_s, is_alive, wait_until
from tests.worker.common import stop

pytestmark = pytest.mark.commands


class TestStop:
    @ANY_KIND
    def test_term_while_processes_start_does_not_wait_for_the_grace(self, fleet: Fleet) -> None:
        pool = fleet.start("-p", "6", "--grace", "20s")
        wait_until(lambda: pool.poll() is None and fleet.children(pool))

        begun = time.monotonic()

        assert stop(pool) == 0
        assert time.monotonic() - begun < allowed_s(10)

    def test_idle_one_ends_at_once(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready("-p", "2", "-c", "2")
        assert submit([0.0] * 5, "nap").wait(10).parts.done == 5
        begun = time.monotonic()

        assert stop(pool) == 0

        # It was waiting for a token, for ten seconds if nobody ended that.
        assert time.monotonic() - begun < allowed_s(5)

    @ANY_KIND
    def test_flood_of_signals_does_no_harm(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready("-p", "2")

        for _ in range(200):
            pool.send_signal(signal.SIGUSR2)
            pool.send_signal(signal.SIGHUP)

        assert submit([0.0] * 5, "nap").wait(30).parts.done == 5
        assert stop(pool) == 0

    def test_term_finishes_what_runs_and_exits_0(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready("-p", "2", "-c", "2")
        request = submit([0.5] * 8, "nap")
        wait_until(lambda: len(fleet.notes("S")) == 4)

        code = stop(pool)

        assert code == 0
        assert len(fleet.notes("E")) == 4
        status = request.status()
        assert (status.parts.done, status.parts.running) == (4, 0)
        fleet.ready("-c", "4")
        assert request.wait(5).parts.done == 8, "no lease had to expire first"

    @ANY_KIND
    def test_what_does_not_end_in_the_grace_time_is_handed_back_unharmed(
        self, fleet: Fleet, submit: Any, protocol: Protocol
    ) -> None:
        pool = fleet.ready("--grace", "300ms")
        request = submit([1.2], "nap", retries=0)
        wait_until(lambda: fleet.notes("S"))

        assert stop(pool) == 0

        assert request.status().parts.failed == 0
        tries = protocol.connection.redis.hgetall(RequestKeys(request.id).tries)
        assert tries == {}, "it is charged with no crash, and need not run alone"
        fleet.ready()
        assert request.wait(8).parts.done == 1, "no lease had to expire first"

    @ANY_KIND
    def test_signal_does_not_wait_for_the_next_look(self, fleet: Fleet) -> None:
        seldom = (
            "from streamq import cli; from streamq.worker import pool; "
            "pool.IDLE_TICK_S = 600; cli.main()"
        )
        pool = fleet.ready(program=("-c", seldom))
        for pid in fleet.children(pool):
            os.kill(pid, signal.SIGSTOP)  # else each of its words makes the pool look

        assert stop(pool, signal.SIGQUIT) == 131

    @ANY_KIND
    def test_second_int_stops_now_and_hands_back(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready()
        request = submit([30.0, 0.0], "nap", retries=0, limit=1)
        wait_until(lambda: fleet.notes("S"))
        pool.send_signal(signal.SIGINT)
        wait_until(lambda: "again to stop now" in fleet.errors(pool))

        assert stop(pool, signal.SIGINT) == 130

        status = request.status()
        assert (status.parts.running, status.parts.failed) == (0, 0)

    @ANY_KIND
    def test_processes_end_with_their_parent(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready("-p", "3")
        children = fleet.children(pool)
        submit([30.0], "nap")
        wait_until(lambda: fleet.notes("S"))

        pool.kill()

        wait_until(lambda: not any(is_alive(pid) for pid in children))
