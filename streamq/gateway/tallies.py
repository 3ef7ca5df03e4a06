"""Counts the calls that a gateway answered, by route and status, and how long they took."""

from collections import Counter, defaultdict

from streamq.telemetry.metrics import Samples, StopwatchMetric


class Tallies:
    """Counts calls. It belongs to the event loop; another thread may read it."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, int]] = Counter()
        self._took: defaultdict[str, StopwatchMetric] = defaultdict(StopwatchMetric)

    def called(self, route: str, status: int, seconds: float) -> None:
        """Count a call that was answered, and how long that took."""
        self._calls[route, status] += 1
        self._took[route].saw(seconds)

    def samples(self) -> Samples:
        """Return the counts of calls."""
        return {
            "streamq_gateway_calls_total": [
                ({"route": route, "status": str(status)}, number)
                for (route, status), number in sorted(self._calls.copy().items())
            ],
            "streamq_gateway_call_duration_seconds": [
                ({"route": route}, watch.spread())
                for route, watch in sorted(self._took.copy().items())
            ],
        }
