"""The key layout: every key that is read or written is spelled here.

Three modules know the form of the keys besides. ``admin/acl.py`` and ``admin/probe.py`` make
patterns that match many keys. ``admin/probe.py`` and ``queue_protocol.py`` take names of keys
apart.

The braces are a hash tag. All keys of one request share a cluster slot, and so do
all keys of one queue; a script touches keys of one tag only.
"""

from functools import cached_property, lru_cache

from streamq import units
from streamq.flows.shape import Shape
from streamq.model import LAST_LEVEL, PREFIX

#: Keys that all stages of a flow share. Each stage has the others for itself.
_SHARED = frozenset(
    ("left", "results", "events", "groups", "kids", "sync", "keys", "items", "trace")
)
#: The keys that a later stage has, in the order in which ``lay`` and ``cancel`` take them.
_OF_STAGE = (
    "meta",
    "parts",
    "leases",
    "retry",
    "holders",
    "tries",
    "partial",
    "got",
    "failed",
)
_NEIGHBOURS = ("groups", "kids", "got", "results", "meta", "parts", "leases", "retry", "failed")
#: What the lists of keys hold that ``RequestKeys.more`` returns, by the lists' names.
MORE: dict[str, tuple[str, ...]] = {
    "next": ("meta",),
    "metas": ("meta",),
    "resuming": ("meta",),
    "walk": ("kids",),
    "flow": (*_NEIGHBOURS, "tries", "items", "trace"),
    "stages": ("groups", "kids", *_OF_STAGE),
    "whole": ("groups", "kids", *_OF_STAGE, "gone", "pace", "left", "results", "items", "trace"),
}


class RequestKeys:
    """Keys of one place: of a request, or of a later stage of its flow.

    Each is spelled when it is asked for, since most calls need few.
    """

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
    #: STRING  its curve: points of 24 bytes each
    pace: str
    #: channel (sharded)  the end of the request
    events: str
    #: STRING  written before replicas are waited for, and gone a moment later
    sync: str
    #: HASH    of a join or reduce: origin -> result that waits for it
    got: str
    #: HASH    of a flow: origin of a spread part -> its unfinished children, and more
    groups: str
    #: HASH    of a flow: origin -> number of its children, of spreads that no join closes
    kids: str
    #: HASH    key -> numbers of the parts that have it; only of a request that has a key
    keys: str
    #: HASH    of a flow: origin -> stage:number, where the item came last; only if it is tracked
    items: str
    #: HASH    of a flow: origin:stage -> what it came to there; only if it is traced
    trace: str

    def __init__(self, place: str, prefix: str = PREFIX, shape: Shape | None = None) -> None:
        """``shape`` is that of the flow whose stage the place is, as far as the caller knows."""
        #: The place: a request's id, or that and a stage.
        self.id = place
        self.shape = shape
        if "/" in place:
            request_id, self._stage = units.place(place)
            self._shared = f"{prefix}:{{r:{request_id}}}:"
            self._root = f"{self._shared}{self._stage}:"
        else:
            self._stage = ""
            self._root = self._shared = f"{prefix}:{{r:{units.name(place, 'request id')}}}:"

    def __getattr__(self, name: str) -> str:
        if name not in RequestKeys.__annotations__:
            raise AttributeError(name)
        return (self._shared if name in _SHARED else self._root) + name

    def of(self, names: tuple[str, ...]) -> list[str]:
        """Return the keys of these names."""
        root, shared = self._root, self._shared
        if root == shared:
            return [root + name for name in names]
        return [(shared if name in _SHARED else root) + name for name in names]

    def all(self) -> dict[str, str]:
        """Return every key by its name."""
        return {name: getattr(self, name) for name in RequestKeys.__annotations__}

    def more(self, name: str) -> list[str]:
        """Return the keys that a script wants besides, of a stage; none where no flow is known."""
        found: list[str] = getattr(self, f"_{name}") if self.shape and name else []
        return found

    def _of(self, stage: int, *names: str) -> list[str]:
        root = self._shared if stage == 1 else f"{self._shared}{stage}:"
        return [root + name for name in names]

    @property
    def _number(self) -> int:
        return int(self._stage) if self._stage.isdigit() else 1

    @property
    def _next(self) -> list[str]:
        """The meta of the next stage, whose window counts; it need not be there."""
        return self._of(self._number + 1, "meta")

    @property
    def _metas(self) -> list[str]:
        assert self.shape
        return [key for stage in range(1, len(self.shape) + 1) for key in self._of(stage, "meta")]

    @cached_property
    def _flow(self) -> list[str]:
        """Everything that handing over a part of this stage touches; as ``lua/lib/flow.lua``."""
        assert self.shape
        shape, stage = self.shape, self._number
        keys = [self.groups, self.kids, self.got, self.results, *self._metas]
        if shape.feeds(stage) == "parts":
            keys += self._of(stage + 1, "parts", "leases", "retry")
        for other in (shape.closing_join(stage), shape.barrier(stage)):
            if other:
                keys += self._of(other, "parts", "leases", "retry", "failed", "tries", "got")
        if shape.follow:
            keys.append(self.items)
        if shape.follow == "trace":
            keys.append(self.trace)
        return keys

    @property
    def _resuming(self) -> list[str]:
        return self._next + self._metas

    @property
    def _walk(self) -> list[str]:
        return [self.kids]

    @property
    def _stages(self) -> list[str]:
        """The keys of all later stages, to create them or to drop what they hold."""
        assert self.shape
        later = range(2, len(self.shape) + 1)
        return [self.groups, self.kids] + [k for n in later for k in self._of(n, *_OF_STAGE)]

    @property
    def _whole(self) -> list[str]:
        """All keys of all stages."""
        own = self._of(1, *_OF_STAGE, "gone", "pace", "left", "results", "items", "trace")
        later = range(2, len(self.shape or ()) + 1)
        return [*own, *self._stages, *(key for n in later for key in self._of(n, "gone", "pace"))]


