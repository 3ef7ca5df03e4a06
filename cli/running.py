"""What ``streamq run`` does once it is known what is wanted, and what people are told of it.

It needs the driver, and is imported while the processes start that run the function.
"""

import fcntl
import shutil
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import typer

from streamq import units
from streamq.errors import InvalidValue, StreamqError
from streamq.inputs import STDIN
from streamq.job import Job
from streamq.model import Failure, State, Status
from streamq.plan import STANDARD, Plan
from streamq.pool import Unrunnable
from streamq.server import FOR_ONE_JOB, LocalServer
from streamq.settings import Settings, with_login

from . import render
from .context import connected, exit_code
from .progress import Display
from .results import write_errors

#: Folder of the jobs that are not finished, in the current one.
HOME = Path(".streamq")
#: So many failures are told where there is no file to write them to.
_MOST_TOLD = 10


def kept(request_id: str) -> Plan:
    """The plan of a run that was stopped."""
    path = HOME / units.name(request_id, "--resume") / "plan.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except (OSError, msgspec.DecodeError):
        there = [each.name for each in HOME.glob("*") if (each / "plan.json").exists()]
        others = f"; there is {', '.join(there)}" if there else ""
        raise InvalidValue(f"no run {request_id} was stopped in this folder{others}") from None


def named_server(url: str | None, prefix: str | None) -> str:
    """The URL of the server that an option or a setting names, which answers; "" if none does."""
    settings = Settings.from_env()
    named = url or settings.url
    if named:
        with connected(url, prefix, is_patient=False):
            named = with_login(named, settings)
    return named


class Run:
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
        with LocalServer.start(home, persist=home is not None, options=FOR_ONE_JOB) as local:
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
        has_stdin = STDIN in self._plan.policy.spec.files
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
