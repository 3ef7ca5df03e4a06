"""``streamq run``."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from streamq import units
from streamq.errors import InvalidValue
from streamq.records import outputs
from streamq.records.names import expand_file_names
from streamq.records.remote import is_remote
from streamq.runs.folder import Beginning, RunFolder, beginning_of_run
from streamq.runs.options import KEEP, Capacity, capacity_options, describe_run
from streamq.runs.plan import STANDARD, Plan
from streamq.runs.plan_differences import name_of_server, plan_on_server
from streamq.runs.spooling import spooled_plan
from streamq.runs.stored_runs import load_plan
from streamq.settings import Settings
from streamq.worker import program
from streamq.worker.channel import MOST_PROCESSES, MOST_SLOTS
from streamq.worker.spawning import Spawner

from .. import panels, render
from ..connecting import named_server
from ..option_structs import option_name, with_options
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
    use_log_options,
)
from ..ui import dashboard_shown_meanwhile


class RunCommandOptions(msgspec.Struct, kw_only=True):
    """The options of a run that do not concern the request, as they were typed."""

    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE...",
            help="Files, folders, patterns such as 'data/*.csv', URLs, or - for standard input.",
            rich_help_panel=panels.INPUT,
        ),
    ] = None
    target: Annotated[
        str,
        typer.Option(
            "--map",
            metavar="MODULE:FUNCTION",
            help="Call this function with each record: module:function or file.py:function.",
            rich_help_panel=panels.FUNCTION,
        ),
    ] = ""
    flow: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FLOW",
            help="Put each record through the stages of this flow: a name in a module or a "
            "file.py, or a TOML file.",
            rich_help_panel=panels.FUNCTION,
        ),
    ] = ""
    command: ExecOption = ""
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write results to this file. With -, or in a pipe, to standard output.",
            rich_help_panel=panels.OUTPUT,
        ),
    ] = ""
    processes: Annotated[
        int,
        typer.Option(
            "-p",
            "--processes",
            min=0,
            max=MOST_PROCESSES,
            help="Run the function in so many processes.",
            show_default="one for each CPU",
            rich_help_panel=panels.SPEED,
        ),
    ] = 0
    slots: Annotated[
        int,
        typer.Option(
            "-c",
            "--concurrency",
            min=0,
            max=MOST_SLOTS,
            show_default="one for each CPU",
            help="Run so many at once: in all, or with -p in each process. More than there are "
            "CPUs where the function waits, as for an API.",
            rich_help_panel=panels.SPEED,
        ),
    ] = 0
    output_form: Annotated[
        str,
        typer.Option(
            "--output-format",
            metavar="|".join(outputs.FORMS),
            help="Write each result as JSON, as a row of CSV or TSV, or as the text it is.",
            show_default="by the name of the output",
            rich_help_panel=panels.OUTPUT,
        ),
    ] = ""
    is_ordered: Annotated[
        bool,
        typer.Option(
            "--ordered/--unordered",
            help="Write results in the order of the input, or as they come.",
            rich_help_panel=panels.OUTPUT,
        ),
    ] = True
    limit: Annotated[
        int,
        typer.Option(
            min=0,
            help="Run at most so many parts at once, in all processes together.",
            show_default="as many as --concurrency allows",
            rich_help_panel=panels.SPEED,
        ),
    ] = 0
    window: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Stop reading while the server holds this much of inputs and results.",
            rich_help_panel=panels.SPEED,
        ),
    ] = "256MiB"
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace an output file that exists.", rich_help_panel=panels.OUTPUT
        ),
    ] = False
    resume: Annotated[
        str,
        typer.Option(
            metavar="[ID]", help="Continue a run that was stopped; without an id, the last one."
        ),
    ] = ""
    retry: Annotated[
        str,
        typer.Option(
            "--retry-failed",
            metavar="[ID]",
            help="Run the failed records of a run that is done again, and put their results into "
            "their place in its output; without an id, of the last one.",
        ),
    ] = ""
    keep: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Keep a run that is done with failures so long in .streamq, for --retry-failed.",
        ),
    ] = KEEP
    partition_by: Annotated[
        list[str] | None,
        typer.Option(
            "--partition-by",
            metavar="COLUMN",
            help="Write a folder of Parquet files, in folders by the values of this column; may be "
            "repeated. -o names the folder.",
            rich_help_panel=panels.OUTPUT,
        ),
    ] = None
    has_manifest: Annotated[
        bool,
        typer.Option(
            "--manifest",
            help="Write out.manifest.json beside out.jsonl: counts, and digests of input and "
            "output, by which streamq verify compares them.",
            rich_help_panel=panels.OUTPUT,
        ),
    ] = False
    is_fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Start over, instead of continuing what this command began before."
        ),
    ] = False
    has_ui: Annotated[
        bool,
        typer.Option(
            "--ui",
            help="Show the run in a browser while it goes on, at an address of this machine that "
            "is printed. It needs: pip install 'streamq[serve]'.",
        ),
    ] = False
    is_spooled: Annotated[
        bool,
        typer.Option(
            "--spool/--no-spool",
            help="Let processes read local files themselves and keep results in files of the run. "
            "With --no-spool all bytes go through its server, and inputs may change meanwhile.",
            rich_help_panel=panels.SPEED,
        ),
    ] = True
    is_json: Annotated[
        bool, typer.Option("--json", help="Print the summary at the end as JSON, for programs.")
    ] = False

    def __post_init__(self) -> None:
        _ = self.room  # it may be refused
        ways = sum(map(bool, (self.target, self.flow, self.argv)))
        if not self.stored and (not self.files or ways != 1):
            raise InvalidValue(
                "give FILE... and one of --map MODULE:FUNCTION, --flow MODULE:FLOW and "
                "--exec 'PROGRAM', or --resume ID"
            )
        _ = self.beginning

    @property
    def stored(self) -> str:
        """The id of the run that is gone on with or retried; "" for none."""
        return self.resume or self.retry

    @property
    def beginning(self) -> Beginning:
        """How the run begins."""
        return beginning_of_run(resume=self.resume, retry=self.retry, is_fresh=self.is_fresh)

    @property
    def room(self) -> Capacity:
        """How many processes there are, and how many parts run at once."""
        return capacity_options(self.processes, self.slots)

    def spawner(self) -> Spawner:
        """Start the processes of a new run, which is described meanwhile."""
        if self.stored:
            return Spawner(self.room.slots)
        # The run itself needs most of what is imported here.
        from streamq.worker.forking import can_fork, fork_process

        start = fork_process if can_fork() else None
        return Spawner(self.room.slots, self.room.processes, start)

    @property
    def argv(self) -> tuple[str, ...]:
        """The words of the program to run; empty without ``--exec``."""
        return program.words_of_program(self.command)

    def stored_plan(self) -> Plan:
        """Return the run that is gone on with or retried.

        Raises:
            InvalidValue: there is no such run in this folder, or another job is typed beside it.
        """
        what = "--retry-failed" if self.retry else "--resume"
        plan = load_plan(self.stored, what, is_retry=bool(self.retry))
        typed = {
            "FILE": self.files and not _are_inputs_of_run(plan, self.files),
            "--map": self.target and self.target != plan.target,
            "--flow": self.flow and self.flow != plan.target,
            "--exec": self.argv and self.argv != plan.argv,
            "-o": self.output and _run_output(self.output) not in (plan.output, plan.product),
        }
        if others := [name for name, is_other in typed.items() if is_other]:
            raise InvalidValue(
                f"run {plan.id} was begun with another {' and another '.join(others)}: "
                f"give {what} {plan.id} alone, or leave {what} out"
            )
        return plan

    def plan(self, request: RequestOptions) -> Plan:
        """Return a new run as the options describe it.

        Raises:
            InvalidValue: an option is not allowed, or a file cannot be read or written.
        """
        output = _run_output(self.output)
        if output == STANDARD and self.is_json:
            raise InvalidValue("--json goes with -o FILE: results are on standard output")
        return describe_run(
            self.files or [],
            output=output,
            function=self.target,
            flow=self.flow,
            command=self.command,
            processes=self.processes,
            concurrency=self.slots,
            output_format=self.output_form,
            ordered=self.is_ordered,
            limit=self.limit,
            window=self.window,
            force=self.force,
            keep=self.keep,
            manifest=self.has_manifest,
            partition_by=self.partition_by or (),
            queue=request.queue,
            named=option_name,
            **request.given(),
        )


@with_options
def run(
    *,
    options: RunCommandOptions,
    request: RequestOptions,
    queue: QueueOption = "default",
    log_level: LogLevelOption = LogLevel.WARNING,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Put files through a function, and collect what it returns, in one command.

    Without a URL it starts a server of its own, whose data are kept in .streamq until the run is
    done: after Ctrl-C or a crash the same command continues it, and so does `--resume ID`.

    With - it reads standard input, and in a pipe it writes standard output.

        streamq run big.csv --map shop:clean -o out.jsonl
    """
    request.queue = queue
    use_log_options(log_level, LogFormat.TEXT)
    with options.spawner() as spawner:
        plan = options.plan(request) if not options.stored else options.stored_plan()
        given_url = named_server(url, prefix)  # checked before anything is stored
        prefix = prefix or Settings.from_env().prefix
        plan = plan_on_server(plan, name_of_server(given_url, prefix))
        if not options.stored:
            plan = spooled_plan(plan, is_wanted=options.is_spooled)
        begun = time.monotonic()
        folder = RunFolder(plan, options.beginning, named=option_name)
        with (
            folder.held(),
            _run_with_resume_hint(folder),
            folder.server(given_url, prefix) as address,
        ):
            # Importing redis-py takes about as long as server and processes take to start.
            from streamq.runs.retry import new_retry_run

            from ..run_report import RunReport

            report = RunReport(folder, begun=begun)
            this_run = new_retry_run(
                folder,
                address(),
                prefix,
                log_level=log_level.value,
                is_alone=not given_url,
                spawner=None if options.stored else spawner,
                on_begun=report.begin,
            )
            with dashboard_shown_meanwhile(
                address(),
                prefix,
                folder.plan.policy.queue,
                folder.plan.id,
                wanted=options.has_ui,
            ):
                status = report.work(this_run, force=options.force)
    raise typer.Exit(report.sum_up(this_run, status, is_json=options.is_json))


