"""``load``, ``collect`` and ``run`` for Python programs: the commands load, results and run."""

import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Unpack

from streamq import units
from streamq.errors import InvalidValue
from streamq.model import LIMIT, Status
from streamq.protocol.connecting import connected
from streamq.queue.client import Client
from streamq.queue.request import Request
from streamq.records.outputs import FORMS, FileOutput, form_of, is_stream
from streamq.runs.collect import Collector, write_errors
from streamq.runs.folder import RunFolder, load_plan
from streamq.runs.load import Load
from streamq.runs.options import RequestOptions, describe_run, describe_source
from streamq.runs.progress import Progress
from streamq.runs.run import Run, carry_out
from streamq.settings import Settings, with_login
from streamq.worker.spawning import Spawner

log = logging.getLogger(__name__)


def load(
    client: Client,
    files: str | Sequence[str],
    *,
    handler: str,
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

    The other options are those of the command: format, bytes, lines, delimiter, quote, escape,
    header, no_header, by_reference, level, rate, retries, timeout, max_failures.

    Raises:
        InvalidValue: an option is not allowed, or a file cannot be read.
        RequestExists: the id has another submission, or a file has changed since.
        ServerError: not now; the same call with the same id goes on.

    Example:
        request = load(client, "big.txt", handler="shout", id="nightly")
    """
    source = describe_source(
        [files] if isinstance(files, str) else files,
        handler=handler,
        queue=queue or Settings.from_env().queue,
        limit=limit,
        keep=keep,
        **options,
    )
    request_id = secrets.token_hex(8) if id is None else units.name(id, "request id")
    window_bytes = 0 if window is None else units.size_bytes(window, "window")
    Load(client.protocol, request_id, *source, window_bytes=window_bytes).run()
    return Request(client.protocol, request_id)


def collect(
    request: Request,
    output: str | Path,
    *,
    ordered: bool = True,
    follow: bool = True,
    output_format: str = "",
    force: bool = False,
) -> bool:
    """Write the results of a request to a file, each exactly once, as ``streamq results`` does.

    With ``follow`` the call returns when the request has ended. After a crash the same call
    continues where the file ends; results that are written are deleted from the server. Failures
    of ``out.jsonl`` go to ``out.errors.jsonl``. The format is jsonl, csv or raw; by default the
    file's name decides.
    Return whether the request has ended and everything is in the file.

    Raises:
        InvalidValue: an option is not allowed, or the file exists and ``force`` is not given.
        RequestUnknown: there is no such request.
        StreamqError: the file cannot be written.

    Example:
        collect(request, "out.txt")
    """
    path = Path(units.file_name(str(Path(output).absolute())))
    form = output_format or form_of(path.name)
    if form not in FORMS:
        raise InvalidValue(f"output_format {form!r} is none of {', '.join(FORMS)}")
    if is_stream(path):
        raise InvalidValue(f"{output} is no regular file")
    collector = Collector(request.protocol, request.id, FileOutput(path, request.id), form)
    is_complete = collector.run(is_ordered=ordered, follow=follow, force=force)
    if is_complete:
        write_errors(collector.failures, path)
    return is_complete


def run(  # noqa: PLR0913  the options of a run are many and flat
    files: str | Sequence[str] = (),
    map: str = "",
    output: str | Path = "",
    *,
    exec: str = "",
    processes: int = 0,
    concurrency: int = 1,
    output_format: str = "",
    ordered: bool = True,
    limit: int = 0,
    window: str | int = "256MiB",
    force: bool = False,
    resume: str = "",
    queue: str | None = None,
    url: str | None = None,
    prefix: str | None = None,
    watch: Callable[[Progress], object] = lambda _: None,
    **options: Unpack[RequestOptions],
) -> Status:
    """Put files through a function and write what it returns to a file, as ``streamq run`` does.

    ``map`` names the function, ``package.module:function`` or ``file.py:function``: each process
    imports it anew. Instead, ``exec`` is a program, as a shell would write it. Without a URL, here
    and in the settings, the run starts a server of its own, whose data are in ``.streamq`` until
    the run is done. A run that was stopped continues with ``resume``, its id. ``watch`` is called
    with the progress about 4 times a second. Failures of ``out.jsonl`` go to
    ``out.errors.jsonl``. Return the last status.

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
    if not resume and (not files or not output or bool(map) == bool(exec)):
        raise InvalidValue("give files, output and either map or exec, or resume")
    plan = (
        load_plan(resume)
        if resume
        else describe_run(
            [files] if isinstance(files, str) else files,
            output=str(Path(output).absolute()),
            function=map,
            command=exec,
            processes=processes,
            concurrency=concurrency,
            output_format=output_format,
            ordered=ordered,
            limit=limit,
            window=window,
            force=force,
            queue=queue or settings.queue,
            **options,
        )
    )
    named, prefix = with_login(url or settings.url, settings), prefix or settings.prefix
    if named:
        with connected(
            named,
            prefix,
            is_insecure=settings.insecure,
            say=log.warning,
            warn=log.warning,
            is_patient=False,
        ):
            pass  # only to see that a server answers, before anything is stored
    folder = RunFolder(plan)
    with (
        Spawner(plan.slots, plan.processes) as spawner,
        folder.held(),
        folder.server(named) as address,
    ):
        this_run = Run(
            plan,
            address(),
            prefix,
            log_level="warning",
            is_alone=not named,
            spawner=spawner,
        )
        status = carry_out(this_run, plan, folder, watch, force=force, is_resumed=bool(resume))
    if not this_run.is_complete:
        hint = f"; go on with resume={plan.id!r}" if folder.is_kept else ""
        raise KeyboardInterrupt(f"the run was stopped{hint}")
    if not plan.is_piped:
        write_errors(this_run.failures, Path(plan.output))
    return status
