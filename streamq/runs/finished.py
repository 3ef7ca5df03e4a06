"""The note that a run leaves in its folder when it is done with failures, for a retry.

Needs no redis-py.
"""

import os
import time
from pathlib import Path

import msgspec

from streamq.errors import InvalidValue
from streamq.records.output import OutputExists
from streamq.runs.plan import Plan

_NOTE = "finished.json"


class FinishedSeal(msgspec.Struct, frozen=True):
    """The state of an output, to see later whether it is as the run has left it."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FinishedSeal | None":
        """Return the seal of a file; None where there is none."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(found.st_size, found.st_mtime_ns)

    def difference(self, path: Path) -> str:
        """Say in words how the file differs from what was left; "" if it does not."""
        now = FinishedSeal.of(path)
        if now is None:
            return f"{path} is gone: put it back"
        if now.size > self.size:
            return f"{path} has {now.size - self.size} bytes more than were written"
        return "" if now == self else f"{path} was changed since it was written"


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended that can be retried."""

    #: How many records failed, and until when (s since 1970) they are kept.
    failed: int
    until_s: float
    seal: FinishedSeal
    #: Whether a retry has begun, and whether all failed parts run again. While it is not done, the
    #: collector looks after the output.
    has_begun: bool = False
    is_redriven: bool = False

    @property
    def is_expired(self) -> bool:
        """Whether it need not be kept any longer."""
        return time.time() > self.until_s


class FinishedNote:
    """The file in the folder of a run that says how it ended."""

    def __init__(self, folder: Path) -> None:
        self._place = folder / _NOTE

    def read(self) -> Finished | None:
        """Return how the run ended; None if it has not ended, or nothing is known of it."""
        try:
            return msgspec.json.decode(self._place.read_bytes(), type=Finished)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, finished: Finished) -> None:
        """Note how the run ended, in one step.

        Raises:
            OSError: it cannot be written.
        """
        draft = self._place.with_name(f"{_NOTE}.new")
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(finished))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._place)


def check_retry(plan: Plan, note: FinishedNote) -> None:
    """Make sure that the failed records of a run can be retried.

    Raises:
        InvalidValue: the run has not ended.
        OutputExists: the output is not as the run has left it.
    """
    finished, output = note.read(), Path(plan.output)
    if finished is None:
        raise InvalidValue(f"run {plan.id} was not finished")
    difference = "" if finished.has_begun else finished.seal.difference(output)
    if difference:
        raise OutputExists(
            f"{difference}, so run {plan.id} cannot put results into their place there. "
            "Undo that, or run the failed records on their own"
        )
