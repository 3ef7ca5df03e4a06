"""What the slots of a process did lately, in memory that its parent sees too.

A span is one lease: its slot, its request, from when to when, and what became of its parts. A slot
writes a span when its lease is over, into a ring of its own; bench/dashboard.py measures how long
that takes. The parent reads the rings only while somebody looks at the timeline of the dashboard.
"""

import struct
from collections.abc import Iterable

from streamq.queue.told import ToldSpan

#: How many spans of a slot are kept.
MOST_SPANS = 32
#: From when and to when (ms since 1970), parts done, failed and retried, the stage, and texts.
_SPAN = struct.Struct("=6q8s64s")
#: Words that a slot needs: how many spans it has written, and the ring.
WORDS = 1 + MOST_SPANS * (_SPAN.size // 8)


class Spans:
    """The rings of one process's slots, in the words it is given."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._bytes = words.cast("B")

    def add(self, slot: int, span: ToldSpan) -> None:
        """Write down a lease that is over. Only the slot itself may."""
        at = slot * WORDS
        number = self._words[at]
        request_id, _, stage = span.request.partition("/")
        _SPAN.pack_into(
            self._bytes,
            self._place(slot, number),
            span.from_ms,
            span.to_ms,
            span.done,
            span.failed,
            span.retried,
            int(stage) if stage.isdecimal() else 0,
            span.slot.encode()[:8],
            request_id.encode()[:64],
        )
        self._words[at] = number + 1

    def after(self, slot: int, seen: int) -> tuple[int, list[ToldSpan]]:
        """Return how many spans the slot has written, and those after the first ``seen``."""
        at = slot * WORDS
        written = self._words[at]
        first = max(seen, written - MOST_SPANS)
        found = [self._read(slot, number) for number in range(first, written)]
        # The slot may have gone on meanwhile, and written over the oldest of them.
        spoilt = max(0, self._words[at] + 1 - MOST_SPANS - first)
        return written, found[spoilt:]

    def release(self) -> None:
        """Let go of the memory."""
        self._bytes.release()
        self._words.release()

    def _read(self, slot: int, number: int) -> ToldSpan:
        found = _SPAN.unpack_from(self._bytes, self._place(slot, number))
        from_ms, to_ms, done, failed, retried, stage, label, request = found
        place = request.rstrip(b"\0").decode("ascii", "replace")
        return ToldSpan(
            slot=label.rstrip(b"\0").decode("ascii", "replace"),
            from_ms=from_ms,
            to_ms=to_ms,
            request=f"{place}/{stage}" if stage else place,
            done=done,
            failed=failed,
            retried=retried,
        )

    @staticmethod
    def _place(slot: int, number: int) -> int:
        return (slot * WORDS + 1) * 8 + number % MOST_SPANS * _SPAN.size


class SpanReader:
    """Reads the spans of all processes of a pool that were not read before."""

    def __init__(self) -> None:
        #: How many spans of each slot were read, by process id and slot.
        self._seen: dict[tuple[int, int], int] = {}

    def read(
        self, processes: Iterable[tuple[int, Spans, int]], most: int
    ) -> tuple[list[ToldSpan], int]:
        """Return the latest of the new spans, so many at most, and how many are left out.

        ``processes``: the id of each process, its spans, and how many slots it has.
        """
        found: list[ToldSpan] = []
        seen: dict[tuple[int, int], int] = {}
        for pid, spans, slots in processes:
            for slot in range(slots):
                before = self._seen.get((pid, slot), 0)
                seen[pid, slot], new = spans.after(slot, before)
                found += new
        self._seen = seen
        found.sort(key=lambda span: span.to_ms)
        left_out = max(0, len(found) - most)
        return found[left_out:], left_out
