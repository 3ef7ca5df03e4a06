"""Chooses which of a process's handlers comes first, so that requests of one level take turns.

Tokens of one handler and level are in one list, and there requests take turns by themselves.
Between the lists of a level it is the taker who chooses. It knows whose tokens it took: a handler
of which it saw many requests comes first more often than one of which it saw few.
"""

from collections import Counter, deque

#: How many of a handler's last tokens are remembered.
REMEMBERED = 64


class Turns:
    """The order in which one process takes from its handlers' lists. For one thread."""

    def __init__(self, handlers: tuple[str, ...]) -> None:
        self._handlers = handlers
        #: Of handlers that had a token when they were last asked first: their last tokens.
        self._seen: dict[str, _Seen] = {}
        self._first = ""

    def order(self) -> tuple[str, ...]:
        """Return all handlers, in the order to take from them.

        Handlers of which nothing is known come first: mostly they have no token, and one that has
        is known after it. Of the others one comes first in its turn.
        """
        seen = self._seen
        if len(self._handlers) == 1 or not seen:
            return self._handlers
        self._first = self._next()
        unknown = [name for name in self._handlers if name not in seen]
        others = [name for name in self._handlers if name in seen and name != self._first]
        return (*unknown, self._first, *others)

    def took(self, handler: str, request_id: str) -> None:
        """Note that a token came from this handler's list."""
        if handler not in self._seen:
            self._seen[handler] = _Seen()
        elif handler != self._first:
            # The handler whose list came first had no token. It is forgotten here, so that it comes
            # first until it has one.
            self._seen.pop(self._first, None)
        self._seen[handler].add(request_id)

    def took_nothing(self) -> None:
        """Note that no token came: no handler has any."""
        self._seen.clear()

    def _next(self) -> str:
        """Choose the handler that is furthest behind: turns are in proportion to requests."""
        seen = self._seen
        for each in seen.values():
            each.behind += each.requests
        first = max(seen, key=lambda name: seen[name].behind)
        seen[first].behind -= sum(each.requests for each in seen.values())
        return first


class _Seen:
    """The last tokens of one handler."""

    def __init__(self) -> None:
        self._ids: deque[str] = deque()
        self._times: Counter[str] = Counter()
        #: By how much it is behind the turns that it should have had.
        self.behind = 0

    @property
    def requests(self) -> int:
        """How many requests they are of."""
        return len(self._times)

    def add(self, request_id: str) -> None:
        """Add a token; the oldest is forgotten."""
        self._ids.append(request_id)
        self._times[request_id] += 1
        if len(self._ids) > REMEMBERED:
            oldest = self._ids.popleft()
            self._times[oldest] -= 1
            if not self._times[oldest]:
                del self._times[oldest]
