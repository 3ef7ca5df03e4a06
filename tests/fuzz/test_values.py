"""What people write: every text is either understood or refused in words, never a crash."""

import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamq import Connection, units
from streamq.driver.url import ServerURL, mask_passwords_of_url
from streamq.errors import InvalidValue, ServerRefused, SettingsError, StreamqError
from streamq.settings import Settings
from tests.fuzz.profile import anything, fuzz, garbage, numbers, texts

UNITS = st.sampled_from(["", "ms", "s", "m", "h", "d", "B", "KB", "MB", "GB", "KiB", "MiB", "GiB"])
AMOUNTS = st.builds(
    "{}{}{}".format, numbers | texts, st.sampled_from(["", " ", "/"]), UNITS | texts
)
PARSERS: dict[str, Callable[[Any], Any]] = {
    "name": lambda value: units.name(value, "it"),
    "whole": lambda value: units.whole(value, "it", 0),
    "duration": units.duration_ms,
    "moment": lambda value: units.moment_s(value, "it"),
    "size": units.size_bytes,
    "rate": units.rate_ms,
    "tolerance": units.tolerated_failures,
}
SCHEMES = st.sampled_from(
    ["redis", "rediss", "valkey", "unix", "local", "redis+cluster", "redis+sentinel", "http", ""]
)
OPTIONS = st.sampled_from(
    ["db", "password", "socket_timeout", "max_connections", "ssl_check_hostname", "ssl_cert_reqs"]
)
HOSTS = (
    st.sampled_from(["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999", ".", "a..b", "x" * 70]) | texts
)
URLS = texts | st.builds(
    "{}://{}{}/{}?{}={}".format,
    SCHEMES,
    st.just("") | texts.map("{}@".format),
    HOSTS,
    st.sampled_from(["", "0", "service"]) | texts,
    OPTIONS,
    texts,
)


@pytest.mark.parametrize("parser", PARSERS)
@fuzz(60)
@given(value=anything | AMOUNTS)
def test_value_is_understood_or_refused(parser: str, value: Any) -> None:
    with suppress(InvalidValue):
        found = PARSERS[parser](value)
        for each in found if isinstance(found, tuple) else (found,):
            assert isinstance(each, str) or math.isfinite(each)


@fuzz(40)
@given(ms=st.integers(0, 10**12))
def test_duration_that_was_written_is_read_back(ms: int) -> None:
    assert units.duration_ms(f"{ms}ms") == ms
    assert units.duration_ms(f" {ms // 1_000} s ") == ms // 1_000 * 1_000


@fuzz(40)
@given(size=st.integers(1, 2**50))
def test_size_that_was_written_is_read_back(size: int) -> None:
    assert units.size_bytes(str(size)) == units.size_bytes(f"{size}B") == units.size_bytes(size)


@fuzz(120)
@given(url=URLS)
def test_url_is_understood_or_refused(url: str) -> None:
    with suppress(InvalidValue):
        ServerURL(url)


@fuzz(40)
@given(secret=st.text(min_size=4, max_size=20), scheme=SCHEMES, rest=texts)
def test_password_is_never_shown(secret: str, scheme: str, rest: str) -> None:
    hidden = f"<{secret}>"

    for url in (
        f"{scheme}://me:{hidden}@host/{rest}",
        f"redis://h/0?password={hidden.strip('&#')}",
    ):
        shown = mask_passwords_of_url(url)
        if "@" not in rest:
            assert hidden not in shown


@fuzz(60)
@given(
    env=st.dictionaries(
        st.sampled_from(
            ["URL", "PREFIX", "QUEUE", "LEASE_MS", "BEAT_MS", "AUDIT_MS", "URL_FILE"]
        ).map(lambda name: f"STREAMQ_{name}"),
        texts,
    )
)
def test_environment_is_understood_or_refused(env: dict[str, str]) -> None:
    with suppress(SettingsError):
        settings = Settings.from_env(env)
        assert 0 < settings.beat_ms < settings.lease_ms


#: Where nobody listens, on this machine: nothing may go out of it.
NOWHERE = st.sampled_from(["redis://127.0.0.1:1", "unix:///nowhere", "redis://.", "redis://a..b"])


@fuzz(60)
@given(where=NOWHERE, path=st.sampled_from(["", "/0"]), option=OPTIONS, value=texts)
def test_server_that_is_not_there_is_said_in_words(
    where: str, path: str, option: str, value: str
) -> None:
    with pytest.raises(StreamqError):
        check(f"{where}{path}?{option}={quote(value, errors='replace')}")


@fuzz(40)
@given(reply=garbage | st.sampled_from([b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n"]))
def test_stranger_at_the_port_is_said_in_words(stranger: "Stranger", reply: bytes) -> None:
    stranger.reply = reply

    with pytest.raises(StreamqError):
        check(stranger.url)


def test_database_that_the_server_does_not_have_is_said_in_words(
    urls: Callable[[str], str],
) -> None:
    with pytest.raises(ServerRefused, match="out of range"):
        check(f"{urls('valkey')}?db=99")


def check(url: str) -> None:
    connection = Connection(url)
    try:
        connection.check()
    finally:
        connection.close()


class Stranger:
    """Listens on a port, answers whatever it is asked with the same bytes, and hangs up."""

    reply = b""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._socket.accept()
                with caller, suppress(OSError):
                    caller.recv(1_000)
                    caller.sendall(self.reply)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def stranger() -> Iterator[Stranger]:
    stranger = Stranger()
    yield stranger
    stranger.close()
