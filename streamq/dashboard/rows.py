"""Tables of requests: their filters, pages and rows."""

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec.structs import replace

from streamq.dashboard import why
from streamq.dashboard.census import Census, Whole
from streamq.errors import InvalidValue
from streamq.model import State, Status
from streamq.protocol.protocol import Protocol
from streamq.protocol.snapshot import Snapshot
from streamq.queue import listing
from streamq.queue.flow_status import status_of_request_or_flow

#: Rows of a page.
PAGE = 50
#: The pause between two searches for ended requests (s): this, or 20 times as long as the last
#: search took.
ENDED_EVERY_S, _TIMES = 5.0, 20
STATES = ("live", "open", "loading", "paused", "ended", "done", "failed", "cancelled")
_SORTS: dict[str, Callable[[Status], Any]] = {
    "newest": lambda status: -status.created_ms,
    "oldest": lambda status: status.created_ms,
    "level": lambda status: (status.level, -status.created_ms),
    "running": lambda status: -status.parts.running,
    "waiting": lambda status: -status.parts.waiting,
    "failed": lambda status: (-status.records.failed, -status.parts.failed),
}


class Filters(msgspec.Struct, frozen=True):
    """Which requests a table shows, in which order, and which page of them."""

    state: str = "live"
    handler: str = ""
    #: Only requests whose id begins with this.
    prefix: str = ""
    level: int | None = None
    sort: str = "newest"
    page: int = 1

    @classmethod
    def of(cls, text: str) -> "Filters":
        """Read filters as they stand in an address.

        Raises:
            InvalidValue: there is no such state or order, or a number is none.
        """
        given = {name: values[-1] for name, values in parse_qs(text).items()}
        try:
            level = int(given["level"]) if given.get("level") else None
            page = max(1, int(given.get("page", 1)))
        except ValueError:
            raise InvalidValue(f"level and page are numbers: {text!r:.80}") from None
        filters = cls(
            state=given.get("state", "live"),
            handler=given.get("handler", ""),
            prefix=given.get("prefix", ""),
            level=level,
            sort=given.get("sort", "newest"),
            page=page,
        )
        if filters.state not in STATES or filters.sort not in _SORTS:
            raise InvalidValue(
                f"state {filters.state!r:.40}, sort {filters.sort!r:.40}: states are "
                f"{', '.join(STATES)}; a table is sorted by {', '.join(_SORTS)}"
            )
        return filters

    @property
    def is_of_ended(self) -> bool:
        """Whether requests are wanted that have ended."""
        return self.state in ("ended", "done", "failed", "cancelled")

    def fits(self, status: Status) -> bool:
        """Return whether a request that lives is shown."""
        counts_as = "paused" if status.paused else status.state.value
        return (
            self.state in ("live", counts_as)
            and self.handler in ("", status.handler)
            and status.id.startswith(self.prefix)
            and self.level in (None, status.level)
        )

    def fits_glimpse(self, glimpse: listing.Glimpse) -> bool:
        """Return whether a request that has ended is shown."""
        return (
            not glimpse.state.is_live
            and (self.state == "ended" or glimpse.is_in(self.state))
            and self.handler in ("", glimpse.handler)
            and glimpse.id.startswith(self.prefix)
        )


class EndedRows:
    """Finds requests that have ended, and remembers them for a while."""

    def __init__(self, protocol: Protocol, queue: str) -> None:
        self._protocol = protocol
        self._queue = queue
        self._found: listing.Found | None = None
        self._good_until = 0.0

    def find(self, filters: Filters) -> listing.Found:
        """Return the requests that fit, the newest first."""
        begun = time.monotonic()
        if self._found is None or begun >= self._good_until:
            self._found = listing.list_requests(
                self._protocol, self._queue, filters.fits_glimpse, ended=True
            )
            now = time.monotonic()
            self._good_until = now + max(ENDED_EVERY_S, _TIMES * (now - begun))
        return self._found


def page_of_rows(
    protocol: Protocol, census: Census, ended: EndedRows, filters: Filters
) -> dict[str, Any]:
    """Return one page of a table. The requests on it are read anew, the others are not."""
    wholes: list[Whole] = []
    if filters.is_of_ended:
        found = ended.find(filters)
        ids, more = [each.id for each in found.requests], found.total - found.looked
    else:
        wholes = [each for each in census.wholes() if filters.fits(each.status)]
        wholes.sort(key=lambda each: _SORTS[filters.sort](each.status))
        ids, more = [each.status.id for each in wholes], census.unread
    count = len(ids)
    pages = max(1, -(-count // PAGE))
    page = min(filters.page, pages)
    shown = slice((page - 1) * PAGE, page * PAGE)
    handlers = {known.status.handler for known in census.requests.values()}
    return {
        "t": round(time.time() * 1e3),
        "count": count,
        "unread": more,
        "age_ms": census.age_ms,
        "page": page,
        "pages": pages,
        "handlers": sorted(handlers)[:200],
        "rows": _rows_read_anew(protocol, census, ids[shown], wholes[shown]),
    }


def _rows_read_anew(
    protocol: Protocol, census: Census, ids: list[str], wholes: list[Whole]
) -> list[dict[str, Any]]:
    known = {each.status.id: each for each in wholes}
    found = []
    for request_id, snapshot in zip(ids, protocol.inspect_all(ids), strict=True):
        if not isinstance(snapshot, Snapshot):
            continue
        whole, status = known.get(request_id), snapshot.status()
        if whole is None:
            status = status_of_request_or_flow(protocol, snapshot)
            whole = Whole(status, status.rate, 0, status.handler)
        elif not snapshot.count("stages"):  # of a flow the census knows the stages
            whole = replace(whole, status=status)
        found.append(row_of_request(whole, census))
    return found


def row_of_request(whole: Whole, census: Census) -> dict[str, Any]:
    """Return what a row of a table tells of a request."""
    status = whole.status
    left = status.records.total - status.records.done - status.records.failed
    speed = whole.speed if status.state.is_live else status.rate
    if status.paused or status.waits_for_release:
        speed = 0.0
    return {
        **short_row_of_request(status),
        "handler": whole.handlers,
        "limit": status.limit,
        "records": status.records,
        "created_ms": status.created_ms,
        "started_ms": status.started_ms,
        "finished_ms": status.finished_ms,
        "labels": status.labels,
        "speed": round(speed, 3),
        "eta_s": round(left / speed, 1) if speed > 0 and status.state is State.OPEN else None,
        "why": why.reason_held_back(status, census, whole.peak),
    }


def short_row_of_request(status: Status) -> dict[str, Any]:
    """Return what a small card tells of a request."""
    return {
        "id": status.id,
        "handler": status.handler,
        "state": status.state,
        "paused": status.paused,
        "level": status.level,
        "parts": status.parts,
    }
