"""The worker pool through its command: real processes, real servers."""

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from streamq import Client, Protocol, Request
from streamq.driver.connection import Connection
from streamq.driver.lanes import Lane
from streamq.model import Policy, State
from streamq.protocol.keys import RequestKeys
from streamq.protocol.lua import digest
from streamq.servers.local import LocalServer
from tests.conftest import ANY_KIND, KINDS, ONE_KIND
from tests.support.fleet import APPS, Fleet, most_at_once
from tests.support.waiting import is_alive, wait_until

pytestmark = pytest.mark.commands
#: Where the server matters little; but routing to nodes must do what one server does.
TWO_KINDS = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "redis"], indirect=True
)


@pytest.fixture
def submit(client: Client, queue: str) -> Any:
    """Submit to the test's own queue."""

    def submit(payloads: Any, handler: str, **options: Any) -> Request:
        return client.submit(payloads, handler=handler, queue=queue, **options)

    return submit


def values(request: Request) -> list[Any]:
    """Results in input order."""
    return [result for _, result in request.results(timeout=20)]


def stop(pool: "subprocess.Popen[bytes]", number: int = signal.SIGTERM) -> int:
    pool.send_signal(number)
    return pool.wait(15)


class TestHandlers:
    def test_every_kind_of_handler_gets_its_records_and_gives_results(
        self, fleet: Fleet, submit: Any
    ) -> None:
        fleet.ready("-p", "2", "-c", "4")

        shouted = submit(["a", "b"], "shout")
        echoed = submit([b"\0\xff", b""], "echo")
        summed = submit([[{"item": "a", "count": 2}, {"item": "b", "count": 3}]], "total")
        priced = submit([{"item": "a", "count": 2}], "priced")
        doubled = submit(range(50), "doubled", limit=20)

        assert values(shouted) == ["A", "B"]
        assert values(echoed) == [b"\0\xff", b""]
        assert values(summed) == [5]
        assert values(priced) == [{"a": 6}]
        assert values(doubled) == [2 * n for n in range(50)]

    @ANY_KIND
    def test_handler_without_annotation_gets_values_as_submitted(
        self, fleet: Fleet, submit: Any
    ) -> None:
        fleet.ready()

        request = submit([b"raw", "text", 7, {"a": 1}], "as_given")

        assert values(request) == [
            ["bytes", "raw"],
            ["str", "text"],
            ["int", 7],
            ["dict", {"a": 1}],
        ]

    @ANY_KIND
    def test_record_that_does_not_decode_fails_at_once_with_its_place(
        self, fleet: Fleet, submit: Any
    ) -> None:
        fleet.ready()

        request = submit([{"item": "a", "count": 1}, {"item": "a"}], "priced")

        request.wait(10)
        (failure,) = request.errors()
        assert (failure.part, failure.record, failure.attempts) == (2, 1, 1)
        assert "count" in failure.message

    @TWO_KINDS
    def test_retry_snooze_hold_and_abandon(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("-c", "2")

        retried = submit(["retry"], "tells")
        snoozed = submit(["snooze"], "tells")
        held = submit(["hold", "fine", "fine", "fine"], "tells", limit=1)
        abandoned = submit(["abandon"], "tells")

        assert values(retried) == [2]
        assert values(snoozed) == [1], "a snooze spends no attempt"
        assert values(held) == [1, 1, 1, 1]
        starts = [note.time for note in fleet.notes("S", held.id)]
        assert starts[1] - starts[0] > 0.25, "nothing of the request started meanwhile"
        abandoned.wait(10)
        assert [failure.error for failure in abandoned.errors()] == ["Abandon"]

    @ANY_KIND
    def test_short_delays_are_short(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready(audit_ms=5_000)
        submit(["fine"], "tells").wait(10)

        begun = time.monotonic()
        submit(["retry"], "tells").wait(10)
        submit(["snooze"], "tells").wait(10)
        submit(["fails"], "fails", backoff="50ms").wait(10)

        assert time.monotonic() - begun < 3, "nobody slept over what was due"

    @ONE_KIND
    @pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.1])
    def test_woken_before_its_request_is_there_a_worker_runs_it_all_the_same(
        self, fleet: Fleet, client: Client, submit: Any, pause_s: float
    ) -> None:
        fleet.ready(audit_ms=60_000)
        submit([0.0], "nap").wait(10)
        protocol, policy = client._protocol, Policy(handler="nap", queue=fleet.queue)

        def content() -> tuple[str, list[bytes]]:
            time.sleep(pause_s)
            return "", [b"0.0", b"1j"]

        waits = []
        for number in range(20):
            protocol.submit(f"{fleet.queue}-{number}", policy, content, is_soon=True)
            begun = time.monotonic()
            client.get(f"{fleet.queue}-{number}").wait(10)
            waits.append(time.monotonic() - begun)
        assert statistics.median(waits) < 0.1, f"nobody waited for an audit: {sorted(waits)}"

    @ONE_KIND
    def test_small_request_for_a_server_without_scripts_waits_for_no_audit(
        self, fleet: Fleet, client: Client, submit: Any, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fleet.ready(audit_ms=60_000)
        submit([0.0], "nap").wait(10)
        connection, owner = client._protocol.connection, Connection(url)
        load = connection.load_script

        def load_slowly(*words: Any, **options: Any) -> None:
            time.sleep(0.05)
            load(*words, **options)

        monkeypatch.setattr(connection, "load_script", load_slowly)
        for _ in range(3):
            owner.redis.script_flush()
            begun = time.monotonic()
            submit([0.0], "nap").wait(10)
            assert time.monotonic() - begun < 0.6
        owner.close()

    @ONE_KIND
    def test_small_request_that_is_held_up_on_its_way_waits_for_no_audit(
        self, fleet: Fleet, submit: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fleet.ready(audit_ms=60_000)
        submit([0.0], "nap").wait(10)
        send = Lane.send

        def hold_up(lane: Lane, packed: list[bytes]) -> None:
            if any(digest("submit").encode() in piece for piece in packed):
                time.sleep(0.1)
            send(lane, packed)

        monkeypatch.setattr(Lane, "send", hold_up)
        waits = []
        for _ in range(10):
            request = submit([0.0], "nap")
            begun = time.monotonic()
            request.wait(10)
            waits.append(time.monotonic() - begun)

        print("waits", sorted(waits))
        assert sorted(waits)[-2] < 0.1

    @ANY_KIND
    def test_error_is_retried_with_backoff_then_given_up_with_its_traceback(
        self, fleet: Fleet, submit: Any
    ) -> None:
        pool = fleet.ready()

        request = submit(["no such luck"], "fails", backoff="20ms")

        assert request.wait(10).state is State.DONE
        (failure,) = request.errors()
        assert (failure.error, failure.message, failure.attempts) == (
            "ValueError",
            "no such luck",
            3,
        )
        assert len(fleet.notes("S")) == 3
        assert "tasks.py" in failure.traceback
        assert "runner.py" not in failure.traceback
        assert "ValueError: no such luck" in fleet.errors(pool)


class TestBadHandlers:
    @ANY_KIND
    @pytest.mark.parametrize(
        ("what", "error"),
        [
            ("exit", "RuntimeError"),
            ("unencodable", "EncodeError"),
            ("large", "ResultTooLarge"),
            ("die", "Poison"),
            ("killed", "Poison"),
            ("leaves", "Poison"),
            ("half", "EncodeError"),
            ("unspeakable", "Unspeakable"),
            ("garbled", "ValueError"),
            ("cancelled", "RuntimeError"),
        ],
    )
    def test_part_is_accounted_for_and_the_pool_survives(
        self, fleet: Fleet, submit: Any, what: str, error: str
    ) -> None:
        pool = fleet.ready()

        request = submit([what, "fine"], "odd")

        assert request.wait(20).parts.failed == 1
        assert [failure.error for failure in request.errors()] == [error]
        assert values(request) == ["fine"]
        assert pool.poll() is None

    @ANY_KIND
    @pytest.mark.parametrize("what", ["close_stdin", "print"])
    def test_part_succeeds_all_the_same(self, fleet: Fleet, submit: Any, what: str) -> None:
        fleet.ready()

        request = submit([what, "fine"], "odd")

        assert request.wait(10).parts.done == 2

    @ANY_KIND
    def test_handler_that_forks_makes_no_second_worker(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready()

        request = submit(["fork", "fine"], "odd")

        assert request.wait(10).parts.done == 2
        assert values(request) == ["parent", "fine"]
        wait_until(lambda: fleet.notes("F"))
        forked = fleet.notes("F")[0].pid
        wait_until(lambda: not is_alive(forked))
        assert len(fleet.children(pool)) == 1

    @ANY_KIND
    def test_coroutine_cannot_end_its_loop(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready("-c", "4")
        before = fleet.children(pool)

        request = submit(["exit", "cancel", "fine"], "odd_async")

        assert request.wait(20).parts.failed == 2
        assert values(request) == ["fine"]
        assert fleet.children(pool) == before

    @ANY_KIND
    def test_process_without_its_loop_is_replaced(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("-c", "4")

        request = submit(["exit beside", "fine"], "odd_async")

        assert request.wait(20).parts.failed == 1
        assert [failure.error for failure in request.errors()] == ["Poison"]
        assert values(request) == ["fine"]

    @ANY_KIND
    def test_coroutine_that_forks_makes_no_second_worker(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("-c", "4")

        request = submit(["fork"] * 8 + ["fine"], "odd_async")

        assert request.wait(20).parts.done == 9
        assert values(request) == ["parent"] * 8 + ["fine"]

    @ANY_KIND
    def test_part_is_failed_though_nothing_can_be_logged(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready()

        request = submit(["close_stderr", "exit", "fine"], "odd", limit=1)

        assert request.wait(20).parts.failed == 1
        assert values(request) == ["closed", "fine"]

    @ANY_KIND
    def test_results_that_take_long_to_send_leak_no_lease(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("--lease", "60s")

        request = submit([3_000_000] * 30, "big", limit=1)

        assert request.wait(40).parts.done == 30

    @ANY_KIND
    def test_programs_of_handlers_can_be_stopped(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready()

        (took,) = values(submit([1], "stops_a_program"))

        assert took < 2

    @ANY_KIND
    def test_id_used_again_for_another_handler_runs_that(
        self, fleet: Fleet, submit: Any, request_id: str
    ) -> None:
        fleet.ready()
        first = submit(["aB"], "shout", id=request_id)
        assert values(first) == ["AB"]
        first.purge()

        again = submit(["aB"], "low", id=request_id)

        assert values(again) == ["ab"]


class TestTime:
    @ANY_KIND
    def test_sync_part_over_its_time_is_stopped_and_its_neighbours_lose_no_attempt(
        self, fleet: Fleet, submit: Any
    ) -> None:
        fleet.ready("-c", "3")
        beside = submit([1.0, 1.0], "nap", retries=0)
        wait_until(lambda: len(fleet.notes("S", beside.id)) == 2)

        request = submit([9.0], "overdue", backoff="10ms")

        assert request.wait(20).parts.failed == 1
        assert [(each.error, each.attempts) for each in request.errors()] == [("Timeout", 2)]
        assert len(fleet.notes("S", request.id)) == 2, "it was tried again once"
        assert beside.wait(20).parts.done == 2

    @ANY_KIND
    def test_coroutine_over_its_time_is_cancelled_alone(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready("-c", "3")
        before = fleet.children(pool)

        request = submit([9.0, 0.0], "overdue_async", backoff="10ms")

        assert request.wait(20).parts.failed == 1
        assert [failure.error for failure in request.errors()] == ["Timeout"]
        assert fleet.children(pool) == before

    @TWO_KINDS
    @pytest.mark.parametrize("handler", ["nap", "holds_gil"])
    def test_part_longer_than_its_lease_runs_once(
        self, fleet: Fleet, submit: Any, handler: str
    ) -> None:
        fleet.ready("--lease", "1s")
        fleet.ready("--lease", "1s")

        request = submit([2.5], handler)

        assert request.wait(20).parts.done == 1
        assert len(fleet.notes("S")) == 1

    @ANY_KIND
    def test_parts_behind_one_that_turns_slow_are_handed_to_others(
        self, fleet: Fleet, submit: Any
    ) -> None:
        fleet.ready("-p", "2")

        request = submit([0.0] * 300 + [3.0] + [0.0] * 100, "nap", limit=2)

        wait_until(lambda: len(fleet.notes("S")) == 401, 10)
        slow = next(note for note in fleet.notes("S") if note.part == 301)
        assert max(note.time for note in fleet.notes("S")) < slow.time + 2.0
        assert request.wait(10).parts.done == 401
        assert len(fleet.notes("S")) == 401, "none was started by two"


class TestCancel:
    def test_coroutine_is_cancelled(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("-c", "2")
        request = submit([60.0] * 4, "nap_async")
        wait_until(lambda: len(fleet.notes("S")) == 2)

        request.cancel()

        wait_until(lambda: len(fleet.notes("C")) == 2)
        assert len(fleet.notes("S")) == 2

    @ANY_KIND
    def test_function_sees_should_stop(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready()
        request = submit([1], "until_told")
        wait_until(lambda: fleet.notes("S"))

        request.cancel()

        wait_until(lambda: fleet.notes("C"))

    @ANY_KIND
    def test_function_that_does_not_listen_is_stopped(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("--cancel-grace", "300ms")
        request = submit([60.0], "deaf")
        (note,) = wait_until(lambda: fleet.notes("S"))

        request.cancel()

        wait_until(lambda: not is_alive(note.pid))
        assert submit([0.0], "nap").wait(10).parts.done == 1


class TestStop:
    @ANY_KIND
    def test_term_while_processes_start_does_not_wait_for_the_grace(self, fleet: Fleet) -> None:
        pool = fleet.start("-p", "6", "--grace", "20s")
        wait_until(lambda: pool.poll() is None and fleet.children(pool))

        begun = time.monotonic()

        assert stop(pool) == 0
        assert time.monotonic() - begun < 10

    def test_idle_one_ends_at_once(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready("-p", "2", "-c", "2")
        assert submit([0.0] * 5, "nap").wait(10).parts.done == 5
        begun = time.monotonic()

        assert stop(pool) == 0

        # It was waiting for a token, for ten seconds if nobody ended that.
        assert time.monotonic() - begun < 5

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


class TestCapacity:
    @ANY_KIND
    def test_levels_keep_capacity_for_the_better_ones(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("--levels", "0-19")

        low = submit([0.0], "nap", level=50)
        high = submit([0.0], "nap", level=10)

        assert high.wait(10).parts.done == 1
        assert low.status().parts.done == 0

    def test_burst_ends_when_nothing_is_left(self, fleet: Fleet, submit: Any) -> None:
        request = submit([0.01] * 20, "nap")

        pool = fleet.start("--burst", "-c", "4")

        assert pool.wait(20) == 0
        assert request.status().state is State.DONE

    @ANY_KIND
    def test_max_idle_ends_the_pool(self, fleet: Fleet) -> None:
        pool = fleet.ready("--max-idle", "1s")

        assert pool.wait(10) == 0

    @ANY_KIND
    def test_max_parts_replaces_the_process(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("--max-parts", "5")

        request = submit([0.05] * 60, "nap")

        assert request.wait(30).parts.done == 60
        assert len({note.pid for note in fleet.notes("S")}) > 1

    @ONE_KIND
    def test_a_thousand_coroutines_run_at_once_on_few_connections(
        self, fleet: Fleet, submit: Any, client: Client
    ) -> None:
        fleet.ready("-c", "1000")

        request = submit([6.0] * 1000, "nap_async", limit=1000)

        wait_until(lambda: request.status().parts.running == 1000, 20)
        connections = client._protocol.connection.redis.info("clients")["connected_clients"]
        assert request.wait(30).parts.done == 1000
        assert most_at_once(fleet.notes()) == 1000
        assert connections < 60

    @TWO_KINDS
    def test_limit_holds_over_processes_and_is_reached(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("-p", "3", "-c", "8")
        fleet.ready("-p", "1", "-c", "8")

        sizes = {1: 10, 3: 30, 17: 170}
        requests = {
            limit: submit([0.1] * size, "nap", limit=limit) for limit, size in sizes.items()
        }

        for limit, request in requests.items():
            request.wait(60)
            assert most_at_once(fleet.notes(request=request.id)) == limit


class TestTrouble:
    @ANY_KIND
    @pytest.mark.parametrize(
        ("target", "code", "says"),
        [
            ("nowhere:app", 4, "there is no module 'nowhere'"),
            ("tasks:nothing", 4, "it has the app 'app'"),
            ("tasks:shout", 4, "not a streamq.App"),
            ("tasks", 4, "names no app"),
            ("nowhere.py:app", 4, "there is no file"),
            ("broken:app", 4, "broken on purpose"),
        ],
    )
    def test_wrong_target(self, fleet: Fleet, target: str, code: int, says: str) -> None:
        pool = fleet.start(target=target)

        assert pool.wait(15) == code
        assert says in fleet.errors(pool)
        assert "child.py" not in fleet.errors(pool), "no traceback of ours"

    @ANY_KIND
    def test_file_as_target(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready(target=str(APPS / "tasks.py") + ":app")

        assert values(submit(["a"], "shout")) == ["A"]

    def test_no_url_and_wrong_url(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.endswith(("_URL", "URL_FILE"))}
        command = [sys.executable, "-m", "streamq.cli", "worker", "tasks:app"]

        without = subprocess.run(command, env=environment, cwd=APPS, capture_output=True)
        wrong = subprocess.run(
            [*command, "--url", "redis://127.0.0.1:1"],
            env=environment,
            cwd=APPS,
            capture_output=True,
        )

        assert without.returncode == 2
        assert b"STREAMQ_URL" in without.stderr
        assert wrong.returncode == 3
        assert b"Traceback" not in without.stderr + wrong.stderr

    @TWO_KINDS
    def test_killed_process_is_replaced_and_its_parts_run_at_once(
        self, fleet: Fleet, submit: Any
    ) -> None:
        pool = fleet.ready("--lease", "60s")
        request = submit([1.0], "nap")
        (note,) = wait_until(lambda: fleet.notes("S"))

        os.kill(note.pid, signal.SIGKILL)

        assert request.wait(8).parts.done == 1, "it did not wait for the lease"
        assert "killed by SIGKILL" in fleet.errors(pool)

    @ONE_KIND
    def test_process_killed_again_and_again_while_it_starts_is_started_again(
        self, fleet: Fleet, submit: Any, tmp_path: Path
    ) -> None:
        gate = tmp_path / "gate"
        module = f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists():\n"
        module += "    time.sleep(0.01)\nfrom tasks import app\n"
        (tmp_path / "gated.py").write_text(module)
        pool = fleet.start(target=f"{tmp_path / 'gated.py'}:app")
        killed: set[int] = set()

        for _ in range(4):
            (pid,) = wait_until(lambda: set(fleet.children(pool)) - killed, 15)
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        gate.touch()

        assert values(submit(["a"], "shout")) == ["A"]
        assert fleet.errors(pool).count("was killed by SIGKILL; it is replaced") == 4

    @ONE_KIND
    @pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGSEGV)"])
    def test_module_that_ends_its_process_ends_the_pool(
        self, fleet: Fleet, tmp_path: Path, end: str
    ) -> None:
        (tmp_path / "deadly.py").write_text(f"import os, signal\n{end}\n")

        pool = fleet.start(target=f"{tmp_path / 'deadly.py'}:app")

        assert pool.wait(30) == 4
        assert "when loading it" in fleet.errors(pool)

    def test_server_goes_away_comes_back_and_comes_back_empty(
        self, tmp_path: Any, queue: str
    ) -> None:
        home = tmp_path / "data"
        server = LocalServer.start(home, persist=True, port=0)
        port = int(server.url.rpartition(":")[2])
        client = Client(server.url)
        fleet = Fleet(server.url, queue, tmp_path)
        pool = fleet.ready("-p", "2", "--lease", "2s")
        request = client.submit([0.05] * 100, handler="nap", queue=queue)
        wait_until(lambda: request.status().parts.done > 10)
        server.kill()
        server.stop()
        wait_until(lambda: "waiting for the server" in fleet.errors(pool), 15)

        server = LocalServer.start(home, persist=True, port=port)

        assert request.wait(30).parts.done == 100
        server.kill()
        server.stop()
        server = LocalServer.start(port=port)
        again = client.submit([0.0] * 10, handler="nap", queue=queue)
        assert again.wait(30).parts.done == 10
        assert pool.poll() is None
        fleet.end()
        client.close()
        server.stop()

    def test_outage_longer_than_the_time_limit_fails_nothing(
        self, tmp_path: Any, queue: str
    ) -> None:
        server = LocalServer.start(tmp_path / "data", persist=True, port=0)
        client = Client(server.url)
        fleet = Fleet(server.url, queue, tmp_path)
        pool = fleet.ready("--lease", "20s")
        request = client.submit([1], handler="half_a_second", queue=queue)
        wait_until(lambda: request.status().parts.running == 1)

        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(server.pid, signal.SIGCONT)

        assert request.wait(30).parts.done == 1
        assert "took longer" not in fleet.errors(pool)
        fleet.end()
        client.close()
        server.stop()

    @ONE_KIND
    def test_request_whose_handler_nobody_has_waits_without_spin(
        self, fleet: Fleet, submit: Any, client: Client
    ) -> None:
        fleet.ready("-p", "2")
        redis = client._protocol.connection.redis
        request = submit(["x"] * 10, "unheard_of")
        before = redis.info("commandstats").get("cmdstat_brpop", {"calls": 0})["calls"]

        time.sleep(2)

        after = redis.info("commandstats")["cmdstat_brpop"]["calls"]
        assert after - before < 80
        assert request.status().parts.waiting == 10
