"""Sits out a server, or a node of it, that does not answer: how long to rest, and what to log.

A caller reports an outage once and then asks the server less and less often (``Outage``). While a
node is away, workers cannot renew leases on it, so live ones look dead (``Outages``). Nothing on
the node is taken back until every worker has had the time to renew its leases.
Threads that share a server report once that it is away, and once that it answers
(``OutageLog``).
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from streamq import backoff
from streamq.errors import ServerError, StreamqError

log = logging.getLogger(__name__)

#: How long after a call without an answer nothing on the node is taken back: the longest pause
#: between two tries of a worker, and the time of a renewal.
QUIET_S = 5.0


class Outage:
    """Reports an outage once, and its end once, and tells how long to wait between two tries."""

    def __init__(
        self,
        say: Callable[[StreamqError], object] = lambda _: None,
        say_over: Callable[[], object] = lambda: None,
        *,
        rest_ms: int = 50,
        longest_ms: int = 2_000,
    ) -> None:
        """Make the first rest about ``rest_ms`` long, and each further one twice as long.

        No rest is longer than ``longest_ms``.
        """
        self._say = say
        self._say_over = say_over
        self._rests_ms = (rest_ms, longest_ms)
        #: Tries without an answer since the last that had one.
        self.tries = 0

    def failed(self, error: StreamqError) -> float:
        """Note a try without an answer. Return the seconds to wait before the next."""
        self.tries += 1
        if self.tries == 1:
            self._say(error)
        return backoff.delay_ms(self.tries, *self._rests_ms) / 1e3

    def over(self) -> None:
        """Note a try that was answered."""
        if self.tries:
            self.tries = 0
            self._say_over()


class Outages:
    """The time of the last unanswered call to each node. Threads may share this object."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def saw(self, node: str) -> None:
        """Note that a call to the node was not answered."""
        self._seen[node] = time.monotonic()

    def left_s(self, node: str) -> float:
        """Return for how long nothing on the node is to be taken back; 0 when it is well."""
        seen = self._seen.get(node)
        return 0.0 if seen is None else max(0.0, seen + QUIET_S - time.monotonic())


class OutageLog:
    """Logs once for several threads that the server does not answer, and once that it does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        #: Calls that the server did not answer, by kind of error.
        self.errors: Counter[str] = Counter()
        self._has_answered = False

    @property
    def is_server_up(self) -> bool:
        """Whether every thread's last call was answered."""
        return self._has_answered and not self._waiting

    def failed(self, who: str, error: ServerError) -> None:
        """Note that a call of this thread was not answered."""
        with self._lock:
            self.errors[type(error).__name__] += 1
            if not self._waiting:
                log.warning("waiting for the server: %s", error)
            self._waiting.add(who)

    def worked(self, who: str) -> None:
        """Note that all calls of this thread were answered."""
        if self._has_answered and not self._waiting:
            return
        with self._lock:
            self._has_answered = True
            if who in self._waiting:
                self._waiting.remove(who)
                if not self._waiting:
                    log.info("the server answers again")
