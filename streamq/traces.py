"""Tracebacks as a user wants them: of the user's own code, not of ours that called it."""

import traceback
from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).parent)


def users_traceback(error: BaseException) -> str:
    """The traceback without the frames of ours, and of the import machinery, at its beginning."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen importlib")) or "/importlib/" in filename
