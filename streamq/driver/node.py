"""Calls to one node of a cluster, whichever keys it has: to create and to examine clusters."""

from typing import Any

from redis import Redis
from redis import exceptions as driver
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamq.driver.clients import client_options
from streamq.driver.errors import translating_driver_errors
from streamq.driver.url import ServerURL
from streamq.errors import ServerRefused


class NodeClient:
    """A connection to one node, with the login and TLS of a URL. Replies are strings."""

    def __init__(self, url: ServerURL, host: str, port: int) -> None:
        self._where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        options = client_options(url, decode_responses=True, retry=Retry(NoBackoff(), 0))
        self._client = Redis(host=host, port=port, **options)
        with translating_driver_errors(self._where):
            self._connection: Any = self._client.connection_pool.get_connection()

    def ask(self, *words: str) -> str:
        """Send a command and return the answer as text; a list becomes one item per line.

        Raises:
            ServerError: the node does not answer, or refuses.
        """
        try:
            with translating_driver_errors(self._where):
                self._connection.send_command(*words)
                reply = self._connection.read_response()
        except driver.ResponseError as error:
            raise ServerRefused(f"{self._where} refuses {' '.join(words[:2])}: {error}") from None
        return "\n".join(map(str, reply)) if isinstance(reply, list) else str(reply)

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()
        self._client.close()
