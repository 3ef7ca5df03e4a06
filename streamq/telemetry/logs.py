"""Log lines for people or machines, on stderr. Only commands configure logging."""

import json
import logging
import sys
import time
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


def harmless(text: str) -> str:
    """Return the text in its lines, with escapes for whatever else could move a terminal's cursor.

    Words of users are in it: errors of handlers, names of files.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def style(format: str) -> str:
    """Return the form that is meant: of ``auto`` JSON, unless a person looks at stderr."""
    if format != "auto":
        return format
    return "text" if sys.stderr is not None and sys.stderr.isatty() else "json"


class TextFormatter(logging.Formatter):
    """``12:04:31.207 INFO  worker ready``."""

    def formatException(self, exc_info: Any) -> str:  # noqa: N802  the name is logging's
        """Return the traceback, and nothing that a terminal would obey."""
        return harmless(super().formatException(exc_info))

    def format(self, record: logging.LogRecord) -> str:
        """One line, and what follows it is set in: the rest of the message, and a traceback."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = harmless(record.getMessage()).replace("\n", "\n    ")
        line = f"{clock}.{record.msecs:03.0f} {record.levelname:<7} {message}"
        if sys.stderr is not None and sys.stderr.isatty():
            # There may be a line of progress, by another process even: this one takes its place.
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


class _Handler(logging.StreamHandler[TextIO]):
    """Drops what cannot be written: nothing is to fail for want of a log."""

    def handleError(self, _: logging.LogRecord) -> None:  # noqa: N802  the name is logging's
        """Say nothing: there is nowhere to say it."""


def configure(level: str, style: str) -> None:
    """Send the library's log lines to stderr; the root logger is the user's."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logger = logging.getLogger("streamq")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
