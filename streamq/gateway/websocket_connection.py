"""The connection of a WebSocket: one that does not read is cut off."""

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from streamq.gateway.listener import REFUSED_S, ImpatientListener, ListenerConnection
from streamq.gateway.websocket import PATH


class WebSocketStream(ImpatientListener, WebSocketsSansIOProtocol):
    """One stream of a worker, or of a browser. There may be thousands, so each is kept small."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.queue = WebSocketMessages()  # type: ignore[assignment]
        # Starlette hands the state to the application.
        self.app_state = {**self.app_state, "stream": self}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, as one whose caller is not known yet."""
        super().connection_made(transport)
        ListenerConnection.newcomers.add(self, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Make no more room."""
        ListenerConnection.newcomers.drop(self)
        super().connection_lost(exc)

    def accepted(self) -> None:
        """Note that the caller may have the stream: it makes no room."""
        ListenerConnection.newcomers.drop(self)

    def goodbye(self) -> None:
        """Cut the connection soon: not all callers answer when they are told that it ends."""
        self.loop.call_later(REFUSED_S, self.transport.abort)

    def start_keepalive(self) -> None:
        """Ask a browser now and then whether it is there. A worker beats."""
        if self.scope["path"] != PATH:
            super().start_keepalive()
        # Its opening handshake is not needed any more.
        del self.request, self.response


class WebSocketMessages:
    """A queue for one reader, which takes a tenth of the memory of ``asyncio.Queue``."""

    __slots__ = ("_coming", "_here")

    def __init__(self) -> None:
        self._here: list[Any] = []
        self._coming: asyncio.Future[None] | None = None

    def put_nowait(self, message: Any) -> None:
        """Add a message."""
        self._here.append(message)
        if self._coming and not self._coming.done():
            self._coming.set_result(None)

    def empty(self) -> bool:
        """Return whether no message is there."""
        return not self._here

    async def get(self) -> Any:
        """Return the oldest message; wait for one if there is none."""
        while not self._here:
            self._coming = asyncio.get_running_loop().create_future()
            await self._coming
        return self._here.pop(0)
