"""Carries out a run for ``streamq run``, and reports what came of it.

This module imports redis-py, so ``streamq run`` imports it while the server and the processes
start.
"""

import signal
import sys
import time
from typing import NoReturn

import typer

from streamq.errors import AppLoadError, RequestExists, StreamqError
from streamq.model import Failure, RecordCounts, State, Status
from streamq.records.output import OutputExists
from streamq.runs.folder import RunFolder
from streamq.runs.plan import STANDARD
from streamq.runs.run import Run, carry_out_run
from streamq.runs.stored_runs import retry_command
from streamq.telemetry.logs import harmless_log_text

from . import render
from .exits import exit_code
from .failure_lines import failure_place, show_failures
from .progress import ProgressDisplay
from .resuming import resume_command, resume_hint

#: A rate is shown for runs of at least this many seconds, or this many records.
_RATE_FROM_S, _RATE_FROM = 5.0, 1_000
#: How many failures are printed where there is no file to write them to.
_MOST_TOLD = 10


class RunReport:
    """A plan that is carried out, and its report to the user."""

    def __init__(self, folder: RunFolder, *, begun: float) -> None:
        self._plan = folder.plan
        self._folder = folder
        self._begun = begun

    def begin(self) -> None:
        """Tell the run's id, and how to resume it if it dies without a word."""
        if self._folder.is_kept and not self._folder.is_found:
            render.note(f"run {self._plan.id}; if it is stopped: {self._how_to_go_on}")

    @property
    def _how_to_go_on(self) -> str:
        return resume_command(self._plan, is_retry=self._folder.is_retry)

    def work(self, run: Run, *, force: bool) -> Status:
        """Carry the run out. After an error, tell how to resume it and exit."""
        show = ProgressDisplay(
            is_quiet=self._plan.output == STANDARD and render.is_terminal(sys.stdout)
        )
        try:
            return carry_out_run(run, self._folder, show, force=force)
        except AppLoadError as error:
            show.end()
            typer.echo(harmless_log_text(error.trace), err=True, nl=False)
            self._fail(error, 4)
        except StreamqError as error:
            show.end()
            self._fail(error, exit_code(error))
        finally:
            show.end()

    def _fail(self, error: StreamqError, code: int) -> NoReturn:
        render.error(str(error))
        if isinstance(error, RequestExists | OutputExists) and self._folder.is_found:
            render.note("or start over: the same command with --fresh")
        elif self._folder.is_kept:
            render.note(f"go on with: {self._how_to_go_on}")
        raise typer.Exit(code) from None

    def sum_up(self, run: Run, status: Status, *, is_json: bool) -> int:
        """Report how the run ended. Return the exit code."""
        plan, seconds = self._plan, time.monotonic() - self._begun
        if is_json:
            self._print(status, seconds)
        if not run.is_complete:
            own = _reported_records(status)
            done = own.done + own.failed
            hint = resume_hint(plan, is_kept=self._folder.is_kept, is_retry=self._folder.is_retry)
            render.note(f"stopped after {render.count(done, 'record')}{hint}")
            return 128 + (run.stopped_by or signal.SIGINT)
        where = "" if plan.output == STANDARD else f"; results in {plan.product}"
        records = status.records
        own = _reported_records(status)
        finished = own.done + own.failed
        # The rate of a moment says nothing: most of it is the start.
        is_long = seconds >= _RATE_FROM_S or finished >= _RATE_FROM
        rate = f", {render.rate(finished / max(seconds, 1e-3))}" if finished and is_long else ""
        render.note(
            f"{status.state} in {seconds:.1f} s: "
            f"{render.count(finished, 'record')} {_reported_parts_or_stages(status)}"
            f"{render.blank_lines(run.blank_lines)}"
            f"{'' if self._folder.is_resumed else rate}{where}"
        )
        if problem := self._folder.errors_problem:
            render.error(str(problem))
        if self._folder.errors_file:
            show_failures(run.failures, self._folder.errors_file)
        else:
            _report_first_failures(run.failures)
        if self._folder.can_retry:
            render.note(f"to run them again: {retry_command(plan.id)}")
        if problem:
            return exit_code(problem)
        return 1 if records.failed or status.state is not State.DONE else 0

    def _print(self, status: Status, seconds: float) -> None:
        summary = {"request": status.id, "state": status.state, "seconds": round(seconds, 3)}
        has_failures = self._folder.errors_file and status.records.failed
        render.as_json(
            summary
            | {
                "parts": status.parts,
                "records": status.records,
                "output": self._plan.product,
                "errors_file": str(self._folder.errors_file) if has_failures else None,
            }
        )


def _reported_records(status: Status) -> RecordCounts:
    """Return how many records of the input have ended; of a flow, in its first stage."""
    return status.stages[0].records if status.stages else status.records


def _reported_parts_or_stages(status: Status) -> str:
    failed = status.records.failed
    if status.stages:
        stages = render.count(len(status.stages), "stage")
        return f"through {stages}, {render.count(failed, 'failure')}"
    return f"in {render.count(status.parts.total, 'part')}, {render.failed_of(failed)}"


def _report_first_failures(failures: list[Failure]) -> None:
    """Print the first failures."""
    for each in failures[:_MOST_TOLD]:
        place = failure_place(each) or f"part {each.part}"
        render.note(render.clean(f"{place}: {each.error}: {each.message}"))
    if len(failures) > _MOST_TOLD:
        render.note(f"and {len(failures) - _MOST_TOLD:,} more; with -o FILE all are written")
