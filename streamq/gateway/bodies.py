"""Reads the bodies of calls: each in time, and all of them together in so much memory."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from streamq.gateway.problems import Problem, problem_of_too_many_takes
from streamq.gateway.roles import LOCAL, Caller

#: How long a caller may take to send the body of a call.
BODY_S = 30.0
#: How many bytes the bodies of all calls at hand may have together, and those of one key.
MOST_TOGETHER = 2**27
MOST_OF_KEY = 2**26


class Bodies:
    """The bodies of calls that are read or carried out. It belongs to the event loop."""

    def __init__(self) -> None:
        self._bytes = 0
        self._of_key: Counter[str] = Counter()

    @contextmanager
    def of(self, caller: Caller) -> Iterator["Body"]:
        """Give room to the body of a call, as long as the block lasts."""
        body = Body(self, caller)
        try:
            yield body
        finally:
            self.take(caller, -body.size)

    def take(self, caller: Caller, size: int) -> None:
        """Count bytes that have come, or that are needed no more.

        Raises:
            Problem: there are too many at once.
        """
        self._bytes += size
        of_key = self._of_key[caller.name] + size
        if of_key:
            self._of_key[caller.name] = of_key
        else:
            del self._of_key[caller.name]
        if size > 0 and self._bytes > MOST_TOGETHER:
            raise problem_of_too_many_takes(f"bodies of {MOST_TOGETHER} bytes are on their way")
        if size > 0 and of_key > MOST_OF_KEY and caller is not LOCAL:
            raise problem_of_too_many_takes(
                f"bodies of {MOST_OF_KEY} bytes with the key {caller.name} are on their way already"
            )


class Body:
    """The body of one call."""

    def __init__(self, bodies: Bodies, caller: Caller) -> None:
        self._bodies = bodies
        self._caller = caller
        self.size = 0

    async def read(self, request: Request, most: int) -> bytes:
        """Read it.

        Raises:
            Problem: it is larger than ``most``, comes too slowly, or there is no room for it.
        """
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise _body_of_call_too_large(most)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    self.size += len(chunk)
                    self._bodies.take(self._caller, len(chunk))
                    body += chunk
                    if len(body) > most:
                        raise _body_of_call_too_large(most)
        except TimeoutError:
            raise Problem(
                408, "SLOW", "the body did not come in time", f"it took longer than {BODY_S:g} s"
            ) from None
        return bytes(body)


def _body_of_call_too_large(most: int) -> Problem:
    return Problem(413, "LARGE", "the body is too large", f"{most} bytes are allowed")
