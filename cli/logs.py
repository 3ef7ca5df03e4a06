"""How much commands that stay say on stderr, and in which form."""

import sys
from enum import StrEnum

from streamq.telemetry import logs

from . import render


class Level(StrEnum):
    """What is said: this, and what is worse."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Format(StrEnum):
    """How it is said: in lines for people, or in JSON. Auto is JSON where no person looks."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


def style(format: Format) -> str:
    """The form that is meant."""
    if format is Format.AUTO:
        return "text" if render.is_terminal(sys.stderr) else "json"
    return format.value


def configure(level: Level, format: Format) -> None:
    """Say on stderr what the library logs from this level on."""
    logs.configure(level.value, style(format))
