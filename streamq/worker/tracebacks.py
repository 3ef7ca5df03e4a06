"""Shortens a traceback to the user's own code: frames of streamq that called it are left out."""

import traceback
from pathlib import Path
from types import TracebackType

_MOST_CHARS = 2_000
_OURS = str(Path(__file__).parents[1])


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
