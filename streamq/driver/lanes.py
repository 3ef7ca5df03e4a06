"""Calls to one server on connections that are kept.

The driver makes the connections: it knows of logins, TLS and sentinels. A short call by its own
way through its pool, its checks and its parser costs several times what the call itself does.
"""

import os
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import hiredis
from redis import exceptions as driver

#: What tells that a server, or the way to it, is not there.
GONE = (driver.ConnectionError, driver.TimeoutError, OSError)
_READ_BYTES = 2**16
#: A word of more bytes is sent from where it is: to copy it costs more than to send.
_LARGE = 2**16
#: A server that is well answers sooner than this, whatever it may do besides.
_SOON_S = 5.0
#: So many commands are kept in the form they are sent in, of no more words than this.
_KEPT = 64
_KEPT_WORDS = 1_700


def pack(words: tuple[Any, ...]) -> list[bytes]:
    """A command, in the pieces that it is sent in. Large words are among the last two or nowhere:
    results are one word, and the parts of a load are about as large as each other.
    """
    if not (_is_large(words[-1]) or _is_large(words[-2:][0])):
        return [hiredis.pack_command(words)]
    pieces: list[bytes] = []
    small = [b"*%d\r\n" % len(words)]
    for word in words:
        if _is_large(word):
            pieces += (b"".join(small) + b"$%d\r\n" % len(word), word)
            small = [b"\r\n"]
        else:
            small.append(hiredis.pack_command((word,)).removeprefix(b"*1\r\n"))
    return [*pieces, b"".join(small)]


def _is_large(word: Any) -> bool:
    return type(word) is bytes and len(word) > _LARGE


class Lane:
    """One connection, on which a command may be sent before the last one is answered."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._connection = pool.get_connection()
        self._buffer = bytearray(_READ_BYTES)
        self._use()

    def _use(self) -> None:
        #: What the server calls the connection; 0 where it does not tell, None before it is asked.
        self.number: int | None = None
        connection = self._connection
        self._socket = connection._sock
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        parse_error = connection._parser.parse_error
        self._reader = hiredis.Reader(protocolError=driver.InvalidResponse, replyError=parse_error)

    def is_usable(self) -> bool:
        """Whether it still leads to the server from here, with nothing on its way.

        Not if another process made it, if the server has left it, or if sentinels name another
        primary by now.
        """
        connection = self._connection
        return (
            connection.pid == os.getpid()
            and not self._poll.poll(0)
            and self._pool.owns_connection(connection)
        )

    def is_owned_by(self, pool: Any) -> bool:
        """Whether a pool would lead to the same server now; after a failover it does not."""
        return bool(pool.owns_connection(self._connection))

    def send(self, packed: Iterable[bytes]) -> None:
        """Send what ``pack`` made."""
        try:
            for piece in packed:
                self._socket.sendall(piece)
        except TimeoutError as error:
            raise driver.TimeoutError(f"nothing was taken in time: {error}") from None
        except OSError as error:
            raise driver.ConnectionError(str(error)) from None

    def receive(self) -> Any:
        """The answer to the first command that has none yet.

        Raises:
            ResponseError: it is a refusal.
        """
        reader: Any = self._reader
        buffer = self._buffer
        answer = reader.gets()
        while answer is False:
            try:
                size = self._socket.recv_into(buffer)
            except TimeoutError as error:
                raise driver.TimeoutError(f"no answer in time: {error}") from None
            except OSError as error:
                raise driver.ConnectionError(str(error)) from None
            if not size:
                raise driver.ConnectionError("it closed the connection")
            reader.feed(buffer, 0, size)
            answer = reader.gets()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def learn_number(self) -> None:
        """Ask the server what it calls the connection, once."""
        if self.number is None:
            self.send(pack(("CLIENT", "ID")))
            if not self.is_answered(_SOON_S):
                raise driver.TimeoutError(f"no answer in {_SOON_S:g} s")
            try:
                self.number = int(self.receive())
            except driver.ResponseError:
                self.number = 0

    def is_answered(self, within_s: float) -> bool:
        """Whether an answer begins to come in time."""
        return bool(self._poll.poll(within_s * 1e3))

    def hang_up(self) -> None:
        """End a wait for an answer, from another thread: there it is an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def renew(self) -> None:
        """Connect again."""
        self._connection.disconnect()
        self._connection.connect()
        self._use()

    def close(self) -> None:
        """Drop the connection: answers may be on their way that nobody wants."""
        self._connection.disconnect()
        self._pool.release(self._connection)


