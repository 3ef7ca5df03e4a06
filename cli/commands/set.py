"""``streamq set``."""

from typing import Annotated, Any

import typer

from streamq.errors import InvalidValue
from streamq.queue.request import Request

from ..connecting import steer
from ..shared_options import IdArgument, JsonOption, PrefixOption, UrlOption


def set_(
    request_id: IdArgument,
    level: Annotated[
        int | None,
        typer.Option("--level", "--priority", metavar="0-99", help="0 goes first, 99 last."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", help="Most parts that run at once.")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate", metavar="RATE", help="Most starts in a time: 100/s, 30/m; off: no rate."
        ),
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Change level, limit or rate of a request that runs.

    streamq set nightly --level 10 --limit 4 --rate 100/s
    """
    given = {"level": level, "limit": limit, "rate": rate}
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise InvalidValue("nothing to change: give --level, --limit or --rate")

    def act(request: Request) -> tuple[str, dict[str, Any]]:
        request.set(level=level, limit=limit, rate=rate)
        return ", ".join(f"{name} {value}" for name, value in changes.items()), changes

    steer([request_id], url, prefix, act, as_json=as_json)
