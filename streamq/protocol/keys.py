"""The key layout: every key that is read or written is spelled here.

Three modules know the form of the keys besides. ``admin/acl.py`` and ``admin/probe.py`` make
patterns that match many keys. ``admin/probe.py`` and ``queue_protocol.py`` take names of keys
apart.

The braces are a hash tag. All keys of one request share a cluster slot, and so do
all keys of one queue; a script touches keys of one tag only.
"""

from functools import lru_cache

from streamq import units
from streamq.model import LAST_LEVEL, PREFIX


class RequestKeys:
    """Keys of one request. Each is spelled when it is asked for, since most calls need few."""

    #: HASH    everything that is known of the request
    meta: str
    #: STREAM  one entry per part, id `<number>-0`; consumer group `w`
    parts: str
    #: STRING  parts not finished, plus 1 while loading
    left: str
    #: ZSET    holder, scored by the deadline (ms) of its lease
    leases: str
    #: HASH    holder -> number of its last call; holder# -> number of the part it runs
    holders: str
    #: ZSET    holder that was released without a lease, scored by when (ms); has a TTL
    gone: str
    #: ZSET    part number, scored by when it may run again; below any time: at once
    retry: str
    #: HASH    part number -> errors, crashes, alone, run, records
    tries: str
    #: HASH    part number -> outcomes of the records that have one
    partial: str
    #: HASH    part number -> result; `<number>.<run>` for what a redrive yielded
    results: str
    #: HASH    part number -> what was given up
    failed: str
    #: channel (sharded)  the end of the request
    events: str
    #: STRING  written before replicas are waited for, and gone a moment later
    sync: str

    def __init__(self, request_id: str, prefix: str = PREFIX) -> None:
        self.id = units.name(request_id, "request id")
        self._root = f"{prefix}:{{r:{self.id}}}:"

    def __getattr__(self, name: str) -> str:
        if name not in RequestKeys.__annotations__:
            raise AttributeError(name)
        return self._root + name

    def of(self, names: tuple[str, ...]) -> list[str]:
        """Return the keys of these names."""
        root = self._root
        return [root + name for name in names]

    def all(self) -> dict[str, str]:
        """Return every key by its name."""
        return {name: self._root + name for name in RequestKeys.__annotations__}


def list_of(handler: str, level: int) -> str:
    """Return how the list of one handler's tokens of one level is called; as in ``lua/lib``."""
    return f"{handler}:{level:02d}"


class QueueKeys:
    """Keys of one queue, seen from one list of tokens (``list_of``) and one worker of it."""

    def __init__(
        self, queue: str, prefix: str = PREFIX, to: str = "", worker: str = "", spoilt: str = ""
    ) -> None:
        root = f"{prefix}:{{q:{units.name(queue, 'queue')}}}:"
        #: LIST    request ids, pushed left and popped right; one for each handler and level
        self.tokens = f"{root}tokens:{to}"
        #: ZSET    lists that tokens came into (``list_of``), scored by when; and HANDLER:told
        self.used = root + "used"
        #: LIST    lists of one handler that came into use lately; has a TTL
        self.news = f"{root}news:{to.rpartition(':')[0]}"
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
        #: any     a key of the queue that is of another type
        self.spoilt = root + spoilt
        #: any     the same when it was set aside
        self.aside = f"{root}aside:{spoilt}"

    def of(self, names: tuple[str, ...]) -> list[str]:
        """Return the keys of these names."""
        own = self.__dict__
        return [own[name] for name in names]

    def all(self) -> dict[str, str]:
        """Return every key by its name."""
        return dict(self.__dict__)


class KeySpace:
    """Keys of all requests and queues under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        # Spelled anew for every call they would cost more than the call: a worker waits at
        # hundreds of lists.
        #: The keys of a queue, seen from one of its lists of tokens (``list_of``).
        self.queue = lru_cache(1024)(self._queue)
        #: The lists that tokens of these handlers may be in, best level first.
        self.token_lists = lru_cache(64)(self._token_lists)
        #: The same of lists in use, after the lists of news.
        self.used_lists = lru_cache(64)(self._used_lists)

    def request(self, request_id: str) -> RequestKeys:
        """Return the keys of a request."""
        return RequestKeys(request_id, self.prefix)

    def worker(self, queue: str, worker: str) -> QueueKeys:
        """Return the keys of a queue, seen from one worker of it."""
        return QueueKeys(queue, self.prefix, worker=worker)

    def spoilt(self, queue: str, name: str) -> QueueKeys:
        """Return the keys of a queue of which the one of that name is of another type."""
        return QueueKeys(queue, self.prefix, spoilt=name)

    def former_lists(self, queue: str) -> list[str]:
        """Return the lists of one level for all handlers, which an earlier version pushes to."""
        root = self.queue(queue).tokens
        return [f"{root}{level:02d}" for level in range(LAST_LEVEL + 1)]

    def _queue(self, queue: str, to: str = "") -> QueueKeys:
        return QueueKeys(queue, self.prefix, to)

    def _token_lists(
        self, queue: str, handlers: tuple[str, ...], levels: tuple[int, ...]
    ) -> tuple[str, ...]:
        root = self.queue(queue).tokens
        return tuple(root + list_of(handler, level) for level in levels for handler in handlers)

    def _used_lists(
        self,
        queue: str,
        handlers: tuple[str, ...],
        levels: tuple[int, ...],
        used: frozenset[str],
    ) -> tuple[str, ...]:
        root = self.queue(queue).tokens
        ends = {to[-2:] for to in used}
        some = [level for level in levels if f"{level:02d}" in ends]
        wanted = (list_of(handler, level) for level in some for handler in handlers)
        lists = tuple(root + to for to in wanted if to in used)
        news = tuple(self.queue(queue, list_of(handler, 0)).news for handler in handlers)
        return news + lists
