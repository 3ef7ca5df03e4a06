"""Finding requests of a queue: newest first, by what they are, at a bounded cost."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice

import msgspec

from streamq import units
from streamq.errors import UNREADABLE
from streamq.model import State
from streamq.protocol.protocol import Protocol

#: The most requests that are looked at in each index (open and ended), unless all are wanted. One
#: costs the server about 2 us.
MOST_LOOKS = 10_000
#: Requests that are read in one round trip.
PAGE = 500

_FIELDS = (
    "created_ms",
    "finished_ms",
    "state",
    "paused",
    "handler",
    "failed",
    "records_done",
    "records_failed",
    "labels",
)


class Glimpse(msgspec.Struct, frozen=True, kw_only=True):
    """The few things of a request by which it is found. ``Request.status`` has the others."""

    id: str
    created_ms: int
    #: 0 while the request lives.
    finished_ms: int
    state: State
    paused: bool
    handler: str
    #: Whether a part or a record failed; and whether, besides, none is done.
    has_failures: bool
    is_all_failed: bool
    labels: dict[str, str]

    def is_in(self, state: str) -> bool:
        """Return whether the request is looked for under this state.

        A request that is done without one record that is done counts as failed, not as done.
        """
        if state == "paused":
            return self.paused
        counts_as = State.FAILED if self.state is State.DONE and self.is_all_failed else self.state
        return counts_as.value == state

    def has_labels(self, wanted: Mapping[str, str]) -> bool:
        """Return whether the request has all of these labels."""
        return all(self.labels.get(name) == value for name, value in wanted.items())


class Found(msgspec.Struct, frozen=True):
    """Requests that fit, the newest first, and how many were looked at to find them."""

    requests: list[Glimpse]
    looked: int
    #: How many there are to look at; more than ``looked`` if the search was stopped.
    total: int
    #: Requests whose fields cannot be read.
    damaged: list[str]


def list_requests(
    protocol: Protocol,
    queue: str,
    fits: Callable[[Glimpse], bool],
    *,
    ended: bool,
    most: int | None = MOST_LOOKS,
) -> Found:
    """Return the requests that fit, the newest first by the time they were submitted.

    Neither index is in that order: one goes by the last registration, the other by when a request
    may be purged. So all are looked at, up to ``most`` in each index (None: all), beginning with
    those that are likely to be the newest. ``ended``: look also at the index of ended requests.
    """
    units.name(queue, "queue")
    found: dict[str, Glimpse] = {}
    damaged: list[str] = []
    looked = total = 0
    for closed in (False, True) if ended else (False,):
        ids = islice(protocol.newest(queue, closed=closed, page=PAGE), most)
        count = 0
        for page in _listed_pages_of_ids(ids):
            count += len(page)
            _listed_glimpses_at_page(protocol, page, fits, found, damaged)
        looked += count
        is_cut = most is not None and count >= most
        total += max(count, protocol.index_size(queue, closed=closed)) if is_cut else count
    # A request that moved from one index to the other meanwhile was read twice.
    newest = sorted(found.values(), key=lambda each: (each.created_ms, each.id), reverse=True)
    return Found(newest, looked, total, damaged)


def listed_as_ended_before(seconds: float) -> Callable[[Glimpse], bool]:
    """Return whether a request ended longer ago than this, by this machine's clock."""
    before_ms = (time.time() - seconds) * 1e3
    return lambda each: not each.state.is_live and each.finished_ms < before_ms


def _listed_pages_of_ids(ids: Iterator[str]) -> Iterator[list[str]]:
    while page := list(islice(ids, PAGE)):
        yield page


def _listed_glimpses_at_page(
    protocol: Protocol,
    ids: list[str],
    fits: Callable[[Glimpse], bool],
    found: dict[str, Glimpse],
    damaged: list[str],
) -> None:
    replies = protocol.fields_of(ids, _FIELDS)
    for request_id, values in zip(ids, replies, strict=True):
        if values is not None and not any(values):
            continue  # registered and not opened yet, or just purged
        glimpse = None
        with suppress(*UNREADABLE):
            glimpse = None if values is None else _listed_glimpse_of_values(request_id, values)
        if glimpse is None:
            damaged.append(request_id)
        elif fits(glimpse):
            found[request_id] = glimpse


def _listed_glimpse_of_values(request_id: str, values: list[str]) -> Glimpse:
    created, finished, state, paused, handler, failed, records_done, records_failed, labels = values
    is_live = State(state).is_live
    has_failures = bool(int(failed or 0) or int(records_failed or 0))
    return Glimpse(
        id=request_id,
        created_ms=int(created),
        finished_ms=int(finished or 0),
        state=State(state),
        paused=paused == "1" and is_live,
        handler=handler,
        has_failures=has_failures,
        is_all_failed=has_failures and not is_live and not int(records_done or 0),
        labels=msgspec.json.decode(labels, type=dict[str, str]) if labels else {},
    )
