"""How fast a run is, and that it is right from the first second."""

import pytest

from streamq.runs.progress import Speed


def rates(*readings: tuple[float, float], is_busy: bool = True) -> list[float]:
    speed = Speed()
    return [speed.read(now, finished, is_busy=is_busy) for now, finished in readings]


def test_time_before_anything_runs_does_not_count() -> None:
    speed = Speed()
    for now in range(20):
        assert speed.read(now, 0, is_busy=False) == 0
    speed.read(19.25, 0, is_busy=True)

    assert speed.read(20, 50, is_busy=True) == 50


def test_what_was_finished_before_the_run_was_gone_on_with_does_not_count() -> None:
    assert rates((0, 1_000), (0.5, 1_000), (1, 1_100)) == [0, 0, 100]


def test_rate_is_that_of_the_last_ten_seconds() -> None:
    quick = [(now, 100 * now) for now in range(21)]
    slow = [(20 + now, 2_000 + 10 * now) for now in range(1, 11)]

    assert rates(*quick, *slow)[-1] == 10


def test_slow_records_are_seen_over_a_longer_time() -> None:
    """Of records of a minute, thirty at once, thirty end at the same moment."""
    found = rates(*[(now / 4, 30.0 * (now // 240)) for now in range(4 * 60 * 5)])

    assert not any(found[: 4 * 60])
    assert found[4 * 60] == pytest.approx(0.5)
    assert all(0.2 < each < 0.6 for each in found[4 * 60 :])


def test_rate_falls_when_nothing_is_finished_any_more() -> None:
    found = rates(*[(now, min(now, 60) * 100) for now in range(660)])

    assert found[59] == 100
    assert found[80] < 60
    assert 0 < found[-1] < 2
