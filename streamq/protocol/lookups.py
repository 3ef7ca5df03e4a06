"""Reads about single parts and items of a request, without a script. Several in one round trip."""

from collections.abc import Sequence

import msgspec

from streamq.driver.errors import translating_driver_errors
from streamq.errors import damaged_if_unreadable
from streamq.protocol.protocol import Protocol

#: The score of a part that may run at once is its number; that of others a moment (ms).
_FIRST_MOMENT = 10**12


class PartLookup(msgspec.Struct, frozen=True, kw_only=True):
    """What the server has of one part of a stage."""

    number: int
    #: The holder of the part; "-" for nobody, "" where the part is not pending.
    holder: str
    #: When it may run again (ms), if it waits for that; 0 for at once.
    due_ms: int | None
    #: How often it failed; and what is kept of it where it was given up.
    errors: int
    failed: bytes | None


def look_up_fields(
    protocol: Protocol, place: str, name: str, asked: Sequence[str]
) -> list[bytes | None]:
    """Return these fields of a hash of a request; None for those that it has not."""
    if not asked:
        return []
    key = getattr(protocol.keys(place), name)
    with translating_driver_errors(protocol.connection.where):
        found: list[bytes | None] = protocol.connection.redis.hmget(key, list(asked))
    return found


def look_up_parts(protocol: Protocol, place: str, numbers: Sequence[int]) -> list[PartLookup]:
    """Return what the server has of these parts."""
    keys, own = protocol.keys(place), [str(number) for number in numbers]
    pending = protocol.ask_each(own, lambda pipe, n: pipe.xpending_range(keys.parts, "w", n, n, 1))
    scores = protocol.ask_each(own, lambda pipe, n: pipe.zscore(keys.retry, n))
    tries = look_up_fields(protocol, place, "tries", own)
    failed = look_up_fields(protocol, place, "failed", own)
    return [
        PartLookup(
            number=number,
            holder=waits[0]["consumer"].decode() if waits else "",
            due_ms=None if score is None else int(score) if score >= _FIRST_MOMENT else 0,
            errors=_first_number_of_tries(tried),
            failed=text,
        )
        for number, waits, score, tried, text in zip(
            numbers, pending, scores, tries, failed, strict=True
        )
    ]


def look_up_parts_of_key(protocol: Protocol, ids: Sequence[str], key: str) -> list[list[int]]:
    """Return for each request the numbers of its parts that have the key.

    Raises:
        Damaged: what the server has of the key are no numbers.
    """
    found = protocol.ask_each(ids, lambda pipe, each: pipe.hget(protocol.keys(each).keys, key))
    with damaged_if_unreadable(f"the index of keys, at {key!r},"):
        return [[int(number) for number in (each or b"").split()] for each in found]


def _first_number_of_tries(tried: bytes | None) -> int:
    words = (tried or b"").split()
    return int(words[0]) if words and words[0].isdigit() else 0
