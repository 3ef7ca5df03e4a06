"""Notes beside the outcomes of a part: records that ran when a worker died, or too long.

The server keeps this mark as a line of text (``lua/lib/marks.lua``). ``begun RUN CRASHES START STOP
DEATHS``: in the run of that number, when the part had cost so many workers, the records from START
to before STOP were begun together; so many workers had died of exactly these before. ``late RUN
ATTEMPT RECORD``: that record, from 1, took too long in that attempt. A part that is redriven has
another run, so a mark of an earlier run counts no more.
"""

import msgspec

from streamq.model import Part


class MarkedRecords(msgspec.Struct, frozen=True):
    """Records that were begun and have no outcome, and how many workers died of just these."""

    start: int
    stop: int
    deaths: int

    @property
    def is_single(self) -> bool:
        """Return whether it is one record."""
        return self.stop - self.start == 1


class Late(msgspec.Struct, frozen=True):
    """A record that took too long, from 0, and in which attempt."""

    index: int
    attempt: int


def written_mark(part: Part, begun: MarkedRecords) -> bytes:
    """Return the mark of records that are about to be run."""
    values = (part.run, part.crashes, begun.start, begun.stop, begun.deaths)
    return b"begun %d %d %d %d %d" % values


def read_mark(part: Part) -> MarkedRecords | Late | None:
    """Return what an earlier attempt of this run noted; None if it is nothing that we know."""
    word, *digits = part.mark.split() or [b""]
    try:
        numbers = [int(each) for each in digits]
    except ValueError:
        return None
    if not numbers or numbers[0] != part.run:
        return None
    if word == b"begun" and len(numbers) == 5:
        _, crashes, start, stop, deaths = numbers
        # If no worker was charged since, the attempt ended for another reason.
        return MarkedRecords(start, stop, deaths + (part.crashes > crashes))
    if word == b"late" and len(numbers) == 3:
        return Late(numbers[2] - 1, numbers[1])
    return None
