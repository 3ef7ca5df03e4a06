"""``streamq run``."""

import fcntl
import os
import re
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from streamq import output as outputs
from streamq import program, units
from streamq.collector import form_of
from streamq.errors import InvalidValue, StreamqError
from streamq.job import STANDARD, Job, Plan
from streamq.model import LEVEL, Failure, State, Status
from streamq.pool import Unrunnable
from streamq.server import LocalServer
from streamq.settings import Settings, with_login

from . import logs, render
from .context import LogLevelOption, PrefixOption, QueueOption, UrlOption, connected, exit_code
from .progress import Display
from .results import FORMS, write_errors
from .wishes import (
    ByReferenceOption,
    BytesOption,
    DelimiterOption,
    EscapeOption,
    FormatOption,
    HeaderOption,
    LevelOption,
    LinesOption,
    MaxFailuresOption,
    NoHeaderOption,
    QuoteOption,
    RateOption,
    RetriesOption,
    TimeoutOption,
    Wishes,
)

#: Folder of the jobs that are not finished, in the current one.
HOME = Path(".streamq")
#: So many failures are told where there is no file to write them to.
_MOST_TOLD = 10


def run(  # noqa: PLR0913, PLR0917  the options of a job are many and flat
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
    form: FormatOption = "auto",
    part_bytes: BytesOption = "256KiB",
    lines: LinesOption = 0,
    delimiter: DelimiterOption = "",
    quote: QuoteOption = '"',
    escape: EscapeOption = "",
    header: HeaderOption = "",
    has_no_header: NoHeaderOption = False,
    by_reference: ByReferenceOption = False,
    output_form: Annotated[str, typer.Option("--output-format", metavar="|".join(FORMS))] = "",
    is_ordered: Annotated[
        bool, typer.Option("--ordered/--unordered", help="Results in input order, or not.")
    ] = True,
    level: LevelOption = LEVEL,
    limit: Annotated[int, typer.Option(min=0, help="Parts at once; 0: all slots.")] = 0,
    rate: RateOption = "",
    retries: RetriesOption = None,
    timeout: TimeoutOption = "",
    max_failures: MaxFailuresOption = "",
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
    if resume:
        plan = _kept(resume)
    else:
        argv = program.words_of(command)
        run_id = secrets.token_hex(8)
        processes = processes or os.cpu_count() or 1
        wishes = Wishes(
            files=files or [],
            handler=_handler(target, argv, run_id),
            queue=queue,
            form=form,
            part_bytes=part_bytes,
            lines=lines,
            delimiter=delimiter,
            quote=quote,
            escape=escape,
            header=header,
            has_no_header=has_no_header,
            by_reference=by_reference,
            level=level,
            limit=limit or processes * slots,
            rate=rate,
            retries=retries,
            timeout=timeout,
            max_failures=max_failures,
        )
        if not wishes.files or bool(target) == bool(argv):
            raise InvalidValue(
                "give FILE... and either --map MODULE:FUNCTION or --exec 'PROGRAM', or --resume ID"
            )
        plan = Plan(
            id=run_id,
            target=target,
            argv=argv,
            output=_place(output),
            form=_form(output, output_form, has_program=bool(argv)),
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
    logs.configure(log_level, logs.Format.TEXT)
    settings = Settings.from_env()
    given = url or settings.url
    if given:
        with connected(url, prefix):  # before anything is kept
            given = with_login(given, settings)
    run_ = _Run(plan, is_resumed=bool(resume))
    with run_.folder(), run_.server(given) as address:
        job = Job(
            plan,
            address,
            prefix or settings.prefix,
            log_level=log_level.value,
            is_alone=not given,
        )
        status = run_.work(job, force=force or bool(resume))
    raise typer.Exit(run_.sum_up(job, status, is_json=is_json))


def _handler(target: str, argv: tuple[str, ...], run_id: str) -> str:
    """A name that no other run has: its code may be another's under the same name."""
    what = argv[0] if argv else target.rpartition(":")[2].rpartition(".")[2]
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(what).name)
    return f"{readable[:40]}-{run_id}"


def _place(output: str) -> str:
    """Where results go: a file, or standard output when that is a pipe or is asked for."""
    if output == STANDARD or (not output and not render.is_terminal(sys.stdout)):
        return STANDARD
    if not output:
        raise InvalidValue("where to? Give -o FILE, or -o - for this terminal")
    return str(Path(output).absolute())


def _form(output: str, output_form: str, *, has_program: bool) -> str:
    if has_program and output_form not in ("", "raw"):
        raise InvalidValue("--output-format goes with --map: what a program prints is written so")
    form = "raw" if has_program else output_form or form_of(output)
    if form not in FORMS:
        raise InvalidValue(f"--output-format {form!r} is none of {', '.join(FORMS)}")
    return form


def _kept(request_id: str) -> Plan:
    path = HOME / units.name(request_id, "--resume") / "plan.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except (OSError, msgspec.DecodeError):
        kept = [each.name for each in HOME.glob("*") if (each / "plan.json").exists()]
        there = f"; there is {', '.join(kept)}" if kept else ""
        raise InvalidValue(f"no run {request_id} was stopped in this folder{there}") from None


class _Run:
    """A plan being carried out: its folder, its server, and what people are told."""

    def __init__(self, plan: Plan, *, is_resumed: bool) -> None:
        self._plan = plan
        self._is_resumed = is_resumed
        self._home = HOME / plan.id
        self._is_kept = plan.can_go_on
        self._begun = time.monotonic()

    @contextmanager
    def folder(self) -> Generator[None]:
        """Have the run's own folder, locked; it stays if the run can be gone on with."""
        if not self._plan.can_go_on:
            yield
            return
        HOME.mkdir(mode=0o700, exist_ok=True)
        self._home.mkdir(mode=0o700, exist_ok=True)
        with (self._home / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidValue(f"run {self._plan.id} goes on in another process") from None
            try:
                text = self._home / "plan.new"
                text.write_bytes(msgspec.json.encode(self._plan))
                text.rename(self._home / "plan.json")
                yield
            except KeyboardInterrupt:
                if self._is_kept:
                    render.note(f"stopped{self._hope()}")
                raise
            finally:
                if not self._is_kept:
                    shutil.rmtree(self._home, ignore_errors=True)
                    if not any(HOME.iterdir()):
                        HOME.rmdir()

    @contextmanager
    def server(self, url: str) -> Generator[str]:
        """The server's URL: of the given one, or of one of our own."""
        if url:
            yield url
            return
        home = self._home / "server" if self._plan.can_go_on else None
        with LocalServer.start(home, persist=home is not None) as local:
            yield local.url
            if not self._is_kept:
                # Nobody needs its data any more: it is not to write them.
                local.kill()

    def work(self, job: Job, *, force: bool) -> Status:
        """Run the job. An error ends the command, after a word on how to go on."""
        show = Display(is_quiet=self._plan.output == STANDARD and render.is_terminal(sys.stdout))
        try:
            status = job.run(show, force=force)
            self._is_kept = self._plan.can_go_on and not job.is_complete
            return status
        except Unrunnable as error:
            show.end()
            typer.echo(error.trace, err=True, nl=False)
            self._fail(job, error, 4, is_lasting=False)
        except StreamqError as error:
            show.end()
            self._fail(job, error, exit_code(error), is_lasting=not isinstance(error, InvalidValue))
        except BrokenPipeError:
            job.forget()
            raise
        finally:
            show.end()

    def _fail(self, job: Job, error: StreamqError, code: int, *, is_lasting: bool) -> NoReturn:
        render.error(str(error))
        # What was begun before is never thrown away for a mistake that can be mended.
        self._is_kept = self._plan.can_go_on and (is_lasting or self._is_resumed)
        if self._is_kept:
            render.note(f"go on with: {self._command()}")
        else:
            job.forget()
        raise typer.Exit(code) from None

    def _command(self) -> str:
        has_stdin = STANDARD in self._plan.policy.spec.files
        same = " with the same standard input" if has_stdin else ""
        return f"streamq run --resume {self._plan.id}{same}"

    def _hope(self) -> str:
        if self._is_kept:
            return f"; nothing is lost\ngo on with: {self._command()}"
        return "; what goes into a pipe cannot be gone on with"

    def sum_up(self, job: Job, status: Status, *, is_json: bool) -> int:
        """Say what came of it. Returns the exit code."""
        plan, seconds = self._plan, time.monotonic() - self._begun
        if is_json:
            self._print(status, seconds)
        if not job.is_complete:
            done = status.parts.done + status.parts.failed
            render.note(f"stopped at {done} of {status.parts.total} parts{self._hope()}")
            return 128 + (job.stopped_by or signal.SIGINT)
        where = "" if plan.output == STANDARD else f"; results in {plan.output}"
        records = status.records
        rate = f", {render.rate((records.done + records.failed) / max(seconds, 1e-3))}"
        render.note(
            f"{status.state} in {seconds:.1f} s: {render.count(records.done, 'record')} in "
            f"{render.count(status.parts.total, 'part')}, {records.failed:,} failed"
            f"{'' if self._is_resumed else rate}{where}"
        )
        if plan.is_piped:
            _tell(job.failures)
        else:
            write_errors(job.failures, Path(plan.output))
        return 1 if records.failed or status.state is not State.DONE else 0

    def _print(self, status: Status, seconds: float) -> None:
        summary = {"request": status.id, "state": status.state, "seconds": round(seconds, 3)}
        render.as_json(
            summary
            | {"parts": status.parts, "records": status.records, "output": self._plan.output}
        )


def _tell(failures: list[Failure]) -> None:
    """The first failures, for a person."""
    for each in failures[:_MOST_TOLD]:
        place = f"{each.source}:{each.line}" if each.source else f"part {each.part}"
        render.note(f"{place}: {each.error}: {render.clean(each.message)}")
    if len(failures) > _MOST_TOLD:
        render.note(f"and {len(failures) - _MOST_TOLD:,} more; with -o FILE all are written")
