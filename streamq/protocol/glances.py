"""Reads for the pictures of the dashboard: each glance costs the server a bounded time."""

from collections.abc import Sequence
from typing import Any

import msgspec

from streamq.driver.errors import translating_driver_errors
from streamq.errors import Damaged, ServerRefused
from streamq.protocol.reads import Reads
from streamq.protocol.replies import read_names
from streamq.protocol.snapshot import Snapshot

#: The consumer under which parts wait for another attempt.
RETRYING = "-"
#: Fields of a request that its row in a table is made of.
FIELDS = (
    "state",
    "paused",
    "handler",
    "queue",
    "level",
    "limit",
    "total",
    "done",
    "failed",
    "delivered",
    "records",
    "records_done",
    "records_failed",
    "created_ms",
    "started_ms",
    "finished_ms",
    "hold_ms",
    "rate_ms",
    "labels",
    "redrives",
    "keep_ms",
    "ceiling",
    "deadline_ms",
)


#: A point of a curve, as ``lua/lib/pace.lua`` packs it: the time (ms), records done, failed and in
#: all, and leases.
_POINT_BYTES = 24
_POINT_WIDTHS = (6, 5, 5, 5, 3)


class InHand(msgspec.Struct, frozen=True):
    """A part that was handed out and is not finished."""

    number: int
    #: The holder of the part; ``RETRYING`` while the part waits for another attempt.
    holder: str
    #: How long ago the part was handed out (ms), and how often it was.
    idle_ms: int
    times: int


def glance_at_rows(reads: Reads, ids: Sequence[str], now_ms: int) -> list[Snapshot | None]:
    """Return what is shown of each request in a table; None for one that is not there.

    It takes one command for a request of which no part is in anybody's hands, and four for others:
    far less than ``inspect``, which has more to tell.
    """
    found: list[Snapshot | None] = []
    for request_id, values in zip(ids, reads.fields_of(ids, FIELDS), strict=True):
        fields = dict(zip(FIELDS, values or (), strict=False))
        is_there = bool(fields.get("state"))
        known = {name: value for name, value in fields.items() if value != ""}
        known["now_ms"] = str(now_ms)
        found.append(Snapshot(request_id, known) if is_there else None)
    busy = [each for each in found if each and _glance_shows_parts_out(each)]
    for each, counts in zip(busy, _glance_at_hands(reads, [each.id for each in busy]), strict=True):
        each.fields.update(zip(("leases", "retry", "handed_back"), counts, strict=True))
    return found


def _glance_shows_parts_out(request: Snapshot) -> bool:
    try:
        numbers = [int(request.fields.get(name, 0)) for name in ("delivered", "done", "failed")]
    except ValueError:
        return False
    return numbers[0] > numbers[1] + numbers[2]


def _glance_at_hands(reads: Reads, ids: Sequence[str]) -> list[list[str]]:
    """Return how many leases each request has, parts in retry, and parts handed back."""
    leases = reads.ask_each(ids, lambda pipe, each: pipe.zcard(reads.keys(each).leases))
    retry = reads.ask_each(ids, lambda pipe, each: pipe.zcard(reads.keys(each).retry))
    # The score of a part that was handed back is its number, which is far below any time.
    back = reads.ask_each(
        ids, lambda pipe, each: pipe.zcount(reads.keys(each).retry, "-inf", 500_000_000_000)
    )
    return [
        [str(count or 0) for count in counts] for counts in zip(leases, retry, back, strict=True)
    ]


def glance_at_parts_in_hand(reads: Reads, request_id: str, most: int) -> tuple[int, list[InHand]]:
    """Return how many parts are in somebody's hands, and the first so many of them."""
    key = reads.keys(request_id).parts
    with translating_driver_errors(reads.connection.where):
        redis = reads.connection.redis
        try:
            total = int(redis.xpending(key, "w")["pending"])
            found: list[dict[str, Any]] = redis.xpending_range(key, "w", "-", "+", most)
        except Exception as error:
            if "NOGROUP" in str(error):  # ended and swept up, or not opened yet
                return 0, []
            raise
    parts = [
        InHand(
            int(each["message_id"].partition(b"-")[0]),
            each["consumer"].decode("utf-8", "replace"),
            int(each["time_since_delivered"]),
            int(each["times_delivered"]),
        )
        for each in found
    ]
    return total, parts


