"""Runs the failed records of a finished run again; the collector puts results into their place."""

import logging
import threading
from typing import Any

import msgspec

from streamq.model import State
from streamq.protocol.protocol import Protocol
from streamq.queue.request import Request
from streamq.runs.finished import FinishedNote
from streamq.runs.folder import RunFolder
from streamq.runs.run import Run

log = logging.getLogger(__name__)


class RetryRun(Run):
    """One retry of the failed records of a run that was done."""

    def retry(self, note: FinishedNote) -> "RetryRun":
        """Tell the run where the note about its end is. Return the run itself."""
        self._finished = note
        return self

    @property
    def _spools(self) -> bool:
        # Results of retried records are put between the lines that are there, each by itself.
        return False

    def _load(self, protocol: Protocol, opened: threading.Event) -> None:
        """Have the failed parts run again; load what was not loaded because too many failed."""
        request = Request(protocol, self._plan.id)
        finished = self._finished.read()
        assert finished is not None
        if not finished.is_redriven:
            # Killed in between, the next command has the rest of the failed parts run again.
            self._finished.write(msgspec.structs.replace(finished, has_begun=True))
            if not request.retry() and finished.failed:
                log.warning(
                    "no part runs again: their joins and reduces were made without what failed"
                )
            self._finished.write(
                msgspec.structs.replace(finished, has_begun=True, is_redriven=True)
            )
        if request.status().state is State.LOADING:
            super()._load(protocol, opened)
        else:
            self._open(protocol, opened)


def new_retry_run(folder: RunFolder, url: str, prefix: str, **options: Any) -> Run:
    """Return the run that carries out the plan of a folder: a new one, a resumed one, or a retry.

    The options are those of ``Run``.
    """
    kind = RetryRun if folder.is_retry else Run
    run = kind(
        folder.plan,
        url,
        prefix,
        note=folder.note,
        gaps=folder.gaps,
        spool=folder.spool,
        steered=folder.steered,
        **options,
    )
    return run.retry(folder.finished) if isinstance(run, RetryRun) else run
