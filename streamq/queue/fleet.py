"""The workers of a queue: what each says of itself with its heartbeats."""

import msgspec

from streamq import units
from streamq.protocol.protocol import Protocol


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A part that a worker runs now."""

    request: str
    part: int
    #: When it was started (ms), by the worker's clock.
    since_ms: int
    handler: str
    #: Of the process it runs in.
    pid: int


class WorkerDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself with each heartbeat. Times are by its own clock."""

    name: str
    host: str = ""
    pid: int = 0
    version: str = ""
    queue: str = ""
    #: Names of the handlers it can run.
    handlers: list[str] = []
    slots: int = 0
    busy: int = 0
    started_ms: int = 0
    #: When it said this.
    beat_ms: int = 0
    #: The levels it takes from, as they were given.
    levels: str = ""
    running: list[Running] = []
    #: What the names of its holders begin with; another one each time that it starts.
    pool: str = ""


def live_workers(protocol: Protocol, queue: str) -> list[WorkerDetails]:
    """Return the live workers of a queue, by name."""
    found = []
    for name, details in sorted(protocol.workers(units.name(queue, "queue")).items()):
        try:
            found.append(msgspec.json.decode(details, type=WorkerDetails))
        except (ValueError, RecursionError):
            # This worker lives, and is of a version that says other things of itself.
            found.append(WorkerDetails(name=name, queue=queue))
    return found
