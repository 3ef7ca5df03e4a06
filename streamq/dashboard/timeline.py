"""The timeline of leases: which slot has served which request, one look a second."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from streamq.dashboard.census import Census
from streamq.protocol import glances
from streamq.protocol.protocol import Protocol

#: So many looks are kept.
LOOKS = 180
#: Leases of so many requests are read at a look, those with the most parts that run; and so many of
#: one request.
MOST_REQUESTS, MOST_LEASES = 100, 500


class Timeline:
    """Looks at who holds leases. Leases that begin and end between two looks are not seen."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self.looks: deque[dict[str, Any]] = deque(maxlen=LOOKS)

    def look(self, census: Census) -> dict[str, Any]:
        """Return the leases of this moment: for each slot, its request."""
        busy = sorted(
            (known.status for known in census.requests.values() if known.status.parts.running),
            key=lambda status: -status.parts.running,
        )[:MOST_REQUESTS]
        ids = [status.id for status in busy]
        pools = {each.pool: name for name, each in census.workers.items() if each.pool}
        slots: list[tuple[str, str, str]] = []
        for request_id, holders in zip(
            ids, glances.holders_of(self._protocol, ids, MOST_LEASES), strict=True
        ):
            for holder in holders:
                slots.append((*_slot_of(holder, pools), request_id))
        now = {"t": round(time.time() * 1e3), "slots": sorted(slots)}
        self.looks.append(now)
        return now


def _slot_of(holder: str, pools: Mapping[str, str]) -> tuple[str, str]:
    """Return the worker and the slot of a holder, which is called POOL.PROCESS-SLOT-NUMBER."""
    host, _, _ = holder.rpartition("-")
    name, _, slot = host.rpartition("-")
    pool, _, process = name.partition(".")
    return pools.get(pool, pool[:12]), f"{process[:3]}/{slot}"
