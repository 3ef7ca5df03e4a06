"""``streamq set``."""

from typing import Annotated, Any

import typer

from streamq.errors import InvalidValue
from streamq.queue.changes import describe_change
from streamq.queue.request import Request

from ..finding import steer_each_request
from ..shared_options import JsonOption, PrefixOption, RunIdArgument, UrlOption


def set_(
    request_id: RunIdArgument = None,
    level: Annotated[
        int | None,
        typer.Option(
            "--level", "--priority", metavar="0-99", help="New priority: 0 goes first, 99 last."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", help="Run at most so many parts at once from now on."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            metavar="RATE",
            help="Start at most so many in a time: 100/s, 30/m; off for no bound.",
        ),
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option(
            "--weight",
            metavar="1-64",
            help="New share among requests of the same level: a 4 gets half as many turns as an 8.",
        ),
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Change level, limit, rate or weight of a request that runs, or of one stage of a flow.

    streamq set nightly --level 10 --limit 4 --rate 100/s
    """
    given = {"level": level, "limit": limit, "rate": rate, "weight": weight}
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise InvalidValue("nothing to change: give --level, --limit, --rate or --weight")

    request_id, _, stage = (request_id or "").partition("/")

    def act(request: Request) -> tuple[str, dict[str, Any]]:
        request.set(level=level, limit=limit, rate=rate, weight=weight, stage=stage or None)
        return ", ".join(f"{name} {value}" for name, value in changes.items()), changes

    steer_each_request(
        [request_id] if request_id else [],
        url,
        prefix,
        act,
        lambda before: describe_change(before, changes),
        as_json=as_json,
    )
