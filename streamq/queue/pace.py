"""The size of a batch: a holder asks for as many parts as take about a quantum."""

import msgspec

#: A holder is handed at most this many parts at once.
MOST_PARTS = 500


class Pace(msgspec.Struct):
    """How long the parts of one request take, and so how many of them to ask for."""

    quantum_s: float
    #: How long one part takes; 0 while nothing is known.
    part_s: float = 0.0

    def most(self, seconds: float | None = None) -> int:
        """Return how many parts take about so long, or a quantum; 1 while nothing is known."""
        if self.part_s <= 0:
            return 1
        seconds = self.quantum_s if seconds is None else seconds
        return max(1, min(MOST_PARTS, int(seconds / self.part_s)))

    def observe(self, parts: int, seconds: float) -> None:
        """Note that so many parts took so long.

        A part that takes longer than before is believed at once. One that takes less is believed by
        degrees: the next batch is at most four times as large.
        """
        if parts:
            seen = max(seconds / parts, 1e-7)
            self.part_s = max(seen, self.part_s / 4) if self.part_s else seen
