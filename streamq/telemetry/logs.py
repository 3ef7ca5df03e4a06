"""Log lines for people or machines, on stderr. Only commands configure logging."""

import json
import logging
import sys
import time
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


def harmless_log_text(text: str) -> str:
    """Return the text with its newlines and tabs, and every other control character escaped.

    The text holds words of users, such as errors of handlers and names of files, which could move a
    terminal's cursor.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def log_style(format: str) -> str:
    """Return the format; ``auto`` is text if stderr is a terminal, else JSON."""
    if format != "auto":
        return format
    return "text" if sys.stderr is not None and sys.stderr.isatty() else "json"


class TextFormatter(logging.Formatter):
    """``12:04:31.207 INFO  worker ready``."""

    def formatException(self, exc_info: Any) -> str:  # noqa: N802  the name is logging's
        """Return the traceback, with control characters escaped."""
        return harmless_log_text(super().formatException(exc_info))

    def format(self, record: logging.LogRecord) -> str:
        """Return a line. Further lines of the message are indented; a traceback follows."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = harmless_log_text(record.getMessage()).replace("\n", "\n    ")
        line = f"{clock}.{record.msecs:03.0f} {record.levelname:<7} {message}"
        if sys.stderr is not None and sys.stderr.isatty():
            # There may be a progress line on the terminal, even of another process. This line
            # replaces it.
            line = f"\r\x1b[K{line}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        fields = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _LogHandler(logging.StreamHandler[TextIO]):
    """Drops lines that cannot be written: no work may fail because of a log."""

    def handleError(self, _: logging.LogRecord) -> None:  # noqa: N802  the name is logging's
        """Do nothing: there is no place to report it."""


def send_logs_to_stderr(level: str, style: str) -> None:
    """Send the library's log lines to stderr. The root logger is left to the user."""
    handler = _LogHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logger = logging.getLogger("streamq")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
