"""The parts of a run that are needed before redis-py is imported.

They are its folder (plan, lock), and its embedded server, which starts in the background.
"""

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
from streamq.runs.plan import Plan
from streamq.servers.local import FOR_ONE_RUN, LocalServer

#: Folder for runs that are not finished, in the current directory.
HOME = Path(".streamq")


def load_plan(request_id: str, what: str = "resume") -> Plan:
    """Return the plan of a run that was stopped. ``what`` names the id in an error message.

    Raises:
        InvalidValue: no run of that id was stopped in the current folder.
    """
    folder = HOME / units.name(request_id, what)
    path = folder / "plan.json"
    for each in (HOME, folder):
        _refuse_strange(each)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except (OSError, msgspec.DecodeError):
        there = [each.name for each in HOME.glob("*") if (each / "plan.json").exists()]
        others = f"; there is {', '.join(there)}" if there else ""
        raise InvalidValue(f"no run {request_id} was stopped in this folder{others}") from None


def _refuse_strange(folder: Path) -> None:
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


class RunFolder:
    """Where a plan is carried out: its folder, which is kept for ``--resume``, and its server."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._folder = HOME / plan.id
        #: Whether the folder stays after the run.
        self.is_kept = plan.can_go_on

    @contextmanager
    def held(self) -> Generator[None]:
        """Make the folder, write the plan into it and lock it; in the end remove it or keep it.

        Raises:
            InvalidValue: another process runs this plan, or another user may write to the folder.
        """
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
            finally:
                if not self.is_kept:
                    shutil.rmtree(self._folder, ignore_errors=True)
                    if not any(HOME.iterdir()):
                        HOME.rmdir()

    @contextmanager
    def server(self, url: str) -> Generator[Callable[[], str]]:
        """Give a function that waits for the server and returns its URL. No URL: start a server."""
        if url:
            yield lambda: url
            return
        starting = _Starting(self._folder / "server" if self._plan.can_go_on else None)
        try:
            yield lambda: starting.server().url
            if not self.is_kept:
                # A finished run needs no data, so the server is killed before it writes them. If
                # that fails, ``stop`` ends the server a moment later.
                with suppress(ServerError):
                    starting.server().kill()
        finally:
            starting.stop()


class _Starting(threading.Thread):
    """Starts a server in the background."""

    def __init__(self, directory: Path | None) -> None:
        super().__init__(daemon=True)
        self._directory = directory
        self._server: LocalServer | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Start the server."""
        is_kept = self._directory is not None
        try:
            self._server = LocalServer.start(self._directory, persist=is_kept, options=FOR_ONE_RUN)
        except BaseException as error:  # noqa: BLE001  ``server`` raises it
            self._error = error

    def server(self) -> LocalServer:
        """Wait until the server answers, and return it.

        Raises:
            ServerError: the server does not start.
        """
        self.join()
        if self._error:
            raise self._error
        assert self._server is not None
        return self._server

    def stop(self) -> None:
        """End the server."""
        self.join()
        if self._server:
            self._server.stop()
