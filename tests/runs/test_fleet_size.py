"""Parts of a load are sized by what the workers of the queue say of the handler."""

from pathlib import Path
from typing import Any

import pytest

from streamq import Client, load
from streamq.queue.fleet import FleetPace, fleet_pace_of_handler
from streamq.records.sizes import AS_LARGE_AS_ALLOWED, MOST_RECORDS, Step
from streamq.runs import fleet_size
from streamq.runs.fleet_size import FleetSize
from tests.conftest import ANY_KIND
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

CODE = """
import time
from streamq import App

app = App()

@app.map
def slowly(line: str) -> str:
    time.sleep(0.02)
    return line
"""


class TestStep:
    def step(self, pace: FleetPace | None, most: int = MOST_RECORDS) -> Step:
        return FleetSize(lambda: pace, most).step(0, 1e9)

    def test_as_large_as_allowed_if_nobody_knows_or_the_handler_takes_parts(self) -> None:
        assert self.step(None) == AS_LARGE_AS_ALLOWED
        assert self.step(FleetPace(is_map=False)) == AS_LARGE_AS_ALLOWED

    @pytest.mark.parametrize(
        ("record_s", "is_coroutine", "records"),
        [(2.0, False, 1), (0.01, False, 25), (0.01, True, 25), (0.5, True, 1)],
    )
    def test_so_that_a_part_takes_a_quarter_of_a_second(
        self, record_s: float, is_coroutine: bool, records: int
    ) -> None:
        pace = FleetPace(record_s=record_s, records=9, is_coroutine=is_coroutine, slots=100)

        assert self.step(pace).records == records

    def test_rate_bounds_it(self) -> None:
        assert self.step(FleetPace(record_s=1e-6, records=9), 7).records == 7

    def test_workers_that_know_nothing_are_asked_with_parts_of_one_record(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = [FleetPace(at_once=4)]
        sizing = FleetSize(lambda: found[0], MOST_RECORDS)
        monkeypatch.setattr(fleet_size, "LOOK_EVERY_S", 0.0)

        assert sizing.step(0, 1e9) == Step(1, 8)
        assert sizing.step(8, 1e9) == Step(1, 0)
        found[0] = FleetPace(record_s=0.05, records=8)
        assert sizing.step(8, 1e9).records == 5

    def test_workers_that_are_busy_are_not_waited_for_for_long(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizing = FleetSize(lambda: FleetPace(), MOST_RECORDS)
        monkeypatch.setattr(fleet_size, "PATIENCE_S", 0.0)

        sizing.step(0, 1e9)
        assert sizing.step(2, 1e9) == Step(64, 64)


@pytest.mark.commands
class TestFleet:
    @ANY_KIND
    def test_load_learns_from_the_workers_and_nothing_is_lost(
        self, fleet: Fleet, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fleet_size, "PATIENCE_S", 60.0)
        (tmp_path / "slow_map.py").write_text(CODE)
        fleet.ready("-p", "1", target="slow_map:app", cwd=tmp_path)
        wait_until(
            lambda: fleet_pace_of_handler(client.protocol, fleet.queue, "slowly") is not None
        )
        (tmp_path / "in.txt").write_text("".join(f"{n}\n" for n in range(60)))

        request = load(
            client, str(tmp_path / "in.txt"), handler="slowly", queue=fleet.queue, limit=4
        )

        status = request.wait(60)
        assert 6 <= status.parts.total <= 40, "about 12 records in 250 ms, after parts of one"
        got: list[Any] = [result for _, result in request.results(timeout=20)]
        assert [each for some in got for each in some] == [str(n) for n in range(60)]
        pace = fleet_pace_of_handler(client.protocol, fleet.queue, "slowly")
        assert pace
        assert 0.02 <= pace.record_s < 0.2
