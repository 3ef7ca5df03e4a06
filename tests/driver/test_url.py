"""URLs of servers: what they say, and that no password is shown."""

from typing import Any
from urllib.parse import quote

import pytest
from redis.connection import SSLConnection

from streamq import (
    Connection,
    InvalidValue,
)
from streamq.driver.url import ServerURL, mask_passwords_of_url
from tests.driver.common import PASSWORD, connected


class TestUrl:
    @pytest.mark.parametrize(
        ("url", "kind", "is_tls"),
        [
            ("redis://h", "single", False),
            ("rediss://h", "single", True),
            ("valkey://h", "single", False),
            ("valkeys://h", "single", True),
            ("unix:///tmp/s", "unix", False),
            ("redis+cluster://h", "cluster", False),
            ("rediss+cluster://h", "cluster", True),
            ("valkey+cluster://h", "cluster", False),
            ("valkeys+cluster://h", "cluster", True),
            ("redis+sentinel://h/main", "sentinel", False),
            ("rediss+sentinel://h/main", "sentinel", True),
            ("valkey+sentinel://h/main", "sentinel", False),
            ("local://", "local", False),
            ("REDIS://h", "single", False),
        ],
    )
    def test_scheme_says_how_to_connect(self, url: str, kind: str, is_tls: bool) -> None:
        target = ServerURL(url)

        assert (target.kind, target.options.get("ssl", False)) == (kind, is_tls)

    @pytest.mark.parametrize(
        ("url", "hosts"),
        [
            ("redis://", [("localhost", 6379)]),
            ("redis://h:7", [("h", 7)]),
            ("redis://[::1]:7", [("::1", 7)]),
            ("redis+cluster://u:p@a:1,b:2,c", [("a", 1), ("b", 2), ("c", 6379)]),
            ("redis+sentinel://a,b:2/main", [("a", 26379), ("b", 2)]),
        ],
    )
    def test_hosts(self, url: str, hosts: list[tuple[str, int]]) -> None:
        assert ServerURL(url).hosts == hosts

    def test_service_and_database(self) -> None:
        sentinel = ServerURL("redis+sentinel://h/main/3")

        assert (sentinel.service, sentinel.options) == ("main", {"db": 3})
        assert ServerURL("redis://h/4").options == {"db": 4}
        assert ServerURL("unix:///tmp/s?db=5").options == {"db": 5}
        assert ServerURL("redis+cluster://h/0").options == {}

    @pytest.mark.parametrize(
        "url", ["redis://{}h", "redis+cluster://{}h", "redis+sentinel://{}h/main", "unix://{}/s"]
    )
    def test_login_is_percent_encoded(self, url: str) -> None:
        named = ServerURL(url.format(f"me%40home:{quote(PASSWORD, safe='')}@"))
        nameless = ServerURL(url.format(f":{quote(PASSWORD, safe='')}@"))

        assert named.options == {"username": "me@home", "password": PASSWORD}
        assert nameless.options == {"password": PASSWORD}

    def test_options_have_their_types(self) -> None:
        target = ServerURL("rediss://h?socket_timeout=3&ssl_check_hostname=false&client_name=me")

        assert target.options == {
            "ssl": True,
            "socket_timeout": 3.0,
            "ssl_check_hostname": False,
            "client_name": "me",
        }

    def test_driver_gets_what_the_url_says(self) -> None:
        with connected("rediss://me:pw@h:7/3?socket_timeout=3") as connection:
            pool = connection.redis.connection_pool
            blocking = connection.blocking(20).connection_pool

        assert pool.connection_class is SSLConnection
        wanted = {"host": "h", "port": 7, "db": 3, "username": "me", "password": "pw"}
        assert pool.connection_kwargs.items() >= (wanted | {"socket_timeout": 3.0}).items()
        assert blocking.connection_kwargs.items() >= wanted.items()
        assert blocking.connection_kwargs["socket_timeout"] > 20

    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("", "scheme"),
            ("localhost:6379", "scheme"),
            ("http://h", "no such scheme"),
            ("redis+ring://h", "no such scheme"),
            ("unix+cluster:///s", "no such scheme"),
            ("redis://h:port", "host or port"),
            ("redis://h:70000", "host or port"),
            ("redis+cluster://a:1,b:x", "host or port"),
            ("redis://[::1", "cannot be read"),
            ("redis://a,b", "several hosts"),
            ("redis://h/main", "number of a database"),
            ("redis+sentinel://h", "wants a service"),
            ("redis+sentinel://h/main/x", "number of a database"),
            ("redis+cluster://h/1", "database than 0"),
            ("unix://relative/s", "unix:///path"),
            ("unix://", "unix:///path"),
            ("redis://h?colour=red", "no such option"),
            ("redis://h?socket_timeout=soon", "socket_timeout"),
            ("redis://h?decode_responses=true", "no such option"),
        ],
    )
    def test_url_that_cannot_be(self, url: str, says: str) -> None:
        with pytest.raises(InvalidValue, match=says):
            Connection(url)

    @pytest.mark.parametrize("url", [None, 7, b"redis://h"], ids=repr)
    def test_url_that_is_no_text(self, url: Any) -> None:
        with pytest.raises(InvalidValue, match="a URL is text"):
            Connection(url)


class TestSecrets:
    @pytest.mark.parametrize(
        ("url", "masked"),
        [
            ("redis://h:7/3", "redis://h:7/3"),
            ("redis://me:secret@h:7/3", "redis://me:***@h:7/3"),
            ("redis://:secret@h", "redis://:***@h"),
            ("redis+cluster://me:secret@a:1,b:2", "redis+cluster://me:***@a:1,b:2"),
            ("redis://h?db=1&password=secret&x=1", "redis://h?db=1&password=***&x=1"),
            ("unix:///tmp/a@b.sock?password=secret", "unix:///tmp/a@b.sock?password=***"),
            ("unix://me:secret@/tmp/s", "unix://me:***@/tmp/s"),
            ("local://", "local://"),
        ],
    )
    def test_password_is_not_shown(self, url: str, masked: str) -> None:
        assert mask_passwords_of_url(url) == masked

    @pytest.mark.parametrize("between", [*"@:/?#[]%&= ", "://"])
    @pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel", "http", "unix"])
    def test_nor_one_that_should_have_been_encoded(self, scheme: str, between: str) -> None:
        url = f"{scheme}://me:topsecret{between}hushhush@h:x/main"

        with pytest.raises(InvalidValue) as failure:
            Connection(url)

        for text in (mask_passwords_of_url(url), str(failure.value), repr(failure.value)):
            assert "topsecret" not in text
            assert "hushhush" not in text

    @pytest.mark.parametrize(
        "url", ["me:secret@h", "redis:secret@h", "secret@h://x", "//:secret@h"]
    )
    def test_nor_one_in_what_is_no_url(self, url: str) -> None:
        with pytest.raises(InvalidValue) as failure:
            Connection(url)

        assert "secret@" not in str(failure.value)
