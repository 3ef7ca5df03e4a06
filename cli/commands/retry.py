"""``streamq retry``."""

from typing import Annotated

import typer

from streamq.model import StageStatus
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
        before = request.status()
        queue = before.queue
        parts = request.retry(stage=stage)
        note_change(
            protocol, queue, Change(who=user_who_changes(), what="retry", request=request_id)
        )
    if as_json:
        render.as_json({"id": request_id, "parts": parts})
        return
    render.data(f"{render.count(parts, 'part')} {'runs' if parts == 1 else 'run'} again")
    chosen = [each for each in before.stages or [] if stage in (None, str(each.number), each.name)]
    _tell_of_others(chosen, parts)


def _tell_of_others(stages: list[StageStatus], again: int) -> None:
    """Say why failed parts of a flow's stages do not run again, if some do not."""
    failed = sum(each.parts.failed for each in stages)
    last = sum(each.parts.failed for each in stages if each.kind in ("join", "reduce"))
    if again >= failed:
        return
    made_without = "a join or reduce was made without them"
    come_back = "a join or reduce runs again after the failed parts that it had too few of"
    why = f"{made_without}; or {come_back}"
    if not last:
        why = made_without
    elif last == failed or again >= failed - last:
        why = come_back
    others = failed - again
    render.note(
        f"{render.count(others, 'failed part')} {'does' if others == 1 else 'do'} not: {why}"
    )
