"""``streamq wait``."""

import time
from collections.abc import Callable
from typing import Annotated

import typer

from streamq import units
from streamq.errors import ServerBusy, ServerUnreachable, StreamqError, WaitTimeout
from streamq.model import State, Status
from streamq.queue.outages import Outage
from streamq.queue.request import Request

from .. import render
from ..connecting import connected, naming
from ..shared_options import IdsArgument, JsonOption, PrefixOption, UrlOption

#: Seconds between two updates of the progress line.
LOOK_S = 1.0


def wait(
    ids: IdsArgument,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="TIME", help="Wait at most so long: 30s, 5m, 2h."),
    ] = None,
    is_quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only the exit code, no progress.")
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
    with connected(url, prefix, is_patient=False) as protocol:
        requests = [Request(protocol, request_id) for request_id in dict.fromkeys(ids)]
        try:
            # An unknown id is reported at once, not after the requests before it have ended.
            for request in requests:
                _first_look(request, deadline)
            ends = [_follow(request, deadline, is_quiet=is_quiet) for request in requests]
        except KeyboardInterrupt:
            if not is_quiet:
                render.note("stopped waiting; the same command waits again")
            raise
    if as_json:
        render.as_json(ends)
    raise typer.Exit(max(map(_code, ends)))


def _follow(request: Request, deadline: float, *, is_quiet: bool) -> Status:
    with naming(request.id), render.Progress(is_shown=not is_quiet) as progress:
        status = _end(request, deadline, progress)
    if not is_quiet:
        render.note(_last_words(status))
    return status


def _code(status: Status) -> int:
    if status.state is State.CANCELLED:
        return 5
    return 1 if status.state is State.FAILED or status.has_failures else 0


def _first_look(request: Request, deadline: float) -> None:
    with naming(request.id), render.Progress(is_shown=False) as progress:
        _insist(request, lambda _: request.status(), lambda _: True, deadline, progress)


def _end(request: Request, deadline: float, progress: render.Progress) -> Status:
    """Wait for the end of the request. Return its last status."""

    def is_last(status: Status) -> bool:
        if status.state.is_live:
            progress.show(_progress(status))
        return not status.state.is_live

    return _insist(request, lambda seconds: _look(request, seconds), is_last, deadline, progress)


def _insist(
    request: Request,
    look: Callable[[float], Status],
    is_enough: Callable[[Status], bool],
    deadline: float,
    progress: render.Progress,
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
            outage.failed(error)
            time.sleep(seconds)
        else:
            outage.over()
            if is_enough(status):
                return status
        if left <= LOOK_S:
            raise WaitTimeout(f"request {request.id} is not finished")


def _look(request: Request, seconds: float) -> Status:
    try:
        return request.wait(timeout=seconds)
    except WaitTimeout:
        return request.status()


def _progress(status: Status) -> str:
    parts, records = status.parts, status.records
    told = render.pace(status.rate, records.done + records.failed)
    pace = "".join(f", {each}" for each in told)
    eta = "" if status.eta_s is None else f", {render.span(status.eta_s * 1e3)} to go"
    return (
        f"{status.id} {render.state_of(status)}: {parts.done:,}/{parts.total:,} parts, "
        f"{records.done:,} records, {records.failed:,} failed{pace}{eta}"
    )


def _last_words(status: Status) -> str:
    started = status.started_ms or status.created_ms
    took = render.span((status.finished_ms or started) - started)
    records = status.records
    return (
        f"{status.id}: {status.state}, {records.done + records.failed:,} records, "
        f"{render.failed_of(records.failed)}, {took}"
    )
