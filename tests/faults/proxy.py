"""A door to a server that misbehaves on demand.

Clients connect to the proxy's port on loopback. What is wrong is set from any thread and
counts for everything that passes from then on. All proxies share one thread.
"""

import asyncio
import atexit
import itertools
import random
import socket
import struct
import threading
from collections.abc import Callable
from functools import cache

from streamq.protocol.lua import script_digest, script_signature
from streamq.servers.launcher import LOOPBACK

#: Linger for no time at all: closing sends a reset.
_AT_ONCE = struct.pack("ii", 1, 0)
_CLAIM = script_digest("claim").encode()
_FINISH = script_digest("finish").encode()
#: Where the words of a finish are: EVALSHA, digest and number of keys come first.
_FINISH_WORDS = {
    name: place
    for place, name in enumerate(itertools.chain(*script_signature("finish")[:2]), start=3)
}
_GRANTED = b"$2\r\nok\r\n"


class Proxy:
    """The door of one server."""

    def __init__(self, backend: int, seed: int = 0) -> None:
        #: The port of the server. Connections that stand keep theirs.
        self.backend = backend
        #: How likely a reply is lost, with its connection, after the server has done its work.
        self.lose = 0.0
        #: How much later everything arrives, in both directions.
        self.delay_s = 0.0
        #: Whether replicas are cut off.
        self.is_cut = False
        self.lost = 0
        #: Tokens and news popped, news among them, pops that found nothing, claims that were
        #: granted parts.
        self.pops = self.news = self.idle = self.granted = 0
        #: Results that came with calls of finish that were answered, by lease and call; a call
        #: that is repeated counts once. And how many of them the server counted.
        self.given: dict[tuple[bytes, ...], int] = {}
        self.counted = 0
        self._is_hole = False
        self._chance = random.Random(seed)
        self._links: set[_Link] = set()
        self._loop = _loop()
        start = self._loop.create_server(lambda: _Link(self).client, LOOPBACK, 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def target(self) -> int:
        """Return the port that a new connection is led to."""
        return self.backend

    def reset(self) -> int:
        """Break every connection as a router does that forgot them. Returns how many."""
        links = [link for link in self._links if not link.is_replication]
        self._do(*(link.reset for link in links))
        return len(links)

    def open_hole(self) -> None:
        """From now on nothing arrives, in no direction, and nobody is told."""
        self._is_hole = True
        for link in list(self._links):
            link.is_swallowed = not link.is_replication

    def close_hole(self) -> None:
        """New connections work again. Those that met the hole stay dead, and silent."""
        self._is_hole = False

    def cut_replicas(self) -> None:
        """Let replicas learn nothing more."""
        self.is_cut = True
        self._do(*(link.reset for link in list(self._links) if link.is_replication))

    def switch(self, backend: int) -> None:
        """Let another server stand behind the door."""
        self.backend = backend
        self.reset()

    def calm(self) -> None:
        """Behave."""
        self.lose = self.delay_s = 0.0
        self.is_cut = False
        self.close_hole()

    def close(self) -> None:
        """Let nobody in any more, and break what stands."""
        self._do(self._server.close, *(link.reset for link in list(self._links)))

    def _do(self, *steps: Callable[[], object]) -> None:
        for step in steps:
            self._loop.call_soon_threadsafe(step)

    # What the links ask, in the proxy's thread.

    def joined(self, link: "_Link") -> None:
        self._links.add(link)
        link.is_swallowed = self._is_hole

    def left(self, link: "_Link") -> None:
        self._links.discard(link)

    def loses(self) -> bool:
        """Whether this reply is lost."""
        if self.lose and self._chance.random() < self.lose:
            self.lost += 1
            return True
        return False


class _Link:
    """A client's connection and its twin at the server."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.client = _Side(self)
        self.server = _Side(self)
        self.is_swallowed = self.is_replication = False
        self._early = b""
        self._asked = ""
        self._results: tuple[tuple[bytes, ...], int] = ((), 0)

    def made(self, side: "_Side") -> None:
        if side is self.server:
            if self._early:
                self.server.write(self._early)
        else:
            self.proxy.joined(self)
            loop = asyncio.get_running_loop()
            self._connecting = loop.create_task(self._connect(loop))

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.is_swallowed:
            return
        try:
            await loop.create_connection(lambda: self.server, LOOPBACK, self.proxy.target())
        except OSError:
            self.reset()

    def received(self, side: "_Side", data: bytes) -> None:
        if side is self.client:
            self._note_call(data)
        else:
            self._note_reply(data)
            if not self.is_replication and not self.is_swallowed and self.proxy.loses():
                self.reset()
                return
        if self.is_swallowed:
            return
        if self.proxy.delay_s and not self.is_replication:
            asyncio.get_running_loop().call_later(self.proxy.delay_s, self._pass, side, data)
        else:
            self._pass(side, data)

    def _pass(self, side: "_Side", data: bytes) -> None:
        if self.is_swallowed:
            return
        if side is self.server:
            self.client.write(data)
        elif self.server.transport is None:
            self._early += data
        else:
            self.server.write(data)

    def _note_call(self, data: bytes) -> None:
        head = data[:96]
        if b"BRPOP" in head:
            self._asked = "pop"
        elif _CLAIM in head:
            self._asked = "claim"
        elif _FINISH in head:
            self._asked = "finish"
            self._results = _results(data)
        elif b"REPLCONF" in head or b"PSYNC" in head:
            self.is_replication = True
            if self.proxy.is_cut:
                self.reset()

    def _note_reply(self, data: bytes) -> None:
        if self._asked == "pop":
            self.proxy.pops += data.startswith(b"*2")
            self.proxy.news += data.startswith(b"*2") and b":news:" in data[:96]
            self.proxy.idle += not data.startswith(b"*2")
        elif self._asked == "claim":
            self.proxy.granted += _GRANTED in data[:24]
        elif self._asked == "finish" and data.startswith(b"*"):
            call, number = self._results
            self.proxy.given[call] = number
            # word, tokens, their list, when to look again, counted, ...
            self.proxy.counted += int(_scalars(data, 5)[4])
        self._asked = ""

    def reset(self) -> None:
        """End both connections without a word."""
        self.proxy.left(self)
        for side in (self.client, self.server):
            if side.transport is not None:
                side.reset(side.transport)

    def lost(self, side: "_Side") -> None:
        """One end has closed: the other hears of it, unless nothing gets through."""
        self.proxy.left(self)
        other = self.server if side is self.client else self.client
        if other.transport is not None and not (self.is_swallowed and other is self.client):
            other.transport.close()


class _Side(asyncio.Protocol):
    def __init__(self, link: _Link) -> None:
        self._link = link
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link.made(self)

    def data_received(self, data: bytes) -> None:
        self._link.received(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.lost(self)

    def write(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def reset(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        transport.abort()


def _results(call: bytes) -> tuple[tuple[bytes, ...], int]:
    """Whose a finish is (request, lease, number), and how many results come with it."""
    words = _scalars(call, _FINISH_WORDS["numbers"] + 1)
    whose = tuple(words[_FINISH_WORDS[name]] for name in ("meta", "holder", "call"))
    return whose, len(words[_FINISH_WORDS["numbers"]]) // 8


def _scalars(array: bytes, count: int) -> list[bytes]:
    """The first elements of an array, as long as they are numbers and strings."""
    found = []
    at = array.index(b"\r\n") + 2
    for _ in range(count):
        end = array.index(b"\r\n", at)
        head, at = array[at:end], end + 2
        if head.startswith(b"$"):
            size = int(head[1:])
            found.append(array[at : at + size])
            at += size + 2
        else:
            found.append(head[1:])
    return found


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxies", daemon=True)
    thread.start()

    def end() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    atexit.register(end)
    return loop
