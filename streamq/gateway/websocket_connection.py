"""The connection of a WebSocket: one that does not read is cut off."""

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from streamq.gateway.listener import Impatient


class Stream(Impatient, WebSocketsSansIOProtocol):
    """One stream of a worker, or of a browser."""
