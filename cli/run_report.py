"""Carries out a run for ``streamq run``, and reports what came of it.

This module imports redis-py, so ``streamq run`` imports it while the server and the processes
start.
"""

import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import typer

from streamq.errors import AppLoadError, StreamqError
from streamq.model import Failure, State, Status
from streamq.records.outputs import OutputError
from streamq.runs.collect import write_errors
from streamq.runs.folder import RunFolder
from streamq.runs.plan import STANDARD, Plan
from streamq.runs.run import Run, carry_out
from streamq.telemetry.logs import harmless

from . import render
from .commands.errors import where
from .exits import exit_code
from .progress import Display
from .resuming import resume_command, resume_hint

#: So many failures are printed where there is no file to write them to.
_MOST_TOLD = 10


class RunReport:
    """A plan that is carried out, and its report to the user."""

    def __init__(self, plan: Plan, folder: RunFolder, *, is_resumed: bool, begun: float) -> None:
        self._plan = plan
        self._folder = folder
        self._is_resumed = is_resumed
        self._begun = begun

    def work(self, run: Run, *, force: bool) -> Status:
        """Carry the run out. After an error, tell how to resume it and exit."""
        show = Display(is_quiet=self._plan.output == STANDARD and render.is_terminal(sys.stdout))
        try:
            return carry_out(
                run, self._plan, self._folder, show, force=force, is_resumed=self._is_resumed
            )
        except AppLoadError as error:
            show.end()
            typer.echo(harmless(error.trace), err=True, nl=False)
            self._fail(error, 4)
        except StreamqError as error:
            show.end()
            self._fail(error, exit_code(error))
        finally:
            show.end()

    def _fail(self, error: StreamqError, code: int) -> NoReturn:
        render.error(str(error))
        if self._folder.is_kept:
            render.note(f"go on with: {resume_command(self._plan)}")
        raise typer.Exit(code) from None

    def sum_up(self, run: Run, status: Status, *, is_json: bool) -> int:
        """Report how the run ended. Return the exit code."""
        plan, seconds = self._plan, time.monotonic() - self._begun
        if is_json:
            self._print(status, seconds)
        if not run.is_complete:
            done = status.parts.done + status.parts.failed
            hint = resume_hint(plan, is_kept=self._folder.is_kept)
            render.note(f"stopped at {done} of {status.parts.total} parts{hint}")
            return 128 + (run.stopped_by or signal.SIGINT)
        where = "" if plan.output == STANDARD else f"; results in {plan.output}"
        records = status.records
        finished = records.done + records.failed
        rate = f", {render.rate(finished / max(seconds, 1e-3))}" if finished else ""
        render.note(
            f"{status.state} in {seconds:.1f} s: "
            f"{render.count(finished, 'record')} in "
            f"{render.count(status.parts.total, 'part')}, {render.failed_of(records.failed)}"
            f"{'' if self._is_resumed else rate}{where}"
        )
        if plan.is_piped:
            _tell(run.failures)
        else:
            try:
                render.failures(run.failures, write_errors(run.failures, Path(plan.output)))
            except OutputError as error:
                render.error(str(error))
                _tell(run.failures)
                return exit_code(error)
        return 1 if records.failed or status.state is not State.DONE else 0

    def _print(self, status: Status, seconds: float) -> None:
        summary = {"request": status.id, "state": status.state, "seconds": round(seconds, 3)}
        render.as_json(
            summary
            | {"parts": status.parts, "records": status.records, "output": self._plan.output}
        )


def _tell(failures: list[Failure]) -> None:
    """Print the first failures."""
    for each in failures[:_MOST_TOLD]:
        place = where(each) or f"part {each.part}"
        render.note(render.clean(f"{place}: {each.error}: {each.message}"))
    if len(failures) > _MOST_TOLD:
        render.note(f"and {len(failures) - _MOST_TOLD:,} more; with -o FILE all are written")
