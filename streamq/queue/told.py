"""The reports of workers for the dashboard: tallies by handler, and spans of what slots did."""

import msgspec


class ToldTally(msgspec.Struct, frozen=True, array_like=True):
    """What a worker did for one handler since it started."""

    done: int
    failed: int
    retried: int
    #: How long all these parts ran (s), and how many of them there are in each class of time
    #: (``telemetry.metrics.BOUNDS_S``).
    seconds: float
    classes: list[int]


class ToldSpan(msgspec.Struct, frozen=True, array_like=True):
    """A lease that is over: which slot served which request, when, and what became of its parts."""

    slot: str
    #: Moments in ms since 1970, by the worker's clock.
    from_ms: int
    to_ms: int
    request: str
    done: int
    failed: int
    retried: int


class SpansTold(msgspec.Struct, frozen=True):
    """Spans as a worker tells them while somebody looks at the timeline."""

    worker: str
    spans: list[ToldSpan]
    #: How many more there were than it may tell.
    left_out: int = 0


def slot_of_told_span(holder: str) -> tuple[str, str]:
    """Return the pool of a holder, and how its slot is called: its process and its number.

    A holder is called ``POOL.PROCESS-SLOT-NUMBER``.
    """
    place, _, _ = holder.rpartition("-")
    host, _, slot = place.rpartition("-")
    pool, _, process = host.partition(".")
    return pool, f"{process[:3]}/{slot}"
