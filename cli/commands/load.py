"""``streamq load``."""

import secrets
from collections.abc import Sequence
from typing import Annotated

import typer
from msgspec import UNSET
from msgspec.structs import replace

from streamq import units
from streamq.errors import ServerError
from streamq.model import LIMIT, Policy
from streamq.protocol.protocol import Protocol
from streamq.queue.fleet import live_workers
from streamq.records.names import expand
from streamq.records.remote import RemoteUnreachable
from streamq.runs.load import Load
from streamq.runs.load_requests import submit_lines
from streamq.runs.options import check_format

from .. import render
from ..connecting import connected
from ..option_structs import named, with_options
from ..request_options import RequestOptions
from ..shared_options import JsonOption, PrefixOption, QueueOption, UrlOption


@with_options
def load(  # noqa: PLR0913  the options of a load are many and flat
    *,
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Files, folders, patterns, URLs, or - for stdin."),
    ],
    handler: Annotated[str, typer.Option(metavar="NAME", help="The handler that runs the parts.")],
    request_id: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="ID", help="Name of the request; the same again continues a load."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Parts that run at once, at most.")] = LIMIT,
    keep: Annotated[
        str, typer.Option("--keep", metavar="TIME", help="Keep it for this long after its end.")
    ] = "7d",
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="NAME=VALUE",
            help="Label the request, to find it by; up to 8, each with --label.",
        ),
    ] = None,
    window: Annotated[
        str, typer.Option(metavar="SIZE", help="Most bytes of parts that wait in the server.")
    ] = "",
    options: RequestOptions,
    queue: QueueOption = "default",
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Split files into the parts of a request, and print its id.

    Workers run parts while later ones are still being read. A load that was killed continues when
    the command is run again with the same --id; with - for standard input, it must be given the
    same bytes again. Gzip, bzip2, xz and zstd are recognised.

    With --format requests each line is a request, limit:part:part:..., and their ids are printed; #
    begins a comment. With --json the id, or the ids, and how many were loaded come at the end.

        streamq load big.csv --handler clean --limit 20
    """
    options.files, options.handler, options.queue = files, handler, queue
    options.limit, options.keep = limit, keep
    told = units.labels(dict(units.label(each) for each in labels or ()), "--label")
    name = secrets.token_hex(8) if request_id is None else units.name(request_id, "--id")
    if check_format(options.form, named) == "requests":
        each = replace(options.policy_of_each(), labels=told or UNSET)
        can_go_on = request_id is not None
        _load_requests(each, files, name, url, prefix, can_go_on=can_go_on, as_json=as_json)
        return
    policy, size = options.source()
    policy = replace(policy, labels=told or UNSET)
    room = units.size_bytes(window, "--window") if window else 0
    with connected(url, prefix, advice="") as protocol:
        _warn_of_no_worker(protocol, policy.queue, policy.handler)
        load_ = Load(protocol, name, policy, size, window_bytes=room)
        try:
            parts = load_.run(lambda: None if as_json else typer.echo(name))
        except (KeyboardInterrupt, ServerError, RemoteUnreachable):
            if load_.is_begun:
                render.note(f"stopped; the same command goes on with --id {name}")
            raise
    if as_json:
        render.as_json({"id": name, "parts": parts})
        return
    render.note(f"loaded {_few(policy.spec.files)}: {render.count(parts, 'part')}")


def _warn_of_no_worker(protocol: Protocol, queue: str, handler: str) -> None:
    """Warn if no live worker has the handler: it may be misspelt, and the request would wait."""
    # A worker that has just started does not list its handlers yet.
    workers = [worker for worker in live_workers(protocol, queue) if worker.handlers]
    if workers and not any(handler in worker.handlers for worker in workers):
        known = ", ".join(sorted({name for worker in workers for name in worker.handlers}))
        render.warning(
            f"no live worker of queue {queue} has a handler {handler!r}, and the request waits "
            f"for one; there is {known}"
        )


def _load_requests(
    policy: Policy,
    patterns: list[str],
    name: str,
    url: str | None,
    prefix: str | None,
    *,
    can_go_on: bool,
    as_json: bool,
) -> None:
    files = expand(patterns)
    ids: list[str] = []
    tell = ids.append if as_json else typer.echo
    with connected(url, prefix, advice="") as protocol:
        _warn_of_no_worker(protocol, policy.queue, policy.handler)
        try:
            count = submit_lines(protocol, name, policy, files, tell, can_go_on=can_go_on)
        except (KeyboardInterrupt, ServerError):
            render.note(f"stopped; the same command goes on with --id {name}")
            raise
    if as_json:
        render.as_json({"ids": ids, "requests": count})
        return
    render.note(f"loaded {_few(files)}: {render.count(count, 'request')}")


def _few(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' ...' if names[3:] else ''}"