@contextmanager
def _run_with_resume_hint(folder: RunFolder) -> Generator[None]:
    """Tell the user how to resume a run that Ctrl-C ends."""
    if folder.is_found:
        render.note(f"going on with run {folder.plan.id}, which was stopped; --fresh starts over")
    try:
        yield
    except KeyboardInterrupt:
        if folder.is_kept:
            render.note(
                f"stopped{resume_hint(folder.plan, is_kept=True, is_retry=folder.is_retry)}"
            )
        raise


def _are_inputs_of_run(plan: Plan, files: list[str]) -> bool:
    """Return whether these are the files of a run, however they are named."""
    typed, begun = expand_file_names(files), plan.policy.spec.files
    return [Path(each).absolute() for each in typed] == [Path(each).absolute() for each in begun]


def _run_output(output: str) -> str:
    """Return the output: a file, or standard output if it is a pipe or ``-`` was given."""
    if output in ("", STANDARD) and sys.stdout is None:
        raise InvalidValue("where to? Standard output is closed: give -o FILE")
    if output == STANDARD or (not output and not render.is_terminal(sys.stdout)):
        return STANDARD
    if not output:
        raise InvalidValue("where to? Give -o FILE, or -o - for this terminal")
    return output if is_remote(output) else units.file_name(str(Path(output).absolute()))
