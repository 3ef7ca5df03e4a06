"""Versions of servers: the oldest that works, and versions with known faults."""

from collections.abc import Mapping
from typing import Any, NamedTuple

OLDEST = (7, 0, 0)
_BREAKOUT = "has CVE-2025-49844 (scripts can break out)"
_TLS = "has CVE-2026-56684 (with TLS, CLIENT KILL can run code)"
#: Of which server, from and before which version, and what is wrong. From the release notes.
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
    """The kind and version that a server reports."""

    #: redis or valkey.
    kind: str
    #: As the server reports it.
    text: str
    #: Empty if the text cannot be read.
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.text}"

    @property
    def is_too_old(self) -> bool:
        """Whether the version lacks what our scripts need; one that cannot be read does not."""
        return () < self.numbers < OLDEST

    def dangers(self, *, is_tls: bool) -> list[str]:
        """Return the known attacks on this version; those on TLS only where TLS is used."""
        found = known_faults(self.kind, self.numbers)
        return [why for why in (_BREAKOUT, _TLS) if why in found and (is_tls or why != _TLS)]


def version_of_server(info: Mapping[str, Any]) -> Version:
    """Return the version that the reply to INFO states."""
    kind = "valkey" if "valkey_version" in info else "redis"
    text = str(info.get("valkey_version") or info.get("redis_version") or "")
    words = text.split(".")[:3]
    is_readable = all(word.isdecimal() for word in words)
    return Version(kind, text, tuple(map(int, words)) if is_readable else ())


def known_faults(kind: str, version: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the known faults of a version, each with the first version that is free of it."""
    return {
        why: until
        for of, since, until, why in _BAD_VERSIONS
        if of == kind and since <= version < until
    }


def first_version_without_faults(kind: str, version: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first version, from this one on, that has no known fault."""
    while bad := known_faults(kind, version):
        version = max(bad.values())
    return version
