"""What every command needs: one way to fail."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import typer

from streamq.errors import (
    InvalidValue,
    RequestUnknown,
    ServerError,
    SettingsError,
    StreamqError,
    WaitTimeout,
)

#: The first class that fits gives the exit code.
EXIT_CODES: tuple[tuple[type[StreamqError], int], ...] = (
    (InvalidValue, 2),
    (SettingsError, 2),
    (ServerError, 3),
    (RequestUnknown, 5),
    (WaitTimeout, 124),
    (StreamqError, 1),
)


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, with known errors as one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except StreamqError as error:
            typer.secho(f"streamq: {error}", err=True, fg="red")
            code = next(code for kind, code in EXIT_CODES if isinstance(error, kind))
            raise typer.Exit(code) from None
        except BrokenPipeError:
            # Whoever read our output has gone, and wants no more of it.
            sys.stderr.close()
            raise typer.Exit(141) from None

    return run
