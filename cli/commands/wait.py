"""``streamq wait``."""

import time
from collections.abc import Callable
from typing import Annotated, NamedTuple

import typer

from streamq import units
from streamq.errors import ServerBusy, ServerUnreachable, StreamqError, WaitTimeout
from streamq.model import State, Status
from streamq.queue.outages import Outage
from streamq.queue.request import Request
from streamq.runs.finding import FoundRun, find_live_runs, is_run_kept

from .. import render
from ..connecting import naming_request
from ..finding import found_requests
from ..shared_options import JsonOption, PrefixOption, RunIdsArgument, UrlOption

#: Seconds between two updates of the progress line.
LOOK_S = 1.0


def wait(
    ids: RunIdsArgument = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout",
            metavar="TIME",
            help="Wait at most so long: 90s, 5m, 1h30m.",
            show_default="no bound",
        ),
    ] = None,
    is_quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no progress; the exit code tells the end.")
    ] = False,
    for_canary: Annotated[
        bool,
        typer.Option("--canary", help="Wait no longer than until the canary of each has ended."),
    ] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Wait until requests have ended.

    It exits with 0 if all parts are done, 1 if some failed, 5 if a request was cancelled or is
    unknown, 124 if the time was over first. With --json it prints the last status of each.

        streamq wait nightly --timeout 2h && echo all done
    """
    seconds = float("inf") if timeout is None else units.duration_ms(timeout, "timeout") / 1e3
    deadline = time.monotonic() + seconds
    with found_requests(ids or [], url, prefix, is_patient=False) as found:
        requests = [Waited(request, place.run) for request, place in found]
        try:
            # An unknown id is reported at once, not after the requests before it have ended.
            for request in requests:
                _first_look_of_wait(request, deadline)
            ends = [
                _wait_for_request(request, deadline, is_quiet=is_quiet, for_canary=for_canary)
                for request in requests
            ]
        except KeyboardInterrupt:
            if not is_quiet:
                render.note("stopped waiting; the same command waits again")
            raise
    if as_json:
        render.as_json(ends)
    raise typer.Exit(max(map(_exit_code_of_wait, ends)))


class Waited(NamedTuple):
    """A request that is waited for, and the run of this folder that it is; None for no run."""

    request: Request
    run: FoundRun | None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    def refuse_ended(self) -> None:
        """Raise if the server will not come back, because the run that started it has ended.

        Raises:
            InvalidValue: the run was stopped.
            StreamqError: the run has ended, and nobody can tell how.
        """
        if self.run is None:
            return
        if not is_run_kept(self.run.id):
            raise StreamqError(
                f"run {self.run.id} has ended before it was seen how; it wrote {self.run.output}"
            )
        find_live_runs(self.run.id)


def _wait_for_request(
    request: Waited, deadline: float, *, is_quiet: bool, for_canary: bool
) -> Status:
    with naming_request(request.id), render.StatusLine(is_shown=not is_quiet) as progress:
        status = _wait_for_end(request, deadline, progress, for_canary=for_canary)
    if not is_quiet:
        render.note(_last_words_of_wait(status))
    return status


def _exit_code_of_wait(status: Status) -> int:
    if status.state is State.CANCELLED:
        return 5
    return 1 if status.state is State.FAILED or status.has_failures else 0


def _first_look_of_wait(request: Waited, deadline: float) -> None:
    with naming_request(request.id), render.StatusLine(is_shown=False) as progress:
        _wait_until_enough(
            request, lambda _: request.request.status(), lambda _: True, deadline, progress
        )


def _wait_for_end(
    request: Waited, deadline: float, progress: render.StatusLine, *, for_canary: bool
) -> Status:
    """Wait for the end of the request, or of its canary. Return its last status."""

    def is_last(status: Status) -> bool:
        if status.state.is_live:
            progress.show(_wait_progress_in_words(status))
        return not status.state.is_live or (for_canary and status.waits_for_release)

    return _wait_until_enough(
        request,
        lambda seconds: _look_of_wait(request.request, seconds),
        is_last,
        deadline,
        progress,
    )


def _wait_until_enough(
    request: Waited,
    look: Callable[[float], Status],
    is_enough: Callable[[Status], bool],
    deadline: float,
    progress: render.StatusLine,
) -> Status:
    """Look until ``is_enough``. A server that is away for a while does not end the wait."""

    def say(error: StreamqError) -> None:
        progress.show("")
        render.warning(f"{error}; waiting on")

    outage = Outage(say)
    while True:
        left = deadline - time.monotonic()
        seconds = max(0.0, min(left, LOOK_S))
        try:
            status = look(seconds)
        except (ServerBusy, ServerUnreachable) as error:
            request.refuse_ended()
            outage.failed(error)
            time.sleep(seconds)
        else:
            outage.over()
            if is_enough(status):
                return status
        if left <= LOOK_S:
            raise WaitTimeout(f"request {request.id} is not finished")


def _look_of_wait(request: Request, seconds: float) -> Status:
    try:
        return request.wait(timeout=seconds)
    except WaitTimeout:
        return request.status()


def _wait_progress_in_words(status: Status) -> str:
    records = status.records
    told = render.pace(status.rate, records.done + records.failed)
    pace = "".join(f", {each}" for each in told)
    eta = "" if status.eta_s is None else f", {render.span(status.eta_s * 1e3)} to go"
    so_far = " so far" if status.state is State.LOADING else ""
    done = f"{records.done:,}/{records.total:,} records{so_far}"
    return f"{status.id} {render.state_of(status)}: {done}, {records.failed:,} failed{pace}{eta}"


def _last_words_of_wait(status: Status) -> str:
    started = status.started_ms or status.created_ms
    took = render.span((status.finished_ms or started) - started)
    records = status.records
    state = "canary" if status.waits_for_release else status.state
    return (
        f"{status.id}: {state}, {records.done + records.failed:,} records, "
        f"{render.failed_of(records.failed)}, {took}"
    )
