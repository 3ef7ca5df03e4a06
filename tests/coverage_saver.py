"""A plugin of coverage: saves what was run every half second, in every process.

Pools kill their processes where their work is not wanted any more, and killed processes save
nothing themselves. The data are in a SQLite file, and the interpreter crashes when two threads
write it at once. So there is a lock around each save, and the thread ends with the save that
coverage makes at the end of a process.
"""

import os
import threading
from contextlib import suppress
from typing import Any

from coverage import Coverage

EVERY_S = 0.5


class _Saver:
    """Saves from a thread until the process saves for the last time."""

    def __init__(self) -> None:
        self._save = Coverage.save
        self._begin()
        of_coverage: Any = Coverage
        of_coverage.save = lambda coverage: self._save_last(coverage)
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        # A fork copies the lock as it is: perhaps held by a thread that the copy does not have.
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._save_often, name="coverage", daemon=True)

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        if not self._thread.is_alive():
            self._thread.start()

    def _save_often(self) -> None:
        is_over = self._is_over
        while not is_over.wait(EVERY_S):
            with self._lock:
                current = Coverage.current()
                if current is not None and not is_over.is_set():
                    with suppress(Exception):  # its process is just ending, and saves by itself
                        self._save(current)

    def _save_last(self, coverage: Coverage) -> None:
        self._is_over.set()
        with self._lock:
            self._save(coverage)


_saver = _Saver()


def coverage_init(_registry: Any, _options: dict[str, Any]) -> None:
    """Start to save; called by coverage in each process that it follows."""
    _saver.start()
