"""Errors of commands: a known error is one line on stderr and an exit code."""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from streamq.errors import (
    AppLoadError,
    InvalidValue,
    RequestUnknown,
    ServerError,
    SettingsError,
    StreamqError,
    WaitTimeout,
)
from streamq.telemetry.logs import harmless_log_text

from . import render, signals
from .shared_options import COMMON

#: The first class that fits gives the exit code.
EXIT_CODES: tuple[tuple[type[StreamqError], int], ...] = (
    (InvalidValue, 2),
    (SettingsError, 2),
    (ServerError, 3),
    (AppLoadError, 4),
    (RequestUnknown, 5),
    (WaitTimeout, 124),
    (StreamqError, 1),
)
#: What the codes mean, with those that no error has.
EXIT_MEANINGS = {
    0: "done, or stopped politely",
    1: "finished with failures (`wait`, `run`); refused, because the request has ended (`set`, "
    "`pause`, `cancel`, ...); something is wrong (`doctor`)",
    2: "wrong usage or settings, no URL",
    3: "the server does not answer, refuses the login, may evict keys, or has no password",
    4: "the app or the function cannot be imported",
    5: "no such request, or it was cancelled",
    124: "the time given to `wait` is over",
    129: "cut short by HUP",
    130: "cut short by Ctrl-C",
    131: "cut short by QUIT (`worker`)",
    141: "the reader of the output has closed it",
    143: "cut short by TERM",
}


def exit_code(error: StreamqError) -> int:
    """Return the exit code for an error."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def guarded_command(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command, with known errors as one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        for option in COMMON:
            kwargs.pop(option, None)
        try:
            return command(*args, **kwargs)
        except StreamqError as error:
            _tell_error(error)
            raise typer.Exit(exit_code(error)) from None
        except BrokenPipeError:
            # The reader of our output has closed the pipe. /dev/null takes what Python flushes at
            # exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except OSError as error:
            render.error(str(error))
            raise typer.Exit(1) from None
        except KeyboardInterrupt as error:
            raise typer.Exit(signals.exit_code_of_signal(error)) from None

    signature = inspect.signature(command)
    if "url" in signature.parameters:
        # Options of all commands that talk to a server. They go into the settings, so the command
        # itself does not get them.
        extra = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in COMMON.items()
        ]
        run.__annotations__ = command.__annotations__ | COMMON
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), *extra]
        )
    return run


def _tell_error(error: StreamqError) -> None:
    if isinstance(error, AppLoadError):
        typer.echo(harmless_log_text(error.trace), err=True, nl=False)
    render.error(str(error))
