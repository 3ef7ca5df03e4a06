"""Puts the commands together.

A command's module is imported only when that command is typed, so that ``--help`` and
every other command stay quick.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer

from .context import guarded

#: Each command: its panel in the help, and what it does in one line. Its module has its name.
COMMANDS = {
    "server": ("Serve", "Start an embedded server or a real local cluster, for development."),
}


def main() -> None:
    """Run the command that was typed."""
    wanted = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    app = typer.Typer(
        name="streamq",
        help="Put a huge input through your function, on a shared fleet, and lose nothing.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, (panel, summary) in COMMANDS.items():
        command = _load(name) if name == wanted else _stub(summary)
        app.command(name, rich_help_panel=panel, short_help=summary)(command)
    app()


def _load(name: str) -> Callable[..., Any]:
    module = import_module(f".{name}", __package__)
    return guarded(getattr(module, name))


def _stub(summary: str) -> Callable[[], None]:
    def command() -> None:
        raise AssertionError("a command that was not typed was run")

    command.__doc__ = summary
    return command


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"streamq {version('streamq')}")
        raise typer.Exit


def _root(
    _: Annotated[
        bool,
        typer.Option("--version", "-V", help="Show the version.", callback=_show_version),
    ] = False,
) -> None:
    """Put a huge input through your function, on a shared fleet, and lose nothing."""
