"""What a run has before its driver: its folder, and a server that is being started."""

import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from streamq import units
from streamq.errors import InvalidValue, ServerError
from streamq.records.inputs import STDIN
from streamq.runs.plan import Plan
from streamq.servers.local import FOR_ONE_JOB, LocalServer
from streamq.settings import Settings, with_login

from . import render
from .connecting import connected

#: Folder of the jobs that are not finished, in the current one.
HOME = Path(".streamq")


def kept(request_id: str) -> Plan:
    """The plan of a run that was stopped."""
    folder = HOME / units.name(request_id, "--resume")
    path = folder / "plan.json"
    for each in (HOME, folder):
        _refuse_strange(each)
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


def _refuse_strange(folder: Path) -> None:
    """Raise if somebody else could have put a plan there: it names the code that is run.

    Raises:
        InvalidValue: it is no folder of ours that only we may write to.
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
        raise InvalidValue(f"{folder} belongs to another user, who could change what is run")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidValue(
            f"{folder} may be written to by others, who could change what is run: "
            f"chmod go-w {folder}"
        )


class Home:
    """Where a plan is carried out: its folder and its server."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._folder = HOME / plan.id
        #: Whether the folder stays.
        self.is_kept = plan.can_go_on

    @contextmanager
    def folder(self) -> Generator[None]:
        """Have the run's own folder, locked; it stays if the run can be gone on with."""
        if not self._plan.can_go_on:
            yield
            return
        for each in (HOME, self._folder):
            _refuse_strange(each)
            each.mkdir(mode=0o700, exist_ok=True)
            _refuse_strange(each)
        with (self._folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidValue(f"run {self._plan.id} goes on in another process") from None
            try:
                text = self._folder / "plan.new"
                text.write_bytes(msgspec.json.encode(self._plan))
                text.rename(self._folder / "plan.json")
                yield
            except KeyboardInterrupt:
                if self.is_kept:
                    render.note(f"stopped{self.hope()}")
                raise
            finally:
                if not self.is_kept:
                    shutil.rmtree(self._folder, ignore_errors=True)
                    if not any(HOME.iterdir()):
                        HOME.rmdir()

    @contextmanager
    def server(self, url: str) -> Generator[Callable[[], str]]:
        """What tells the server's URL when it is up: of the given one, or of one of our own."""
        if url:
            yield lambda: url
            return
        starting = _Starting(self._folder / "server" if self._plan.can_go_on else None)
        try:
            yield lambda: starting.server().url
            if not self.is_kept:
                # Nobody needs its data any more: it is not to write them. If it cannot be told so,
                # nothing is lost but a moment.
                with suppress(ServerError):
                    starting.server().kill()
        finally:
            starting.stop()

    def command(self) -> str:
        """What goes on with the run."""
        has_stdin = STDIN in self._plan.policy.spec.files
        same = " with the same standard input" if has_stdin else ""
        return f"streamq run --resume {self._plan.id}{same}"

    def hope(self) -> str:
        """What is said of a run that was stopped."""
        if self.is_kept:
            return f"; nothing is lost\ngo on with: {self.command()}"
        return "; what goes into a pipe cannot be gone on with"


class _Starting(threading.Thread):
    """A server that starts while others do something else."""

    def __init__(self, directory: Path | None) -> None:
        super().__init__(daemon=True)
        self._directory = directory
        self._server: LocalServer | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Start it."""
        is_kept = self._directory is not None
        try:
            self._server = LocalServer.start(self._directory, persist=is_kept, options=FOR_ONE_JOB)
        except BaseException as error:  # noqa: BLE001  it is raised where the server is needed
            self._error = error

    def server(self) -> LocalServer:
        """The server, when it answers.

        Raises:
            ServerError: it does not start.
        """
        self.join()
        if self._error:
            raise self._error
        assert self._server is not None
        return self._server

    def stop(self) -> None:
        """End it."""
        self.join()
        if self._server:
            self._server.stop()
