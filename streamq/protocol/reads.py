"""Reads of a server that need no script: indexes, results and failures, page by page."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from streamq.driver.connection import Connection
from streamq.driver.errors import translating_driver_errors
from streamq.errors import Damaged, damaged_if_unreadable
from streamq.flows.shape import Shape
from streamq.model import PREFIX, Part
from streamq.protocol.events import Events
from streamq.protocol.keys import KeySpace, QueueKeys, RequestKeys
from streamq.protocol.replies import read_names, read_places
from streamq.units import MOST_STAGES

_NUMBER = re.compile(rb"[1-9][0-9]{0,15}")
#: A part's number; of a flow also its child (``17/3``); and the number of a redrive (``17.1``).
_FIELD = re.compile(rb"[1-9][0-9]{0,15}([./][0-9]{1,15})*")
#: Inputs of a join that are read at once.
_INBOX_AT_ONCE = 500
#: Places of flows whose shape is remembered.
_MOST_SHAPES = 20_000
#: A request that was closed no longer ago than this may have the score of its second look.
_CLOSED_LATELY_MS = 600_000


class Reads:
    """Reads what is under one prefix of a server."""

    def __init__(self, connection: Connection, prefix: str = PREFIX) -> None:
        self.connection = connection
        self._space = KeySpace(prefix)
        #: By place: the shape of the flow that it is a stage of, as far as that was told.
        self._shapes: dict[str, Shape] = {}

    @property
    def prefix(self) -> str:
        """What every key begins with."""
        return self._space.prefix

    def keys(self, request_id: str, guess: Shape | None = None) -> RequestKeys:
        """Return the keys of a request, or of a stage of a flow (``ID/2``).

        ``guess``: the shape of its flow, if nobody has told it.
        """
        return self._space.request(request_id, self._shapes.get(request_id, guess))

    def queue_keys(self, queue: str) -> QueueKeys:
        """Return the keys of a queue."""
        return self._space.queue(queue)

    def learn(self, request_id: str, shape: Shape | None) -> None:
        """Note that a request is a flow of this shape, or (None) that it is none.

        Scripts refuse a caller that does not know it, so nobody needs to know it beforehand.
        """
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.clear()
        places = (request_id, *(f"{request_id}/{stage}" for stage in range(2, MOST_STAGES + 1)))
        for place in places if shape is None else places[: len(shape)]:
            if shape is None:
                self._shapes.pop(place, None)
            else:
                self._shapes[place] = shape

    def node_of(self, request_id: str) -> str:
        """Return the node of a cluster that has the request; "" where there is one server."""
        connection = self.connection
        return connection.node_of(self.keys(request_id).meta) if connection.is_cluster else ""

    def node_of_queue(self, queue: str) -> str:
        """Return the node of a cluster that has the queue; "" where there is one server."""
        return self.connection.node_of(self._space.queue(queue).due)

    def listen(self, request_id: str) -> Events:
        """Hear of the request's end; the caller closes what is returned."""
        return Events(self.connection, self.keys(request_id).events)

    def replicas(self, queue: str, request_id: str, wanted: int, wait_s: float) -> int:
        """Wait until so many replicas have the request, and how it stands in its queue.

        Returns how many have both when the time is over.
        """
        keys = (self.keys(request_id).sync, self._space.queue(queue).sync)
        return min(self.connection.replicas(key, wanted, wait_s) for key in keys)

    # Queues

    def ids(self, queue: str, *, closed: bool = False) -> list[str]:
        """Return ids of the queue's open requests, or of those that have ended, oldest first.

        Later stages of flows are not among them: they are parts of a request.
        """
        return read_names(self._index(queue, closed))

    def places(self, queue: str) -> list[str]:
        """Return the queue's open requests, and stages of requests that are open in it."""
        return read_places(self._index(queue, False))

    def _index(self, queue: str, closed: bool) -> list[bytes]:
        keys = self._space.queue(queue)
        with translating_driver_errors(self.connection.where):
            found: list[bytes] = self.connection.redis.zrange(
                keys.closed if closed else keys.open, 0, -1
            )
        return found

    def registered(self, queue: str, request_id: str) -> float | None:
        """Return the score of a request among the queue's open ones, for ``close``."""
        with translating_driver_errors(self.connection.where):
            score = self.connection.redis.zscore(self._space.queue(queue).open, request_id)
        return None if score is None else float(score)

    def newest(self, queue: str, *, closed: bool, page: int) -> Iterator[str]:
        """Yield ids of open requests, last submitted first; or of ended ones. Reads page by page.

        Of ended ones those come first that were just closed or are about to be purged, then those
        that are kept longest.
        """
        keys = self._space.queue(queue)
        # Until the janitor has looked at a closed request once more, its score is that moment.
        soon = round(time.time() * 1e3) + _CLOSED_LATELY_MS
        ended = ((soon, "-inf"), ("+inf", f"({soon}"))
        for most, least in ended if closed else (("+inf", "-inf"),):
            first = 0
            while True:
                with translating_driver_errors(self.connection.where):
                    found = self.connection.redis.zrange(
                        keys.closed if closed else keys.open,
                        most,
                        least,
                        desc=True,
                        byscore=True,
                        offset=first,
                        num=page,
                    )
                if not found:
                    break
                yield from read_names(found)
                first += page

    def latest(self, queue: str, most: int, *, with_stages: bool = False) -> list[str]:
        """Return ids of open requests, those registered last first, so many at most.

        ``with_stages``: and the places of later stages of flows (``ID/2``).
        """
        key = self._space.queue(queue).open
        with translating_driver_errors(self.connection.where):
            found = self.connection.redis.zrange(key, 0, most - 1, desc=True)
        return read_places(found) if with_stages else read_names(found)

    def heard_lately(self, queue: str, most: int, within_ms: int) -> list[str]:
        """Return names of workers that were heard so long before the last that was, at most."""
        key = self._space.queue(queue).workers
        with translating_driver_errors(self.connection.where):
            found = self.connection.redis.zrange(key, 0, most - 1, desc=True, withscores=True)
        return read_names(name for name, at_ms in found if at_ms >= found[0][1] - within_ms)

    def details(self, queue: str, names: Sequence[str]) -> list[bytes | None]:
        """Return what these workers say of themselves; None for one that is gone or unreadable."""
        return self.ask_each(
            names, lambda pipe, name: pipe.hget(self._space.worker(queue, name).worker, "details")
        )

    def waiting_lists(self, queue: str) -> list[str]:
        """Return the lists that tokens came into in the last hour or wait in, as ``list_of``."""
        key = self._space.queue(queue).used
        with translating_driver_errors(self.connection.where):
            found = self.connection.redis.zrange(key, 0, -1)
        names = (each.decode("utf-8", "replace") for each in found)
        return [each for each in names if each[-2:].isdigit() and each[-3:-2] == ":"]

    def tokens_in(self, queue: str, lists: Sequence[str]) -> list[int]:
        """Return how many tokens wait in each of these lists."""
        root = self._space.queue(queue).tokens
        sizes = self.ask_each(lists, lambda pipe, name: pipe.llen(root + name))
        return [0 if size is None else size for size in sizes]

    def ask_each(self, names: Sequence[str], ask: Callable[[Any, str], object]) -> list[Any]:
        """Ask something for each name, in one round trip to each node.

        The answers come in the order of the questions; None stands for one that was refused.
        """
        redis = self.connection.redis
        with (
            translating_driver_errors(self.connection.where),
            redis.pipeline(transaction=False) as pipe,
        ):
            for name in names:
                ask(pipe, name)
            replies = pipe.execute(raise_on_error=False) if names else []
        return [None if isinstance(reply, Exception) else reply for reply in replies]

    def workers(self, queue: str) -> dict[str, bytes]:
        """Return what each live worker of the queue says of itself."""
        return {name: details for name, (_, details) in self.beats(queue).items()}

    def beats(self, queue: str) -> dict[str, tuple[float, bytes]]:
        """Return when each live worker was last heard, by the server's clock (ms), and its details.

        A worker whose key is of another type is left out, as if it had not been heard.
        """
        where = self.connection.where
        with translating_driver_errors(where):
            redis = self.connection.redis
            found = redis.zrange(self._space.queue(queue).workers, 0, -1, withscores=True)
            heard = {name: score for each, score in found for name in read_names([each])}
            with redis.pipeline(transaction=False) as pipe:
                for name in heard:
                    pipe.hget(self._space.worker(queue, name).worker, "details")
                replies = pipe.execute(raise_on_error=False) if heard else []
        alive = {}
        for (name, at_ms), reply in zip(heard.items(), replies, strict=True):
            with suppress(Damaged), translating_driver_errors(where):
                if isinstance(reply, Exception):
                    raise reply
                if reply is not None:
                    alive[name] = at_ms, reply
        return alive

    def index_size(self, queue: str, *, closed: bool = False) -> int:
        """Return how many requests of the queue are open, or have ended."""
        keys = self._space.queue(queue)
        with translating_driver_errors(self.connection.where):
            return int(self.connection.redis.zcard(keys.closed if closed else keys.open))

    # Requests

    def fields_of(self, ids: Sequence[str], fields: Sequence[str]) -> list[list[str] | None]:
        """Return these fields of each request, "" for one it has not; None: it cannot be read.

        It takes one command for each request, and one round trip to each node for all of them.
        """
        wanted = list(fields)
        replies = self.ask_each(ids, lambda pipe, each: pipe.hmget(self.keys(each).meta, wanted))
        return [
            None
            if values is None
            else ["" if value is None else value.decode("utf-8", "replace") for value in values]
            for values in replies
        ]

    def holders(self, request_id: str) -> list[str]:
        """Return who holds a lease of the request."""
        with translating_driver_errors(self.connection.where):
            found = self.connection.redis.zrange(self.keys(request_id).leases, 0, -1)
        return [holder.decode("utf-8", "replace") for holder in found]

    def result_bytes(self, request_id: str) -> int:
        """Return about how much memory the results take that the server has."""
        with translating_driver_errors(self.connection.where):
            used = self.connection.redis.memory_usage(self.keys(request_id).results, samples=20)
        return int(used or 0)

    def failures(self, request_id: str) -> Iterable[tuple[int, bytes]]:
        """Yield parts that were given up, in no order, and what is kept of each."""
        for page in self._pages(self.keys(request_id).failed, 2**22):
            for number, text in page.items():
                if _NUMBER.fullmatch(number):
                    yield int(number), text

    def entries_of(self, request_id: str, numbers: Sequence[int]) -> list[Part | None]:
        """Return these parts as they were loaded; None for one that the server has no more."""
        key = self.keys(request_id).parts
        replies = self.ask_each(
            [f"{number}-0" for number in numbers], lambda pipe, each: pipe.xrange(key, each, each)
        )
        found: list[Part | None] = []
        for number, reply in zip(numbers, replies, strict=True):
            fields = list(reply[0][1].items()) if reply and reply[0][1] else []
            found.append(Part(number, fields[0][1], fields[0][0]) if fields else None)
        return found

    def refusals(self, request_id: str) -> Iterable[tuple[int, bytes]]:
        """Yield parts that stand for what could not be loaded, and what is kept of each."""
        for page in self._pages(self.keys(request_id).failed, 2**22):
            for field, text in page.items():
                if field.endswith(b"!") and _NUMBER.fullmatch(field[:-1]):
                    yield int(field[:-1]), text

    def failures_of(self, request_id: str, numbers: Sequence[int]) -> list[bytes | None]:
        """Return what is kept of each of these parts; None for one that was not given up."""
        if not numbers:
            return []
        with translating_driver_errors(self.connection.where):
            found = self.connection.redis.hmget(self.keys(request_id).failed, list(numbers))
        return list(found)

    def leftovers(self, request_id: str, at_once: int = 2**22) -> Iterable[tuple[str, bytes]]:
        """Yield every result the server has, in no order, by its field; some perhaps twice."""
        for page in self.result_pages(request_id, at_once):
            yield from page.items()

    def result_pages(self, request_id: str, at_once: int = 2**22) -> Iterable[dict[str, bytes]]:
        """Yield results in no order, by their fields, in pages of about ``at_once`` bytes.

        A result that is still there when the next page is asked for may come again.
        """
        for page in self._pages(self.keys(request_id).results, at_once):
            yield {key.decode(): value for key, value in page.items() if _FIELD.fullmatch(key)}

    def results_of(self, request_id: str, fields: Sequence[str]) -> list[tuple[str, bytes]]:
        """Return the results of these fields, in that order, as far as the server has them."""
        with translating_driver_errors(self.connection.where):
            found = self.connection.redis.hmget(self.keys(request_id).results, list(fields))
        pairs = zip(fields, found, strict=True)
        return [(field, result) for field, result in pairs if result is not None]

    # Inboxes of joins and reduces

    def inbox_of_group(self, place: str, origin: str) -> list[bytes | None]:
        """Return what a spread kept for its join, and what each child returned or failed with."""
        keys = self.keys(place)
        with translating_driver_errors(self.connection.where):
            redis = self.connection.redis
            size = redis.hget(keys.groups, f"{origin}#")
            with damaged_if_unreadable(f"the size of the group of item {origin}"):
                count = int(size or 0)
            found: list[bytes | None] = []
            for first in range(0, count + 1, _INBOX_AT_ONCE):
                below = range(first, min(count + 1, first + _INBOX_AT_ONCE))
                found += redis.hmget(keys.got, [f"{origin}/{child}" for child in below])
        return found

    def group_counts(self, request_id: str) -> tuple[int, int]:
        """Return how many groups of a flow wait for children, and how many have failed ones."""
        opened = blocked = 0
        for page in self._pages(self.keys(request_id).groups, 2**22):
            with damaged_if_unreadable(f"how many children the groups of {request_id} wait for"):
                opened += sum(field[-1:].isdigit() and int(n) > 0 for field, n in page.items())
                blocked += sum(field.endswith(b"!") and int(n) > 0 for field, n in page.items())
        return opened, blocked

    def inbox(self, place: str, origins: list[str]) -> tuple[list[bytes | None], list[int]]:
        """Return the inputs of a reduce for these origins, and how many children each has."""
        keys = self.keys(place)
        with translating_driver_errors(self.connection.where):
            redis = self.connection.redis
            results: list[bytes | None] = redis.hmget(keys.got, origins)
            kids = redis.hmget(keys.kids, origins)
        with damaged_if_unreadable("how many children items have"):
            return results, [int(count or 0) for count in kids]

    def rerun_inputs(self, place: str) -> list[str]:
        """Return the origins below which a reduce has inputs that a redrive yielded: ``17.1``."""
        keys, found = self.keys(place), set[str]()
        for key in (keys.got, keys.kids):
            cursor = None
            while cursor != 0:
                with translating_driver_errors(self.connection.where):
                    redis = self.connection.redis
                    cursor, page = redis.hscan(key, cursor or 0, match="*.*", count=500)
                found.update(field.decode() for field in page)
        return sorted(found)

    def _pages(self, key: str, at_once: int) -> Iterable[dict[bytes, bytes]]:
        """Yield a hash in pages. How many fields the next has follows from the size of these."""
        cursor, count = 0, 10
        while True:
            with translating_driver_errors(self.connection.where):
                redis = self.connection.redis
                cursor, found = redis.hscan(key, cursor, count=count)
            yield found
            if cursor == 0:
                return
            mean = sum(map(len, found.values())) // max(1, len(found))
            count = max(1, min(500, at_once // max(1, mean)))
