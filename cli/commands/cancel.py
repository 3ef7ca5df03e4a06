"""``streamq cancel``."""

import sys
from typing import Annotated, Any

import typer

from streamq.errors import InvalidValue
from streamq.queue.request import Request

from .. import render
from ..finding import steer_each_request
from ..shared_options import JsonOption, PrefixOption, RunIdsArgument, UrlOption


def cancel(
    ids: RunIdsArgument = None,
    is_sure: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before cancelling several requests.")
    ] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """End requests now. Their results are kept until the requests are purged.

    streamq cancel nightly
    """
    ids = ids or []
    if len(ids) > 1 and not is_sure:
        if not render.is_terminal(sys.stdin):
            raise InvalidValue(
                f"say --yes to cancel {len(ids)} requests: stdin is no terminal to ask on"
            )
        typer.confirm(f"Cancel {len(ids)} requests?", abort=True, err=True)

    def act(request: Request) -> tuple[str, dict[str, Any]]:
        unfinished = request.cancel()
        says = f"cancelled, {render.count(unfinished, 'part')} not finished"
        return says, {"unfinished": unfinished}

    steer_each_request(ids, url, prefix, act, lambda _: "cancel", as_json=as_json)
