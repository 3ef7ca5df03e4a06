"""Remembers how long parts take at a worker, so that its next lease begins with a whole batch.

A ticket has the pace of its own lease; a gateway remembers paces between leases. They are hints
only: a gateway that has none gives a worker one part at first.
"""

from collections import OrderedDict

#: How many paces are remembered: the ones that were used last.
MOST_PACES = 10_000


class Paces:
    """Paces of workers that say who they are. Others are not told apart, so they have none."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    def note(self, caller: str, worker: str, request_id: str, part_s: float) -> None:
        """Note how long a part took last (s)."""
        if not worker:
            return
        key = (caller, worker, request_id)
        self._known[key] = part_s
        self._known.move_to_end(key)
        while len(self._known) > MOST_PACES:
            self._known.popitem(last=False)

    def of(self, caller: str, worker: str, request_id: str) -> float:
        """Return how long a part takes (s); 0 if nothing is known."""
        return self._known.get((caller, worker, request_id), 0.0)
