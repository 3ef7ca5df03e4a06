"""The curve that a request keeps of itself: audit.lua with lib/pace.lua."""

from typing import Any

from streamq.protocol.glances import glance_at_curve
from tests.support.by_hand import RequestByHand

POINT = 24
LONG_AGO_MS = 1_000_000


def put(driver: RequestByHand, times: list[int]) -> None:
    """Give the request a curve with a point at each of these times."""
    points = [t.to_bytes(6, "big") + bytes([0] * 18) for t in times]
    driver.redis.set(driver.keys.pace, b"".join(points))


def test_audit_adds_a_point_when_something_has_changed(driver: RequestByHand) -> None:
    driver.load(9)
    driver.protocol.audit(driver.id)
    assert glance_at_curve(driver.protocol, driver.id) == []  # nothing was handed out yet

    holder, _ = driver.claim(3)
    driver.protocol.audit(driver.id)
    driver.protocol.audit(driver.id)
    driver.fail(holder, 3, kind="abandon", records=(0, 1))
    driver.finish(holder, [1, 2], 0)
    driver.protocol.audit(driver.id)

    told = [point[1:] for point in glance_at_curve(driver.protocol, driver.id)]
    assert told == [(0, 0, 9, 1), (2, 1, 9, 0)]
    # A purge of an earlier version leaves it, but not for ever.
    assert driver.redis.pttl(driver.keys.pace) > 29 * 86_400_000


def test_curve_ends_with_the_end_and_is_not_begun_then(driver: RequestByHand) -> None:
    driver.load(2)
    holder, _ = driver.claim(2)
    driver.protocol.audit(driver.id)
    driver.finish(holder, [1, 2], 0)
    for _ in range(2):
        driver.protocol.audit(driver.id)
    assert [point[1] for point in glance_at_curve(driver.protocol, driver.id)] == [0, 2]

    driver.redis.delete(driver.keys.pace)
    driver.protocol.audit(driver.id)
    assert glance_at_curve(driver.protocol, driver.id) == []


def test_points_are_farther_apart_the_longer_the_curve_is(driver: RequestByHand) -> None:
    driver.load(9)
    driver.claim()
    seconds, micros = driver.redis.time()
    now = seconds * 1_000 + micros // 1_000
    put(driver, [now - 2 * LONG_AGO_MS, now - LONG_AGO_MS // 1_000])
    driver.protocol.audit(driver.id)
    assert len(glance_at_curve(driver.protocol, driver.id)) == 2

    put(driver, [now - 2 * LONG_AGO_MS, now - LONG_AGO_MS])
    driver.protocol.audit(driver.id)
    assert len(glance_at_curve(driver.protocol, driver.id)) == 3


def test_every_second_point_is_dropped_when_there_are_240(driver: RequestByHand) -> None:
    driver.load(9)
    driver.claim()
    put(driver, list(range(1, 241)))
    driver.protocol.audit(driver.id)

    found = glance_at_curve(driver.protocol, driver.id)
    assert [point[0] for point in found[:-1]] == list(range(1, 240, 2))
    assert found[-1][4] == 1
    assert driver.redis.strlen(driver.keys.pace) == 121 * POINT


def test_junk_in_its_place_stops_nothing(driver: RequestByHand) -> None:
    driver.load(9)
    driver.claim()
    spoils: list[Any] = [
        lambda key: driver.redis.set(key, b"junk" * 10),
        lambda key: driver.redis.set(key, b"x"),
    ]
    for spoil in spoils:
        spoil(driver.keys.pace)
        assert driver.protocol.audit(driver.id).state == "open"
        glance_at_curve(driver.protocol, driver.id)
