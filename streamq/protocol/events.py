"""Hearing of the end of a request."""

from streamq.driver.connection import Connection
from streamq.driver.errors import translating_driver_errors


class Events:
    """A subscription that can only wake its owner: what happened is read from the request."""

    def __init__(self, connection: Connection, channel: str) -> None:
        self._where = connection.where
        self._pubsub = connection.subscribe(channel)

    def wait(self, timeout_s: float) -> None:
        """Return at the next message, or when the time is over."""
        with translating_driver_errors(self._where):
            self._pubsub.get_sharded_message(ignore_subscribe_messages=True, timeout=timeout_s)

    def close(self) -> None:
        """End the subscription."""
        self._pubsub.close()
