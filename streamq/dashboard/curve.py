"""The speed of a request, and a forecast of its end: a band instead of a number that jumps."""

from collections import deque

import msgspec

from streamq.protocol import glances
from streamq.protocol.protocol import Protocol

#: How many points are kept. When there are more, every second one of the older half is dropped.
MOST_POINTS = 600
#: The present speed is measured over about the last 10 s.
SPEED_MS = 10_000
#: The band comes from speeds in stretches of 10 s of the last 10 minutes, six of them at least.
STRETCH_MS, STRETCHES, LEAST_STRETCHES = 10_000, 60, 6


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One moment: the clock (ms), records done and failed, parts that run, records in all."""

    t: int
    done: int
    failed: int
    running: int
    total: int

    @property
    def finished(self) -> int:
        """Records that are done or failed."""
        return self.done + self.failed


class Ending(msgspec.Struct, frozen=True):
    """When a request ends, in ms since 1970; ``low`` and ``high`` are 0 while it is too early."""

    low: int
    likely: int
    high: int


def curve_of(protocol: Protocol, request_id: str) -> list[Point]:
    """Return the curve that a request keeps of itself: janitors add a point now and then."""
    found = glances.glance_at_curve(protocol, request_id)
    return [Point(t, done, failed, running, total) for t, done, failed, total, running in found]


class Curve:
    """Points of one request or queue, oldest first."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque()

    @property
    def points(self) -> list[Point]:
        """What is known of the past."""
        return list(self._points)

    def add(self, point: Point) -> None:
        """Take in what was seen now."""
        points = self._points
        if points and (point.finished < points[-1].finished or point.t < points[-1].t):
            points.clear()  # parts run again, or the clock went back
        points.append(point)
        if len(points) > MOST_POINTS:
            half = MOST_POINTS // 2
            kept = list(points)
            self._points = deque([*kept[:half:2], *kept[half:]])

    def speed(self) -> float | None:
        """Return how many records a second were finished lately; None: too early to tell."""
        points = self._points
        if len(points) < 2:
            return None
        last = points[-1]
        first = points[0]
        for each in reversed(points):
            first = each
            if last.t - each.t >= SPEED_MS:
                break
        if last.t - first.t < 500:
            return None
        return (last.finished - first.finished) / (last.t - first.t) * 1e3

    def peak(self) -> int:
        """Return how many parts ran at once at most in the last seconds.

        Between two leases a slot runs nothing for a moment, so a single look shows too few.
        """
        return max((point.running for point in list(self._points)[-5:]), default=0)

    def ending(self, overall: float) -> Ending | None:
        """Return when all is finished, if it goes on as it did; None if nothing moves.

        ``overall``: records a second since the start, for when too little was seen.
        """
        points = self._points
        if not points:
            return None
        last = points[-1]
        left = last.total - last.finished
        speeds = sorted(self._speeds())
        if len(speeds) < LEAST_STRETCHES:
            now = self.speed() or overall
            likely = last.t + round(left / now * 1e3) if now > 0 else 0
            return Ending(0, likely, 0) if likely else None
        slow, middle, fast = (speeds[round(share * (len(speeds) - 1))] for share in (0.1, 0.5, 0.9))
        if middle <= 0:
            return None
        return Ending(
            last.t + round(left / fast * 1e3),
            last.t + round(left / middle * 1e3),
            last.t + round(left / slow * 1e3) if slow > 0 else 0,
        )

    def _speeds(self) -> list[float]:
        """Return the speed in each stretch of the last minutes."""
        speeds: list[float] = []
        points = self._points
        later = points[-1]
        for each in reversed(points):
            if later.t - each.t >= STRETCH_MS:
                speeds.append((later.finished - each.finished) / (later.t - each.t) * 1e3)
                later = each
                if len(speeds) >= STRETCHES:
                    break
        return speeds
