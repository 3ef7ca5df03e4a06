"""Speeds and endings from points."""

from streamq.dashboard.curve import MOST_POINTS, Curve, Point


def moving(seconds: int, speed: int, total: int = 100_000) -> Curve:
    curve = Curve()
    for second in range(seconds):
        curve.add(Point(second * 1_000, second * speed, 0, 4, total))
    return curve


def test_speed_is_that_of_the_last_seconds() -> None:
    curve = moving(60, 100)
    for second in range(60, 80):
        curve.add(Point(second * 1_000, 5_900 + (second - 59) * 10, 0, 4, 100_000))
    assert curve.speed() == 10


def test_nothing_is_told_of_one_point() -> None:
    assert Curve().speed() is None
    assert moving(1, 5).speed() is None


def test_ending_has_no_range_before_six_stretches_of_ten_seconds() -> None:
    ending = moving(30, 100, total=5_900).ending(0)
    assert ending is not None
    assert (ending.low, ending.likely, ending.high) == (0, 59_000, 0)


def test_ending_is_a_range_when_the_speed_changed() -> None:
    curve, done = Curve(), 0
    for second in range(200):
        curve.add(Point(second * 1_000, done, 0, 4, 100_000))
        done += 50 if second % 40 < 20 else 150
    ending = curve.ending(0)
    assert ending is not None
    assert ending.low < ending.likely <= ending.high


def test_nothing_moves_so_there_is_no_end() -> None:
    assert moving(100, 0).ending(0) is None


def test_points_are_thinned_and_kept_in_order() -> None:
    points = moving(5_000, 1, total=10_000).points
    assert len(points) <= MOST_POINTS + 1
    assert points[0].t == 0
    assert [each.t for each in points] == sorted(each.t for each in points)


def test_a_retry_begins_the_curve_anew() -> None:
    curve = moving(50, 10)
    curve.add(Point(60_000, 3, 0, 1, 100))
    assert len(curve.points) == 1
