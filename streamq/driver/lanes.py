"""Calls to one server on connections that are kept.

redis-py makes the connections: it knows about logins, TLS and sentinels. Its own way to make a call
(pool, checks, parser) costs several times as much as a short call itself.
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

#: Errors that mean: the server is away, or the connection to it is lost.
GONE = (driver.ConnectionError, driver.TimeoutError, OSError)
_READ_BYTES = 2**16
#: A word of more bytes is sent by itself: copying it into a larger buffer costs more than a send.
_LARGE = 2**16
#: A healthy server answers CLIENT ID within this time, however busy it is.
_SOON_S = 5.0
#: ``block`` keeps up to 64 commands in packed form, and none of more than 1,700 words.
_KEPT = 64
_KEPT_WORDS = 1_700


def packed_command(words: tuple[Any, ...]) -> list[bytes]:
    """Return a command in the pieces that it is sent in.

    Only the last two words are checked for size, and that is enough: ``finish`` sends all results
    as its last word, and the payloads of one ``append`` have about the same size.
    """
    if not (_is_large_word(words[-1]) or _is_large_word(words[-2:][0])):
        return [hiredis.pack_command(words)]
    pieces: list[bytes] = []
    small = [b"*%d\r\n" % len(words)]
    for word in words:
        if _is_large_word(word):
            pieces += (b"".join(small) + b"$%d\r\n" % len(word), word)
            small = [b"\r\n"]
        else:
            small.append(hiredis.pack_command((word,)).removeprefix(b"*1\r\n"))
    return [*pieces, b"".join(small)]


def _is_large_word(word: Any) -> bool:
    return type(word) is bytes and len(word) > _LARGE


class Lane:
    """One connection, on which a command may be sent before the last one is answered."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._connection = pool.get_connection()
        self._buffer = bytearray(_READ_BYTES)
        self._use()

    def _use(self) -> None:
        #: The server's id of this connection; 0 if the server does not tell, None before it was
        #: asked.
        self.number: int | None = None
        connection = self._connection
        self._socket = connection._sock
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        parse_error = connection._parser.parse_error
        self._reader = hiredis.Reader(protocolError=driver.InvalidResponse, replyError=parse_error)

    def is_usable(self) -> bool:
        """Return whether the connection still leads to the right server, with no answer on its way.

        It does not if another process made it, if the server has closed it, or if sentinels name
        another primary by now.
        """
        connection = self._connection
        return (
            connection.pid == os.getpid()
            and not self._poll.poll(0)
            and self._pool.owns_connection(connection)
        )

    def is_owned_by(self, pool: Any) -> bool:
        """Return whether the pool leads to the server of this lane; not so after a failover."""
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
        """Return the answer to the oldest command that has none yet.

        Raises:
            ResponseError: the answer is a refusal.
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
        """Ask the server for its id of this connection, once."""
        if self.number is None:
            self.send(packed_command(("CLIENT", "ID")))
            if not self.is_answered(_SOON_S):
                raise driver.TimeoutError(f"no answer in {_SOON_S:g} s")
            try:
                self.number = int(self.receive())
            except driver.ResponseError:
                self.number = 0

    def is_answered(self, within_s: float) -> bool:
        """Return whether an answer begins to arrive within that time."""
        return bool(self._poll.poll(within_s * 1e3))

    def hang_up(self) -> None:
        """End another thread's wait for an answer: ``receive`` raises an error there."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def renew(self) -> None:
        """Connect again."""
        self._connection.disconnect()
        self._connection.connect()
        self._use()

    def close(self) -> None:
        """Drop the connection. Answers that are still on their way are lost with it."""
        self._connection.disconnect()
        self._pool.release(self._connection)


class Lanes:
    """Lanes to one server. Each serves one call at a time and is then kept for the next."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._free: deque[Lane] = deque()
        self._packed: dict[tuple[Any, ...], list[bytes]] = {}
        #: Lanes on which a call blocks now.
        self.blocked: set[Lane] = set()

    def call(self, words: tuple[Any, ...]) -> Any:
        """Send a command and return the answer."""
        return self._call(self._take(), packed_command(words))

    def ask(self, words: tuple[Any, ...], within_s: float) -> Any:
        """Send a command and return the answer, or raise TimeoutError if none comes in time."""
        return self._call(self._take(), packed_command(words), within_s)

    def block(self, words: tuple[Any, ...]) -> Any:
        """Send a command that blocks and return the answer.

        Such a command is repeated word by word, so its packed form is kept.
        """
        is_kept = len(words) <= _KEPT_WORDS
        packed = self._packed.get(words) if is_kept else None
        if packed is None:
            packed = packed_command(words)
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
            # `Lane.send` does not reconnect. A new connection would have another number, and `wake`
            # would unblock the old one.
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
            # This lane leads to a server that is no longer the primary.
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
        """Send commands one after the other and return the answers; a refusal is an answer, too.

        Each command is sent before the next is packed, so that the server works meanwhile.
        """
        packed = map(packed_command, calls)
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
            lane.close()  # it leads to a server that is no longer the primary
        else:
            self._free.append(lane)
        return answers

    def close(self) -> None:
        """Close the lanes that are free."""
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
            # The server closed the connection before it had the whole command, so it has not run
            # it: the command can be sent again on a new connection.
            lane.renew()
            lane.send(packed)

    @staticmethod
    def _answer(lane: Lane) -> Any:
        try:
            return lane.receive()
        except driver.ResponseError as refusal:
            return refusal
