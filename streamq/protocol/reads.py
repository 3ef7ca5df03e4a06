"""What is read of a server without a script: indexes, results and failures, page by page."""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from streamq.driver.connection import Connection
from streamq.driver.errors import translating_driver_errors
from streamq.errors import Damaged
from streamq.model import PREFIX
from streamq.protocol.events import Events
from streamq.protocol.keys import KeySpace, RequestKeys
from streamq.protocol.replies import read_names

_NUMBER = re.compile(rb"[1-9][0-9]{0,15}")
_FIELD = re.compile(rb"[1-9][0-9]{0,15}(\.[0-9]{1,15})?")
#: A request that was closed no longer ago than this may have the score of its second look.
_CLOSED_LATELY_MS = 600_000


class Reads:
    """Reads what is under one prefix of a server."""

    def __init__(self, connection: Connection, prefix: str = PREFIX) -> None:
        self.connection = connection
        self._space = KeySpace(prefix)

    def keys(self, request_id: str) -> RequestKeys:
        """Return the keys of a request."""
        return self._space.request(request_id)

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
        """Return ids of the queue's open requests, or of those that have ended, oldest first."""
        keys = self._space.queue(queue)
        with translating_driver_errors(self.connection.where):
            found = self.connection.redis.zrange(keys.closed if closed else keys.open, 0, -1)
        return read_names(found)

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

    # Requests

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
