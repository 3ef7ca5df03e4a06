"""``load``, ``collect`` and ``run`` for Python programs: the commands load, results and run."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Unpack

from streamq import units
from streamq.errors import InvalidValue
from streamq.flows.flow import Flow
from streamq.model import LIMIT, Status
from streamq.protocol.connecting import connected_protocol
from streamq.queue.client import Client
from streamq.queue.fleet import check_fleet
from streamq.queue.request import Request
from streamq.records.gaps import gaps_beside
from streamq.records.outputs import (
    FORMS,
    FileOutput,
    check_output_keys,
    check_output_name,
    form_by_output_name,
    is_stream_output,
)
from streamq.runs.collect import Collector, write_collected_errors
from streamq.runs.folder import RunFolder, beginning_of_run
from streamq.runs.load import Load
from streamq.runs.options import (
    KEEP,
    RequestOptions,
    describe_flow,
    describe_run,
    describe_source,
)
from streamq.runs.plan_differences import name_of_server, plan_on_server
from streamq.runs.progress import Progress
from streamq.runs.retry import new_retry_run
from streamq.runs.run import carry_out_run
from streamq.runs.spooled_results import spools_of_fleet
from streamq.runs.spooling import spooled_plan
from streamq.runs.stored_runs import load_plan
from streamq.settings import Settings, url_with_login
from streamq.worker.flow_reader import read_flow_apart
from streamq.worker.spawning import Spawner

log = logging.getLogger(__name__)


def load(
    client: Client,
    files: str | Sequence[str],
    *,
    handler: str = "",
    flow: Flow | str | None = None,
    id: str | None = None,
    queue: str | None = None,
    limit: int = LIMIT,
    keep: str | float = "7d",
    window: str | int | None = None,
    **options: Unpack[RequestOptions],
) -> Request:
    """Split files into the parts of a request, and return it, as ``streamq load`` does.

    ``files`` are names, folders, patterns or URLs. Workers run parts while later ones are still
    being read. After a crash the same call with the same ``id`` continues the load. With a
    ``window``, the loader waits while more than so many bytes of parts are in the server.
    ``flow`` is a flow of this program, or the name of one, as ``"shop:shop"``, or of a TOML file.

    The other options are those of the command: format, bytes, lines, delimiter, quote, escape,
    header, no_header, by_reference, key, track, trace, level, rate, retries, timeout, max_failures.

    Raises:
        InvalidValue: an option is not allowed, or a file cannot be read.
        AppLoadError: there is no such flow.
        FleetTooOld: a live worker is of a version that does not know flows.
        RequestExists: the id has another submission, or a file has changed since.
        ServerError: the server does not answer now; the same call with the same id goes on.

    Example:
        request = load(client, "big.txt", handler="shout", id="nightly")
    """
    settings = Settings.from_env()
    names = [files] if isinstance(files, str) else files
    if bool(handler) == bool(flow):
        raise InvalidValue("give either a handler or a flow")
    queue = queue or settings.queue
    if flow:
        meant = flow if isinstance(flow, Flow) else read_flow_apart(flow, has_handlers=False)
        source = describe_flow(meant, names, queue=queue, limit=limit, keep=keep, **options)
    else:
        source = describe_source(
            names, handler=handler, queue=queue, limit=limit, keep=keep, **options
        )
    request_id = units.request_id(id, settings.team)
    window_bytes = 0 if window is None else units.size_bytes(window, "window")
    if source.policy.flow:
        check_fleet(client.protocol, source.policy.flow)
    Load(client.protocol, request_id, *source, window_bytes=window_bytes).run()
    return Request(client.protocol, request_id)


def collect(
    request: Request,
    output: str | Path,
    *,
    ordered: bool = True,
    follow: bool = True,
    output_format: str = "",
    keys: bool = False,
    spool: str = "",
    force: bool = False,
) -> bool:
    """Write the results of a request to a file, each exactly once, as ``streamq results`` does.

    With ``follow`` the call returns when the request has ended. After a crash the same call
    continues where the file ends; results that are written are deleted from the server. Failures
    of ``out.jsonl`` go to ``out.errors.jsonl``. The format is jsonl, csv, tsv, raw or parquet; by
    default the file's name decides. With ``keys`` each line has the numbers of its part and its
    record. Results of parts that were retried are put in their place in the file. Results that
    workers keep in a folder of their own are read from ``spool``, which is that folder.
    Return whether the request has ended and everything is in the file.

    Raises:
        InvalidValue: an option is not allowed, or the file exists and ``force`` is not given.
        RequestUnknown: there is no such request.
        StreamqError: the file cannot be written.

    Example:
        collect(request, "out.txt")
    """
    check_output_name(str(output), output_format)
    path = Path(units.file_name(str(Path(output).absolute())))
    form = output_format or form_by_output_name(path.name)
    if form not in FORMS:
        raise InvalidValue(f"output_format {form!r} is none of {', '.join(FORMS)}")
    if keys:
        check_output_keys(form, "keys")
    if is_stream_output(path):
        raise InvalidValue(f"{output} is no regular file")
    collector = Collector(
        request.protocol,
        request.id,
        FileOutput(path, request.id),
        form,
        gaps=gaps_beside(path, request.id),
        has_keys=keys,
        spools=spools_of_fleet(request.protocol, request.id, form, spool, has_keys=keys),
    )
    is_complete = collector.run(is_ordered=ordered, follow=follow, force=force)
    if is_complete:
        write_collected_errors(collector.failures, path)
    return is_complete


def run(  # noqa: PLR0913  the options of a run are many and flat
    files: str | Sequence[str] = (),
    map: str = "",
    output: str | Path = "",
    *,
    flow: str = "",
    exec: str = "",
    processes: int = 0,
    concurrency: int = 0,
    output_format: str = "",
    ordered: bool = True,
    limit: int = 0,
    window: str | int = "256MiB",
    force: bool = False,
    keep: str | float = KEEP,
    manifest: bool = False,
    partition_by: Sequence[str] = (),
    resume: str = "",
    fresh: bool = False,
    retry_failed: str = "",
    spool: bool = True,
    queue: str | None = None,
    url: str | None = None,
    prefix: str | None = None,
    watch: Callable[[Progress], object] = lambda _: None,
    **options: Unpack[RequestOptions],
) -> Status:
    """Put files through a function and write what it returns to a file, as ``streamq run`` does.

    ``map`` names the function, ``package.module:function`` or ``file.py:function``: each process
    imports it anew. Instead, ``flow`` names a flow in the same way, or a TOML file, and ``exec``
    is a program, as a shell would write it. Without a URL, here and in the settings, the run
    starts a server of its own, whose data are in ``.streamq`` until the run is done. The same call
    again goes on with a run that was stopped, unless it is to be ``fresh``; so does ``resume``, its
    id or "last". A run that is done with failures is kept for ``keep``; ``retry_failed``, its id or
    "last", runs what failed again, and puts the results into their place in the output. ``watch``
    is called with the progress about 4 times a second. Failures of ``out.jsonl`` go to
    ``out.errors.jsonl``; with ``manifest`` counts and digests to ``out.manifest.json``. With
    ``partition_by``, names of columns, the output is a folder of Parquet files.
    Processes read local files themselves and keep results in files of the run; with
    ``spool=False`` all bytes go through its server. Return the last status.

    The other options are those of the command: format, bytes, lines, delimiter, quote, escape,
    header, no_header, by_reference, level, rate, retries, timeout, max_failures.

    Raises:
        InvalidValue: an option is not allowed, or a file cannot be read or written.
        AppLoadError: the function cannot be imported.
        StreamqError: what went wrong with the input, the output or the server.
        KeyboardInterrupt: Ctrl-C or TERM stopped it; it says with which id to go on.

    Example:
        run("big.csv", "shop:clean", "out.jsonl")
    """
    settings = Settings.from_env()
    stored = resume or retry_failed
    if not all(isinstance(each, str) for each in (map, flow, exec)):
        raise InvalidValue("map and flow are names, such as 'shop:clean': processes import them")
    if not stored and (not files or not output or [map, flow, exec].count("") != 2):
        raise InvalidValue("give files, output and one of map, flow and exec, or resume")
    plan = (
        load_plan(stored, is_retry=bool(retry_failed))
        if stored
        else describe_run(
            [files] if isinstance(files, str) else files,
            output=str(output),
            function=map,
            flow=flow,
            command=exec,
            processes=processes,
            concurrency=concurrency,
            output_format=output_format,
            ordered=ordered,
            limit=limit,
            window=window,
            force=force,
            keep=keep,
            manifest=manifest,
            partition_by=partition_by,
            queue=queue or settings.queue,
            **options,
        )
    )
    named, prefix = url_with_login(url or settings.url, settings), prefix or settings.prefix
    if named:
        with connected_protocol(
            named,
            prefix,
            is_insecure=settings.insecure,
            say=log.warning,
            warn=log.warning,
            is_patient=False,
        ):
            pass  # only to see that a server answers, before anything is stored
    plan = plan_on_server(plan, name_of_server(named, prefix))
    if not stored:
        plan = spooled_plan(plan, is_wanted=spool)
    beginning = beginning_of_run(resume=resume, retry=retry_failed, is_fresh=fresh)
    folder = RunFolder(plan, beginning)
    with (
        Spawner(plan.slots, plan.processes) as spawner,
        folder.held(),
        folder.server(named, prefix) as address,
    ):
        plan = folder.plan
        this_run = new_retry_run(
            folder,
            address(),
            prefix,
            log_level="warning",
            is_alone=not named,
            spawner=spawner,
        )
        status = carry_out_run(this_run, folder, watch, force=force)
    if not this_run.is_complete:
        hint = f"; go on with resume={plan.id!r}" if folder.is_kept else ""
        raise KeyboardInterrupt(f"the run was stopped{hint}")
    if folder.errors_problem:
        raise folder.errors_problem
    return status
