"""Notices that files of the user's code have changed, for ``streamq worker --reload``."""

from collections.abc import Iterable
from pathlib import Path


class FileWatch:
    """Remembers files, and when each was last written."""

    def __init__(self) -> None:
        self._written: dict[str, float] = {}

    def add(self, files: Iterable[str]) -> None:
        """Remember files as they are now."""
        self._written |= {file: _modification_time(file) for file in files}

    def changed(self) -> list[str]:
        """Return the files that were written since. If there are any, all files are forgotten."""
        found = [file for file, then in self._written.items() if _modification_time(file) != then]
        if found:
            self._written = {}
        return found


def _modification_time(file: str) -> float:
    try:
        return Path(file).stat().st_mtime
    except OSError:
        return 0.0
