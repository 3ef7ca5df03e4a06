"""``streamq run``."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from streamq import cpus, units
from streamq.errors import InvalidValue
from streamq.records import outputs
from streamq.runs.folder import RunFolder, load_plan
from streamq.runs.options import describe_run
from streamq.runs.plan import STANDARD, Plan
from streamq.settings import Settings
from streamq.worker import program
from streamq.worker.channel import MOST_PROCESSES, MOST_SLOTS, check_capacity
from streamq.worker.spawning import Spawner

from .. import render
from ..connecting import named_server
from ..option_structs import named, with_options
from ..request_options import RequestOptions
from ..resuming import resume_hint
from ..shared_options import (
    ExecOption,
    LogFormat,
    LogLevel,
    LogLevelOption,
    PrefixOption,
    QueueOption,
    UrlOption,
    configure_logs,
)


class RunOptions(msgspec.Struct, kw_only=True):
    """The options of a run that do not concern the request, as they were typed."""

    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE...", help="Files, folders, patterns, URLs, or - for stdin."),
    ] = None
    target: Annotated[
        str,
        typer.Option(
            "--map", metavar="MODULE:FUNCTION", help="The function; also file.py:function."
        ),
    ] = ""
    command: ExecOption = ""
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Where results go; - is stdout, the default in a pipe.",
        ),
    ] = ""
    processes: Annotated[
        int,
        typer.Option(
            "-p",
            "--processes",
            min=0,
            max=MOST_PROCESSES,
            help="Processes that run the function; 0: one for each CPU.",
        ),
    ] = 0
    slots: Annotated[
        int,
        typer.Option(
            "-c",
            "--concurrency",
            min=1,
            max=MOST_SLOTS,
            help="Parts that run at once in each process.",
        ),
    ] = 1
    output_form: Annotated[
        str,
        typer.Option(
            "--output-format",
            metavar="|".join(outputs.FORMS),
            help="Form of the lines; by the file's name if not given.",
        ),
    ] = ""
    is_ordered: Annotated[
        bool, typer.Option("--ordered/--unordered", help="Results in input order, or not.")
    ] = True
    limit: Annotated[
        int, typer.Option(min=0, help="Most parts that run at once; 0: one for each slot.")
    ] = 0
    window: Annotated[
        str, typer.Option(metavar="SIZE", help="Most bytes of parts and results in the server.")
    ] = "256MiB"
    force: Annotated[bool, typer.Option("--force", help="Replace an output file that exists.")] = (
        False
    )
    resume: Annotated[str, typer.Option(metavar="ID", help="Continue a run that was stopped.")] = ""
    is_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False

    def __post_init__(self) -> None:
        self.processes = self.processes or cpus.usable()
        check_capacity(self.processes, self.slots)
        if not self.resume and (not self.files or bool(self.target) == bool(self.argv)):
            raise InvalidValue(
                "give FILE... and either --map MODULE:FUNCTION or --exec 'PROGRAM', or --resume ID"
            )

    @property
    def argv(self) -> tuple[str, ...]:
        """The words of the program to run; empty without ``--exec``."""
        return program.words_of(self.command)

    def plan(self, request: RequestOptions) -> Plan:
        """Return a new run as the options describe it.

        Raises:
            InvalidValue: an option is not allowed, or a file cannot be read or written.
        """
        output = _place_of(self.output)
        if output == STANDARD and self.is_json:
            raise InvalidValue("--json goes with -o FILE: results are on standard output")
        return describe_run(
            self.files or [],
            output=output,
            function=self.target,
            command=self.command,
            processes=self.processes,
            concurrency=self.slots,
            output_format=self.output_form,
            ordered=self.is_ordered,
            limit=self.limit,
            window=self.window,
            force=self.force,
            queue=request.queue,
            named=named,
            warn=render.warning,
            **request.given(),
        )


@with_options
def run(
    *,
    options: RunOptions,
    request: RequestOptions,
    queue: QueueOption = "default",
    log_level: LogLevelOption = LogLevel.WARNING,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Put files through a function, and collect what it returns, in one command.

    Without a URL it starts a server of its own, whose data are kept in .streamq until the run is
    done: after Ctrl-C or a crash `--resume ID` continues it.

    With - it reads standard input, and in a pipe it writes standard output.

        streamq run big.csv --map shop:clean -o out.jsonl
    """
    request.queue = queue
    configure_logs(log_level, LogFormat.TEXT)
    with Spawner(options.slots, 0 if options.resume else options.processes) as spawner:
        plan = load_plan(options.resume, "--resume") if options.resume else options.plan(request)
        given_url = named_server(url, prefix)  # checked before anything is stored
        begun, folder = time.monotonic(), RunFolder(plan)
        with folder.held(), _hinted(plan, folder), folder.server(given_url) as address:
            # Importing redis-py takes about as long as server and processes take to start.
            from streamq.runs.run import Run

            from ..run_report import RunReport

            report = RunReport(plan, folder, is_resumed=bool(options.resume), begun=begun)
            this_run = Run(
                plan,
                address(),
                prefix or Settings.from_env().prefix,
                log_level=log_level.value,
                is_alone=not given_url,
                spawner=None if options.resume else spawner,
            )
            status = report.work(this_run, force=options.force)
    raise typer.Exit(report.sum_up(this_run, status, is_json=options.is_json))


@contextmanager
def _hinted(plan: Plan, folder: RunFolder) -> Generator[None]:
    """Tell the user how to resume a run that Ctrl-C ends."""
    try:
        yield
    except KeyboardInterrupt:
        if folder.is_kept:
            render.note(f"stopped{resume_hint(plan, is_kept=True)}")
        raise


def _place_of(output: str) -> str:
    """Return the output: a file, or standard output if it is a pipe or ``-`` was given."""
    if output in ("", STANDARD) and sys.stdout is None:
        raise InvalidValue("where to? Standard output is closed: give -o FILE")
    if output == STANDARD or (not output and not render.is_terminal(sys.stdout)):
        return STANDARD
    if not output:
        raise InvalidValue("where to? Give -o FILE, or -o - for this terminal")
    return units.file_name(str(Path(output).absolute()))
