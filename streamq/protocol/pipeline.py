"""Calls that are sent before the one before them is answered."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from streamq.driver.connection import Connection
from streamq.driver.errors import RedisError
from streamq.driver.lanes import Lane, pack
from streamq.errors import StreamqError
from streamq.protocol import request_calls
from streamq.protocol.call import Call
from streamq.protocol.keys import RequestKeys
from streamq.protocol.replies import Appended, Tokens
from streamq.protocol.scripts import Scripts

T = TypeVar("T")

_BROKEN = (RedisError, StreamqError, OSError)


class CallPipeline:
    """Sends calls whose keys are of one request, each before the one before it is answered.

    When anything goes wrong on that way, a call is made again in the usual way, one after the
    other. So this is for scripts that may be repeated, and that refuse by themselves when one
    before them has failed. The caller asks for answers in the order of the calls.
    """

    def __init__(self, connection: Connection, key: str) -> None:
        """``key`` says which node of a cluster the calls go to."""
        self._scripts = Scripts(connection)
        self._connection = connection
        self._key = key
        self._lane: Lane | None = None

    def send(self, call: Call[T]) -> Callable[[], T]:
        """Send a call. Returns the function that waits for its answer."""
        words = call.words()
        try:
            self._lane = self._lane or self._connection.lane(self._key)
            self._lane.send(pack(words))
        except _BROKEN:
            self.close()
        lane = self._lane

        def answer() -> T:
            if lane and lane is self._lane:
                with suppress(*_BROKEN):
                    return call.read(lane.receive())
                self.close()
            return self._scripts.do(call)

        return answer

    def close(self) -> None:
        """Forget the answers that were not asked for."""
        lane, self._lane = self._lane, None
        if lane:
            lane.close()


class AppendPipeline:
    """``append`` again and again: parts are on their way while the server adds those before."""

    def __init__(self, connection: Connection, keys: RequestKeys) -> None:
        self._pipeline = CallPipeline(connection, keys.meta)
        self._keys = keys
        self._answer: Callable[[], Appended] | None = None

    def send(self, first: int, cursor: str, records: int, entries: Sequence[bytes | int]) -> Tokens:
        """Send parts. Returns the tokens to push for those sent before, when they are there.

        Raises:
            RequestEnded: the request takes no more parts.
            LoadGap: the parts do not follow those that are there.
        """
        call = request_calls.append(self._keys, first, cursor, records, entries)
        sent = self._pipeline.send(call)
        tokens = self.wait()
        self._answer = sent
        return tokens

    def wait(self) -> Tokens:
        """Wait until all that was sent is there. Returns the tokens to push for it."""
        answer, self._answer = self._answer, None
        return answer()[2] if answer else Tokens()

    def close(self) -> None:
        """Let go of the way to the server."""
        self._pipeline.close()
