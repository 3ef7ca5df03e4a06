"""Finds the runs of the current folder that go on now, and the servers that they have started."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from streamq.errors import InvalidValue
from streamq.model import Failure
from streamq.records import errors_file
from streamq.runs import stored_runs
from streamq.runs.stored_runs import HOME, StoredRun

_ADDRESS = "address.json"


class FoundRun(NamedTuple):
    """A run of the current folder that goes on now. ``find_run`` returns one.

    Example:
        run = find_run()
        with Client(run.url, prefix=run.prefix) as client:
            client.get(run.id).set(limit=4)
    """

    #: Its id, which is also that of its request.
    id: str
    #: Its server; "" for one that was named with ``--url``, which is not written down here.
    url: str
    prefix: str
    queue: str
    #: The file that it writes.
    output: str
    #: The process that runs it; -1 where that is not known.
    pid: int


class _Address(msgspec.Struct, frozen=True):
    """Where the embedded server of a run listens."""

    url: str
    prefix: str


def find_run(id: str = "") -> FoundRun:
    """Return the run of the current folder with that id, or the one that began last.

    Runs are found in ``.streamq``, where ``streamq run`` keeps them. Only runs that go on now have
    a server to talk to.

    Raises:
        InvalidValue: no such run goes on in this folder.

    Example:
        run = find_run()
        with Client(run.url, prefix=run.prefix) as client:
            print(client.get(run.id).status().records)
    """
    return find_live_runs(id)[0]


def has_runs() -> bool:
    """Return whether runs are kept in this folder, also ones that were stopped."""
    return bool(_find_runs_stored_here())


def is_run_kept(run_id: str) -> bool:
    """Return whether the run is still kept in this folder."""
    return any(run.id == run_id for run in _find_runs_stored_here())


def find_live_runs(run_id: str = "") -> list[FoundRun]:
    """Return the runs that go on in this folder, the last one first; with an id only that one.

    Raises:
        InvalidValue: there is none.
    """
    runs = _find_runs_stored_here()
    wanted = [run for run in runs if run_id in ("", run.id)]
    found = [_found_run(run) for run in wanted if run.is_live]
    if not found:
        raise InvalidValue(_why_no_run(runs, wanted, run_id))
    return found


def failures_of_kept_run(run_id: str = "") -> list[Failure] | None:
    """Return the failures of a run that is done: of that one, or the last of this folder.

    None if another run is meant, or the file of failures is gone.
    """
    wanted = [run for run in _find_runs_stored_here() if run_id in ("", run.id)]
    if not wanted or not wanted[0].finished or any(run.is_live for run in wanted):
        return None
    try:
        lines = _errors_file_of_run(wanted[0]).read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Failure) for line in lines]
    except (OSError, msgspec.DecodeError):
        return None


def _errors_file_of_run(run: StoredRun) -> Path:
    return errors_file.errors_beside(Path(run.plan.output))


def _find_runs_stored_here() -> list[StoredRun]:
    stored_runs.refuse_strange_home(HOME)
    if not HOME.exists():
        return []
    with stored_runs.home_locked():
        return stored_runs.read_stored_runs()


def _found_run(run: StoredRun) -> FoundRun:
    policy = run.plan.policy
    if run.plan.server:
        prefix = run.plan.server.rpartition(" ")[2]
        return FoundRun(run.id, "", prefix, policy.queue, run.plan.output, run.pid)
    try:
        text = (HOME / run.id / _ADDRESS).read_bytes()
        address = msgspec.json.decode(text, type=_Address)
    except (OSError, msgspec.DecodeError):
        raise InvalidValue(
            f"run {run.id} ({run.process}) just starts, and its server does not answer yet: "
            "try again in a moment"
        ) from None
    return FoundRun(run.id, address.url, address.prefix, policy.queue, run.plan.output, run.pid)


def _why_no_run(runs: Sequence[StoredRun], wanted: Sequence[StoredRun], run_id: str) -> str:
    """Say why no run was found, and what can be done."""
    if wanted:
        return why_run_has_no_server(wanted[0])
    if run_id and runs:
        return f"no run {run_id} is in this folder; there is {', '.join(run.id for run in runs)}"
    return f"no run{f' {run_id}' if run_id else ''} goes on in this folder"


def why_run_has_no_server(run: StoredRun) -> str:
    """Say why a run that is stored has no server, and how to go on with it."""
    if run.finished:
        return (
            f"run {run.id} {run.finished_words}, listed in {_errors_file_of_run(run)}: "
            f"{stored_runs.retry_command(run.id)} runs these again"
        )
    return (
        f"run {run.id} was stopped, and its server with it: streamq run --resume {run.id} goes on"
    )


def note_server_address(run_id: str, url: str, prefix: str) -> None:
    """Write down where the server of a run listens, for commands that look for the run."""
    place = HOME / run_id / _ADDRESS
    draft = place.with_name(f"{place.name}.new")
    draft.write_bytes(msgspec.json.encode(_Address(url, prefix)))
    draft.replace(place)


def forget_server_address(run_id: str) -> None:
    """Remove the note about a server that has ended."""
    (HOME / run_id / _ADDRESS).unlink(missing_ok=True)
