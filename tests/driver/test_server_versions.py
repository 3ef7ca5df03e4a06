"""Servers that are refused: for their version, or for what they drop when they are full."""

from collections.abc import Iterator
from contextlib import suppress

import pytest

from streamq import Client, Connection
from streamq.driver import server_versions
from streamq.driver.server_versions import version_of_server
from streamq.errors import ServerError, ServerFull
from streamq.protocol.keys import QueueKeys
from streamq.servers.local import LocalServer
from tests.support.command import run
from tests.support.simulated import Worker


@pytest.mark.parametrize(
    ("info", "is_too_old", "dangers"),
    [
        ({"redis_version": "6.2.14"}, True, 0),
        ({"redis_version": "7.0.15"}, False, 0),
        ({"redis_version": "7.2.4"}, False, 1),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.3"}, False, 2),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.1"}, False, 0),
        ({"redis_version": "255.255.255"}, False, 0),
        ({"redis_version": "unstable"}, False, 0),
        ({}, False, 0),
    ],
)
def test_version_is_read(info: dict[str, str], dangers: int, *, is_too_old: bool) -> None:
    version = version_of_server(info)

    assert version.is_too_old == is_too_old
    assert len(version.dangers(is_tls=True)) == dangers


def test_server_that_is_too_old_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_versions, "OLDEST", (99, 0, 0))

    with pytest.raises(ServerError, match="too old: use Redis 7"):
        Client(url)


def test_server_with_known_trouble_is_told_of(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Connection(url)
    version = version_of_server(connection._infos()[0])
    trouble = (version.kind, (0,), (99,), server_versions._BREAKOUT)
    monkeypatch.setattr(server_versions, "_BAD_VERSIONS", (trouble,))
    told: list[str] = []

    connection.check(warn=told.append)

    assert len(told) == 1
    assert "scripts can break out" in told[0]
    connection.close()


@pytest.fixture
def mild() -> Iterator[LocalServer]:
    """A server that drops keys with a TTL when it is full, as managed ones do by default."""
    options = [("maxmemory", "12mb"), ("maxmemory-policy", "volatile-lru")]
    with LocalServer.start(options=options) as server:
        yield server


def test_full_server_that_drops_keys_with_a_ttl_loses_nothing_of_a_request(
    mild: LocalServer,
) -> None:
    told: list[str] = []
    connection = Connection(mild.url)
    connection.check(warn=told.append)
    assert ["volatile-lru" in text for text in told] == [True]
    connection.close()

    with Client(mild.url) as client:
        protocol, redis = client._protocol, client._protocol.connection.redis
        worker = QueueKeys("default", worker="W").worker
        protocol.beat("default", "W", 60_000, b"{}")
        sent = {}
        with suppress(ServerFull):
            for number in range(1000):
                payloads = [f"{number}-{part}-".encode() + b"x" * 5000 for part in range(20)]
                client.submit(payloads, handler="h", id=f"r{number}")
                sent[number] = payloads
        assert 20 < len(sent) < 1000
        # What has a TTL was dropped to make room, and nothing else was.
        assert not redis.exists(worker)
        assert redis.info("stats")["evicted_keys"] >= 1
        # More is dropped as often as somebody beats, and the request is run all the same.
        simulated = Worker(protocol, "default")
        while simulated.step():
            protocol.beat("default", "W", 60_000, b"{}")
        for number, payloads in sent.items():
            request = client.get(f"r{number}")
            assert request.status().state == "done"
            assert [result for _, result in request.results()] == [
                each.upper() for each in payloads
            ]
        # With room again a worker is seen from its next beat on.
        redis.config_set("maxmemory", 0)
        protocol.beat("default", "W", 60_000, b"{}")
        assert redis.exists(worker)


def test_who_serves_says_so_and_works(mild: LocalServer) -> None:
    ran = run("janitor", "--once", STREAMQ_URL=mild.url)

    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("maxmemory-policy is volatile-lru") == 1
    assert "volatile" not in run("status", STREAMQ_URL=mild.url).stderr
