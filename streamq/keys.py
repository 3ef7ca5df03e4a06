"""The key layout, and the only place that spells a Redis key.

The braces are a hash tag. All keys of one request share a cluster slot, and so do
all keys of one queue; a script touches keys of one tag only.
"""

from streamq import units
from streamq.model import PREFIX


class RequestKeys:
    """Keys of one request."""

    def __init__(self, request_id: str, prefix: str = PREFIX) -> None:
        root = f"{prefix}:{{r:{units.name(request_id, 'request id')}}}:"
        #: HASH    everything that is known of the request
        self.meta = root + "meta"
        #: STREAM  one entry per part, id `<number>-0`; consumer group `w`
        self.parts = root + "parts"
        #: STRING  parts not finished, plus 1 while loading
        self.left = root + "left"
        #: ZSET    holder, scored by the deadline (ms) of its lease
        self.leases = root + "leases"
        #: HASH    holder -> number of its last call; holder# -> number of the part it runs
        self.holders = root + "holders"
        #: ZSET    part number, scored by when it may run again; below any time: at once
        self.retry = root + "retry"
        #: HASH    part number -> errors, crashes, alone, run, records
        self.tries = root + "tries"
        #: HASH    part number -> outcomes of the records that have one
        self.partial = root + "partial"
        #: HASH    part number -> result; `<number>.<run>` for what a redrive yielded
        self.results = root + "results"
        #: HASH    part number -> what was given up
        self.failed = root + "failed"
        #: channel (sharded)  the end of the request
        self.events = root + "events"
        #: STRING  written before replicas are waited for, and gone a moment later
        self.sync = root + "sync"


class QueueKeys:
    """Keys of one queue, seen from one level and one worker of it."""

    def __init__(self, queue: str, prefix: str = PREFIX, level: int = 0, worker: str = "") -> None:
        root = f"{prefix}:{{q:{units.name(queue, 'queue')}}}:"
        #: LIST    request ids, pushed left and popped right; one list for each level
        self.tokens = f"{root}tokens:{level:02d}"
        #: ZSET    request id, scored by when to look at it again (ms)
        self.due = root + "due"
        #: ZSET    requests not finished, scored by submission (ms)
        self.open = root + "open"
        #: ZSET    finished requests, scored by when they may be purged (ms)
        self.closed = root + "closed"
        #: ZSET    worker name, scored by its last heartbeat (ms)
        self.workers = root + "workers"
        #: HASH    what one worker says of itself; has a TTL
        self.worker = f"{root}worker:{worker}"
        #: STRING  written before replicas are waited for, and gone a moment later
        self.sync = root + "sync"
        #: any     what stood under another key of the queue and was of another type
        self.aside = root + "aside:"
