"""Looking on while a part runs: which record begins, what to keep, and whether to stop.

A runner tells its watch what it does, and asks it whether to go on. It knows neither the server nor
the parent of its process.
"""

from collections.abc import Callable
from typing import Any, Literal

#: Why the call of a coroutine was cancelled: it took too long, nobody wants its result any more, or
#: the handler did it itself.
CancelReason = Literal["", "timeout", "unwanted"]

#: A stretch of records is to take about 5 to 20 ms. After it a stop is noticed, and what it yielded
#: can be kept.
SHORT_STRETCH_S = 0.005
LONG_STRETCH_S = 0.02


class Stretch:
    """How many records to run at a stretch: one while nothing is known, for it may be slow."""

    def __init__(self) -> None:
        self.size = 1

    def observe(self, records: int, seconds: float) -> None:
        """Note that so many records took so long."""
        if seconds > LONG_STRETCH_S:
            self.size = max(1, int(records * SHORT_STRETCH_S / seconds))
        elif seconds < SHORT_STRETCH_S and records >= self.size:
            self.size = 2 * records


class PartWatch:
    """A watch that keeps nothing and never stops a part."""

    #: The records that are run at a stretch now. Another thread may empty this list: then the
    #: stretch ends after the record that runs.
    stretch: list[Any] | None = None

    def is_over(self) -> bool:
        """Return whether no further record may be begun."""
        return False

    def begin(self, index: int) -> None:
        """Note that a record is about to be run."""

    def tell(self, index: int) -> None:
        """Say the same of a record of a stretch, where the time of each is limited."""

    def cancelled(self) -> CancelReason:
        """Return why the call that just ended was cancelled."""
        return ""

    def offer(self, snapshot: Callable[[], bytes]) -> None:
        """Say how to get what records came to, for another thread while a record takes long."""

    def is_due(self) -> bool:
        """Return whether it is time to keep what records came to."""
        return False

    def keep(self, partial: bytes, mark: bytes, *, must: bool = False) -> None:
        """Keep what records came to, so that it outlives this process; and which run next.

        ``must``: wait until it is kept.
        """

    async def keep_later(self, partial: bytes, mark: bytes, *, must: bool = False) -> None:
        """Do the same for a coroutine, in a thread."""


#: For parts that nobody looks after.
UNWATCHED = PartWatch()
