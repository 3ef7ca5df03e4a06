"""Which nodes of a server did not answer lately.

Whoever renews leases was silent as long as a node was. So nothing that looks abandoned on it is
taken back until everybody has had the time to say that it lives.
"""

import time

#: So long after a call without an answer nothing on the node is taken back: the longest pause
#: between two tries of a worker, and a renewal.
QUIET_S = 5.0


class Outages:
    """When each node was last seen to be away. Threads may share it."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def saw(self, node: str) -> None:
        """A call to the node was not answered."""
        self._seen[node] = time.monotonic()

    def left_s(self, node: str) -> float:
        """For how long nothing on the node is to be taken back; 0 when it is well."""
        seen = self._seen.get(node)
        return 0.0 if seen is None else max(0.0, seen + QUIET_S - time.monotonic())
