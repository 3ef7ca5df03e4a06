"""Lets callers in over TLS. Those who still shake hands count as connections, too."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sized
from contextlib import suppress
from functools import partial

from streamq.gateway.listener import ListenerConnection

log = logging.getLogger(__name__)

#: How long a caller may take to agree on how to encrypt.
HANDSHAKE_S = 10.0
#: How many connections there may be beyond the most, while others are on their way out.
_SPARE = 100
#: How many callers are let in before others of the event loop have their turn.
_AT_ONCE = 20
#: How long the door stays shut when there are too many, or when the system has no more files.
_SHUT_S = 0.05


class TlsDoor:
    """Accepts connections, and hands them on when they are encrypted.

    The event loop's own server tells of a connection when its handshake is over. Before that,
    silent ones could take all open files of the process, and nobody would have counted them.
    """

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        make: Callable[[], ListenerConnection],
        connections: Sized,
    ) -> None:
        """``make`` makes the connection of a caller; ``connections`` are those that there are."""
        self._listener = listener
        self._tls = tls
        self._make = make
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        #: Those who are on the way in, each with its socket until the event loop has it.
        self._coming: dict[asyncio.Task[None], socket.socket | None] = {}
        self._opening: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._open()

    def close(self) -> None:
        """Let nobody in any more."""
        self._loop.remove_reader(self._listener.fileno())
        if self._opening:
            self._opening.cancel()
        for task in self._coming:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until nobody is on the way in."""
        await asyncio.gather(*self._coming, return_exceptions=True)

    def _open(self) -> None:
        self._opening = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _shut_for_a_moment(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._opening = self._loop.call_later(_SHUT_S, self._open)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            too_many = 1 + len(self._connections) + len(self._coming) - ListenerConnection.most
            if too_many > _SPARE:
                ListenerConnection.newcomers.make_room()
                self._shut_for_a_moment()
                return
            try:
                raw, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("connections wait: %s", error)
                self._shut_for_a_moment()
                return
            if too_many > 0:  # somebody did come
                ListenerConnection.newcomers.make_room()
            raw.setblocking(False)
            task = self._loop.create_task(self._let_in(raw))
            self._coming[task] = raw
            task.add_done_callback(self._has_come)
            ListenerConnection.newcomers.add(task, task.cancel)

    async def _let_in(self, raw: socket.socket) -> None:
        task = asyncio.current_task()
        assert task
        # From here on the event loop closes the socket. Another close could hit a later connection
        # which has its number by then.
        self._coming[task] = None

        def make() -> ListenerConnection:
            connection = self._make()
            # When it is encrypted it counts as a connection. It must not make room for itself.
            connection.before_it_counts = partial(ListenerConnection.newcomers.drop, task)
            return connection

        # It spoke no TLS, left, was too slow, or made room.
        with suppress(OSError, asyncio.CancelledError):
            await self._loop.connect_accepted_socket(
                make, raw, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
            )

    def _has_come(self, task: asyncio.Task[None]) -> None:
        ListenerConnection.newcomers.drop(task)
        if raw := self._coming.pop(task):
            raw.close()  # it made room before anything was done for it
