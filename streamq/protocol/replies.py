"""The replies of scripts, and the terms they are asked for, as plain data."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from streamq import units
from streamq.model import Part, State

Ended = Literal["done", "failed", "cancelled"]
"""The state of a request that has ended."""
#: How ``fail`` is to treat a part.
FailKind = Literal["retry", "late", "snooze", "hold", "abandon"]
#: What ``mint`` is to do with tokens: push so many more; push those missing from so many; take out
#: those of ended requests; push none, and forget the list if it is empty.
MintMode = Literal["push", "ensure", "drop", "forget", "heard"]
#: Whether ``mint`` registers the request: no; yes, it is about to open; again, with a new score, so
#: that a janitor that read the old score cannot close the request any more.
Register = Literal["no", "yes", "again"]
#: The state of a request, whether it is paused, and of each holder whether its lease stands.
Renewed = tuple[State, bool, dict[str, bool]]


class Tokens(msgspec.Struct, frozen=True):
    """What a script asks its caller to do in the queue."""

    count: int = 0
    #: The list they belong in: ``HANDLER:LL``, the end of its name.
    to: str = ""
    #: Moment to look at the request again (ms), or 0.
    look_ms: int = 0
    #: Of a flow: what to push for other stages.
    others: tuple["StageTokens", ...] = ()
    #: Of a redrive of a flow: how many parts do not run again, because their join or reduce was
    #: made without them, or because inputs of theirs are missing.
    refused: int = 0

    def __bool__(self) -> bool:
        return self.count > 0 or self.look_ms > 0 or len(self.others) > 0

    def next_look_ms(self, queue: str) -> int:
        """Return when a janitor of the queue is to look first at what is told of here; 0: never."""
        if not self.others:
            return self.look_ms
        others = (each.tokens.look_ms for each in self.others if each.queue == queue)
        return min((look for look in (self.look_ms, *others) if look), default=0)


class StageTokens(msgspec.Struct, frozen=True):
    """Tokens to push for another stage of a flow, in that stage's queue."""

    place: str
    queue: str
    tokens: Tokens


#: The answer to ``append``: parts so far, the load cursor, tokens to push.
Appended = tuple[int, str, Tokens]


class Token(msgspec.Struct, frozen=True):
    """An invitation that was taken: to claim parts of a request."""

    request_id: str
    #: Of the list that it came from.
    handler: str
    level: int


class Opened(msgspec.Struct, frozen=True):
    """A request as ``open`` found or made it."""

    is_new: bool
    state: State
    total: int
    cursor: str


class Terms(msgspec.Struct, frozen=True):
    """What a holder asks for: how many parts at most, how many bytes, for how long."""

    most: int = 1
    max_bytes: int = 2**20
    lease_ms: int = 20_000


class Grant(msgspec.Struct):
    """The answer to ``claim`` and ``finish``: what to run next, if anything."""

    #: ok: run the parts. Else why there are none. "over", "late": from ``finish`` only.
    word: Literal[
        "ok", "empty", "limit", "held", "paused", "handler", "level", "over", "late", "lost", Ended
    ]
    tokens: Tokens
    parts: list[Part]
    #: How many of the parts had trouble before; they come first.
    retried: int = 0
    #: Given by claim: the request's handler, and its spec unless the caller knew it.
    handler: str = ""
    spec: bytes = b""
    #: Given by claim: when the request was created, which tells it from another of its id.
    created_ms: int = 0
    #: Given by claim: how long the request's parts could have been run by then.
    waited_ms: int = 0
    #: Given by finish: how many of the results were counted.
    counted: int = 0


class PassedPart(msgspec.Struct):
    """A finished part of a stage: what it hands over."""

    number: int
    #: Of the item that it is.
    origin: str
    #: What each child says of itself (its ``about``), or its origin; and its payload.
    labels: list[str]
    payloads: list[bytes]
    #: How many records the children have in all.
    handed: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """The answer to a call that hands out no parts."""

    #: What became of the part (``fail``), the lease (``release``) or the call.
    word: Literal["ok", "retry", "failed", "ended", "over", "late", "lost", Ended]
    tokens: Tokens


class Audit(msgspec.Struct, frozen=True):
    """What should be out for a request."""

    state: State
    queue: str
    tokens: Tokens
    #: Leases that may be reaped.
    expired: int
    #: 0 while it lives, or while leases stand.
    purge_at: int
    #: Entries that somebody else added to its stream, dropped since the last audit.
    strays: int = 0
    #: Leases past their deadline: their holders are suspected to be dead.
    overdue: int = 0
    #: Tokens that were believed out.
    believed: int = 0
    #: How many tokens may be out; 0: as many as of most requests.
    weight: int = 0
    #: 1 when callbacks of its end are to be started: it is not closed before.
    owed: int = 0
    #: How long (ms) it is past its deadline.
    overdue_by: int = 0


class Reaped(msgspec.Struct, frozen=True):
    """What expired leases gave back."""

    leases: int
    parts: int
    state: State
    tokens: Tokens


class Beaten(msgspec.Struct, frozen=True):
    """What a worker is told when it says that it lives."""

    #: How many workers were forgotten because they were silent for a day.
    forgotten: int
    #: How many spans a second it is to tell, because somebody looks at the timeline; 0: nobody.
    spans: int = 0


class Tick(msgspec.Struct, frozen=True):
    """Requests that want a look, and those that may be purged, with their scores."""

    now_ms: int
    wait_ms: int
    due: list[tuple[str, float]]
    purgeable: list[str]
    #: What is in the indexes and can be no request's id, with its score.
    strays: list[tuple[bytes, float]] = []


class Collected(msgspec.Struct, frozen=True):
    """Results in input order."""

    state: State
    next: int
    #: Results the server still has.
    left: int
    results: list[tuple[int, bytes]]
    #: Of a flow: the fields of the results, such as ``17/3``; and the child of the part ``next`` to
    #: go on with, "" for the part itself.
    fields: list[str] = []
    within: str = ""


def part_of_field(field: str) -> int:
    """Return the number of the part whose result has that field: 17 for ``17``, ``17/3``."""
    return int(field.partition(".")[0].partition("/")[0])


def read_tokens(reply: Sequence[Any]) -> Tokens:
    """Return the tokens that most replies end with."""
    count, to, look_ms, *more = reply
    return Tokens(count, to.decode(), look_ms, read_other_stages(more[0]) if more else ())


def read_other_stages(flat: Sequence[Any]) -> tuple[StageTokens, ...]:
    """Return the tokens for other stages: place, queue, count, list, look, place, ..."""
    return tuple(
        StageTokens(place.decode(), queue.decode(), Tokens(count, to.decode(), look_ms))
        for place, queue, count, to, look_ms in zip(*[iter(flat)] * 5, strict=True)
    )


def read_names(found: Iterable[bytes]) -> list[str]:
    """Return those that can be names. The janitor takes whatever else is in an index out of it."""
    names = []
    for each in found:
        with suppress(ValueError):
            names.append(units.name(each.decode(), "name"))
    return names


def read_places(found: Iterable[bytes]) -> list[str]:
    """Return those that can be places: request ids, or stages of requests."""
    places = []
    for each in found:
        text = each.decode("ascii", "replace")  # what is no ASCII becomes no name
        if units.is_place(text):
            places.append(text)
    return places


def two_by_two(flat: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    """Return the values two by two."""
    return zip(flat[::2], flat[1::2], strict=True)
