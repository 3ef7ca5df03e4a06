"""``streamq purge``."""

import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from streamq import units
from streamq.errors import InvalidValue, RequestOpen
from streamq.model import Status
from streamq.queue.listing import Glimpse, list_requests, listed_as_ended_before
from streamq.queue.request import Request

from .. import render
from ..connecting import connected
from ..finding import steer_each_request
from ..shared_options import JsonOption, PrefixOption, QueueOption, UrlOption

HEADERS = ("ID", "HANDLER", "STATE", ">ENDED")


class Purgeable(StrEnum):
    """The states of a request that has ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


def purge(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Ids of the requests; streamq ls -a lists them."),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="TIME",
            help="Remove all that ended longer ago than this: 12h, 7d; 0s for all.",
        ),
    ] = None,
    state: Annotated[
        Purgeable | None, typer.Option("--state", help="Remove all that ended in this state.")
    ] = None,
    queue: QueueOption = "default",
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Only show which requests would be removed.")
    ] = False,
    is_sure: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before removing.")
    ] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Remove requests that have ended from the server, with their results and failures.

    Give their ids, or --older-than, --state or both, which look at every ended request of the
    queue; as for ls, a request of which all records failed counts as failed. A request that still
    runs is refused: cancel it first. Results that were written to a file stay there.

        streamq purge --older-than 7d --state done --dry-run
    """
    is_search = older_than is not None or state is not None
    if bool(ids) == is_search:
        raise InvalidValue(
            "give either ids, or --older-than and --state"
            if ids
            else "which requests? Give their ids, --older-than 7d or --state done"
        )
    chosen = _requests_to_purge(older_than, state, queue, url, prefix) if is_search else {}
    wanted = list(chosen) if is_search else list(dict.fromkeys(ids or ()))
    if is_dry or not wanted:
        _show_what_would_be_purged(wanted, chosen, as_json=as_json, url=url, prefix=prefix)
        return
    if not is_sure:
        what = f"{render.count(len(wanted), 'request')} with all results"
        if not render.is_terminal(sys.stdin):
            raise InvalidValue(f"say --yes to purge {what}: stdin is no terminal to ask on")
        typer.confirm(f"Purge {what}?", abort=True, err=True)

    def act(request: Request) -> tuple[str, dict[str, Any]]:
        status = _status_if_purgeable(request)
        seen = chosen.get(request.id)
        if seen and (status.finished_ms or 0) != seen.finished_ms:
            raise RequestOpen("it was run again meanwhile, and is left alone")
        request.purge()
        return "purged", {"purged": True, "state": status.state, "finished_ms": status.finished_ms}

    steer_each_request(wanted, url, prefix, act, lambda _: "purge", as_json=as_json)


def _status_if_purgeable(request: Request) -> Status:
    status = request.status()
    if status.state.is_live:
        raise RequestOpen(f"the request is {status.state}: cancel it first")
    return status


def _requests_to_purge(
    older_than: str | None, state: Purgeable | None, queue: str, url: str | None, prefix: str | None
) -> dict[str, Glimpse]:
    """Return the ended requests that fit, the oldest first."""
    seconds = units.duration_ms(older_than or "0s", "--older-than") / 1e3
    is_old = listed_as_ended_before(seconds)

    def fits(each: Glimpse) -> bool:
        return (is_old(each) if older_than else not each.state.is_live) and (
            state is None or each.is_in(state.value)
        )

    with connected(url, prefix) as protocol:
        found = list_requests(protocol, queue, fits, ended=True, most=None)
    for request_id in found.damaged:
        render.warning(f"{request_id}: what the server has of it cannot be read; it is left alone")
    return {each.id: each for each in reversed(found.requests)}


def _show_what_would_be_purged(
    wanted: list[str],
    chosen: dict[str, Glimpse],
    *,
    as_json: bool,
    url: str | None,
    prefix: str | None,
) -> None:
    """Show what would be removed, and remove nothing."""
    if wanted and not chosen:

        def act(request: Request) -> tuple[str, dict[str, Any]]:
            status = _status_if_purgeable(request)
            values = {"purged": False, "state": status.state, "finished_ms": status.finished_ms}
            return "would be purged", values

        steer_each_request(wanted, url, prefix, act, None, as_json=as_json)
        return
    if as_json:
        render.as_json(
            [
                {
                    "id": each.id,
                    "ok": True,
                    "purged": False,
                    "state": each.state,
                    "finished_ms": each.finished_ms,
                }
                for each in chosen.values()
            ]
        )
        return
    if chosen:
        rows = [
            (each.id, each.handler, each.state.value, render.age(each.finished_ms))
            for each in chosen.values()
        ]
        render.data(render.table(HEADERS, rows))
    render.note(
        f"{render.count(len(chosen), 'request')} would be purged" if chosen else "none fits"
    )
