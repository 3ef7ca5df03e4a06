"""Hearing of the ends of requests that somebody watches, on one subscription for all of them."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from streamq.driver.errors import translating_driver_errors
from streamq.errors import StreamqError
from streamq.protocol.protocol import Protocol

log = logging.getLogger(__name__)

#: Requests that somebody began to watch are subscribed to within this time (s).
TURN_S = 0.25
#: The pause between tries to subscribe during an outage (s).
AGAIN_S = 2.0


class Ends:
    """Calls ``ended`` with the id of each watched request that has ended. A message may be lost."""

    def __init__(self, protocol: Protocol, ended: Callable[[str], object]) -> None:
        self._protocol = protocol
        self._ended = ended
        self._wanted: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="ends", daemon=True)
        self._thread.start()

    def watch(self, request_id: str) -> None:
        """Begin to listen for the end of a request."""
        self._wanted = self._wanted | {request_id}

    def leave(self, request_id: str) -> None:
        """Listen no longer for the end of a request."""
        self._wanted = self._wanted - {request_id}

    def close(self) -> None:
        """End the thread and its connection."""
        self._over.set()

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                if not self._wanted:
                    self._over.wait(TURN_S)
                    continue
                self._hear()
            except StreamqError as error:
                log.debug("ends of requests are not heard: %s", error)
                self._over.wait(AGAIN_S)
            except Exception:
                log.exception("ends of requests are not heard")
                self._over.wait(AGAIN_S)

    def _hear(self) -> None:
        channels = self._protocol.keys
        connection = self._protocol.connection
        with translating_driver_errors(connection.where):
            pubsub = connection.redis.pubsub()
            heard: dict[str, str] = {}
            try:
                while not self._over.is_set() and (self._wanted or heard):
                    self._adjust(pubsub, heard, channels)
                    if not heard:
                        return
                    message = pubsub.get_sharded_message(
                        ignore_subscribe_messages=True, timeout=TURN_S
                    )
                    if message and message.get("channel"):
                        name = message["channel"].decode()
                        if name in heard:
                            self._ended(heard[name])
            finally:
                with suppress(Exception):
                    pubsub.close()

    def _adjust(self, pubsub: object, heard: dict[str, str], keys: Callable[[str], object]) -> None:
        wanted = {getattr(keys(each), "events"): each for each in self._wanted}  # noqa: B009
        if more := wanted.keys() - heard.keys():
            pubsub.ssubscribe(*more)  # type: ignore[attr-defined]
        if less := heard.keys() - wanted.keys():
            pubsub.sunsubscribe(*less)  # type: ignore[attr-defined]
        heard.clear()
        heard.update(wanted)
