"""``streamq help``."""

from typing import Annotated

import typer


def help_(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]", help="The command; if not given, all are listed."),
    ] = None,
) -> None:
    """List the commands, or explain one: the same as COMMAND --help.

    streamq help run
    """
    from ..app import application

    typed = words or []
    application(typed)([*typed, "--help"], prog_name="streamq")
