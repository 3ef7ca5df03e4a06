"""What every command needs: the options that several have, a connection, one way to fail.

The driver is imported by those functions that use it: ``--help`` does not wait for it.
"""

import functools
import os
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from streamq import units
from streamq.errors import (
    InvalidValue,
    ProtocolError,
    RequestUnknown,
    ServerError,
    SettingsError,
    StreamqError,
    WaitTimeout,
)
from streamq.model import WorkerDetails
from streamq.settings import Settings
from streamq.target import Target

from . import render
from .logs import Format, Level

if TYPE_CHECKING:
    from streamq.client import Request
    from streamq.protocol import Protocol

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


def _inherited(
    context: typer.Context, option: typer.CallbackParam, value: str | None
) -> str | None:
    """The option's value: it may stand before the command as well as behind it."""
    source = context.get_parameter_source(option.name or "")
    if context.parent is None or (source is not None and source.name == "COMMANDLINE"):
        return value
    return context.parent.params.get(option.name or "", value)


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


def url_of(given: str | None) -> str:
    """The server's URL, from the option or the environment.

    Raises:
        SettingsError: there is none.
    """
    url = given or Settings.from_env().url
    if not url:
        raise SettingsError(NO_URL)
    is_typed = given is not None and given != os.environ.get("STREAMQ_URL")
    if is_typed and {"password", "ssl_password"} & Target(url).options.keys():
        render.warning(
            "everybody on this machine can see the password in --url (ps shows it): "
            "better give the URL in STREAMQ_URL or STREAMQ_URL_FILE"
        )
    return url


@contextmanager
def connected(url: str | None, prefix: str | None) -> "Generator[Protocol]":
    """The way to the server that the options or the environment name.

    Raises:
        SettingsError: neither names one.
        ServerError: it cannot be used.
    """
    from streamq.connection import Connection
    from streamq.protocol import Protocol

    address = url_of(url)
    name = units.name(prefix or Settings.from_env().prefix, "prefix")
    connection = Connection(address)
    try:
        connection.check()
        yield Protocol(connection, name)
    finally:
        connection.close()


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
    from streamq.client import Request

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


def fleet(protocol: "Protocol", queue: str) -> list[WorkerDetails]:
    """The live workers of a queue, by name."""
    found = []
    for name, details in sorted(protocol.workers(units.name(queue, "queue")).items()):
        try:
            found.append(msgspec.json.decode(details, type=WorkerDetails))
        except (ValueError, RecursionError):
            # It lives, and is of a version that says other things of itself.
            found.append(WorkerDetails(name=name, queue=queue))
    return found


def exit_code(error: StreamqError) -> int:
    """What a command that ends with the error tells the shell."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, with known errors as one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
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
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return run
