"""``streamq run``."""

import os
import re
import secrets
from pathlib import Path
from typing import Annotated

import typer

from streamq import output as outputs
from streamq import program, units
from streamq.errors import InvalidValue
from streamq.nursery import Nursery
from streamq.settings import Settings, with_login

from . import logs
from .context import LogLevelOption, PrefixOption, QueueOption, UrlOption, connected
from .wishes import Wishes, with_wishes


@with_wishes
def run(  # noqa: PLR0913, PLR0917  the options of a job are many and flat
    wishes: Wishes,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE...", help="Files, folders, patterns, or -.")
    ] = None,
    target: Annotated[
        str, typer.Option("--map", metavar="MODULE:FUNCTION", help="Or file.py:function.")
    ] = "",
    command: Annotated[
        str,
        typer.Option(
            "--exec",
            metavar="'PROGRAM ARGS'",
            help="Instead of a function: the records of a part on its stdin, results on stdout.",
        ),
    ] = "",
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="FILE", help="- or nothing in a pipe: standard output."
        ),
    ] = "",
    processes: Annotated[
        int, typer.Option("-p", "--processes", min=0, help="0: as many as there are CPUs.")
    ] = 0,
    slots: Annotated[
        int, typer.Option("-c", "--concurrency", min=1, help="Parts at once in each.")
    ] = 1,
    output_form: Annotated[
        str, typer.Option("--output-format", metavar="|".join(outputs.FORMS))
    ] = "",
    is_ordered: Annotated[
        bool, typer.Option("--ordered/--unordered", help="Results in input order, or not.")
    ] = True,
    limit: Annotated[int, typer.Option(min=0, help="Parts at once; 0: all slots.")] = 0,
    window: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes in the server at most.")
    ] = "256MiB",
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
    resume: Annotated[
        str, typer.Option(metavar="ID", help="Go on with a run that was stopped.")
    ] = "",
    is_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    queue: QueueOption = "default",
    log_level: LogLevelOption = logs.Level.WARNING,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Put files through a function, and collect what it returns: the whole job at once.

    Without a URL it starts a server of its own, whose data are kept in .streamq until the
    job is done: after Ctrl-C or a crash `--resume ID` goes on.

    With - it reads standard input, and in a pipe it writes standard output.

        streamq run big.csv --map shop:clean -o out.jsonl
    """
    argv = program.words_of(command)
    processes = processes or os.cpu_count() or 1
    run_id = secrets.token_hex(8)
    wishes.files, wishes.handler, wishes.queue = files or [], _handler(target, argv, run_id), queue
    wishes.limit = limit or processes * slots
    if not resume and (not wishes.files or bool(target) == bool(argv)):
        raise InvalidValue(
            "give FILE... and either --map MODULE:FUNCTION or --exec 'PROGRAM', or --resume ID"
        )
    logs.configure(log_level, logs.Format.TEXT)
    with Nursery(slots, 0 if resume else processes) as nursery:
        # The driver takes a while to import: as long as the processes take to start.
        from streamq.job import STANDARD, Job, Plan

        from . import running

        if resume:
            plan = running.kept(resume)
        else:
            plan = Plan(
                id=run_id,
                target=target,
                argv=argv,
                output=running.place_of(output),
                form=running.written_as(output, output_form, has_program=bool(argv)),
                policy=wishes.policy(),
                size=wishes.size(),
                processes=processes,
                slots=slots,
                window_bytes=units.size_bytes(window, "--window"),
                is_ordered=is_ordered,
            )
            if plan.output != STANDARD:
                outputs.check(Path(plan.output), force=force)
            elif is_json:
                raise InvalidValue("--json goes with -o FILE: results are on standard output")
        settings = Settings.from_env()
        given = url or settings.url
        if given:
            with connected(url, prefix, is_patient=False):  # before anything is kept
                given = with_login(given, settings)
        run_ = running.Run(plan, is_resumed=bool(resume))
        with run_.folder(), run_.server(given) as address:
            job = Job(
                plan,
                address,
                prefix or settings.prefix,
                log_level=log_level.value,
                is_alone=not given,
                nursery=None if resume else nursery,
            )
            status = run_.work(job, force=force or bool(resume))
    raise typer.Exit(run_.sum_up(job, status, is_json=is_json))


def _handler(target: str, argv: tuple[str, ...], run_id: str) -> str:
    """A name that no other run has: its code may be another's under the same name."""
    what = argv[0] if argv else target.rpartition(":")[2].rpartition(".")[2]
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(what).name)
    return f"{readable[:40]}-{run_id}"
