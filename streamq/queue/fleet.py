"""The workers of a queue, as their heartbeats describe them."""

import math
import time

import msgspec

from streamq import units
from streamq.errors import FleetTooOld
from streamq.model import FlowPlan
from streamq.protocol.protocol import Protocol
from streamq.queue.told import ToldTally

#: The first version of the protocol whose workers can run a stage of a flow.
_FLOWS_SINCE = 3
#: A client that submits many small flows looks at the workers of a queue once in this time.
_GOOD_FOR_S = 1.0


class Running(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part that a worker runs now."""

    request: str
    part: int
    #: When the part was started (ms), by the worker's clock.
    since_ms: int
    handler: str
    #: The process that runs the part.
    pid: int
    #: How far its handler says that it is (``Context.progress``), in percent; left out if 0.
    progress: int = 0


class FleetPace(msgspec.Struct, frozen=True, kw_only=True):
    """What a record took a worker's handler lately, so that loaders can size parts."""

    record_s: float = 0.0
    #: How many bytes the result of a record had. An earlier version does not say.
    record_bytes: float = 0.0
    #: How many records that was measured with; 0 while none has run.
    records: float = 0.0
    #: Whether it is called with each record, and whether it is a coroutine.
    is_map: bool = True
    is_coroutine: bool = False
    #: How many parts a process of the worker runs at once, and how many the worker.
    slots: int = 1
    at_once: int = 1


class WorkerDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself with each heartbeat. Times are by its own clock."""

    name: str
    host: str = ""
    pid: int = 0
    version: str = ""
    queue: str = ""
    #: Names of the handlers that the worker can run.
    handlers: list[str] = []
    slots: int = 0
    busy: int = 0
    started_ms: int = 0
    #: When the heartbeat was sent (ms).
    beat_ms: int = 0
    #: The levels the worker takes from, as the option gave them.
    levels: str = ""
    running: list[Running] = []
    #: The names of its holders begin with this word, which is new each time the worker starts.
    pool: str = ""
    #: By handler. An earlier version does not say.
    paces: dict[str, FleetPace] = {}
    tallies: dict[str, ToldTally] = {}
    #: The latest protocol version that it knows. Workers that do not say know version 1.
    protocol: int = 1


def live_workers(protocol: Protocol, queue: str) -> list[WorkerDetails]:
    """Return the live workers of a queue, by name."""
    found = protocol.workers(units.name(queue, "queue"))
    return [read_worker_details(name, details, queue) for name, details in sorted(found.items())]


def fleet_pace_of_handler(protocol: Protocol, queue: str, handler: str) -> FleetPace | None:
    """Return what the live workers of a queue know of a handler; None if none of them says."""
    found = [each.paces.get(handler) for each in live_workers(protocol, queue)]
    paces = [pace for pace in found if pace]
    if not paces:
        return None
    records = sum(pace.records for pace in paces)
    seconds = sum(pace.record_s * pace.records for pace in paces)
    size = sum(pace.record_bytes * pace.records for pace in paces)
    return msgspec.structs.replace(
        paces[0],
        records=records,
        record_s=seconds / records if records else 0.0,
        record_bytes=size / records if records else 0.0,
        at_once=sum(pace.at_once for pace in paces),
    )


def pools_heard_in_fleet(protocol: Protocol, queue: str) -> dict[str, float]:
    """Return when each live pool of a queue was last heard, by the server's clock (ms)."""
    found = protocol.beats(queue)
    pools = (
        (read_worker_details(name, details, queue).pool, at)
        for name, (at, details) in found.items()
    )
    return {pool: at_ms for pool, at_ms in pools if pool}


def read_worker_details(name: str, details: bytes, queue: str) -> WorkerDetails:
    """Return what a worker says of itself, or only its name where that cannot be read."""
    try:
        return msgspec.json.decode(details, type=WorkerDetails)
    except (ValueError, RecursionError):
        # The worker lives, but its version describes itself in another form.
        return WorkerDetails(name=name, queue=queue)


def check_fleet(
    protocol: Protocol, plan: FlowPlan, checked: dict[str, float] | None = None
) -> None:
    """Raise FleetTooOld if a live worker of one of the queues cannot run flows.

    Such a worker runs no part of a flow wrongly. It takes tokens of the flow and drops them.
    ``checked`` has when a queue was last found good: within a second it is not asked again.
    """
    checked = {} if checked is None else checked
    for queue in sorted({stage.policy.queue for stage in plan.stages}):
        if time.monotonic() - checked.get(queue, -math.inf) < _GOOD_FOR_S:
            continue
        checked.pop(queue, None)
        old = [each for each in live_workers(protocol, queue) if each.protocol < _FLOWS_SINCE]
        if old:
            many = "1 worker" if len(old) == 1 else f"{len(old)} workers"
            raise FleetTooOld(
                f"{many} of queue {queue} cannot run flows, such as {old[0].name} (streamq "
                f"{old[0].version or '?'}): upgrade or stop what is so old, then submit again"
            )
        checked[queue] = time.monotonic()
