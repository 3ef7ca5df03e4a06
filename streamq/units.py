"""Durations, sizes, rates and names as people write them, with one parser for each."""

import os
import re
from collections.abc import Mapping
from typing import TypeGuard

from streamq.errors import InvalidValue

#: Units of time as people write them, and their milliseconds.
_DURATION_MS = {
    **dict.fromkeys(("ms", "msec", "millisecond", "milliseconds"), 1),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1_000),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60_000),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3_600_000),
    **dict.fromkeys(("d", "day", "days"), 86_400_000),
}
#: Units of size in capitals, and their bytes. As for head and dd, K is 1,024 and KB 1,000.
_SIZE_BYTES = {
    **dict.fromkeys(("", "B"), 1),
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    **dict.fromkeys(("K", "KIB"), 2**10),
    **dict.fromkeys(("M", "MIB"), 2**20),
    **dict.fromkeys(("G", "GIB"), 2**30),
}
#: A rate is given per second, minute or hour.
_RATE_UNITS_MS = (1_000, 60_000, 3_600_000)
_DURATIONS = "90s, 5m, 1h30m or 7d"
_SIZES = "64k, 256KiB or 1M"
#: Longest duration, and longest time between two starts under a rate: about 30 years.
_LONGEST_MS = 10**12
#: Largest whole number: Lua's numbers are doubles, which count exactly up to 2^53.
_LARGEST = 2**53
_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
#: Longer texts are no duration and no size: reading megabytes of them would take seconds.
_LONGEST_TEXT = 100
#: Most labels of a request, and the longest value of one, in characters.
_MOST_LABELS = 8
_LONGEST_LABEL = 256
#: Longest name of a team: ids of the team and names made of them have room for it.
_LONGEST_TEAM = 32
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
#: Most stages of a flow.
MOST_STAGES = 16
#: The stages of a place, besides numbers, that run after the end of a request.
EPILOGUES = ("then", "failure", "finally")
_LATER = frozenset((*map(str, range(2, MOST_STAGES + 1)), *EPILOGUES))


def name(value: str, what: str) -> str:
    """Return the value if it can be part of a key: 1 to 64 of ``A-Z a-z 0-9 _ . -``."""
    if type(value) is str and len(value) <= 64 and value.isalnum() and value.isascii():
        return value  # the quick way: most ids are only letters and digits
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidValue(f"{what} {value!r:.100} is not 1 to 64 characters of A-Z a-z 0-9 _ . -")
    return str.__str__(value)  # plain text also where the value is a member of a StrEnum


def request_id(given: str | None, team: str = "", what: str = "request id") -> str:
    """Return the id of a new request: the given one, or one that is made up.

    Ids of a team begin with its name.

    Raises:
        InvalidValue: the given id cannot be part of a key, or is not one of the team.
    """
    head = id_head(team)
    if given is None:
        return head + os.urandom(8).hex()
    if head and not str(given).startswith(head):
        raise InvalidValue(f"{what} {given!r:.100}: ids of the team {team} begin with {head}")
    return name(given, what)


def id_head(team: str) -> str:
    """Return what ids of a team begin with. The hyphen keeps team1 apart from team10."""
    return f"{team}-" if team else ""


def team(value: str, what: str) -> str:
    """Return the value if it can be the name of a team: as a name, 32 characters at most."""
    if len(name(value, what)) > _LONGEST_TEAM:
        raise InvalidValue(f"{what} {value!r} has more than {_LONGEST_TEAM} characters")
    return value


def place(value: str) -> tuple[str, str]:
    """Return the request id and the stage of a place: ``nightly`` or ``nightly/2``.

    The stage is "" for the request itself, which is its own first stage.
    """
    request_id, slash, stage = value.partition("/")
    if slash and stage not in _LATER:
        raise InvalidValue(f"place {value!r:.100} is neither a request id nor one of its stages")
    return name(request_id, "request id"), stage


def is_place(value: str) -> bool:
    """Return whether ``place`` would take the value; many are asked for at once."""
    request_id, slash, stage = value.partition("/")
    return bool(_NAME.fullmatch(request_id)) and (not slash or stage in _LATER)


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
        raise InvalidValue(f"{what} {text!r:.80}: write NAME=VALUE, such as user=62")
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
    """Return the milliseconds of ``"90s"``, ``"5 min"``, ``"1h30m"``; a number is seconds."""
    ms = value * 1_000 if _is_number(value) else _sum_ms(value, what)
    if not 0 <= ms <= _LONGEST_MS:
        raise InvalidValue(f"{what} {value!r:.80} is negative or longer than 30 years")
    return round(ms)


def _sum_ms(value: object, what: str) -> float:
    amounts = _amounts_with_units(value, what, _DURATIONS)
    if len(amounts) == 1 and not amounts[0][1]:
        return amounts[0][0] * 1_000
    ms, last_ms = 0.0, float("inf")
    for amount, unit in amounts:
        if unit not in _DURATION_MS:
            which = f"there is no unit {unit!r}" if unit else f"{amount:g} has no unit"
            raise InvalidValue(f"{what} {value!r:.80}: {which}; write {_DURATIONS}")
        unit_ms = _DURATION_MS[unit]
        if unit_ms >= last_ms:
            raise InvalidValue(f"{what} {value!r:.80}: larger units come first, as in 1h30m")
        ms, last_ms = ms + amount * unit_ms, unit_ms
    return ms


def moment_s(value: float, what: str) -> float:
    """Return the value if it can be a time in seconds since 1970."""
    if not _is_number(value) or not 0 <= value <= _LONGEST_MS:
        raise InvalidValue(f"{what} {value!r} is not a time in seconds since 1970")
    return value


def size_bytes(value: str | int, what: str = "size") -> int:
    """Return the bytes of ``"64k"``, ``"256KiB"``, ``"2GB"``, or of a bare number of bytes."""
    if isinstance(value, int):
        return whole(value, what, 1)
    amounts = _amounts_with_units(value, what, _SIZES)
    amount, unit = amounts[0]
    if len(amounts) > 1:
        raise InvalidValue(f"{what} {value!r:.80}: write one number and its unit: {_SIZES}")
    if unit.upper() not in _SIZE_BYTES:
        raise InvalidValue(f"{what} {value!r:.80}: there is no unit {unit!r:.80}; write {_SIZES}")
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
    unit_ms = _DURATION_MS.get(unit, 0)
    if not slash or unit_ms not in _RATE_UNITS_MS or not 0 < per_unit < float("inf"):
        raise InvalidValue(f"{what} {value!r:.80}: write 100/s, 30/m or 1000/h")
    ms = unit_ms / per_unit
    if ms > _LONGEST_MS:
        raise InvalidValue(f"{what} {value!r:.80} is too slow")
    return ms


def tolerated_failures(value: str | int | None) -> tuple[int, float]:
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
    raise InvalidValue(f"max_failures {value!r:.80}: write a number such as 10, or 2%")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _amounts_with_units(value: object, what: str, examples: str) -> list[tuple[float, str]]:
    """Return the numbers of ``1h 30 min``, each with its unit or with ""."""
    text = value.strip() if isinstance(value, str) and len(value) <= _LONGEST_TEXT else ""
    at, found = 0, []
    while match := _NUMBER_AND_UNIT.match(text, at):
        found.append((float(match[1]), match[2]))
        at = match.end()
    if not found or at < len(text):
        raise InvalidValue(f"{what} {value!r:.80}: write {examples}")
    if any(amount == float("inf") for amount, _ in found):
        raise InvalidValue(f"{what} is too large: write {examples}")
    return found
