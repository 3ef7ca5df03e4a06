"""Two scenarios of the fault suite for gateways, short. ``make faults-gateway`` has all."""

from pathlib import Path

import pytest

from tests.clients.conftest import KINDS, missing
from tests.faults.gateways import SCENARIOS, built_go, play

#: The busier the machine, the later: the whole suite allows no more than 10 s.
BACK = "a part of a dead worker ran again after"


@pytest.mark.long
@pytest.mark.skipif(bool(missing(*KINDS)), reason=missing(*KINDS))
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["kill-gateways", "everything"])
def test_nothing_is_lost_and_nothing_counted_twice(name: str, tmp_path: Path) -> None:
    (scenario,) = (each for each in SCENARIOS if each.name == name)
    with built_go() as go:
        figures = play(scenario, "valkey", 1, 600, tmp_path, go, window_s=5.0)
    assert [each for each in figures.broken if not each.startswith(BACK)] == []
    assert figures.faults >= 2
