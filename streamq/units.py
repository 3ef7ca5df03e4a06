"""Durations, sizes, rates and names as people write them, with one parser for each."""

import os
import re
from collections.abc import Mapping
from typing import TypeGuard

from streamq.errors import InvalidValue

_DURATION_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
#: Longest duration, and longest time between two starts under a rate: about 30 years.
_LONGEST_MS = 10**12
#: Largest whole number: Lua's numbers are doubles, which count exactly up to 2^53.
_LARGEST = 2**53
_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
#: Most labels of a request, and the longest value of one, in characters.
_MOST_LABELS = 8
_LONGEST_LABEL = 256
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def name(value: str, what: str) -> str:
    """Return the value if it can be part of a key: 1 to 64 of ``A-Z a-z 0-9 _ . -``."""
    if type(value) is str and len(value) <= 64 and value.isalnum() and value.isascii():
        return value  # the quick way: most ids are only letters and digits
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidValue(f"{what} {value!r} is not 1 to 64 characters of A-Z a-z 0-9 _ . -")
    return str.__str__(value)  # plain text also where the value is a member of a StrEnum


def labels(value: object, what: str = "labels") -> tuple[tuple[str, str], ...]:
    """Return labels, names and values by name, if there are 8 at most and all can be shown."""
    if not isinstance(value, Mapping):
        raise InvalidValue(f'{what} {value!r:.80}: give names and values, such as {{"user": "62"}}')
    if len(value) > _MOST_LABELS:
        raise InvalidValue(f"{what}: {len(value)} are more than the {_MOST_LABELS} of a request")
    checked = {name(key, "the name of a label"): text for key, text in value.items()}
    for key, text in checked.items():
        if not isinstance(text, str):
            raise InvalidValue(f"the label {key} is {text!r:.80}, which is no text")
        if len(text) > _LONGEST_LABEL:
            raise InvalidValue(
                f"the label {key} has {len(text)} characters, more than the {_LONGEST_LABEL} of one"
            )
        if not text.isprintable():
            raise InvalidValue(f"the label {key} has characters that cannot be shown: {text!r:.80}")
    return tuple(sorted(checked.items()))


def label(text: str, what: str = "--label") -> tuple[str, str]:
    """Return the name and the value of ``user=62``."""
    key, equals, value = text.partition("=")
    if not equals:
        raise InvalidValue(f"{what} {text!r}: write NAME=VALUE, such as user=62")
    return name(key, "the name of a label"), value


def file_name(value: str) -> str:
    """Return the name of a file if it is UTF-8: requests are kept as JSON, which needs it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidValue(
            f"the file name {os.fsencode(value)!r} is not UTF-8: give the file another name"
        ) from None
    return value


def whole(value: int, what: str, least: int, most: int = _LARGEST) -> int:
    """Return the value if it is a whole number in the range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValue(f"{what} {value!r} is not a whole number")
    allowed = f"{least} or more" if most == _LARGEST and value < least else f"{least} to {most}"
    if not least <= value <= most:
        shown = value if abs(value) < 10**30 else "(a very large number)"
        raise InvalidValue(f"{what} {shown} is out of range: {allowed}")
    return int(value)


def duration_ms(value: str | float, what: str = "duration") -> int:
    """Return the milliseconds of ``"30s"``, ``"5m"``, ``"2h"``, ``"7d"``; a number is seconds."""
    if _is_number(value):
        ms = value * 1_000
    else:
        amount, unit = _split(value, what, "30s, 5m, 2h or 7d")
        if (unit or "s") not in _DURATION_MS:
            raise InvalidValue(f"{what} {value!r}: no such unit; write 30s, 5m, 2h or 7d")
        ms = amount * _DURATION_MS[unit or "s"]
    if not 0 <= ms <= _LONGEST_MS:
        raise InvalidValue(f"{what} {value!r} is negative or longer than 30 years")
    return round(ms)


def moment_s(value: float, what: str) -> float:
    """Return the value if it can be a time in seconds since 1970."""
    if not _is_number(value) or not 0 <= value <= _LONGEST_MS:
        raise InvalidValue(f"{what} {value!r} is not a time in seconds since 1970")
    return value


def size_bytes(value: str | int, what: str = "size") -> int:
    """Return the bytes of ``"256KiB"``, ``"1MiB"``, ``"2GB"``, or of a bare number of bytes."""
    if isinstance(value, int):
        return whole(value, what, 1)
    amount, unit = _split(value, what, "256KiB or 1MiB")
    if unit.upper() not in _SIZE_BYTES:
        raise InvalidValue(f"{what} {value!r}: no such unit; write 256KiB or 1MiB")
    size = amount * _SIZE_BYTES[unit.upper()]
    return whole(round(min(size, 2.0 * _LARGEST)), what, 1)


def rate_ms(value: str, what: str = "rate") -> float:
    """Return the milliseconds between two starts at ``"100/s"``, ``"30/m"``, ``"1000/h"``."""
    count, slash, unit = str(value).partition("/")
    unit = unit.strip()
    try:
        per_unit = float(count)
    except ValueError:
        per_unit = 0.0
    if not slash or unit not in {"s", "m", "h"} or not 0 < per_unit < float("inf"):
        raise InvalidValue(f"{what} {value!r}: write 100/s, 30/m or 1000/h")
    ms = _DURATION_MS[unit] / per_unit
    if ms > _LONGEST_MS:
        raise InvalidValue(f"{what} {value!r} is too slow")
    return ms


def tolerance(value: str | int | None) -> tuple[int, float]:
    """Return how many failures and what percentage are tolerated; -1 where there is no bound."""
    if value is None:
        return -1, -1.0
    text = str(value).strip()
    try:
        if text.endswith("%"):
            percent = float(text[:-1])
            if 0 <= percent <= 100:
                return -1, percent
        elif 0 <= int(text) <= _LARGEST:
            return int(text), -1.0
    except ValueError:
        pass
    raise InvalidValue(f"max_failures {value!r}: write a number such as 10, or 2%")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _split(value: object, what: str, examples: str) -> tuple[float, str]:
    match = _NUMBER_AND_UNIT.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise InvalidValue(f"{what} {value!r}: write {examples}")
    amount = float(match[1])
    if amount == float("inf"):
        raise InvalidValue(f"{what} is too large: write {examples}")
    return amount, match[2]
