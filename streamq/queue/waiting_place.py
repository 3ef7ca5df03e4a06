"""At which lists of tokens a process waits: those that are in use, of all that there may be.

There is a list for each handler and level. To wait at all of them costs the server time and bytes
for each, and nearly all are always empty. What is in use, and how those who wait hear of a list
that comes into use, is stated in ``lua/README.md``, section 4.
"""

import time

from streamq.errors import Damaged, ServerError
from streamq.model import LAST_LEVEL, News
from streamq.protocol.keys import list_of
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Token

#: What is in use is read again before a take when it was read so long ago. While a process may
#: not have read it, every token of a new list comes with news (KNOWN_AFTER_MS of ``mint.lua``).
READ_EVERY_S = 10.0
#: Just after it was read, tokens come before news: otherwise each token of a new list would cost
#: its taker a look at the news and a reading, and not just one in so long.
NEWS_EVERY_S = 0.05
#: And so often all lists are waited at, in use or not: earlier versions do not tell of theirs.
ALL_EVERY_S = 60.0


class WaitingPlace:
    """Where one process takes its tokens. For one thread."""

    def __init__(self, protocol: Protocol, queue: str, levels: tuple[int, ...]) -> None:
        self._protocol = protocol
        self._queue = queue
        self._levels = levels
        self._used: frozenset[str] = frozenset()
        # News go to one process: who serves only some levels would take those of other lists.
        self._has_every_level = len(set(levels)) > LAST_LEVEL
        self._read_at = self._all_at = float("-inf")
        #: The list that this process was told of and has not seen to yet, or "".
        self._news = ""

    def take(self, handlers: tuple[str, ...], block_s: float) -> Token | None:
        """The next token for one of these handlers, best level first."""
        protocol, queue, levels = self._protocol, self._queue, self._levels
        now = time.monotonic()
        if not self._has_every_level or now - self._all_at > ALL_EVERY_S:
            found = protocol.take(queue, handlers, block_s, levels)
            self._all_at = now
            return found
        if now - self._read_at > READ_EVERY_S:
            self._read(handlers)
        while True:
            is_late = time.monotonic() - self._read_at > NEWS_EVERY_S
            token = protocol.take_used(
                queue, handlers, block_s, levels, self._used, news_first=is_late
            )
            if not isinstance(token, News):
                break
            # Should the reading fail, the next take begins with it: nobody else was told.
            self._news, self._read_at = token.to, float("-inf")
            self._read(handlers)
        if self._news:
            self._see_to_news(token)
        return token

    def _see_to_news(self, token: Token | None) -> None:
        """Tell others of the list that this process was told of, if it took no token of it."""
        news = self._news
        if news in self._used and (not token or news != list_of(token.handler, token.level)):
            # Its token is still there, and others may wait who do not know of the list. The token
            # that was just taken is worth more than the news: they are told with the next take.
            try:
                self._protocol.tell_again(self._queue, news)
            except (ServerError, Damaged):
                return
        self._news = ""

    def _read(self, handlers: tuple[str, ...]) -> None:
        # The time before it is asked: what comes into use meanwhile is news.
        begun = time.monotonic()
        used = self._protocol.used_lists(self._queue, handlers)
        if used != self._used:
            self._used = used
        self._read_at = begun
