"""The runs that are kept in the current folder: their plans, and which of them go on now.

A run has a folder ``.streamq/ID``. A command that begins, finds or removes runs holds the lock of
``.streamq`` meanwhile, so no two commands decide at the same time. A run holds the lock of its own
folder for as long as it lives. Needs no redis-py.
"""

import fcntl
import os
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from streamq import units
from streamq.errors import InvalidValue
from streamq.runs.finished import Finished, FinishedNote
from streamq.runs.plan import Plan

#: Folder for runs that are not finished, in the current directory.
HOME = Path(".streamq")
#: Stands for the id of the run that began or went on last.
LAST = "last"
_PLAN, _LOCK = "plan.json", "lock"


class StoredRun(NamedTuple):
    """A run whose plan is stored here."""

    plan: Plan
    #: When it began, or went on last (ns).
    at_ns: int
    #: The process that runs it now; 0 for none, -1 where that is not known.
    pid: int
    #: How it ended, if it is done with failures that can be retried.
    finished: Finished | None = None

    @property
    def id(self) -> str:
        """The run's id."""
        return self.plan.id

    @property
    def is_live(self) -> bool:
        """Whether a process runs it now."""
        return self.pid != 0

    @property
    def finished_words(self) -> str:
        """How it ended, in words."""
        failed = self.finished.failed if self.finished else 0
        return f"is done, with {failed:,} failed record{'s' * (failed != 1)}"

    @property
    def process(self) -> str:
        """The process that runs it, in words."""
        return f"process {self.pid}" if self.pid > 0 else "another process"


