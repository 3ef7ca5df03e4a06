"""``streamq retry``."""

from typing import Annotated

import typer

from streamq.queue.changes import Change, note_change, user_who_changes
from streamq.queue.request import Request

from .. import render
from ..connecting import connected, naming_request
from ..shared_options import IdArgument, JsonOption, PrefixOption, UrlOption


def retry(
    request_id: IdArgument,
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            metavar="STAGE",
            help="Only those of one stage of a flow: its number, or the name of its handler.",
        ),
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Run the failed parts of a request again, under the same id, and print their number.

    streamq retry nightly
    """
    with connected(url, prefix) as protocol, naming_request(request_id):
        request = Request(protocol, request_id)
        queue = request.status().queue
        parts = request.retry(stage=stage)
        note_change(
            protocol, queue, Change(who=user_who_changes(), what="retry", request=request_id)
        )
    if as_json:
        render.as_json({"id": request_id, "parts": parts})
        return
    render.data(f"{render.count(parts, 'part')} {'runs' if parts == 1 else 'run'} again")
