"""Options that several commands have, and what the options for settings and logs do."""

import os
import sys
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer

from streamq.errors import SettingsError
from streamq.settings import gather_settings, variable_of
from streamq.telemetry import logs

from . import panels, render


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


def _option_before_or_after_command(
    context: typer.Context, option: typer.CallbackParam, value: str | None
) -> str | None:
    """Return the option's value; it may stand before the command's name or after it."""
    source = context.get_parameter_source(option.name or "")
    if context.parent is None or (source is not None and source.name == "COMMANDLINE"):
        return value
    return context.parent.params.get(option.name or "", value)


def _use_config_option(context: typer.Context, path: str | None) -> None:
    """Take defaults of options from the files with settings. Runs also without ``--config``.

    The option sets its variable, for this process and for those that it starts.
    """
    if path:
        os.environ["STREAMQ_CONFIG"] = path
    try:
        gathered = gather_settings()
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


def _use_insecure_option(is_said: bool | None) -> None:
    if is_said:
        os.environ["STREAMQ_INSECURE"] = "1"


ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Read settings from this file; else from the nearest streamq.toml or pyproject.toml.",
        callback=_use_config_option,
        is_eager=True,
        rich_help_panel=panels.SERVER,
    ),
]
InsecureOption = Annotated[
    bool | None,
    typer.Option(
        "--insecure/ ",
        help="Allow a server on another machine that asks for no password.",
        callback=_use_insecure_option,
        rich_help_panel=panels.SERVER,
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
        help="URL of the server, such as redis://HOST:6379, redis+cluster://HOST:6379 or "
        "unix:///PATH.",
        callback=_option_before_or_after_command,
        rich_help_panel=panels.SERVER,
    ),
]
PrefixOption = Annotated[
    str | None,
    typer.Option(
        "--prefix",
        envvar="STREAMQ_PREFIX",
        metavar="NAME",
        help="Begin every key in the server with this name.",
        callback=_option_before_or_after_command,
        show_default="sq",
        rich_help_panel=panels.SERVER,
    ),
]
QueueOption = Annotated[
    str,
    typer.Option(
        "--queue",
        envvar="STREAMQ_QUEUE",
        metavar="NAME",
        help="Queue to use; workers serve one queue each.",
        rich_help_panel=panels.SERVER,
    ),
]
QueuesOption = Annotated[
    list[str],
    typer.Option(
        "--queue",
        envvar="STREAMQ_QUEUE",
        metavar="NAME",
        help="Queue to look after; may be repeated.",
        rich_help_panel=panels.SERVER,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, for programs.")]
IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Id of the request; streamq ls lists them.")
]
_OR_THE_RUN = "without one, the run that goes on in this folder."
RunIdArgument = Annotated[
    str | None,
    typer.Argument(metavar="ID", help=f"Id of the request or the run; {_OR_THE_RUN}"),
]
RunIdsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help=f"Ids of requests or runs; {_OR_THE_RUN}"),
]
ExecOption = Annotated[
    str,
    typer.Option(
        "--exec",
        metavar="'PROGRAM ARGS'",
        help="Run this program instead of a Python function. It reads records from standard "
        "input, one in a line, and writes results to standard output. No shell is used.",
        rich_help_panel=panels.FUNCTION,
    ),
]
LogLevelOption = Annotated[
    LogLevel,
    typer.Option(
        "--log-level",
        envvar="STREAMQ_LOG_LEVEL",
        case_sensitive=False,
        help="Log messages of this level and worse.",
        rich_help_panel=panels.LOGS,
    ),
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar="STREAMQ_LOG_FORMAT",
        case_sensitive=False,
        help="Write log lines as text for people or as JSON; auto means text on a terminal, "
        "and JSON elsewhere.",
        rich_help_panel=panels.LOGS,
    ),
]
HealthPortOption = Annotated[
    str,
    typer.Option(
        "--health-port",
        envvar="STREAMQ_HEALTH_PORT",
        metavar="[HOST:]PORT",
        help="Serve health checks and metrics over HTTP on this port: /livez, /readyz, /metrics, "
        "/scale.",
        rich_help_panel=panels.LOGS,
    ),
]


def shared_log_style(format: LogFormat) -> str:
    """Return the log format, with ``auto`` decided."""
    if format is LogFormat.AUTO:
        return "text" if render.is_terminal(sys.stderr) else "json"
    return format.value


def use_log_options(level: LogLevel, format: LogFormat) -> None:
    """Write the library's log lines of this level and above to stderr."""
    logs.send_logs_to_stderr(level.value, shared_log_style(format))
