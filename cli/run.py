"""``streamq run``."""

import re
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from streamq import cpus, units
from streamq.errors import InvalidValue
from streamq.records import outputs
from streamq.runs.plan import STANDARD, Plan
from streamq.settings import Settings
from streamq.worker import program
from streamq.worker.channel import MOST_PROCESSES, MOST_SLOTS, check_capacity
from streamq.worker.spawning import Nursery

from . import logs, render
from .context import ExecOption, LogLevelOption, PrefixOption, QueueOption, UrlOption
from .home import Home, kept, named_server
from .options import with_options
from .wishes import Wishes


class JobWishes(msgspec.Struct, kw_only=True):
    """What is to be done with the request, as it was typed."""

    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE...", help="Files, folders, patterns, or -.")
    ] = None
    target: Annotated[
        str, typer.Option("--map", metavar="MODULE:FUNCTION", help="Or file.py:function.")
    ] = ""
    command: ExecOption = ""
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="FILE", help="- or nothing in a pipe: standard output."
        ),
    ] = ""
    processes: Annotated[
        int,
        typer.Option(
            "-p", "--processes", min=0, max=MOST_PROCESSES, help="0: as many as there are CPUs."
        ),
    ] = 0
    slots: Annotated[
        int,
        typer.Option("-c", "--concurrency", min=1, max=MOST_SLOTS, help="Parts at once in each."),
    ] = 1
    output_form: Annotated[
        str, typer.Option("--output-format", metavar="|".join(outputs.FORMS))
    ] = ""
    is_ordered: Annotated[
        bool, typer.Option("--ordered/--unordered", help="Results in input order, or not.")
    ] = True
    limit: Annotated[int, typer.Option(min=0, help="Parts at once; 0: all slots.")] = 0
    window: Annotated[str, typer.Option(metavar="SIZE", help="Bytes in the server at most.")] = (
        "256MiB"
    )
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False
    resume: Annotated[
        str, typer.Option(metavar="ID", help="Go on with a run that was stopped.")
    ] = ""
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
        """The program's words, if there is one."""
        return program.words_of(self.command)

    def plan(self, wishes: Wishes) -> Plan:
        """The job that is meant, a new one.

        Raises:
            InvalidValue: an option that cannot be, or a file that cannot be read or written.
        """
        run_id = secrets.token_hex(8)
        wishes.files, wishes.handler = self.files or [], self._handler(run_id)
        wishes.limit = self.limit or self.processes * self.slots
        plan = Plan(
            id=run_id,
            target=self.target,
            argv=self.argv,
            output=_place_of(self.output),
            form=self._form(),
            policy=wishes.policy(),
            size=wishes.size(),
            processes=self.processes,
            slots=self.slots,
            window_bytes=units.size_bytes(self.window, "--window"),
            is_ordered=self.is_ordered,
            force=self.force,
        )
        if plan.output != STANDARD:
            outputs.refuse_inputs(Path(plan.output), plan.policy.spec.files)
            outputs.check(Path(plan.output), force=self.force)
        elif self.is_json:
            raise InvalidValue("--json goes with -o FILE: results are on standard output")
        return plan

    def _handler(self, run_id: str) -> str:
        """A name that no other run has: its code may be another's under the same name."""
        what = self.argv[0] if self.argv else self.target.rpartition(":")[2].rpartition(".")[2]
        readable = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(what).name)
        return f"{readable[:40]}-{run_id}"

    def _form(self) -> str:
        """How results are written: as asked for, or by the output's name."""
        if self.argv and self.output_form not in ("", "raw"):
            raise InvalidValue(
                "--output-format goes with --map: what a program prints is written so"
            )
        form = "raw" if self.argv else self.output_form or outputs.form_of(self.output)
        if form not in outputs.FORMS:
            raise InvalidValue(f"--output-format {form!r} is none of {', '.join(outputs.FORMS)}")
        return form


@with_options
def run(
    *,
    job: JobWishes,
    wishes: Wishes,
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
    wishes.queue = queue
    logs.configure(log_level, logs.Format.TEXT)
    with Nursery(job.slots, 0 if job.resume else job.processes) as nursery:
        plan = kept(job.resume) if job.resume else job.plan(wishes)
        named = named_server(url, prefix)  # before anything is kept
        begun, home = time.monotonic(), Home(plan)
        with home.folder(), home.server(named) as address:
            # The driver takes a while to import: as long as server and processes take to start.
            from streamq.runs.run import Job

            from .running import Run

            run_ = Run(plan, home, is_resumed=bool(job.resume), begun=begun)
            work = Job(
                plan,
                address(),
                prefix or Settings.from_env().prefix,
                log_level=log_level.value,
                is_alone=not named,
                nursery=None if job.resume else nursery,
            )
            status = run_.work(work, force=job.force)
    raise typer.Exit(run_.sum_up(work, status, is_json=job.is_json))


def _place_of(output: str) -> str:
    """Where results go: a file, or standard output when that is a pipe or is asked for."""
    if output in ("", STANDARD) and sys.stdout is None:
        raise InvalidValue("where to? Standard output is closed: give -o FILE")
    if output == STANDARD or (not output and not render.is_terminal(sys.stdout)):
        return STANDARD
    if not output:
        raise InvalidValue("where to? Give -o FILE, or -o - for this terminal")
    return units.file_name(str(Path(output).absolute()))
