"""Appending parts before the call before is answered, for loads."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from streamq.driver.connection import Connection
from streamq.driver.errors import RedisError
from streamq.driver.lanes import Lane, packed_command
from streamq.errors import StreamqError
from streamq.protocol import request_calls
from streamq.protocol.call import Call
from streamq.protocol.keys import RequestKeys
from streamq.protocol.replies import Appended, Tokens
from streamq.protocol.scripts import Scripts

_BROKEN = (RedisError, StreamqError, OSError)


class AppendPipeline:
    """Calls ``append`` again and again: parts are on their way while the server adds those before.

    When anything goes wrong on that way, a call is made again in the usual way, one after the
    other: ``append`` may be repeated, and refuses parts that do not follow those that are there.
    """

    def __init__(self, connection: Connection, keys: RequestKeys) -> None:
        self._scripts = Scripts(connection)
        self._connection = connection
        self._keys = keys
        self._lane: Lane | None = None
        self._answer: Callable[[], Appended] | None = None

    def send(
        self, first: int, after: str, cursor: str, records: int, entries: Sequence[bytes | int]
    ) -> Tokens:
        """Send parts. Returns the tokens to push for those sent before, when they are there.

        Raises:
            RequestEnded: the request takes no more parts.
            LoadGap: the parts do not follow those that are there.
        """
        sent = self._send(request_calls.append(self._keys, first, after, cursor, records, entries))
        tokens = self.wait()
        self._answer = sent
        return tokens

    def wait(self) -> Tokens:
        """Wait until all that was sent is there. Returns the tokens to push for it."""
        answer, self._answer = self._answer, None
        return answer()[2] if answer else Tokens()

    def close(self) -> None:
        """Forget the answers that were not asked for, and close the connection."""
        lane, self._lane = self._lane, None
        if lane:
            lane.close()

    def _send(self, call: Call[Appended]) -> Callable[[], Appended]:
        """Send a call. Returns the function that waits for its answer."""
        words = call.words()
        try:
            # The key says which node of a cluster the calls go to.
            self._lane = self._lane or self._connection.lane(self._keys.meta)
            self._lane.send(packed_command(words))
        except _BROKEN:
            self.close()
        lane = self._lane

        def answer() -> Appended:
            if lane and lane is self._lane:
                with suppress(*_BROKEN):
                    return call.read(lane.receive())
                self.close()
            return self._scripts.do(call)

        return answer
