"""The command, as tests run it."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.support import warm

_INSTALLED = Path(sys.executable).with_name("streamq")
COMMAND = [str(_INSTALLED)] if _INSTALLED.exists() else [sys.executable, "-m", "streamq.cli"]
NOBODY = "redis://127.0.0.1:1"
Ran = subprocess.CompletedProcess[str]
Streamq = Callable[..., Ran]


def environment(**variables: str) -> dict[str, str]:
    """As it is, without what would change a command's mind."""
    ours = ("STREAMQ_", "REDIS_URL", "VALKEY_URL", "NO_COLOR", "FORCE_COLOR", "TERM")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "COLUMNS": "200", "TERM": "xterm", **variables}


def python_path(folder: Path) -> str:
    """A value of PYTHONPATH: the folder first, then what it was, which `make coverage` needs."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def run(*words: str, **variables: str) -> Ran:
    return warm.run_text([*COMMAND, *words], env=environment(**variables))


class Terminal:
    """A terminal with a person before it, who reads and types."""

    def __init__(self) -> None:
        self._ours, self.file = pty.openpty()
        os.set_blocking(self._ours, False)
        self._seen = bytearray()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ours)
        os.close(self.file)

    def seen(self) -> str:
        """All that was written so far."""
        with suppress(OSError):  # nothing more, for now or for ever
            while chunk := os.read(self._ours, 65536):
                self._seen.extend(chunk)
        return self._seen.decode()

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())
