"""A thread that does chores for a host of leases, each when it is due.

The server may go away for as long as it likes: the thread waits and goes on.
"""

import logging
import threading
import time
from collections.abc import Callable

from streamq.errors import Damaged, ServerError
from streamq.queue.outages import Outage, OutageLog

log = logging.getLogger(__name__)

#: The thread looks at least this often whether something is due.
LONGEST_WAIT_S = 1.0

#: A chore, and how often to do it (s). The chore may return in how many seconds it is due again.
Chore = tuple[Callable[[], float | None], float]


class Rounds:
    """A thread that does chores, each when it is due, whether the server is there or not."""

    def __init__(self, name: str, chores: list[Chore], availability: OutageLog) -> None:
        self._chores = chores
        self._availability = availability
        self._due = {chore: 0.0 for chore, _ in chores}
        self._wake = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._has_more: Callable[[], bool] = lambda: False
        self._leave: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def at_the_end(self, has_more: Callable[[], bool], leave: Callable[[], None]) -> None:
        """Go on at the end while there is more to do, for a few tries, and then leave."""
        self._has_more, self._leave = has_more, leave

    def end(self) -> None:
        """End after the chore at hand."""
        self._is_over.set()
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, up to so long."""
        self._thread.join(timeout_s)

    def hurry(self, chore: Callable[[], float | None], at: float = 0.0) -> None:
        """Do a chore at this time of the monotonic clock, if it was to be done later."""
        if at < self._due[chore]:
            self._due[chore] = at
            self._wake.set()

    def want(self, chore: Callable[[], float | None]) -> None:
        """Do a chore in the next round, whenever that is."""
        self._due[chore] = 0.0

    def _run(self) -> None:
        outage = Outage(rest_ms=100)  # ``OutageLog`` tells of it, for all threads
        while not self._is_over.is_set() or (self._has_more() and outage.tries <= 3):
            try:
                wait_s = self._round()
                outage.over()
            except ServerError as error:
                self._availability.failed(self._thread.name, error)
                wait_s = outage.failed(error)
            except Exception:
                if self._is_over.is_set():
                    break  # its connection may be closed by now
                log.exception("the keeper goes on after")
                wait_s = 1.0
            if self._wake.wait(max(0.0, min(wait_s, LONGEST_WAIT_S))):
                self._wake.clear()
        self._leave()

    def _round(self) -> float:
        """Do what is due. Returns the seconds until something is again."""
        first_error: ServerError | None = None
        for chore, every_s in self._chores:
            if time.monotonic() < self._due[chore]:
                continue
            # Before the chore is done: a ``hurry`` that comes meanwhile makes it due again.
            self._due[chore] = time.monotonic() + every_s
            try:
                said_s = chore()
                if said_s is not None:
                    self._due[chore] = min(self._due[chore], time.monotonic() + said_s)
            except ServerError as error:
                self._due[chore] = 0.0
                first_error = first_error or error
            except Damaged as error:
                # The other chores must not wait for this one.
                log.warning("passed over: %s", error)
        if first_error:
            raise first_error
        return min(self._due.values()) - time.monotonic()
