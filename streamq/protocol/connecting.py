"""A server that answers and is fit, for as long as a block lasts."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager

from streamq import units
from streamq.driver.connection import Connection
from streamq.protocol.protocol import Protocol
from streamq.settings import Settings


@contextmanager
def connected_protocol(
    url: str,
    prefix: str,
    *,
    is_insecure: bool,
    say: Callable[[str], object],
    warn: Callable[[str], object],
    is_patient: bool = True,
) -> Generator[Protocol]:
    """Connect to the server, see that it can be used, and drop the connections at the end.

    While it fails over or starts it is waited for: at the beginning, and if ``is_patient``
    also later. Those who are not have ways of their own to wait. What is waited for goes to
    ``say``, and what of the server should be mended to ``warn``.

    Raises:
        ServerError: it cannot be used.
    """
    name = units.name(prefix, "prefix")
    patience_s = Settings.from_env().patience_ms / 1e3
    connection = Connection(url)
    with closing(connection), ExitStack() as patience:
        patience.enter_context(connection.patience(patience_s, say))
        connection.check(is_insecure=is_insecure, warn=warn)
        if not is_patient:
            patience.close()
        yield Protocol(connection, name)
