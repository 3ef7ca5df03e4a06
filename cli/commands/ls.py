"""``streamq ls``."""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import islice
from typing import Annotated

import typer

from streamq import units
from streamq.errors import Damaged, RequestUnknown
from streamq.model import Status
from streamq.protocol.protocol import Protocol
from streamq.queue.listing import MOST_LOOKS, Glimpse, list_requests
from streamq.queue.request import Request

from .. import render
from ..connecting import connected
from ..finding import place_of_queue
from ..shared_options import JsonOption, PrefixOption, QueueOption, UrlOption

HEADERS = (
    "ID",
    "HANDLER",
    "STATE",
    ">LEVEL",
    ">LIMIT",
    ">PARTS",
    ">RECORDS",
    ">FAILED",
    ">RATE",
    ">ETA",
    ">AGE",
)


class ListedState(StrEnum):
    """The states of a request that ``ls`` shows, with paused as one of them."""

    LOADING = "loading"
    OPEN = "open"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_live(self) -> bool:
        """Whether parts of the request may still run."""
        return self in (ListedState.LOADING, ListedState.OPEN, ListedState.PAUSED)


def ls(
    queue: QueueOption = "default",
    state: Annotated[
        ListedState | None, typer.Option("--state", help="Only requests in this state.")
    ] = None,
    is_all: Annotated[
        bool, typer.Option("--all", "-a", help="Show also requests that have ended.")
    ] = False,
    is_failed: Annotated[
        bool,
        typer.Option(
            "--failed", help="Only requests with a failed part or record; also ended ones."
        ),
    ] = False,
    handler: Annotated[
        str | None, typer.Option("--handler", metavar="NAME", help="Only requests of this handler.")
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="NAME=VALUE", help="Only requests with this label; may be repeated."
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option("--limit-rows", "-n", min=0, help="Show at most so many rows; 0 for all.")
    ] = 50,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """List requests, newest first.

    Requests that have ended are left out unless asked for. PARTS are done/total, RATE is records
    finished per second since the start. A request that is done although every record failed is
    shown as all-failed, and belongs to --state failed. To find the newest, up to 10,000 open and
    10,000 ended requests are looked at, and a note says if there are more; -n 0 looks at all.

        streamq ls --failed --label user=62 -n 10
    """
    units.name(queue, "queue")
    wanted = dict(units.label(each) for each in labels or ())
    has_ended = (is_all or is_failed) if state is None else not state.is_live

    def fits(each: Glimpse) -> bool:
        return (
            (has_ended or each.state.is_live)
            and (state is None or each.is_in(state.value))
            and (not is_failed or each.has_failures)
            and (handler is None or each.handler == handler)
            and each.has_labels(wanted)
        )

    most = MOST_LOOKS if rows else None
    place = place_of_queue(url, prefix, queue)
    with connected(place.url, place.prefix) as protocol:
        found = list_requests(protocol, place.queue, fits, ended=has_ended, most=most)
        shown = list(islice(_listed_statuses(protocol, found.requests), rows or None))
    for request_id in found.damaged:
        render.warning(f"{request_id}: what the server has of it cannot be read")
    if as_json:
        render.as_json(shown)
    else:
        render.data(_ls_table(shown))
    is_narrow = bool(is_failed or handler or wanted)
    if len(found.requests) > len(shown) and rows:
        render.note(f"only the newest {rows} are shown; -n 0 shows every one")
    if found.total > found.looked:
        render.note(
            f"looked at {found.looked:,} of {found.total:,} requests; -n 0 looks at every one"
        )
    if not shown:
        is_wide = is_all or state or is_failed
        render.note(
            "there is none"
            if is_wide
            else f"none {'of these ' if is_narrow else ''}is open; --all has the ended ones"
        )


def _listed_statuses(protocol: Protocol, found: Iterable[Glimpse]) -> Iterator[Status]:
    for each in found:
        try:
            yield Request(protocol, each.id).status()
        except RequestUnknown:  # just purged
            continue
        except Damaged as error:
            render.warning(f"{each.id}: {error}")


def _ls_table(shown: Sequence[Status]) -> str:
    """Return the table; labels have a column of their own if a request has any."""
    has_labels = any(status.labels for status in shown)
    rows = [_ls_row(status) + (render.labels(status.labels),) * has_labels for status in shown]
    return render.table(HEADERS + ("LABELS",) * has_labels, rows)


def _ls_row(status: Status) -> tuple[str, ...]:
    return (
        status.id,
        status.handler,
        render.state_of(status),
        f"{status.level}",
        f"{status.limit}",
        f"{status.parts.done}/{status.parts.total}",
        f"{status.records.total}",
        f"{status.records.failed}",
        render.rate(status.rate) if status.rate else render.NOTHING,
        render.NOTHING if status.eta_s is None else render.span(status.eta_s * 1e3),
        render.age(status.created_ms),
    )
