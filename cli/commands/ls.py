"""``streamq ls``."""

from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from typing import Annotated

import typer

from streamq import units
from streamq.errors import Damaged, RequestUnknown
from streamq.model import Status
from streamq.protocol.protocol import Protocol
from streamq.queue.request import Request

from .. import render
from ..connecting import connected
from ..shared_options import JsonOption, PrefixOption, QueueOption, UrlOption

PAGE = 100
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


class Shown(StrEnum):
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
        return self in (Shown.LOADING, Shown.OPEN, Shown.PAUSED)


def ls(
    queue: QueueOption = "default",
    state: Annotated[
        Shown | None, typer.Option("--state", help="Only requests in this state.")
    ] = None,
    is_all: Annotated[
        bool, typer.Option("--all", "-a", help="Also those that have ended.")
    ] = False,
    rows: Annotated[
        int, typer.Option("--limit-rows", "-n", min=0, help="Most rows to show; 0: all.")
    ] = 50,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """List requests, newest first.

    Requests that have ended are left out unless asked for. PARTS are done/total, RATE is records
    finished per second since the start.

        streamq ls --state failed -n 10
    """
    units.name(queue, "queue")
    has_ended = is_all if state is None else not state.is_live
    found: list[Status] = []
    with connected(url, prefix) as protocol:
        for closed in (False, True) if has_ended else (False,):
            statuses = _statuses(protocol, queue, closed=closed)
            fit = (status for status in statuses if _fits(status, state, is_all=is_all))
            # One more than is shown, to find out whether there are more.
            found += islice(fit, rows + 1 if rows else None)
    # A request may have moved from one index to the other between the two readings.
    unique = {status.id: status for status in found}.values()
    newest = sorted(unique, key=lambda status: (status.created_ms, status.id), reverse=True)
    shown = newest[: rows or None]
    if as_json:
        render.as_json(shown)
    else:
        render.data(render.table(HEADERS, map(_row, shown)))
    if len(newest) > len(shown):
        render.note(f"only the newest {rows} are shown; -n 0 shows every one")
    if not shown:
        render.note(
            "there is none" if is_all or state else "none is open; --all has the ended ones"
        )


def _fits(status: Status, state: Shown | None, *, is_all: bool) -> bool:
    if state is None:
        return is_all or status.state.is_live
    if state is Shown.PAUSED:
        return status.paused and status.state.is_live
    return status.state.value == state.value


def _statuses(protocol: Protocol, queue: str, *, closed: bool) -> Iterator[Status]:
    for request_id in protocol.newest(queue, closed=closed, page=PAGE):
        try:
            yield Request(protocol, request_id).status()
        except RequestUnknown:  # registered and not opened yet, or just purged
            continue
        except Damaged as error:
            render.warning(f"{request_id}: {error}")


def _row(status: Status) -> tuple[str, ...]:
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
