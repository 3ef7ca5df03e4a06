"""Log lines for people or machines, on stderr. Only commands configure logging."""

import json
import logging
import sys
import time
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


class TextFormatter(logging.Formatter):
    """``12:04:31.207 INFO  worker ready``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback after it if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{record.msecs:03.0f} {record.levelname:<7} {record.getMessage()}"
        if sys.stderr is not None and sys.stderr.isatty():
            # There may be a line of progress, by another process even: this one takes its place.
            line = f"\r\x1b[K{line}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
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
