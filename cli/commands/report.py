"""``streamq report``."""

from pathlib import Path
from typing import Annotated

import typer

from streamq.errors import InvalidValue
from streamq.queue.request import Request

from .. import render
from ..connecting import connected, naming_request
from ..shared_options import IdArgument, JsonOption, PrefixOption, UrlOption


def report(
    request_id: IdArgument,
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="FILE", help="Write the page to this file."),
    ] = "report.html",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Write a request as one HTML file: progress, the map of its input, its failures in groups.

    The file needs nothing else, and opens without a network.

        streamq report nightly -o nightly.html
    """
    from streamq.dashboard.report import make_report

    target = Path(output)
    if target.exists() and not force:
        raise InvalidValue(f"{output} exists: give another name, or --force")
    with connected(url, prefix) as protocol, naming_request(request_id):
        page = make_report(protocol, Request(protocol, request_id).id)
    try:
        target.write_bytes(page)
    except OSError as error:
        raise InvalidValue(f"cannot write {output}: {error.strerror}") from None
    if as_json:
        render.as_json({"request": request_id, "file": output, "bytes": len(page)})
    else:
        render.note(f"wrote {output}, {len(page):,} bytes")
