"""Adds up what the processes of a pool have done, also those that are gone.

Each process counts in memory that it shares with its parent. When a process ends, the parent adds
its counts to those of the processes before it, so no figure of the pool ever goes back.
"""

import threading

from streamq.queue.fleet import FleetPace
from streamq.queue.told import ToldSpan, ToldTally
from streamq.records.sizes import Measured, RecordPace
from streamq.worker import counters
from streamq.worker.process_handle import ProcessHandle
from streamq.worker.spans import SpanReader

#: The most handlers whose paces a heartbeat tells.
MOST_PACES = 64


class PoolWork:
    """What all processes of a pool have done, by handler; may be asked from any thread."""

    def __init__(self, handles: list[ProcessHandle], slots: int, processes: int) -> None:
        """``handles`` is the pool's own list of its processes; ``slots`` is of each process."""
        self._handles = handles
        self._slots, self._at_once = slots, slots * processes
        self._past: dict[str, counters.Row] = {}
        self._counting = threading.Lock()
        #: How long records took, by handler. Heartbeats tell it to loaders.
        self._paces: dict[str, RecordPace] = {}
        self._span_reader = SpanReader()

    def forget(self, handle: ProcessHandle) -> None:
        """Take a process that is gone from the pool's list; what it has done stays counted."""
        with self._counting:
            self._handles.remove(handle)
            counters.sum_of_all_rows(self._past, handle.rows())

    def rows(self) -> dict[str, counters.Row]:
        """Return by handler what all processes have done, also those that are gone."""
        with self._counting:
            rows = dict(self._past)
            for handle in self._handles:
                counters.sum_of_all_rows(rows, handle.rows())
        return rows

    def retried(self) -> int:
        """Return how often a process put a part off for another attempt."""
        return sum(row[counters.RETRIED] for row in self.rows().values())

    def measured(self) -> dict[str, Measured]:
        """Return what is known of each handler's records; nothing while no process is ready."""
        ready = next((each.ready for each in self._handles[:] if each.ready), None)
        if ready is None:
            return {}
        rows = self.rows()
        return {
            name: counters.measured_records(
                rows.get(name), is_coroutine=name in ready.coroutines, is_map=ready.is_map(name)
            )
            for name in ready.names
        }

    def paces(self) -> dict[str, FleetPace]:
        """Return how long the records of each handler took lately, for its first 64 handlers."""
        found = {}
        for name, measured in list(self.measured().items())[:MOST_PACES]:
            pace = self._paces.setdefault(name, RecordPace())
            pace.observe(measured)
            found[name] = FleetPace(
                record_s=pace.record_s,
                record_bytes=pace.record_bytes,
                records=pace.records,
                is_map=measured.is_map,
                is_coroutine=measured.is_coroutine,
                slots=self._slots,
                at_once=self._at_once,
            )
        return found

    def tallies(self) -> dict[str, ToldTally]:
        """Return what was done for each handler that did anything."""
        return {name: counters.tally_of_row(row) for name, row in self.rows().items() if any(row)}

    def spans(self, most: int) -> tuple[list[ToldSpan], int]:
        """Return leases that have ended since the last call; and how many more there were."""
        with self._counting:  # the memory of a process is there until it is forgotten
            tables = [(each.pid, each.table.spans, each.table.slots) for each in self._handles]
            return self._span_reader.read(tables, most)
