"""The scripts that touch a queue (``lua/queue/``), as calls."""

from collections.abc import Sequence
from typing import Any

from streamq.protocol.call import Call
from streamq.protocol.keys import QueueKeys
from streamq.protocol.replies import (
    Beaten,
    MintMode,
    Register,
    Tick,
    Tokens,
    read_places,
    two_by_two,
)


def mint(
    keys: QueueKeys,
    request_id: str,
    tokens: Tokens,
    *,
    mode: MintMode = "push",
    register: Register = "no",
    believed: int = 0,
    weight: int = 0,
) -> Call[int]:
    """Push tokens of a request and register its next look. The reply is how many were pushed.

    ``keys`` are those of the list ``tokens.to``. ``believed``: of the tokens that ``ensure`` is to
    see to, so many are believed out. ``weight``: how many may be out; 0 for as many as of most.
    """
    args = {
        "request_id": request_id,
        "count": tokens.count,
        "mode": mode,
        "look_ms": tokens.look_ms,
        "register": register,
        "believed": min(believed, tokens.count),
        "to": tokens.to,
        "weight": [weight] if weight else [],
    }
    return Call("mint", keys, args, int)


def tick(
    keys: QueueKeys,
    limit: int = 100,
    every_ms: int = 5_000,
    looked: Sequence[str] = (),
    lent: int = 0,
) -> Call[Tick]:
    """Take the requests that are due for a look, and those that may be purged.

    ``looked``: those of the last tick that were looked at; they were lent until ``lent``.
    """
    args = {"limit": limit, "every_ms": every_ms, "lent": lent, "looked": looked}
    return Call("tick", keys, args, _read_ticked)


def aside(keys: QueueKeys, type: str) -> Call[bool]:
    """Rename the key ``keys.spoilt``, if it is there and of another type than this."""
    return Call("aside", keys, {"type": type}, bool)


def close(keys: QueueKeys, request_id: str | bytes, score: float, purge_at: int) -> Call[bool]:
    """Take an ended request out of the open ones, or a purged one (0) out of all."""
    args = {"request_id": request_id, "score": score, "purge_at": purge_at}
    return Call("close", keys, args, bool)


def beat(
    keys: QueueKeys,
    worker: str,
    ttl_ms: int,
    details: bytes = b"",
    lease_ms: int = 20_000,
    requests: Sequence[str] = (),
) -> Call[Beaten]:
    """Say that a worker lives and what it holds; with a TTL of 0, that it goes.

    ``keys`` are those of the worker.
    """
    args = {
        "name": worker,
        "ttl_ms": ttl_ms,
        "details": details,
        "lease_ms": lease_ms,
        "requests": requests,
    }
    return Call("beat", keys, args, _read_beaten)


def note(keys: QueueKeys, change: bytes) -> Call[bool]:
    """Write a change down in the queue's log."""
    return Call("note", keys, {"change": change}, bool)


def watch(keys: QueueKeys, most: int, ttl_ms: int) -> Call[bool]:
    """Have each worker tell so many spans a second, for a while."""
    return Call("watch", keys, {"most": most, "ttl_ms": ttl_ms}, bool)


def show(keys: QueueKeys, told: bytes) -> Call[bool]:
    """Tell spans of a worker."""
    return Call("show", keys, {"told": told}, bool)


def _read_beaten(reply: Sequence[int]) -> Beaten:
    forgotten, spans = reply
    return Beaten(forgotten, spans)


def _read_ticked(reply: Sequence[Any]) -> Tick:
    now, wait_ms, due, *flat = reply
    found = [(name, float(score)) for name, score in two_by_two(flat)]
    strays = [(name, score) for name, score in found if not read_places([name])]
    known = [(name.decode(), score) for name, score in found[:due] if read_places([name])]
    return Tick(now, wait_ms, known, read_places([name for name, _ in found[due:]]), strays)
