"""Says what in a queue needs attention, and what to do about it."""

import time
from collections.abc import Iterator

import msgspec

from streamq.dashboard.census import Census, KnownRequest
from streamq.dashboard.why import words_of_count, words_of_time
from streamq.model import State, Status

#: A request needs attention when this share of its records fail, and at least this many did.
FAILING_SHARE, FAILING_LEAST = 0.01, 10
#: How many notices are shown at most, and after how many the search ends.
MOST_LINES, _MOST_FOUND = 20, 200
#: A request stands still when no record was finished for this long (s).
STILL_S = 600.0
#: If the first look is overdue by more than this, no janitor sweeps the queue.
UNSWEPT_MS = 60_000
#: The codes of notices, the worst first.
_ORDER = (
    "nobody",
    "full",
    "janitor",
    "damaged",
    "handler",
    "deadline",
    "failing",
    "still",
    "canary",
    "late",
)


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Something that needs attention."""

    code: str
    says: str
    #: The request it is about; "" if it is about the queue.
    request: str = ""
    #: What to do.
    remedy: str = ""


def notices_that_need_attention(census: Census) -> list[Notice]:
    """Return what needs attention, the worst first, ``MOST_LINES`` at most."""
    found = list(_notices_of_queue(census))
    for known in census.requests.values():
        if len(found) >= _MOST_FOUND:
            break
        found.extend(_notices_of_request(known, census))
    return sorted(found, key=lambda each: _ORDER.index(each.code))[:MOST_LINES]


def _notices_of_queue(census: Census) -> Iterator[Notice]:
    if census.requests and not census.has_slots:
        yield Notice(
            code="nobody",
            says=f"{words_of_count(census.open, 'request')} and no live worker",
            remedy="start workers: streamq worker MODULE:APP",
        )
    for node, share in census.nearly_full:
        yield Notice(
            code="full",
            says=f"the server {node} uses {share:.0%} of its memory: at 100 % loaders are refused",
            remedy="let workers drain it, collect results, or raise maxmemory",
        )
    if census.unswept_ms > UNSWEPT_MS:
        yield Notice(
            code="janitor",
            says=f"no janitor has looked at the queue for {words_of_time(census.unswept_ms / 1e3)}",
            remedy="every pool is a janitor: look whether one runs; streamq janitor --once",
        )
    if census.damaged:
        yield Notice(
            code="damaged",
            says=f"{words_of_count(len(census.damaged), 'request')} cannot be read: "
            + ", ".join(census.damaged[:3]),
            remedy="see Health; cancel or purge them",
        )
    slow = [name for name, each in census.workers.items() if _is_past_deadline(each.beat_ms)]
    if slow:
        yield Notice(
            code="late",
            says=f"{words_of_count(len(slow), 'worker')} not heard for over 20 s: "
            + ", ".join(slow[:3]),
            remedy="see Workers",
        )


def _notices_of_request(known: KnownRequest, census: Census) -> Iterator[Notice]:
    status = known.status
    yield from _notices_of_handler(status, census)
    records = status.records
    finished = records.done + records.failed
    if records.failed >= FAILING_LEAST and records.failed > FAILING_SHARE * finished:
        share = 100 * records.failed / finished
        yield Notice(
            code="failing",
            request=status.id,
            says=f"{share:.1f} % of records fail ({records.failed:,} of {finished:,})",
            remedy="see its failures",
        )
    if status.waits_for_release:
        yield Notice(
            code="canary",
            request=status.id,
            says=f"its canary of {words_of_count(status.canary or 0, 'part')} has ended, "
            "and it waits",
            remedy="look at its failures; then release or cancel it",
        )
    yield from _notices_of_deadline(known, census)


def _notices_of_handler(status: Status, census: Census) -> Iterator[Notice]:
    if census.has_slots and not census.has_handler(status.handler):
        yield Notice(
            code="handler",
            request=status.id,
            says=f"no live worker has the handler {status.handler}",
            remedy="start a worker with it; if the name is wrong, cancel the request",
        )


def _notices_of_deadline(known: KnownRequest, census: Census) -> Iterator[Notice]:
    """Tell of a request that will be late, or that stands still though it could go on."""
    status, parts = known.status, known.status.parts
    if status.deadline_ms and status.state is State.OPEN and known.speed > 0:
        left = status.records.total - status.records.done - status.records.failed
        late_s = time.time() + left / known.speed - status.deadline_ms / 1e3
        if late_s > 0:
            yield Notice(
                code="deadline",
                request=status.id,
                says=f"at this speed it ends {words_of_time(late_s)} after its deadline, and fails",
                remedy="raise its limit, give it a better level, or start more workers",
            )
    still_s = time.monotonic() - known.moved_at
    is_stuck = still_s > STILL_S and (parts.waiting or parts.running or parts.retry)
    is_meant = status.paused or status.waits_for_release or status.held_until_ms
    if is_stuck and not is_meant and census.has_handler(status.handler):
        yield Notice(
            code="still",
            request=status.id,
            says=f"none of its records was finished for {words_of_time(still_s)}",
            remedy="see why on its page, and what runs",
        )


def _is_past_deadline(beat_ms: int) -> bool:
    return bool(beat_ms) and time.time() * 1e3 - beat_ms > 20_000
