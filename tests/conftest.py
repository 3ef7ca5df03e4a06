"""A real server of each kind, a queue and a request id of one's own, a protocol, the command.

``STREAMQ_TEST_SERVERS=valkey,redis,cluster`` says which kinds must be there; without it
those are used that are found. The kinds ``secure`` and ``secure-cluster`` are used only when
they are named: with TLS, and a user for each role, which commands come as. Nobody flushes: every
test has names of its own.
"""

import os
import secrets
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from streamq import Client, Connection, Protocol
from streamq.protocol.keys import QueueKeys, RequestKeys
from streamq.servers.local import LocalServer
from streamq.servers.local_cluster import LocalCluster
from tests.support import warm
from tests.support.by_hand import RequestByHand
from tests.support.fleet import Fleet
from tests.support.secure import SecureCluster, SecureServer, as_role

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background or by nohup. What tests start would inherit it, and not be stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # Under ``nohup``. A handler is not inherited, so programs that tests start can be hung up.
    signal.signal(signal.SIGHUP, lambda *_: None)

_ASKED = os.environ.get("STREAMQ_TEST_SERVERS")
KINDS = (
    _ASKED.split(",")
    if _ASKED
    else [
        kind
        for kind in ("valkey", "redis", "cluster")
        if kind != "redis" or shutil.which("redis-server")
    ]
)
#: For what is the same on all of them.
ONE_KIND = pytest.mark.parametrize("kind", KINDS[:1], indirect=True)

#: For tests of what the kind of server has no part in: they run on one, that asks most of clients.
ANY_KIND = pytest.mark.parametrize("kind", KINDS[-1:], indirect=True)

#: For tests that take seconds: on one kind in ``make test``, on the others in ``make test-long``.
FIRST_KIND = pytest.mark.parametrize(
    "kind",
    [*KINDS[:1], *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[1:])],
    indirect=True,
)

Server = LocalServer | LocalCluster | SecureServer | SecureCluster


def start(kind: str) -> Server:
    """A server of the kind; the caller stops it."""
    if kind == "cluster":
        return LocalCluster.start(primaries=3, replicas=1)
    if kind == "secure":
        return SecureServer()
    if kind == "secure-cluster":
        return SecureCluster()
    return LocalServer.start(binary=shutil.which("redis-server") if kind == "redis" else None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use a server, for ``make test-unit`` to leave them out."""
    for item in items:
        if "urls" in getattr(item, "fixturenames", ()):
            item.add_marker("server")


def pytest_unconfigure() -> None:
    """End the process in whose forks commands run."""
    warm.end()


@pytest.fixture(scope="session")
def urls() -> Generator[Callable[[str], str]]:
    """The URL of a server of a kind, started at the first use and shared by all tests."""
    running: dict[str, Server] = {}

    def url(kind: str) -> str:
        if kind not in running:
            running[kind] = start(kind)
        return running[kind].url

    yield url
    for server in running.values():
        server.stop()


@pytest.fixture(scope="session")
def connections(urls: Callable[[str], str]) -> Generator[Callable[[str], Connection]]:
    """One connection to each kind of server."""
    made: dict[str, Connection] = {}

    def connection(kind: str) -> Connection:
        if kind not in made:
            made[kind] = Connection(urls(kind))
        return made[kind]

    yield connection
    for each in made.values():
        each.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which kind of server the test runs on: it runs on each."""
    return str(request.param)


@pytest.fixture
def url(kind: str, urls: Callable[[str], str]) -> str:
    return urls(kind)


@pytest.fixture
def protocol(kind: str, connections: Callable[[str], Connection]) -> Protocol:
    return Protocol(connections(kind))


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(as_role(url, "load")) as client:
        yield client


@pytest.fixture
def queue() -> str:
    return f"q{secrets.token_hex(6)}"


@pytest.fixture
def request_id() -> str:
    return f"r{secrets.token_hex(6)}"


@pytest.fixture
def keys(request_id: str) -> RequestKeys:
    return RequestKeys(request_id)


@pytest.fixture
def queue_keys(queue: str) -> QueueKeys:
    return QueueKeys(queue)


@pytest.fixture
def fleet(url: str, queue: str, tmp_path: Path) -> Iterator[Fleet]:
    """Worker pools on the test's own queue."""
    fleet = Fleet(url, queue, tmp_path)
    yield fleet
    fleet.end()


@pytest.fixture
def driver(protocol: Protocol, queue: str, request_id: str) -> RequestByHand:
    """Moves one request through the protocol, and looks at its keys."""
    return RequestByHand(protocol, queue, request_id)
