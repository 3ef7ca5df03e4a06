"""Shortens a traceback to the user's own code: frames of streamq that called it are left out."""

import logging
import time
import traceback
from pathlib import Path
from types import TracebackType

log = logging.getLogger(__name__)

_MOST_CHARS = 2_000
_OURS = str(Path(__file__).parents[1])
#: An error is logged in full at most once a second, then every 2 s, 4 s and so on up to 60 s.
_COMPLAIN_EVERY_S = 1.0
_MOST_SILENT_S = 60.0


class Complaints:
    """Logs errors of handlers in full, but not a thousand of them."""

    def __init__(self) -> None:
        self._silent_until = 0.0
        self._silence_s = _COMPLAIN_EVERY_S
        self._unsaid = 0

    def say(self, what: str, trace: str) -> None:
        """Log an error, and how many more there were since the last one."""
        now = time.monotonic()
        if now < self._silent_until:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last one shown)" if self._unsaid else ""
        log.warning("%s%s:\n%s", what, more, trace.rstrip())
        self._silent_until, self._unsaid = now + self._silence_s, 0
        self._silence_s = min(2 * self._silence_s, _MOST_SILENT_S)


def users_traceback(error: BaseException) -> str:
    """Return the traceback without the first frames, which are streamq's or the import system's."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception as worse:  # noqa: BLE001  an error that cannot be shown
        return f"{type(error).__name__} (not to be shown: {type(worse).__name__})\n"
    return _clean(text)


def safe_text(error: BaseException) -> str:
    """Return the text of an error, 2,000 characters at most, even if ``str`` of it raises."""
    try:
        return _clean(str(error))[:_MOST_CHARS]
    except Exception as worse:  # noqa: BLE001  an error that cannot be shown
        return f"(not to be shown: {type(worse).__name__})"


def _clean(text: str) -> str:
    """Return the text without lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen importlib")) or "/importlib/" in filename
