"""Options that several commands have, and what the options for settings and logs do."""

import os
import sys
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer

from streamq.errors import SettingsError
from streamq.settings import gather, variable_of
from streamq.telemetry import logs

from . import render


class LogLevel(StrEnum):
    """The lowest level of log lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """The form of log lines: text or JSON; auto is JSON unless stderr is a terminal."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


def _inherited(
    context: typer.Context, option: typer.CallbackParam, value: str | None
) -> str | None:
    """Return the option's value; it may stand before the command's name or after it."""
    source = context.get_parameter_source(option.name or "")
    if context.parent is None or (source is not None and source.name == "COMMANDLINE"):
        return value
    return context.parent.params.get(option.name or "", value)


def _use_config(context: typer.Context, path: str | None) -> None:
    """Take defaults of options from the files with settings. Runs also without ``--config``.

    The option sets its variable, for this process and for those that it starts.
    """
    if path:
        os.environ["STREAMQ_CONFIG"] = path
    try:
        gathered = gather()
    except SettingsError as error:
        render.error(str(error))
        raise typer.Exit(2) from None
    values = msgspec.structs.asdict(gathered.settings)
    said = {name for name, origin in gathered.origins.items() if origin != "default"}
    by_variable = {variable_of(name): values[name] for name in said}
    context.default_map = {
        str(parameter.name): [value] if parameter.multiple else value
        for parameter in context.command.params
        if (value := by_variable.get(str(getattr(parameter, "envvar", "")))) is not None
    }


def _be_insecure(is_said: bool | None) -> None:
    if is_said:
        os.environ["STREAMQ_INSECURE"] = "1"


ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Read settings from this file; else from the nearest streamq.toml or pyproject.toml.",
        callback=_use_config,
        is_eager=True,
    ),
]
InsecureOption = Annotated[
    bool | None,
    typer.Option(
        "--insecure/ ",
        help="Use a server on another machine that asks for no password.",
        callback=_be_insecure,
    ),
]
#: Options of all commands that talk to a server, besides those they name themselves.
COMMON: dict[str, Any] = {"insecure": InsecureOption, "config": ConfigOption}
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        "-u",
        envvar="STREAMQ_URL",
        metavar="URL",
        help="Where the server is: redis://, redis+cluster://, unix://, ...",
        callback=_inherited,
    ),
]
PrefixOption = Annotated[
    str | None,
    typer.Option(
        "--prefix",
        envvar="STREAMQ_PREFIX",
        metavar="NAME",
        help="What every key in the server begins with; sq if not given.",
        callback=_inherited,
    ),
]
QueueOption = Annotated[
    str, typer.Option("--queue", envvar="STREAMQ_QUEUE", metavar="NAME", help="The queue to use.")
]
QueuesOption = Annotated[
    list[str],
    typer.Option(
        "--queue", envvar="STREAMQ_QUEUE", metavar="NAME", help="A queue to sweep; may be repeated."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of the request.")]
IdsArgument = Annotated[list[str], typer.Argument(metavar="ID", help="The ids of the requests.")]
ExecOption = Annotated[
    str,
    typer.Option(
        "--exec",
        metavar="'PROGRAM ARGS'",
        help="Run a program instead: the records of a part on its stdin, results on stdout.",
    ),
]
LogLevelOption = Annotated[
    LogLevel,
    typer.Option(
        "--log-level",
        envvar="STREAMQ_LOG_LEVEL",
        case_sensitive=False,
        help="Log lines of this level and above.",
    ),
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar="STREAMQ_LOG_FORMAT",
        case_sensitive=False,
        help="Lines for people, or JSON; auto: JSON unless stderr is a terminal.",
    ),
]
HealthPortOption = Annotated[
    str,
    typer.Option(
        "--health-port",
        envvar="STREAMQ_HEALTH_PORT",
        metavar="[HOST:]PORT",
        help="Answer /livez, /readyz, /metrics and /scale there.",
    ),
]


def log_style(format: LogFormat) -> str:
    """Return the log format, with ``auto`` decided."""
    if format is LogFormat.AUTO:
        return "text" if render.is_terminal(sys.stderr) else "json"
    return format.value


def configure_logs(level: LogLevel, format: LogFormat) -> None:
    """Write the library's log lines of this level and above to stderr."""
    logs.configure(level.value, log_style(format))