def token_list_of(handler: str, level: int) -> str:
    """Return how the list of one handler's tokens of one level is called; as in ``lua/lib``."""
    return f"{handler}:{level:02d}"


class QueueKeys:
    """Keys of one queue, seen from one list of tokens (``token_list_of``) and one worker of it."""

    #: A queue is no flow, and no place of one.
    shape = None
    id = ""

    def __init__(
        self, queue: str, prefix: str = PREFIX, to: str = "", worker: str = "", spoilt: str = ""
    ) -> None:
        root = f"{prefix}:{{q:{units.name(queue, 'queue')}}}:"
        #: LIST    request ids, pushed left and popped right; one for each handler and level
        self.tokens = f"{root}tokens:{to}"
        #: ZSET    lists that tokens came into (``token_list_of``), scored by when; and HANDLER:told
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
        #: STREAM  what was changed of requests; about the last thousand
        self.log = root + "log"
        #: STRING  how many spans a second each worker may tell; has a TTL
        self.watch = root + "watch"
        #: STREAM  what slots did; the last minute at most
        self.spans = root + "spans"
        #: any     a key of the queue that is of another type
        self.spoilt = root + spoilt
        #: any     the same when it was set aside
        self.aside = f"{root}aside:{spoilt}"

    def more(self, name: str) -> list[str]:
        """Return none: a queue has no keys besides."""
        raise AssertionError(f"a queue has no keys {name}")

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
        #: The keys of a queue, seen from one of its lists of tokens (``token_list_of``).
        self.queue = lru_cache(1024)(self._queue)
        #: The lists that tokens of these handlers may be in, best level first.
        self.token_lists = lru_cache(64)(self._token_lists)
        #: The same of lists in use, after the lists of news.
        self.used_lists = lru_cache(64)(self._used_lists)

    def request(self, place: str, shape: Shape | None = None) -> RequestKeys:
        """Return the keys of a request, or of a stage of the flow of that shape."""
        return RequestKeys(place, self.prefix, shape)

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
        return tuple(
            root + token_list_of(handler, level) for level in levels for handler in handlers
        )

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
        wanted = (token_list_of(handler, level) for level in some for handler in handlers)
        lists = tuple(root + to for to in wanted if to in used)
        news = tuple(self.queue(queue, token_list_of(handler, 0)).news for handler in handlers)
        return news + lists
