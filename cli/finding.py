"""Finds the requests that a command means: by a URL, or as a run in the current folder."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from streamq.errors import InvalidValue, ProtocolError, SettingsError
from streamq.runs.finding import FoundRun, find_live_runs, has_runs
from streamq.settings import Settings

from . import render
from .connecting import NO_URL, connected, naming_request
from .exits import exit_code

if TYPE_CHECKING:
    from streamq.model import Status
    from streamq.queue.request import Request

_DEFAULT_QUEUE = "default"


class FoundPlace(NamedTuple):
    """A server, and what a command means there."""

    url: str | None
    prefix: str | None
    ids: tuple[str, ...] = ()
    queue: str = _DEFAULT_QUEUE
    #: The run of this folder that was found; None where a URL names the server.
    run: FoundRun | None = None


def places_of_requests(
    ids: Iterable[str], url: str | None, prefix: str | None, *, steers: bool = False
) -> list[FoundPlace]:
    """Return where the requests are: all on the server that is named, or each on its run's own.

    Without ids, it is the run that goes on in this folder. ``steers``: the command changes the
    request, so of several runs one has to be named.

    Raises:
        SettingsError: no server is named, and no run is in this folder.
        InvalidValue: no such run goes on here; or several do, and the command ``steers``.
    """
    wanted = tuple(dict.fromkeys(ids))
    if is_server_named(url):
        return [FoundPlace(url, prefix, wanted or (_one_live_run("", steers=steers).id,))]
    return [_place_of_run(_one_live_run(each, steers=steers), prefix) for each in wanted or ("",)]


def place_of_request(
    request_id: str | None, url: str | None, prefix: str | None, *, queue: str = _DEFAULT_QUEUE
) -> FoundPlace:
    """Return where a request is, or the run of this folder if no id is given.

    Raises:
        SettingsError: as ``places_of``.
        InvalidValue: as ``places_of``.
    """
    place = places_of_requests([request_id] if request_id else [], url, prefix)[0]
    return place._replace(queue=place.queue if queue == _DEFAULT_QUEUE else queue)


def place_of_queue(url: str | None, prefix: str | None, queue: str) -> FoundPlace:
    """Return the server whose queue is looked at: the one that is named, or a run's.

    Raises:
        SettingsError: as ``places_of``.
        InvalidValue: as ``places_of``.
    """
    if is_server_named(url):
        return FoundPlace(url, prefix, queue=queue)
    return place_of_request(None, url, prefix, queue=queue)


@contextmanager
def found_requests(
    ids: Iterable[str],
    url: str | None,
    prefix: str | None,
    *,
    is_patient: bool = True,
    steers: bool = False,
) -> "Generator[list[tuple[Request, FoundPlace]]]":
    """Give requests, with where they are; each is connected to its server for the block.

    Raises:
        SettingsError: as ``places_of``.
        InvalidValue: as ``places_of``.
    """
    from streamq.queue.request import Request

    with ExitStack() as stack:
        found = []
        for place in places_of_requests(ids, url, prefix, steers=steers):
            protocol = stack.enter_context(
                connected(place.url, place.prefix, is_patient=is_patient)
            )
            found += [(Request(protocol, each), place) for each in place.ids]
        yield found


@contextmanager
def found_request(
    request_id: str | None, url: str | None, prefix: str | None
) -> "Generator[Request]":
    """Give the request, or without an id the run of this folder. Refusals name its id.

    Raises:
        SettingsError: as ``places_of``.
        InvalidValue: as ``places_of``.
    """
    with found_requests([request_id] if request_id else [], url, prefix) as found:
        request, _ = found[0]
        with naming_request(request.id):
            yield request


def is_server_named(url: str | None) -> bool:
    """Return whether an option or the settings name a server."""
    return bool(url or Settings.from_env().url)


def _one_live_run(run_id: str, *, steers: bool) -> FoundRun:
    if not has_runs():
        if not run_id and is_server_named(None):
            raise InvalidValue("which request? Give its id; streamq ls lists them")
        raise SettingsError(f"{NO_URL}\nand no run goes on in this folder that could be meant")
    runs = find_live_runs(run_id)
    if len(runs) > 1:
        _tell_of_several_runs(runs, steers=steers)
    return runs[0]


def _tell_of_several_runs(runs: Sequence[FoundRun], *, steers: bool) -> None:
    """Refuse to choose for a command that steers; tell a command that reads which run it is."""
    if steers:
        listed = "".join(f"\n  {run.id}  writes {run.output}" for run in runs)
        raise InvalidValue(f"which run? {len(runs)} go on in this folder:{listed}")
    render.note(f"this is run {runs[0].id}, the newest of {len(runs)} that go on in this folder")


def _place_of_run(run: FoundRun, prefix: str | None) -> FoundPlace:
    if not run.url:
        raise InvalidValue(
            f"run {run.id} works on a server that was named with --url or a variable: "
            "name it for this command, too"
        )
    return FoundPlace(run.url, prefix or run.prefix, (run.id,), run.queue, run)


def steer_each_request(
    ids: Iterable[str],
    url: str | None,
    prefix: str | None,
    act: "Callable[[Request], tuple[str, dict[str, Any]]]",
    noted: "Callable[[Status], str] | None",
    *,
    as_json: bool = False,
) -> None:
    """Do it to each request and say what was done. One that refuses does not stop the others.

    ``noted`` returns what the log of the queue says of it, by what the request was before; None
    if nothing is changed.

    ``act`` returns what it did, in words and as values. As JSON there is an object for each
    request: its id, ``ok``, and the values or the ``error``.
    """
    from streamq.queue.changes import Change, note_change, user_who_changes

    codes, told = {0}, []
    with found_requests(ids, url, prefix, steers=True) as requests:
        for request, _ in requests:
            try:
                with naming_request(request.id):
                    before = _status_of_found_place(request) if noted else None
                    says, values = act(request)
                if noted and before:
                    change = Change(who=user_who_changes(), what=noted(before), request=request.id)
                    note_change(request.protocol, before.queue, change)
                told.append({"id": request.id, "ok": True, **values})
                if not as_json:
                    render.note(f"{request.id}: {says}")
            except (ProtocolError, InvalidValue) as error:
                told.append({"id": request.id, "ok": False, "error": str(error)})
                render.error(str(error))
                codes.add(exit_code(error))
    if as_json:
        render.as_json(told)
    if max(codes):
        raise typer.Exit(max(codes))


def _status_of_found_place(request: "Request") -> "Status | None":
    """Return where a request stands; None where that cannot be told: it may be damaged."""
    with suppress(ProtocolError):
        return request.status()
    return None