def glance_at_failed_numbers(reads: Reads, request_id: str, most: int) -> tuple[int, list[int]]:
    """Return how many parts failed, and the numbers of so many of them, chosen at random."""
    key = reads.keys(request_id).failed
    with translating_driver_errors(reads.connection.where):
        redis = reads.connection.redis
        total = int(redis.hlen(key))
        found = redis.hrandfield(key, most) if total else []
    return total, sorted(int(number) for number in found if number.isdigit())


def glance_at_failures(
    reads: Reads, request_id: str, most: int
) -> tuple[int, list[tuple[int, bytes]]]:
    """Return how many parts failed, and what is kept of so many of them, chosen at random."""
    key = reads.keys(request_id).failed
    with translating_driver_errors(reads.connection.where):
        redis = reads.connection.redis
        total = int(redis.hlen(key))
        flat = redis.hrandfield(key, most, withvalues=True) if total else []
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return total, sorted((int(number), text) for number, text in pairs if number.isdigit())


def glance_at_holders(reads: Reads, ids: Sequence[str], most: int) -> list[list[str]]:
    """Return who holds leases of each request, so many at most."""
    found = reads.ask_each(
        ids, lambda pipe, each: pipe.zrange(reads.keys(each).leases, 0, most - 1)
    )
    return [read_names(names or ()) for names in found]


def glance_at_payload(
    reads: Reads, request_id: str, number: int, most: int
) -> tuple[bytes, bytes, int]:
    """Return a part's ``about``, the first bytes of its payload, and how many it has."""
    with translating_driver_errors(reads.connection.where):
        found = reads.connection.redis.xrange(
            reads.keys(request_id).parts, f"{number}-0", f"{number}-0", count=1
        )
    for _, fields in found:
        for about, payload in fields.items():
            return about, payload[:most], len(payload)
    return b"", b"", -1


def glance_at_curve(reads: Reads, request_id: str) -> list[tuple[int, int, int, int, int]]:
    """Return the curve that a request keeps of itself, oldest point first.

    A point is the time (ms), records done, failed and in all, and leases.
    """
    try:
        with translating_driver_errors(reads.connection.where):
            packed: bytes = reads.connection.redis.get(reads.keys(request_id).pace) or b""
    except (Damaged, ServerRefused):  # of another type, or the ACL is of an earlier version
        return []
    whole = len(packed) - len(packed) % _POINT_BYTES
    return [
        _glanced_point_of_curve(packed[at : at + _POINT_BYTES])
        for at in range(0, whole, _POINT_BYTES)
    ]


def _glanced_point_of_curve(packed: bytes) -> tuple[int, int, int, int, int]:
    found, at = [], 0
    for width in _POINT_WIDTHS:
        found.append(int.from_bytes(packed[at : at + width], "big"))
        at += width
    t, done, failed, total, running = found
    return t, done, failed, total, running


def glance_at_changes(reads: Reads, queue: str, most: int) -> list[tuple[int, bytes]]:
    """Return the entries of a queue's log: when (ms), and what was noted; the last first."""
    with translating_driver_errors(reads.connection.where):
        found = reads.connection.redis.xrevrange(reads.queue_keys(queue).log, count=most)
    return [(_time_of_glanced_entry(entry), fields.get(b"change", b"")) for entry, fields in found]


def glance_at_spans(reads: Reads, queue: str, after: str, most: int) -> list[tuple[str, bytes]]:
    """Return what workers told of their slots: ids of entries after this one, and their texts."""
    with translating_driver_errors(reads.connection.where):
        found = reads.connection.redis.xrange(
            reads.queue_keys(queue).spans, f"({after}", "+", count=most
        )
    return [(entry.decode(), fields.get(b"told", b"")) for entry, fields in found]


def _time_of_glanced_entry(entry: bytes) -> int:
    return int(entry.partition(b"-")[0])
