"""What every command needs: the options that several have, a connection, one way to fail.

The driver is imported by those functions that use it: ``--help`` does not wait for it.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from streamq import units
from streamq.driver.url import Target
from streamq.errors import (
    InvalidValue,
    ProtocolError,
    RequestUnknown,
    ServerBusy,
    ServerError,
    ServerUnreachable,
    SettingsError,
    StreamqError,
    WaitTimeout,
)
from streamq.settings import Settings, gather, variable_of, with_login

from . import render, signals
from .logs import Format, Level

if TYPE_CHECKING:
    from streamq.protocol.protocol import Protocol
    from streamq.queue.client import Request

NO_URL = """which server? Give its URL in one of three ways:
  --url redis://HOST:PORT          for this command
  export STREAMQ_URL=...           for all commands
  export STREAMQ_URL_FILE=FILE     a file that holds it, for URLs with a password"""

#: The first class that fits gives the exit code.
EXIT_CODES: tuple[tuple[type[StreamqError], int], ...] = (
    (InvalidValue, 2),
    (SettingsError, 2),
    (ServerError, 3),
    (RequestUnknown, 5),
    (WaitTimeout, 124),
    (StreamqError, 1),
)
#: And what the codes mean, also those that no error has.
EXIT_MEANINGS = {
    0: "done, or stopped politely",
    1: "finished with failures (`wait`, `run`); refused, because the request has ended (`set`, "
    "`pause`, `cancel`, ...); something is wrong (`doctor`)",
    2: "wrong usage or settings, no URL",
    3: "the server does not answer, does not let us in, may drop keys, or lets in anybody",
    4: "the app or the function cannot be imported",
    5: "no such request, or it was cancelled",
    124: "the time given to `wait` is over",
    129: "cut short by HUP",
    130: "cut short by Ctrl-C",
    131: "cut short by QUIT (`worker`)",
    141: "whoever read the output has gone",
    143: "cut short by TERM",
}


def _inherited(
    context: typer.Context, option: typer.CallbackParam, value: str | None
) -> str | None:
    """The option's value: it may stand before the command as well as behind it."""
    source = context.get_parameter_source(option.name or "")
    if context.parent is None or (source is not None and source.name == "COMMANDLINE"):
        return value
    return context.parent.params.get(option.name or "", value)


def _use_config(context: typer.Context, path: str | None) -> None:
    """Let the files with settings say what options do not. It is called also without the option.

    The option is one more way to set its variable, for this process and those it starts.
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
_COMMON: dict[str, Any] = {"insecure": InsecureOption, "config": ConfigOption}
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
    str, typer.Option("--queue", envvar="STREAMQ_QUEUE", metavar="NAME", help="Of this queue.")
]
QueuesOption = Annotated[
    list[str],
    typer.Option(
        "--queue", envvar="STREAMQ_QUEUE", metavar="NAME", help="This queue; may be repeated."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Of the request.")]
IdsArgument = Annotated[list[str], typer.Argument(metavar="ID", help="Of the requests.")]
ExecOption = Annotated[
    str,
    typer.Option(
        "--exec",
        metavar="'PROGRAM ARGS'",
        help="Run a program instead: the records of a part on its stdin, results on stdout.",
    ),
]
LogLevelOption = Annotated[
    Level,
    typer.Option("--log-level", envvar="STREAMQ_LOG_LEVEL", case_sensitive=False, help="How much."),
]
LogFormatOption = Annotated[
    Format,
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


def url_of(given: str | None) -> str:
    """The server's URL, from the option or the environment.

    Raises:
        SettingsError: there is none.
    """
    settings = Settings.from_env()
    url = given or settings.url
    if not url:
        raise SettingsError(NO_URL)
    is_typed = given is not None and given != settings.url
    if is_typed and {"password", "ssl_password"} & Target(url).options.keys():
        _warn_once(
            "everybody on this machine can see the password in --url (ps shows it): "
            "better give it in STREAMQ_PASSWORD_FILE, STREAMQ_URL or STREAMQ_URL_FILE"
        )
    return with_login(url, settings)


@functools.cache
def _warn_once(text: str) -> None:
    render.warning(text)


@contextmanager
def connected(
    url: str | None,
    prefix: str | None,
    *,
    is_patient: bool = True,
    is_warned: bool = False,
    advice: str = "run the same command again to go on",
) -> "Generator[Protocol]":
    """The way to the server that the options or the environment name.

    ``is_warned``: it is also told what of the server should be mended.

    While it fails over or starts it is waited for: at the beginning, and if ``is_patient``
    also later. Those who are not have ways of their own to wait. ``advice``: what is told when
    it was waited for in vain.

    Raises:
        SettingsError: neither names one.
        ServerError: it cannot be used.
    """
    from streamq.driver.connection import Connection
    from streamq.protocol.protocol import Protocol

    address = url_of(url)
    settings = Settings.from_env()
    name = units.name(prefix or settings.prefix, "prefix")
    connection = Connection(address)
    with closing(connection), ExitStack() as patience:
        patience.enter_context(connection.patience(settings.patience_ms / 1e3, render.warning))
        warn = _warn_once if is_warned else len
        connection.check(is_insecure=settings.insecure, warn=warn)
        if not is_patient:
            patience.close()
        try:
            yield Protocol(connection, name)
        except (ServerBusy, ServerUnreachable) as error:
            if not is_patient or not advice:
                raise
            raise type(error)(f"{error}; {advice}") from None


@contextmanager
def naming(request_id: str) -> Generator[None]:
    """Refusals of scripts, which know no ids, say which request they are about."""
    try:
        yield
    except ProtocolError as error:
        raise type(error)(f"{request_id}: {error}") from None


def steer(
    ids: Iterable[str], url: str | None, prefix: str | None, act: "Callable[[Request], str]"
) -> None:
    """Do it to each request and say what was done. One that refuses does not stop the others."""
    from streamq.queue.client import Request

    codes = {0}
    with connected(url, prefix) as protocol:
        for request_id in dict.fromkeys(ids):
            try:
                with naming(request_id):
                    render.note(f"{request_id}: {act(Request(protocol, request_id))}")
            except (ProtocolError, InvalidValue) as error:
                render.error(str(error))
                codes.add(exit_code(error))
    if max(codes):
        raise typer.Exit(max(codes))


def exit_code(error: StreamqError) -> int:
    """What a command that ends with the error tells the shell."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, with known errors as one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        for option in _COMMON:
            kwargs.pop(option, None)
        try:
            return command(*args, **kwargs)
        except StreamqError as error:
            render.error(str(error))
            raise typer.Exit(exit_code(error)) from None
        except BrokenPipeError:
            # Whoever read our output has gone, and wants no more of it: not at our exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except OSError as error:
            render.error(str(error))
            raise typer.Exit(1) from None
        except KeyboardInterrupt as error:
            raise typer.Exit(signals.exit_code(error)) from None

    signature = inspect.signature(command)
    if "url" in signature.parameters:
        # What all commands have that speak to a server; they find it among the settings.
        extra = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in _COMMON.items()
        ]
        run.__annotations__ = command.__annotations__ | _COMMON
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), *extra]
        )
    return run
