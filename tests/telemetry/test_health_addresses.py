"""Where health is answered: IPv4, IPv6, and addresses that cannot be."""

import socket
import time
import urllib.request
from typing import Any

import pytest

from streamq.errors import InvalidValue
from streamq.telemetry.health import HealthServer, HealthSource


def _subject() -> HealthSource:
    return HealthSource(
        ticked_at=time.monotonic, unready=lambda: "", samples=dict, wanted=lambda: 0
    )


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("0", ["127.0.0.1", "[::1]"]),
        (":0", ["127.0.0.1", "[::1]"]),
        ("127.0.0.1:0", ["127.0.0.1"]),
        ("localhost:0", ["127.0.0.1"]),
        ("[::1]:0", ["[::1]"]),
        ("[::]:0", ["[::1]", "127.0.0.1"]),
    ],
)
def test_health_is_answered_over_both_protocols(address: str, asked: list[str]) -> None:
    if "[::1]" in asked and not _has_ipv6():
        pytest.skip("no IPv6 here")
    server = HealthServer(address, _subject())
    try:
        for host in asked:
            with urllib.request.urlopen(f"http://{host}:{server.port}/livez", timeout=5) as got:
                assert got.status == 200
    finally:
        server.close()


def test_health_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    make = socket.socket.__init__

    def without(self: socket.socket, family: int = -1, *rest: Any, **more: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        make(self, family, *rest, **more)

    monkeypatch.setattr(socket.socket, "__init__", without)
    server = HealthServer("0", _subject())
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/livez", timeout=5) as got:
            assert got.status == 200
    finally:
        server.close()


@pytest.mark.parametrize("address", ["::1:0", "[::1]", "[::1:0", "::", "x", "[127.0.0.1]:0"])
def test_address_that_cannot_be_is_refused(address: str) -> None:
    with pytest.raises(InvalidValue, match=r"\[::1\]:8080"):
        HealthServer(address, _subject())
