"""Connections, logins and a sentinel for the tests of connections."""

import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from streamq import (
    Connection,
)
from streamq.servers.launcher import LOOPBACK, Launcher, start_on_free_port
from streamq.servers.local import LocalServer, find_server

#: Nothing a URL can hold as it is.
PASSWORD = "p@ss:/?#[%]&= ü"


@contextmanager
def connected(url: str) -> Generator[Connection]:
    connection = Connection(url)
    try:
        yield connection
    finally:
        connection.close()


def with_login(url: str, login: str) -> str:
    return url.replace("://", f"://{login}@")


@contextmanager
def sentinel_for(server: LocalServer, service: str) -> Generator[str]:
    """A sentinel that watches a server, and its address."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        launcher = Launcher(home)
        stack.callback(launcher.stop)
        watched = server.url.rpartition(":")[2]

        def run(port: int) -> int:
            file = home / "sentinel.conf"
            file.write_text(
                f"port {port}\nbind {LOOPBACK}\ndir {home}\n"
                f"sentinel monitor {service} {LOOPBACK} {watched} 1\n"
            )
            launcher.run([str(find_server()), str(file), "--sentinel"], home, (LOOPBACK, port))
            return port

        yield f"{LOOPBACK}:{start_on_free_port(run)}"
