"""Shows how far a run is: a changing line on a terminal, elsewhere a line every 10 s."""

import shutil
import sys
import time
from collections.abc import Sequence

from streamq.model import StageStatus
from streamq.runs.progress import Progress

from . import render

_SHOW_EVERY_S = 10.0
_BAR = 20


class ProgressDisplay:
    """Shows progress on stderr."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        """``is_quiet``: results go to the same terminal, so nothing is shown."""
        self._is_quiet = is_quiet
        self._is_live = render.is_terminal(sys.stderr)
        self._line = render.StatusLine(is_shown=not is_quiet)
        self._said = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Show the progress, if it is time to."""
        if self._is_quiet:
            return
        if self._is_live:
            width = shutil.get_terminal_size().columns - 1
            text = progress_in_words(progress)
            wide = f"{progress_bar(progress)} {text}"
            self._line.show((wide if len(wide) <= width else text)[:width])
        elif time.monotonic() - self._said >= _SHOW_EVERY_S:
            self._said = time.monotonic()
            render.note(progress_in_words(progress))

    def end(self) -> None:
        """Clear the line."""
        self._line.show("")


def progress_bar(progress: Progress) -> str:
    """Return a bar for the finished part of the whole."""
    full = round(_BAR * min(1.0, progress.done or 0.0))
    return "━" * full + "─" * (_BAR - full)


def progress_in_words(progress: Progress) -> str:
    """Return the progress in one line."""
    records = progress.status.records
    failed = sum(each.records.failed for each in progress.stages) or records.failed
    told = [
        "     " if progress.done is None else f"{progress.done:4.0%} ",
        _progress_of_stages(progress.stages)
        if progress.stages
        else f"{records.done + records.failed:,}{_progress_of_all(progress)} records",
        *(f" · {each}" for each in _progress_pace(progress)),
        f" · {progress.busy}/{progress.slots} busy",
        f" · {progress.retried:,} retried" if progress.retried else "",
        f" · {failed:,} failed" if failed else "",
    ]
    return "".join(told)


def _progress_pace(progress: Progress) -> list[str]:
    """Return the rate and the time left; of a run that waits for its user, what it waits for."""
    status, records = progress.status, progress.status.records
    if status.paused:
        return [f"paused, until streamq resume {status.id}"]
    if status.waits_for_release:
        return [f"waits for streamq release {status.id}"]
    left = progress.eta_s
    return [
        *render.pace(progress.rate, records.done + records.failed),
        *([] if left is None else [f"{render.span(max(1.0, left) * 1e3)} left"]),
    ]


def _progress_of_stages(stages: Sequence[StageStatus]) -> str:
    """Return for each stage of a flow how many records are finished of those that came so far."""
    return ", ".join(
        f"{each.name} {each.records.done + each.records.failed:,}/{each.records.total:,}"
        for each in stages
    )


def _progress_of_all(progress: Progress) -> str:
    if progress.total is None:
        return ""
    return f"{'/' if progress.is_counted else ' of about '}{progress.total:,}"
