"""Shortens a traceback to the user's own code: frames of streamq that called it are left out."""

import logging
import time
import traceback
from collections import Counter
from pathlib import Path
from types import TracebackType

log = logging.getLogger(__name__)

_MOST_CHARS = 2_000
#: How many characters of an error stand in a line of the log.
_LINE_CHARS = 200
_OURS = str(Path(__file__).parents[1])
#: How many kinds of errors are logged in full. Errors of other kinds are only counted.
_MOST_KINDS = 20
#: What was counted is logged 10 s after the first error, then 20 s later, and so on up to 60 s.
_COUNT_AFTER_S = 10.0
_MOST_SILENT_S = 60.0


class Complaints:
    """Logs the first error of each kind in full, and how many more there were now and then.

    Errors of one type that were raised in one line are of a kind.
    """

    def __init__(self) -> None:
        self._kinds: set[tuple[type[BaseException], str, int]] = set()
        self._more: Counter[str] = Counter()
        self._say_at = 0.0
        self._silence_s = _COUNT_AFTER_S

    def say(self, what: str, error: BaseException, trace: str) -> None:
        """Log an error, unless one of its kind was logged before; then count it."""
        now = time.monotonic()
        self._say_at = self._say_at or now + self._silence_s
        kind = (type(error), *_place_of_exception(error.__traceback__))
        if kind not in self._kinds and len(self._kinds) < _MOST_KINDS:
            self._kinds.add(kind)
            log.warning("%s:\n%s", what, trace.rstrip())
            return
        self._more[type(error).__name__] += 1
        if now >= self._say_at:
            counts = ", ".join(f"{count:,} {name}" for name, count in self._more.most_common())
            last = f"{type(error).__name__}: {text_that_can_be_encoded(error)}".splitlines()[0][
                :_LINE_CHARS
            ]
            log.warning(
                "%s: %s; in the last %.0f s there were %s", what, last, self._silence_s, counts
            )
            self._more.clear()
            self._silence_s = min(2 * self._silence_s, _MOST_SILENT_S)
            self._say_at = now + self._silence_s


def _place_of_exception(trace: TracebackType | None) -> tuple[str, int]:
    """Return file and line of the innermost frame."""
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


def users_traceback(error: BaseException) -> str:
    """Return the traceback without the first frames, which are streamq's or the import system's."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and _is_frame_of_streamq(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception as worse:  # noqa: BLE001  an error that cannot be shown
        return f"{type(error).__name__} (not to be shown: {type(worse).__name__})\n"
    return _without_lone_surrogates(text)


def text_that_can_be_encoded(error: BaseException) -> str:
    """Return the text of an error, 2,000 characters at most, even if ``str`` of it raises."""
    try:
        return _without_lone_surrogates(str(error))[:_MOST_CHARS]
    except Exception as worse:  # noqa: BLE001  an error that cannot be shown
        return f"(not to be shown: {type(worse).__name__})"


def _without_lone_surrogates(text: str) -> str:
    """Return the text without lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


def _is_frame_of_streamq(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen importlib")) or "/importlib/" in filename
