"""What ``streamq/driver/lanes.py`` takes for granted of redis-py and hiredis, beyond their API.

A lane borrows a connection of redis-py, then sends and reads on its socket itself. Nothing of that
is promised by redis-py. When a test here fails after redis-py was changed, read what it says, and
change ``Lane`` before the range of versions in ``pyproject.toml`` is widened.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hiredis
import pytest
from redis import exceptions as driver

from streamq import Connection
from streamq.driver.lanes import packed_command
from streamq.servers.local import LocalServer


@pytest.fixture(scope="module", params=["port", "socket"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with LocalServer.start(port=0 if request.param == "port" else None) as server:
        yield server.url


@pytest.fixture
def borrowed(url: str) -> Iterator[Any]:
    """A connection as ``Lane`` borrows it."""
    connection = Connection(url)
    pool = connection.redis.connection_pool
    found = pool.get_connection()
    yield found
    pool.release(found)
    connection.close()


def test_sock_is_the_connected_socket(borrowed: Any) -> None:
    sock: Any = getattr(borrowed, "_sock", None)

    says = (
        "Lane._use reads Connection._sock. If redis-py keeps its socket under another name, or "
        "connects later than in get_connection(), no lane can send or poll."
    )
    for needed in ("sendall", "recv_into", "shutdown", "fileno"):
        assert callable(getattr(sock, needed, None)), f"no {needed}: {says}"
    assert sock.fileno() >= 0, says
    sock.sendall(b"*1\r\n$4\r\nPING\r\n")
    assert sock.recv(100) == b"+PONG\r\n", (
        "What a lane writes to the socket is not answered in RESP2: the connection has spoken "
        "another protocol before (HELLO 3), or redis-py left an answer unread on it."
    )


def test_socket_has_the_timeout_of_the_url(url: str) -> None:
    connection = Connection(f"{url}{'&' if '?' in url else '?'}socket_timeout=3")
    sock = connection.redis.connection_pool.get_connection()._sock
    timeout = sock.gettimeout()
    connection.close()

    assert timeout == 3, (
        "Lane.send and Lane.receive set no timeout: they rely on redis-py to have set "
        "socket_timeout on the socket. Without it a server that hangs holds a lane for ever."
    )


@pytest.mark.parametrize(
    ("reply", "type_"),
    [
        ("NOSCRIPT No matching script", driver.NoScriptError),
        ("MOVED 1 127.0.0.1:1", driver.MovedError),
        ("ASK 1 127.0.0.1:1", driver.AskError),
        ("READONLY You can't write", driver.ReadOnlyError),
        ("TRYAGAIN Multiple keys", driver.TryAgainError),
        ("CLUSTERDOWN The cluster is down", driver.ClusterDownError),
        ("SHORT 7", driver.ResponseError),
    ],
)
def test_parser_makes_errors_of_refusals(borrowed: Any, reply: str, type_: type[Exception]) -> None:
    parse_error = getattr(getattr(borrowed, "_parser", None), "parse_error", None)

    says = (
        "Lane._use gives Connection._parser.parse_error to its own hiredis.Reader. If redis-py "
        "moves or changes it, a refusal is no NoScriptError, MovedError ... any more: scripts are "
        "not loaded, and a cluster that changes is not followed."
    )
    assert parse_error is not None, says
    reader: Any = hiredis.Reader(protocolError=driver.InvalidResponse, replyError=parse_error)
    reader.feed(f"-{reply}\r\n".encode())
    found = reader.gets()
    assert type(found) is type_, says
    if type_ is driver.ResponseError:
        assert str(found) == reply, "``scripts`` reads the code word from the text: " + says


def test_pool_tells_its_own_connections(url: str) -> None:
    connection, other = Connection(url), Connection(url)
    pool = connection.redis.connection_pool
    found = pool.get_connection()
    try:
        assert pool.owns_connection(found), (
            "Lane.is_usable asks ConnectionPool.owns_connection before each use. If it denies a "
            "connection that it made, every call makes a connection anew."
        )
        assert isinstance(found.pid, int), (
            "Lane.is_usable compares Connection.pid with os.getpid(). Without it a process that "
            "was forked shares the socket of its parent, and reads the parent's answers."
        )
    finally:
        pool.release(found)
        connection.close()
        other.close()


def test_connection_can_be_made_again(borrowed: Any) -> None:
    before = borrowed._sock
    borrowed.disconnect()
    borrowed.connect()

    assert borrowed._sock is not before
    assert borrowed._sock.fileno() >= 0, (
        "Lane.renew disconnects, connects and reads _sock again. If connect() becomes lazy, a lane "
        "is not renewed when a server has closed it."
    )


def test_packed_as_redis_py_packs(borrowed: Any) -> None:
    words = ("EVALSHA", "0" * 40, 1, "{r:a}:meta", 2.5, b"\x00\xff", "ü")
    packed = b"".join(borrowed.pack_command(*words))

    assert b"".join(packed_command(words)) == packed, (
        "lanes.pack uses hiredis.pack_command. If redis-py writes numbers or text otherwise, the "
        "same call has two spellings: by a lane, and by redis-py when it is repeated."
    )


def test_version_is_one_that_was_tried() -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()

    assert '"redis[hiredis]>=8,<9"' in text, (
        "The range of redis-py was changed: run this file with the oldest and the newest version "
        "of the new range, then state the range here."
    )
