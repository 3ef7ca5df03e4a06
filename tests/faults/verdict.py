"""What a run shows: from the handlers' notes to figures and broken promises."""

import heapq
from collections import Counter
from collections.abc import Collection

import msgspec

from tests.support.fleet import Note


class Figures(msgspec.Struct, kw_only=True):
    """One scenario, on one server, with one seed."""

    scenario: str
    subject: str
    server: str
    seed: int
    parts: int
    limit: int
    #: How often something was done to it, and how many slots that stalled beyond their lease.
    faults: int = 0
    stalled: int = 0
    #: Parts that never came to their end; starts beyond the first; miscounts.
    lost: int = 0
    again: int = 0
    wrong: int = 0
    overlap: int = 0
    #: The longest time after the first fault in which no part ended; and the whole run.
    silence_s: float = 0.0
    took_s: float = 0.0
    is_ended: bool = False
    #: How many waiters were told of the end, and the longest time that took.
    told: int = 0
    told_s: float = 0.0
    waiters: int = 0
    #: Tokens and news popped, and how many of these were news of a list in use; claims that were
    #: given parts, or for the old design, parts that were run.
    pops: int = 0
    news: int = 0
    claims: int = 0
    #: Results that the server counted and those it did not take, as seen at its door; and parts
    #: that handlers ended.
    counted: int = 0
    refused: int = 0
    ends: int = 0
    #: Crashes that parts were charged, and how many slots died with their process; what an
    #: episode waited for a start at most.
    charged: int = 0
    died: int = 0
    start_s: float = 0.0
    #: Assertions that do not hold.
    broken: list[str] = []


def overlap(notes: list[Note], deaths: dict[int, float]) -> int:
    """How many parts ran at once at most. What a killed process ran ends with its death."""
    ends: dict[tuple[int, int], list[float]] = {}
    for note in notes:
        if note.word == "E":
            heapq.heappush(ends.setdefault((note.pid, note.part), []), note.time)
    marks = []
    for note in notes:
        if note.word != "S":
            continue
        own = ends.get((note.pid, note.part))
        end = heapq.heappop(own) if own else max(note.time, deaths.get(note.pid, note.time))
        marks += [(note.time, 1), (end, -1)]
    running = most = 0
    for _, step in sorted(marks):
        running += step
        most = max(most, running)
    return most


def silence(notes: list[Note], since: float) -> float:
    """The longest time in which no part ended, from the first fault on."""
    times = sorted(note.time for note in notes if note.word == "E" and note.time >= since)
    return max((b - a for a, b in zip([since, *times], times, strict=False)), default=0.0)


def missing(notes: list[Note], parts: int) -> int:
    """How many parts never came to their end."""
    return parts - len({note.part for note in notes if note.word == "E"})


def repeated(notes: list[Note]) -> int:
    """How often a part was started beyond its first time."""
    starts = Counter(note.part for note in notes if note.word == "S")
    return starts.total() - len(starts)


def dead_slots(notes: list[Note], deaths: Collection[int], each: int) -> int:
    """How many slots went with processes that worked and died, each of which had so many.

    They were killed, or a part ended them: then its start is the last that was heard of them.
    """
    last: dict[int, Note] = {}
    for note in notes:
        last[note.pid] = note
    return sum(each for pid, note in last.items() if pid in deaths or note.word == "S")
