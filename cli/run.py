"""``streamq run``."""

import os
import secrets
import shutil
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from streamq import units
from streamq.collector import form_of
from streamq.errors import InvalidValue
from streamq.job import Job, Plan, remaining
from streamq.load_app import map_name
from streamq.model import LEVEL, State, Status
from streamq.pool import Unrunnable
from streamq.server import LocalServer
from streamq.settings import Settings, with_login

from . import logs, render
from .context import LogLevelOption, PrefixOption, QueueOption, UrlOption, connected
from .results import FORMS, write_errors
from .wishes import (
    BytesOption,
    DelimiterOption,
    FormatOption,
    LevelOption,
    LinesOption,
    MaxFailuresOption,
    RateOption,
    RetriesOption,
    TimeoutOption,
    Wishes,
)

#: Folder of the jobs that are not finished, in the current one.
HOME = Path(".streamq")
_SHOW_EVERY_S = 10.0


def run(  # noqa: PLR0913, PLR0917  the options of a job are many and flat
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE...", help="Files, or folders.")
    ] = None,
    target: Annotated[
        str, typer.Option("--map", metavar="MODULE:FUNCTION", help="Or file.py:function.")
    ] = "",
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE")] = "",
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

        streamq run big.csv --map shop:clean -o out.jsonl
    """
    if resume:
        plan = _kept(resume)
    else:
        processes = processes or os.cpu_count() or 1
        wishes = Wishes(
            files=files or [],
            handler=map_name(target),
            queue=queue,
            form=form,
            part_bytes=part_bytes,
            lines=lines,
            delimiter=delimiter,
            level=level,
            limit=limit or processes * slots,
            rate=rate,
            retries=retries,
            timeout=timeout,
            max_failures=max_failures,
        )
        plan = _plan(wishes, target, output, output_form, processes, slots, window, is_ordered)
        _check_output(plan, force=force)
    logs.configure(log_level, logs.Format.TEXT)
    settings = Settings.from_env()
    address = url or settings.url
    if address:
        with connected(url, prefix):  # before anything is kept
            address = with_login(address, settings)
    home = HOME / plan.id
    _keep(home, plan)
    begun = time.monotonic()
    server = _server(home) if not address else nullcontext(None)
    with server as local:
        job = Job(
            plan,
            address or local.url,  # type: ignore[union-attr]
            prefix or settings.prefix,
            log_level=log_level.value,
        )
        show = _Progress()
        try:
            status = job.run(show, force=force or bool(resume))
        except Unrunnable as error:
            _drop(home)
            typer.echo(error.trace, err=True, nl=False)
            render.error(str(error))
            raise typer.Exit(4) from None
        except InvalidValue:
            _drop(home)
            raise
        finally:
            show.end()
    code = _sum_up(plan, job, status, time.monotonic() - begun, is_json=is_json)
    if job.is_complete:
        _drop(home)
    raise typer.Exit(code)


def _plan(
    wishes: Wishes,
    target: str,
    output: str,
    output_form: str,
    processes: int,
    slots: int,
    window: str,
    is_ordered: bool,
) -> Plan:
    if not wishes.files or not target or not output:
        raise InvalidValue("give FILE..., --map MODULE:FUNCTION and -o OUT, or --resume ID")
    form = output_form or form_of(output)
    if form not in FORMS:
        raise InvalidValue(f"--output-format {form!r} is none of {', '.join(FORMS)}")
    return Plan(
        id=secrets.token_hex(8),
        target=target,
        output=str(Path(output).absolute()),
        form=form,
        policy=wishes.policy(),
        size=wishes.size(),
        processes=processes,
        slots=slots,
        window_bytes=units.size_bytes(window, "--window"),
        is_ordered=is_ordered,
    )


def _check_output(plan: Plan, *, force: bool) -> None:
    path = Path(plan.output)
    if not path.parent.is_dir():
        raise InvalidValue(f"there is no folder {path.parent}")
    if path.exists() and path.stat().st_size and not force:
        raise InvalidValue(f"{plan.output} exists: remove it, or say --force")


def _keep(home: Path, plan: Plan) -> None:
    HOME.mkdir(mode=0o700, exist_ok=True)
    home.mkdir(mode=0o700, exist_ok=True)
    (home / "plan.json").write_bytes(msgspec.json.encode(plan))


def _kept(request_id: str) -> Plan:
    path = HOME / units.name(request_id, "--resume") / "plan.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except OSError:
        kept = [each.name for each in HOME.glob("*") if (each / "plan.json").exists()]
        there = f"; there is {', '.join(kept)}" if kept else ""
        raise InvalidValue(f"no run {request_id} was stopped in this folder{there}") from None


def _drop(home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    if HOME.is_dir() and not any(HOME.iterdir()):
        HOME.rmdir()


def _server(home: Path) -> AbstractContextManager[Any]:
    return LocalServer.start(home / "server", persist=True)


class _Progress:
    """How far the job is: a line that changes on a terminal, one in ten seconds elsewhere."""

    def __init__(self) -> None:
        self._is_live = render.is_terminal(sys.stderr)
        self._said = time.monotonic()

    def __call__(self, status: Status) -> None:
        if self._is_live:
            typer.echo(f"\r\x1b[K{remaining(status)}", err=True, nl=False)
        elif time.monotonic() - self._said > _SHOW_EVERY_S:
            self._said = time.monotonic()
            typer.echo(remaining(status), err=True)

    def end(self) -> None:
        """Leave the line."""
        if self._is_live:
            typer.echo("\r\x1b[K", err=True, nl=False)


def _sum_up(plan: Plan, job: Job, status: Status, seconds: float, *, is_json: bool) -> int:
    if is_json:
        summary = {"request": status.id, "state": status.state, "seconds": round(seconds, 3)}
        render.as_json(
            summary | {"parts": status.parts, "records": status.records, "output": plan.output}
        )
    if not job.is_complete:
        done = status.parts.done + status.parts.failed
        render.note(f"stopped at {done} of {status.parts.total} parts; nothing is lost")
        render.note(f"go on with: streamq run --resume {plan.id}")
        return 130
    render.note(
        f"{status.state} in {seconds:.1f} s: {status.records.done:,} records in "
        f"{status.parts.total} parts, {status.records.failed} failed; results in {plan.output}"
    )
    write_errors(job.failures, Path(plan.output))
    return 1 if status.records.failed or status.state is not State.DONE else 0
