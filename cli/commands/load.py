"""``streamq load``."""

from collections.abc import Sequence
from typing import Annotated

import typer
from msgspec import UNSET
from msgspec.structs import replace

from streamq import units
from streamq.errors import InvalidValue, ServerError
from streamq.model import LIMIT, Policy
from streamq.protocol.protocol import Protocol
from streamq.queue.callbacks import callbacks_of, callbacks_with_deadline, refuse_taken_callback_ids
from streamq.queue.fleet import check_fleet, live_workers
from streamq.records.names import expand_file_names
from streamq.records.remote import RemoteUnreachable
from streamq.records.spool import FORMS as SPOOL_FORMS
from streamq.runs.load import Load
from streamq.runs.load_requests import submit_lines
from streamq.runs.options import check_format
from streamq.runs.spooling import policy_with_spools
from streamq.settings import Settings
from streamq.worker.flow_reader import read_flow_apart

from .. import panels, render
from ..connecting import connected
from ..option_structs import option_name, with_options
from ..request_options import RequestOptions
from ..shared_options import JsonOption, PrefixOption, QueueOption, UrlOption

#: How many files that cannot be read are named.
_MOST_TOLD = 3


@with_options
def load(  # noqa: PLR0913  the options of a load are many and flat
    *,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Files, folders, patterns such as 'data/*.csv', URLs, or - for standard input.",
            rich_help_panel=panels.INPUT,
        ),
    ],
    handler: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Function of the workers' app that is called, by its name.",
            show_default=False,
            rich_help_panel=panels.FUNCTION,
        ),
    ] = "",
    flow: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FLOW",
            help="Flow whose stages the input goes through, instead of one function: a name in a "
            "module or a file.py, or a TOML file.",
            show_default=False,
            rich_help_panel=panels.FUNCTION,
        ),
    ] = "",
    request_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            help="Name of the request. Running the same command again continues it.",
            show_default="made up",
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            help="Run at most so many parts of this request at once, on all workers together.",
            rich_help_panel=panels.SPEED,
        ),
    ] = LIMIT,
    keep: Annotated[
        str,
        typer.Option(
            "--keep", metavar="TIME", help="Keep the request and its results so long after its end."
        ),
    ] = "7d",
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="NAME=VALUE",
            help="Label to find the request by, such as user=62; may be repeated up to 8 times.",
        ),
    ] = None,
    canary: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Run only the first N records, and the rest after streamq release ID. Each of "
            "them is a part of its own.",
            show_default="run all",
        ),
    ] = 0,
    then: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|URL",
            help="When the request is done, call this handler, or post to this URL.",
            show_default="nothing",
            rich_help_panel=panels.CALLBACKS,
        ),
    ] = None,
    on_failure: Annotated[
        str | None,
        typer.Option(
            "--on-failure",
            metavar="NAME|URL",
            help="The same when it has failed or was cancelled.",
            show_default="nothing",
            rich_help_panel=panels.CALLBACKS,
        ),
    ] = None,
    finally_: Annotated[
        str | None,
        typer.Option(
            "--finally",
            metavar="NAME|URL",
            help="The same in any case.",
            show_default="nothing",
            rich_help_panel=panels.CALLBACKS,
        ),
    ] = None,
    finish_by: Annotated[
        str,
        typer.Option(
            "--finish-by",
            metavar="TIME",
            help="End the request as failed if it has not ended by then: 2h from now, or a moment "
            "such as 2026-01-31T18:00.",
            show_default="no bound",
            rich_help_panel=panels.FAILURES,
        ),
    ] = "",
    spool: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Let workers keep results in this folder, which they and the collector share, "
            "instead of in the server. Goes with --by-reference.",
            show_default="none",
            rich_help_panel=panels.SPEED,
        ),
    ] = "",
    spool_form: Annotated[
        str,
        typer.Option(
            "--spool-format",
            metavar="|".join(SPOOL_FORMS),
            help="Keep results there as lines of this form, which the output is to have.",
            rich_help_panel=panels.SPEED,
        ),
    ] = "jsonl",
    window: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Stop reading while the server holds this much of the input.",
            show_default="no bound",
            rich_help_panel=panels.SPEED,
        ),
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
    options.handler = _handler_to_load_for(handler, flow)
    options.files, options.queue = files, queue
    options.limit, options.keep = limit, keep
    told = units.labels(dict(units.label(each) for each in labels or ()), "--label")
    name = units.request_id(request_id, Settings.from_env().team, "--id")
    if check_format(options.form, option_name) == "requests":
        if options.key or flow or canary or then or on_failure or finally_ or finish_by or spool:
            raise InvalidValue(
                "--flow, --key, --canary, --finish-by, --spool and callbacks are for one request, "
                "and --format requests makes many"
            )
        each = replace(options.policy_of_each(), labels=told or UNSET)
        can_go_on = request_id is not None
        _load_requests(each, files, name, url, prefix, can_go_on=can_go_on, as_json=as_json)
        return
    policy, size = options.source(read_flow_apart(flow, has_handlers=False) if flow else None)
    first = units.whole(canary, "--canary", 1) if canary else UNSET
    calls = callbacks_of(
        queue=queue,
        keep=keep,
        then=then,
        on_failure=on_failure,
        finally_=finally_,
        named=option_name,
    )
    policy = replace(
        policy,
        labels=told or UNSET,
        canary=first,
        calls=calls or UNSET,
    )
    policy = policy_with_spools(policy, spool, spool_form, name) if spool else policy
    policy = callbacks_with_deadline(policy, finish_by, "--finish-by") if finish_by else policy
    room = units.size_bytes(window, "--window") if window else 0
    with connected(url, prefix, advice="") as protocol:
        _check_workers_before_load(protocol, policy)
        refuse_taken_callback_ids(protocol, name, policy)
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
    _tell_what_was_loaded(load_, name, policy.spec.files, parts)


