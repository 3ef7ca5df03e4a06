"""Runs janitors again and again, one thread for each queue, also through outages of the server."""

import logging
import threading
import time
from collections.abc import Sequence

from streamq import backoff
from streamq.errors import Damaged, ServerError
from streamq.protocol.protocol import Protocol
from streamq.queue.janitor import Janitor, janitor_samples
from streamq.telemetry.metrics import Samples

log = logging.getLogger(__name__)

#: How long to wait before a server that does not answer is asked again: at first, and at most.
REST_MS = 200
LONGEST_REST_MS = 10_000


class Sweeper:
    """Runs one queue's janitor whenever a request is due, and survives outages."""

    def __init__(self, janitor: Janitor, queue: str) -> None:
        self.janitor = janitor
        self.queue = queue
        self._failed = 0
        #: When to sweep next, by ``time.monotonic``.
        self.at = 0.0

    @property
    def is_away(self) -> bool:
        """Whether the server did not answer the last sweep."""
        return self._failed > 0

    def sweep(self) -> None:
        """Sweep, and set when to sweep next. An outage is logged once."""
        try:
            wait_ms = self.janitor.sweep()
        except (ServerError, Damaged) as error:
            self._failed += 1
            wait_ms = backoff.delay_ms(self._failed, REST_MS, LONGEST_REST_MS)
            if self._failed == 1:
                log.warning("queue %s: %s; trying on", self.queue, error)
        else:
            if self._failed:
                log.info("queue %s is swept again", self.queue)
            self._failed = 0
        self.at = time.monotonic() + wait_ms / 1e3

    def run(self, stop: threading.Event) -> None:
        """Sweep whenever something is due, until told to stop."""
        while not stop.wait(max(0.0, self.at - time.monotonic())):
            self.sweep()


class Sweepers:
    """Sweeps several queues, each in a thread.

    A server that is away may hold up a thread. A queue that takes long must not delay the looks at
    another: a lease is known to be over only if it was looked at every second.
    """

    def __init__(self, protocol: Protocol, queues: Sequence[str], every_ms: int) -> None:
        self._each = [Sweeper(Janitor(protocol, name, every_ms), name) for name in queues]
        self._threads: list[threading.Thread] = []

    @property
    def is_away(self) -> bool:
        """Whether the server did not answer the last sweep of one of the queues."""
        return any(each.is_away for each in self._each)

    def samples(self) -> Samples:
        """Return what the janitors have counted."""
        return janitor_samples([each.janitor for each in self._each])

    def start(self, stop: threading.Event) -> None:
        """Begin to sweep, until the event is set."""
        self._threads = [
            threading.Thread(target=each.run, args=(stop,), name=each.queue, daemon=True)
            for each in self._each
        ]
        for thread in self._threads:
            thread.start()

    def are_alive(self) -> bool:
        """Return whether every thread still sweeps."""
        return all(thread.is_alive() for thread in self._threads)

    def join(self, seconds: float) -> None:
        """Wait at most so many seconds for all threads to end."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
