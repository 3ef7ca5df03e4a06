"""Bounds how many bytes of a load are under way, in the server and in spools beside it."""

from collections.abc import Callable

from streamq.errors import damaged_if_unreadable
from streamq.model import State
from streamq.protocol.protocol import Protocol
from streamq.protocol.snapshot import Snapshot

#: How many times a load looks while it fills the window once, where results fill it too.
_LOOKS = 8


class Window:
    """Says whether a load may add parts, by how many bytes wait to be done or written."""

    def __init__(
        self,
        protocol: Protocol,
        request_id: str,
        size: int,
        *,
        counts_results: bool,
        spooled: Callable[[], int] | None,
    ) -> None:
        """``spooled``: how many bytes wait in spools. Then parts are as large as their input."""
        self._protocol = protocol
        self._id = request_id
        self._size = size
        self._counts_results = counts_results
        self._spooled = spooled
        self._room = 0
        self._result_size = 0.0
        #: How many parts were added, and their bytes in the input.
        self._parts = self._input = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing may be added before the next look."""
        return self._room <= 0

    def add(self, parts: int, size: int) -> None:
        """Note that parts were added, and how many bytes of the input they have."""
        self._room -= size
        self._parts += parts
        self._input += size

    def look(self) -> State:
        """Find out how much room there is now. Return the state of the request."""
        found = self._protocol.inspect(self._id)
        with damaged_if_unreadable(f"what the server has of {self._id}"):
            self._room = self._room_now(found)
        return found.state

    def _room_now(self, found: Snapshot) -> int:
        """Return how many bytes may be added."""
        total, done = found.known_count("total"), found.count("done")
        left = total - done - found.count("failed")
        if not self._counts_results:
            return self._size - round(left * found.known_count("bytes") / total)
        kept, results = self._protocol.result_bytes(self._id), found.count("results")
        size = found.known_count("bytes") / total
        if self._spooled and self._parts:
            # If no result waits, lines that are in spools were not told to the server yet.
            kept += self._spooled() if results else 0
            size = self._input / self._parts
        # Parts that wait become results, which may be larger: as large as those that are there, or
        # were there lately.
        if results:
            now = kept / results
            self._result_size = max(now, (now + self._result_size) / 2)
        held = round(left * max(size, self._result_size)) + kept
        step = max(1, self._size // _LOOKS)
        return min((self._size if done else step) - held, step)