def _tell_what_was_loaded(load_: Load, name: str, files: Sequence[str], parts: int) -> None:
    """Tell what was loaded, and what was not."""
    for why in load_.refused[:_MOST_TOLD]:
        render.warning(f"{why}. It is one failure, and the other files are loaded")
    if len(load_.refused) > _MOST_TOLD:
        render.warning(f"and {len(load_.refused) - _MOST_TOLD:,} more: streamq errors {name}")
    for words in load_.keys.words():
        render.warning(words)
    blank = render.blank_lines(load_.blank_lines)
    render.note(f"loaded {_few_loaded_names(files)}: {render.count(parts, 'part')}{blank}")


def _handler_to_load_for(handler: str, flow: str) -> str:
    if bool(handler) == bool(flow):
        raise InvalidValue("give either --handler or --flow")
    return handler


def _check_workers_before_load(protocol: Protocol, policy: Policy) -> None:
    """Refuse a flow that live workers are too old for, and warn of handlers that none has."""
    if policy.flow:
        check_fleet(protocol, policy.flow)
    stages = [stage.policy for stage in policy.flow.stages] if policy.flow else [policy]
    found = [_warn_that_load_has_no_worker(protocol, each.queue, each.handler) for each in stages]
    if not any(found):
        return  # nothing is started yet
    for each, is_served in zip(stages, found, strict=True):
        if not is_served:
            render.warning(
                f"no live worker serves queue {each.queue}, and stage {each.handler} waits for one"
            )


def _warn_that_load_has_no_worker(protocol: Protocol, queue: str, handler: str) -> bool:
    """Warn if no live worker has the handler: it may be misspelt, and the request would wait.

    Returns whether anybody serves the queue.
    """
    # A worker that has just started does not list its handlers yet.
    workers = [worker for worker in live_workers(protocol, queue) if worker.handlers]
    if workers and not any(handler in worker.handlers for worker in workers):
        known = ", ".join(sorted({name for worker in workers for name in worker.handlers}))
        render.warning(
            f"no live worker of queue {queue} has a handler {handler!r}, and the request waits "
            f"for one; there is {known}"
        )
    return bool(workers)


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
    files = expand_file_names(patterns)
    ids: list[str] = []
    tell = ids.append if as_json else typer.echo
    with connected(url, prefix, advice="") as protocol:
        _warn_that_load_has_no_worker(protocol, policy.queue, policy.handler)
        try:
            count = submit_lines(protocol, name, policy, files, tell, can_go_on=can_go_on)
        except (KeyboardInterrupt, ServerError):
            render.note(f"stopped; the same command goes on with --id {name}")
            raise
    if as_json:
        render.as_json({"ids": ids, "requests": count})
        return
    render.note(f"loaded {_few_loaded_names(files)}: {render.count(count, 'request')}")


def _few_loaded_names(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' ...' if names[3:] else ''}"
