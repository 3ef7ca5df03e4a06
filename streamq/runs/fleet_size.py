"""Sizes the parts of a load by what the workers of its queue say of the handler."""

import time
from collections.abc import Callable

from streamq.model import Policy
from streamq.protocol.protocol import Protocol
from streamq.queue.fleet import FleetPace, fleet_pace_of_handler
from streamq.records.sizes import AS_LARGE_AS_ALLOWED, Step, most_size_by_rate, records_for_size

#: The fleet is asked this often while a load runs. Its heartbeats come every few seconds, and one
#: within a second when the first records of a handler are done.
LOOK_EVERY_S = 0.5
#: While no worker has measured the handler yet, a load hands out some parts of one record, and
#: waits at most this long (s) for the measurements. Busy workers may not run these parts in time.
PATIENCE_S = 3.0
#: How many such parts: this many for each slot of the fleet, and at most.
PROBES = 2
MOST_PROBES = 200
#: What is loaded then, before anything is known, has parts of at most so many records. A cheap
#: handler hardly minds, and one that takes a second for a record has parts of a minute.
UNKNOWN = 64
#: How many parts are cut before the fleet is asked again.
STEP = 64


class FleetSize:
    """Sizes parts so that each takes about a quarter of a second, by the fleet's own measure.

    If no live worker has the handler, or the handler takes whole parts, parts are as large as is
    allowed.
    """

    def __init__(self, look: Callable[[], FleetPace | None], most_records: int) -> None:
        """``look`` asks the fleet. ``most_records``: a part has no more records than this."""
        self._look = look
        self._most_records = most_records
        self._pace: FleetPace | None = None
        self._look_at = 0.0
        self._begun = 0.0

    def step(self, waiting: int, fitting: float) -> Step:
        """Return what to cut next; no parts while workers may soon tell how long records take."""
        now = time.monotonic()
        if now >= self._look_at:
            self._pace, self._look_at = self._look(), now + LOOK_EVERY_S
        pace = self._pace
        if pace is None or not pace.is_map:
            return AS_LARGE_AS_ALLOWED
        if pace.records:
            records = records_for_size(
                pace.record_s,
                pace.record_bytes,
                is_coroutine=pace.is_coroutine,
                slots=pace.slots,
            )
            return Step(min(records, self._most_records), STEP)
        if not self._begun:
            self._begun = now
            return Step(1, min(MOST_PROBES, PROBES * pace.at_once))
        if now - self._begun < PATIENCE_S:
            return Step(1, 0)
        return Step(min(UNKNOWN, self._most_records), STEP)


def sized_by_fleet(protocol: Protocol, policy: Policy) -> FleetSize:
    """Return what sizes the parts of a load for the live workers of its queue."""
    return FleetSize(
        lambda: fleet_pace_of_handler(protocol, policy.queue, policy.handler),
        most_size_by_rate(policy.rate_ms),
    )