@contextmanager
def home_locked() -> Generator[None]:
    """Make the folder for runs, and keep others from beginning or removing runs meanwhile.

    In the end the folder is removed if it is empty.

    Raises:
        InvalidValue: another user may write to the folder.
    """
    while True:
        make_own_folder(HOME)
        descriptor = os.open(HOME, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _path_leads_to_open_file(HOME, descriptor):
                try:
                    yield
                finally:
                    with suppress(OSError):  # it is not empty, or gone
                        HOME.rmdir()
                return
        except FileNotFoundError:
            continue  # another process removed the folder while this one waited
        finally:
            os.close(descriptor)


def _path_leads_to_open_file(path: Path, descriptor: int) -> bool:
    """Return whether the path still leads to the open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def make_own_folder(folder: Path) -> None:
    """Make a folder that only this user may write to.

    Raises:
        InvalidValue: another user may write to it, or it cannot be made.
    """
    refuse_strange_home(folder)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise InvalidValue(
            f"cannot make {folder.absolute()}, where a run is kept until it is done: "
            f"{error.strerror}. Begin it in a folder that you may write to"
        ) from None
    refuse_strange_home(folder)


def refuse_strange_home(folder: Path) -> None:
    """Raise if another user could have put a plan there: a plan names the code that is run.

    Raises:
        InvalidValue: the path is not a folder of this user that only this user may write to.
    """
    try:
        state = folder.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(state.st_mode):
        raise InvalidValue(f"{folder} is a link: runs are kept in a folder. Remove it")
    if not stat.S_ISDIR(state.st_mode):
        raise InvalidValue(f"{folder} is no folder: runs are kept in one. Remove it")
    if state.st_uid != os.geteuid():
        raise InvalidValue(
            f"{folder} belongs to another user, who could change what is run: use another folder"
        )
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidValue(
            f"{folder} may be written to by others, who could change what is run: "
            f"chmod go-w {folder}"
        )


def read_stored_runs() -> list[StoredRun]:
    """Return the runs whose plans are here, the last first. The caller holds the lock of the home.

    A folder that another user may write to, or whose plan cannot be read, is passed over.
    """
    found = []
    for folder in HOME.glob("*"):
        with suppress(InvalidValue, OSError, msgspec.DecodeError):
            refuse_strange_home(folder)
            path = folder / _PLAN
            plan = _read_plan(path)
            if plan.id == folder.name:
                at_ns, finished = path.stat().st_mtime_ns, FinishedNote(folder).read()
                found.append(StoredRun(plan, at_ns, _process_in_lock_file(folder), finished))
    return sorted(found, key=lambda run: -run.at_ns)


def load_plan(request_id: str, what: str = "resume", *, is_retry: bool = False) -> Plan:
    """Return the plan of a run that was stopped; for a retry, of one that is done with failures.

    ``last`` stands for the run that began or went on last. ``what`` names the id in an error
    message.

    Raises:
        InvalidValue: there is no such run in the current folder.
    """
    if request_id == LAST:
        return _last_stored_plan(is_retry=is_retry)
    folder = HOME / units.name(request_id, what)
    for each in (HOME, folder):
        refuse_strange_home(each)
    try:
        plan = _read_plan(folder / _PLAN)
    except (OSError, msgspec.DecodeError):
        there = [each.name for each in HOME.glob("*") if (each / _PLAN).exists()]
        others = f"; there is {', '.join(there)}" if there else ""
        raise InvalidValue(f"{_no_such_run(is_retry, request_id)}{others}") from None
    is_finished = FinishedNote(folder).read() is not None
    if is_finished and not is_retry:
        raise InvalidValue(f"run {plan.id} is done: {retry_command(plan.id)} runs what failed")
    if is_retry and not is_finished:
        raise InvalidValue(
            f"run {plan.id} is not done: streamq run --resume {plan.id} goes on with it"
        )
    return plan


def _no_such_run(is_retry: bool, request_id: str = "") -> str:
    which = f"no run {request_id}" if request_id else "no run"
    return f"{which} {'is done with failures' if is_retry else 'was stopped'} in this folder"


def retry_command(run_id: str) -> str:
    """Return the command that retries the failed records of a run."""
    return f"streamq run --retry-failed {run_id}"


def _last_stored_plan(*, is_retry: bool) -> Plan:
    refuse_strange_home(HOME)
    if HOME.exists():
        with home_locked():
            stored = read_stored_runs()
        runs = [run for run in stored if (run.finished is not None) == is_retry]
        for run in runs:
            if not run.is_live:
                return run.plan
        if runs:
            raise InvalidValue(f"run {runs[0].id} goes on now, in {runs[0].process}")
    raise InvalidValue(_no_such_run(is_retry))


def remove_expired(but: str = "") -> None:
    """Remove finished runs that need not be kept any longer, unless they are being retried.

    ``but``: the id of a run that is about to be retried, however old it is. Folders without a plan
    go, too: their runs were killed while they began or were removed. The caller holds the lock of
    the home, so no run begins meanwhile.
    """
    finished = [run for run in read_stored_runs() if run.finished and run.id != but]
    expired = [run.id for run in finished if run.finished and run.finished.is_expired]
    rests = [each.name for each in HOME.glob("*") if each.is_dir() and not (each / _PLAN).exists()]
    for run_id in (*expired, *rests):
        with suppress(InvalidValue, OSError):
            refuse_strange_home(HOME / run_id)
            if lock := lock_run_folder(run_id):
                with lock:
                    remove_run_folder(run_id)


def _read_plan(path: Path) -> Plan:
    return msgspec.json.decode(path.read_bytes(), type=Plan).found_in(Path.cwd())


def store_plan(plan: Plan) -> None:
    """Write the plan into its folder, in one step that a power failure does not undo by half."""
    folder = HOME / plan.id
    draft = folder / "plan.new"
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(plan))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(folder / _PLAN)
    for each in (folder, HOME):
        descriptor = os.open(each, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # some file systems cannot sync a folder
            os.fsync(descriptor)
        os.close(descriptor)


def lock_run_folder(request_id: str) -> BinaryIO | None:
    """Lock the folder of a run; None if a process has it. The caller holds the lock of the home."""
    file = (HOME / request_id / _LOCK).open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    file.truncate(0)
    file.write(b"%d" % os.getpid())
    file.flush()
    return file


def process_that_holds_run(request_id: str) -> int:
    """Return the process that runs it now; 0 for none, -1 where that is not known."""
    return _process_in_lock_file(HOME / request_id)


def _process_in_lock_file(folder: Path) -> int:
    try:
        with (folder / _LOCK).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read(20)
                return int(text) if text.isdigit() else -1
    except FileNotFoundError:
        pass
    return 0


def remove_run_folder(request_id: str) -> None:
    """Delete the folder of a run. The caller holds its lock."""
    folder = HOME / request_id
    # Without a plan the rest is no run any more, wherever a crash leaves it.
    with suppress(OSError):
        (folder / _PLAN).unlink()
    shutil.rmtree(folder, ignore_errors=True)
