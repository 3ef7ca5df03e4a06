"""``streamq errors``."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from streamq.model import Failure
from streamq.runs.finding import failures_of_kept_run

from .. import render
from ..failure_lines import failure_place
from ..finding import found_request, is_server_named
from ..shared_options import JsonOption, PrefixOption, RunIdArgument, UrlOption

HEADERS = (">PART", ">RECORD", "WHERE", ">ATTEMPTS", "ERROR")
#: Of a flow: the stage, and which item it was there.
FLOW_HEADERS = ("STAGE", ">ITEM", *HEADERS[1:])


class ErrorGroup(msgspec.Struct, frozen=True):
    """Failures with the same error and message."""

    count: int
    error: str
    message: str
    #: The first of them.
    example: Failure


def errors(
    request_id: RunIdArgument = None,
    is_grouped: Annotated[
        bool,
        typer.Option(
            "--group", help="Count failures with the same message, the most frequent first."
        ),
    ] = False,
    is_traced: Annotated[
        bool, typer.Option("--traceback", help="Also show each traceback.")
    ] = False,
    limit: Annotated[
        int,
        typer.Option("--limit", min=0, help="Show at most so many failures.", show_default="all"),
    ] = 0,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Show which parts of a request failed, and why.

    Without a URL, it is the run in this folder that goes on, or that was done with failures.

    streamq errors nightly --group
    """
    failures = None if is_server_named(url) else failures_of_kept_run(request_id or "")
    if failures is None:
        with found_request(request_id, url, prefix) as request:
            request.status()
            failures, request_id = request.errors(), request.id
    found = _error_groups(failures) if is_grouped else failures
    shown = found[: limit or None]
    if as_json:
        render.as_json(shown)
    elif not found:
        render.note(f"{request_id}: nothing failed")
    elif is_grouped or is_traced:
        render.data(
            "\n".join(_error_group_with_traceback(each, is_traced=is_traced) for each in shown)
        )
    else:
        headers = FLOW_HEADERS if any(each.stage for each in failures) else HEADERS
        render.data(render.table(headers, map(_error_row, failures[: limit or None])))
    if len(shown) < len(found):
        render.note(f"{len(shown):,} of {len(found):,} are shown; --limit 0 shows every one")


def _error_groups(failures: list[Failure]) -> Sequence[ErrorGroup | Failure]:
    alike: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        alike.setdefault((failure.error, failure.message), []).append(failure)
    groups = [ErrorGroup(len(same), *what, same[0]) for what, same in alike.items()]
    return sorted(groups, key=lambda group: -group.count)


def _error_group_with_traceback(each: ErrorGroup | Failure, *, is_traced: bool) -> str:
    """Return ``2x ValueError: no (e.g. part 1)``, with the traceback below it."""
    if isinstance(each, ErrorGroup):
        failure = each.example
        line = (
            f"{each.count}x {_error_and_message(failure)} (e.g. {_error_place_of_failure(failure)})"
        )
    else:
        failure = each
        line = f"{_error_place_of_failure(failure)}: {_error_and_message(failure)}"
    trace = failure.traceback.splitlines() if is_traced else []
    return "\n".join([render.clean(line), *(f"    {render.clean(text)}" for text in trace)])


def _error_row(failure: Failure) -> tuple[str, ...]:
    return (
        *((failure.stage, failure.item) if failure.stage else (f"{failure.part}",)),
        f"{failure.record or render.NOTHING}",
        failure_place(failure) or render.NOTHING,
        f"{failure.attempts or render.NOTHING}",
        _error_and_message(failure),
    )


def _error_place_of_failure(failure: Failure) -> str:
    what = f"item {failure.item} in {failure.stage}" if failure.stage else f"part {failure.part}"
    places = [failure_place(failure), what]
    if failure.record:
        places.append(f"record {failure.record}")
    if failure.attempts:
        places.append(render.count(failure.attempts, "attempt"))
    return ", ".join(filter(None, places))


def _error_and_message(failure: Failure) -> str:
    return f"{failure.error}: {failure.message}" if failure.message else failure.error
