"""Chooses the lists of tokens at which a process waits: those in use, of all there may be.

There is a list for each handler and level. To wait at all of them costs the server time and bytes
for each, and nearly all are always empty. What is in use, and how those who wait hear of a list
that comes into use, is stated in ``lua/README.md``, section 4.
"""

import time

from streamq.errors import Damaged, ServerError
from streamq.model import LAST_LEVEL, News
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Token

#: A process reads again what is in use before a take when it last read it so long ago. A busy
#: process may miss the news of a list: another one has taken them and removed the rest.
READ_EVERY_S = 0.5
#: How often a process waits at all lists, in use or not: earlier versions do not tell of theirs.
ALL_EVERY_S = 60.0


class WaitingPlace:
    """Where one process takes its tokens. For one thread."""

    def __init__(self, protocol: Protocol, queue: str, levels: tuple[int, ...]) -> None:
        self._protocol = protocol
        self._queue = queue
        self._levels = levels
        self._used: frozenset[str] = frozenset()
        # A piece of news goes to one process. One that serves only some levels might take a piece
        # of a list that it does not serve.
        self._has_every_level = len(set(levels)) > LAST_LEVEL
        self._read_at = self._all_at = float("-inf")
        #: The list that this process has learned of and not yet told another one of, or "".
        self._news = ""

    def take(self, handlers: tuple[str, ...], block_s: float) -> Token | None:
        """Return the next token for one of these handlers, best level first, or None in time."""
        protocol, queue, levels = self._protocol, self._queue, self._levels
        now = time.monotonic()
        if not self._has_every_level or now - self._all_at > ALL_EVERY_S:
            found = protocol.take(queue, handlers, block_s, levels)
            # No news were waited for.
            self._all_at, self._read_at = now, float("-inf")
            return found
        if now - self._read_at > READ_EVERY_S:
            self._read(handlers)
        while isinstance(token := self._take_used(handlers, block_s), News):
            self._hear(token.to, handlers)
        if self._news:
            self._pass_on_news()
        return token

    def _take_used(self, handlers: tuple[str, ...], block_s: float) -> Token | News | None:
        """Return the next token of a list in use, or news."""
        try:
            return self._protocol.take_used(
                self._queue, handlers, block_s, self._levels, self._used
            )
        except BaseException:
            # News may have been on their way: the next take begins with reading.
            self._read_at = float("-inf")
            raise

    def _hear(self, to: str, handlers: tuple[str, ...]) -> None:
        """Learn of a list that came into use. If it was known, nobody waits for news of it."""
        is_known = to in self._used
        if not is_known:
            self._news = to
        # Should a call fail, the next take begins with reading: nobody else was told.
        self._read_at = float("-inf")
        if is_known:
            self._protocol.heard(self._queue, to)
        self._read(handlers)

    def _pass_on_news(self) -> None:
        """Tell another process of the list that this one has learned of, if it has tokens left.

        So each process that learns of the list wakes another one that does not know of it, for as
        long as there is work. A process that knew of the list before does not do it: its news
        would go round.
        """
        try:
            self._protocol.tell_again(self._queue, self._news)
        except (ServerError, Damaged):
            return  # The token that was just taken is worth more. The next take repeats it.
        self._news = ""

    def _read(self, handlers: tuple[str, ...]) -> None:
        # The time before it is asked: what comes into use meanwhile is news.
        begun = time.monotonic()
        used = self._protocol.used_lists(self._queue, handlers)
        if used != self._used:
            self._used = used
        self._read_at = begun
