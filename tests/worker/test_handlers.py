"""Handlers of a pool, through its command: what they get, and what becomes of what they return."""

import statistics
import time
from typing import Any

import pytest

from streamq import Client
from streamq.driver.connection import Connection
from streamq.driver.lanes import Lane
from streamq.model import Policy, State
from streamq.protocol.lua import script_digest
from tests.conftest import ANY_KIND, FIRST_KIND, ONE_KIND
from tests.support.fleet import Fleet
from tests.support.waiting import allowed_s
from tests.worker.common import TWO_KINDS, values

pytestmark = pytest.mark.commands


class TestHandlers:
    @FIRST_KIND
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

        assert time.monotonic() - begun < allowed_s(3), "nobody slept over what was due"

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
            assert time.monotonic() - begun < allowed_s(0.6)
        owner.close()

    @ONE_KIND
    def test_small_request_that_is_held_up_on_its_way_waits_for_no_audit(
        self, fleet: Fleet, submit: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fleet.ready(audit_ms=60_000)
        submit([0.0], "nap").wait(10)
        send = Lane.send

        def hold_up(lane: Lane, packed: list[bytes]) -> None:
            if any(script_digest("submit").encode() in piece for piece in packed):
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
        assert sorted(waits)[-2] < 1.0

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
