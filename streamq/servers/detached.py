"""An embedded server that outlives the command which started it, in a folder that keeps its data.

A program that serves (``streamq server``) holds a lock on the file ``serving.json`` of the folder
for as long as it lives, and the file says where its server is. The lock ends with the program,
however that ends, so a file without a lock is left over and its process id means nothing.
"""

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from streamq.errors import ServerError

#: The folder of a detached server, unless another is given.
HOME = Path(".streamq-server")
#: A server that loads much data starts slowly; one that writes much ends slowly.
START_S = 60.0
STOP_S = 30.0
_POLL_S = 0.02
#: A command that looks for a server has the lock for a moment. A server that starts waits this long
#: for it.
_LOOKERS_S = 2.0
_FILE = "serving.json"
_LOG = "detached.log"


class Serving(msgspec.Struct, frozen=True):
    """A server that runs: where it is, and the process that looks after it."""

    url: str
    pid: int
    folder: str


@contextmanager
def announced_server(folder: Path, url: str) -> Generator[Serving]:
    """Say in the folder that this process serves there, while it does.

    Raises:
        ServerError: another process does so already.
    """
    serving = Serving(url, os.getpid(), str(folder))
    descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + _LOOKERS_S
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ServerError(f"{folder} is in use by another server")
            time.sleep(_POLL_S)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, msgspec.json.encode(serving))
        yield serving
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def find_detached(folder: Path) -> Serving | None:
    """Return the server that runs in the folder, if one does."""
    try:
        descriptor = os.open(folder / _FILE, os.O_RDWR)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ServerError(f"cannot look for a server: {error}") from None
    try:
        if _try_lock(descriptor, fcntl.LOCK_SH):
            return None
        return msgspec.json.decode(os.pread(descriptor, 65_536, 0), type=Serving)
    except msgspec.DecodeError:
        return None  # it is just starting or ending
    finally:
        os.close(descriptor)


def start_detached(folder: Path, command: Sequence[str]) -> tuple[Serving, bool]:
    """Start the command in the background, and wait until its server answers.

    Returns the server, and whether it is new: if one runs in the folder already, that is returned.
    The same holds for two starts at the same moment.

    Raises:
        ServerError: the server does not start.
    """
    folder = folder.absolute()
    if found := find_detached(folder):
        return found, False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = (folder / _LOG).open("ab")
    except OSError as error:
        raise ServerError(f"no folder for the server: {error}") from None
    with log:
        begin = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while True:
        has_ended = process.poll() is not None
        found = find_detached(folder)
        if found and found.pid != process.pid:
            # Somebody else was quicker. Ours would wait for the folder, and take it when it is
            # free.
            process.terminate()
            process.wait()
        if found:
            return found, found.pid == process.pid
        if has_ended:
            said = (folder / _LOG).read_bytes()[begin:].decode(errors="replace").strip()
            raise ServerError(f"the server did not start: {said or 'it said nothing'}")
        if time.monotonic() > deadline:
            process.terminate()
            raise ServerError(
                f"the server does not answer after {START_S:g} s; see {folder / _LOG}"
            )
        time.sleep(_POLL_S)


def stop_detached(folder: Path) -> Serving | None:
    """End the server of the folder, and wait until it has ended. Returns it, or None: none runs.

    Raises:
        ServerError: it does not end.
    """
    folder = folder.absolute()
    found = find_detached(folder)
    if found is None:
        return None
    try:
        os.kill(found.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError:
        raise ServerError(f"process {found.pid} belongs to another user") from None
    deadline = time.monotonic() + STOP_S
    while (now := find_detached(folder)) and now.pid == found.pid:
        if time.monotonic() > deadline:
            raise ServerError(f"process {found.pid} does not end after {STOP_S:g} s")
        time.sleep(_POLL_S)
    return found


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