class Lanes:
    """Lanes to one server, each for one call at a time and then for another."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._free: deque[Lane] = deque()
        self._packed: dict[tuple[Any, ...], list[bytes]] = {}
        #: Those on which a call blocks now.
        self.blocked: set[Lane] = set()

    def call(self, words: tuple[Any, ...]) -> Any:
        """The answer to a command."""
        return self._call(self._take(), pack(words))

    def ask(self, words: tuple[Any, ...], within_s: float) -> Any:
        """The answer to a command, if it comes in time."""
        return self._call(self._take(), pack(words), within_s)

    def block(self, words: tuple[Any, ...]) -> Any:
        """The answer to a command that blocks, and is made again and again, word by word."""
        is_kept = len(words) <= _KEPT_WORDS
        packed = self._packed.get(words) if is_kept else None
        if packed is None:
            packed = pack(words)
            if is_kept:
                if len(self._packed) >= _KEPT:
                    self._packed.clear()
                self._packed[words] = packed
        lane = self._take()
        self.blocked.add(lane)
        try:
            try:
                lane.learn_number()
            except BaseException:
                lane.close()
                raise
            # Not on a connection that is made anew: it would have another number.
            return self._call(lane, packed, send=Lane.send)
        finally:
            self.blocked.discard(lane)

    def _call(
        self,
        lane: Lane,
        packed: list[bytes],
        within_s: float = 0.0,
        send: Callable[[Lane, list[bytes]], None] | None = None,
    ) -> Any:
        try:
            (send or self._send)(lane, packed)
            if within_s and not lane.is_answered(within_s):
                raise driver.TimeoutError(f"no answer in {within_s:g} s")
            answer = lane.receive()
        except driver.ReadOnlyError:
            # It leads to a former primary.
            lane.close()
            raise
        except driver.ResponseError:
            self._free.append(lane)
            raise
        except BaseException:
            lane.close()
            raise
        self._free.append(lane)
        return answer

    def call_all(self, calls: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The answers to commands that are sent one behind the other.

        Each is sent before the next is made, so that the server is at it meanwhile.
        """
        packed = map(pack, calls)
        lane = self._take()
        try:
            self._send(lane, next(packed))
            sent = 1
            for pieces in packed:
                lane.send(pieces)
                sent += 1
            answers = [self._answer(lane) for _ in range(sent)]
        except BaseException:
            lane.close()
            raise
        if any(isinstance(answer, driver.ReadOnlyError) for answer in answers):
            lane.close()  # it leads to a former primary
        else:
            self._free.append(lane)
        return answers

    def close(self) -> None:
        """Close those that are free."""
        while self._free:
            self._free.pop().close()

    def _take(self) -> Lane:
        try:
            lane = self._free.pop()
        except IndexError:
            return Lane(self._pool)
        if lane.is_usable():
            return lane
        lane.close()
        return Lane(self._pool)

    @staticmethod
    def _send(lane: Lane, packed: list[bytes]) -> None:
        try:
            lane.send(packed)
        except driver.ConnectionError:
            # The server has left, and not heard it all: so it can be said again to one who is back.
            lane.renew()
            lane.send(packed)

    @staticmethod
    def _answer(lane: Lane) -> Any:
        try:
            return lane.receive()
        except driver.ResponseError as refusal:
            return refusal
