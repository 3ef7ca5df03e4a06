"""Versions of servers: the oldest that will do, and those with known trouble."""

from collections.abc import Mapping
from typing import Any, NamedTuple

OLDEST = (7, 0, 0)
_BREAKOUT = "has CVE-2025-49844 (scripts can break out)"
_TLS = "has CVE-2026-56684 (with TLS, CLIENT KILL can run code)"
#: Of which server; from and before which version; what is wrong with them. From the release notes.
_BAD_VERSIONS = (
    ("redis", (7, 0, 0), (7, 2, 0), "is not maintained any more, unless by a distribution"),
    ("redis", (7, 2, 0), (7, 2, 11), _BREAKOUT),
    ("redis", (7, 4, 0), (7, 4, 6), _BREAKOUT),
    ("redis", (8, 0, 0), (8, 0, 4), _BREAKOUT),
    ("redis", (8, 2, 0), (8, 2, 2), _BREAKOUT),
    ("valkey", (7, 2, 0), (7, 2, 11), _BREAKOUT),
    ("valkey", (8, 0, 0), (8, 0, 6), _BREAKOUT),
    ("valkey", (8, 1, 0), (8, 1, 4), _BREAKOUT),
    ("valkey", (8, 0, 0), (8, 0, 10), _TLS),
    ("valkey", (8, 1, 0), (8, 1, 9), _TLS),
    ("valkey", (9, 0, 0), (9, 0, 5), _TLS),
    ("valkey", (9, 1, 0), (9, 1, 1), _TLS),
)


class Version(NamedTuple):
    """What a server says that it is."""

    #: redis or valkey.
    kind: str
    #: As it says it.
    text: str
    #: Empty if it cannot be read.
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.text}"

    @property
    def is_too_old(self) -> bool:
        """Whether it lacks what scripts need. One that cannot be read is not."""
        return () < self.numbers < OLDEST

    def dangers(self, *, is_tls: bool) -> list[str]:
        """What attackers are known to make of it, where TLS is used or not."""
        found = troubles(self.kind, self.numbers)
        return [why for why in (_BREAKOUT, _TLS) if why in found and (is_tls or why != _TLS)]


def version_of(info: Mapping[str, Any]) -> Version:
    """What INFO says."""
    kind = "valkey" if "valkey_version" in info else "redis"
    text = str(info.get("valkey_version") or info.get("redis_version") or "")
    words = text.split(".")[:3]
    is_readable = all(word.isdecimal() for word in words)
    return Version(kind, text, tuple(map(int, words)) if is_readable else ())


def troubles(kind: str, version: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """What is known to be wrong with a version of a server, and the first that is better."""
    return {
        why: until
        for of, since, until, why in _BAD_VERSIONS
        if of == kind and since <= version < until
    }


def first_good(kind: str, version: tuple[int, ...]) -> tuple[int, ...]:
    """The first version from this on that nothing is known to be wrong with."""
    while bad := troubles(kind, version):
        version = max(bad.values())
    return version
