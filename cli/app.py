"""Puts the commands together.

A command's module is imported only when that command is typed, so that ``--help`` and
every other command stay quick.
"""

import os
import sys
from collections.abc import Callable, Container, Iterable
from importlib import import_module
from typing import Annotated, Any

import typer

from .exits import guarded
from .shared_options import ConfigOption, InsecureOption, PrefixOption, UrlOption

#: Each command: its panel in the help, and its summary. Its module has the command's name.
COMMANDS = {
    "demo": ("Run", "Show it all in a few seconds, with a worker killed on purpose."),
    "run": ("Run", "Put files through a function, and collect what it returns."),
    "load": ("Run", "Split files into the parts of a request, and print its id."),
    "results": ("Run", "Write the results of a request to a file, each once."),
    "worker": ("Run", "Run the handlers of an app on parts of requests."),
    "status": ("Inspect", "Show the state of a queue, or of one request."),
    "ls": ("Inspect", "List requests, newest first."),
    "top": ("Inspect", "Watch requests, levels and workers live, in a terminal."),
    "workers": ("Inspect", "List the live workers, and what each runs now."),
    "wait": ("Inspect", "Wait until requests have ended."),
    "errors": ("Inspect", "Show which parts of a request failed, and why."),
    "set": ("Control", "Change level, limit or rate of a request that runs."),
    "pause": ("Control", "Start no more parts of requests; running parts go on."),
    "resume": ("Control", "Start parts of requests again."),
    "cancel": ("Control", "End requests now."),
    "retry": ("Control", "Run the failed parts of a request again."),
    "purge": ("Control", "Remove ended requests and their results from the server."),
    "janitor": ("Serve", "Take back the parts of dead workers, as every worker pool does, too."),
    "server": ("Serve", "Start an embedded server or a real local cluster, for development."),
    "cluster": ("Serve", "Make a cluster of running servers, or show one."),
    "doctor": ("Admin", "Find what is wrong with a server or a queue, and say what to do."),
    "config": ("Admin", "Show the settings that hold here, and where they come from."),
    "acl": ("Admin", "Write an ACL file with a user for each role."),
}
#: Commands with a second word. Each second word is a function in the module of the first.
GROUPS = {"cluster": ("create", "status")}


def main() -> None:
    """Run the command that was typed."""
    _keep_standard_numbers()
    words = sys.argv[1:]
    # If the first word is a command, only that one is put together. Else all are listed, and a word
    # that happens to be a command's name only costs its import.
    shown = words[:1] if COMMANDS.keys() & words[:1] else COMMANDS
    application(words, shown)(prog_name="streamq")


def _keep_standard_numbers() -> None:
    """Open /dev/null for each closed standard stream, so that no other file gets its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)


def application(wanted: Container[str], shown: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the application.

    Only commands in ``wanted`` can be run; the others are only listed.
    """
    app = typer.Typer(
        name="streamq",
        help="Put a huge input through your function, on a shared fleet, and lose nothing.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in shown:
        panel, summary = COMMANDS[name]
        command = _load(name) if name in wanted else _stub(summary)
        options: dict[str, Any] = {"rich_help_panel": panel, "short_help": summary}
        options["help"] = _help(command)
        if name in GROUPS and name in wanted:
            app.add_typer(_group(name), name=name, callback=command, **options)
        else:
            app.command(name, **options)(command)
    return app


def _load(name: str, second: str = "") -> Callable[..., Any]:
    module = import_module(f".commands.{name}", __package__)
    word = second or name
    # `set` is a name of Python's own, so that function is called `set_`.
    return guarded(getattr(module, word, None) or getattr(module, f"{word}_"))


def _group(name: str) -> typer.Typer:
    group = typer.Typer(no_args_is_help=True)
    for second in GROUPS[name]:
        command = _load(name, second)
        summary = (command.__doc__ or "").partition("\n")[0]
        group.command(second, short_help=summary, help=_help(command))(command)
    return group


def _stub(summary: str) -> Callable[[], None]:
    def command() -> None:
        raise AssertionError("a command that was not typed was run")

    command.__doc__ = summary
    return command


def _help(command: Callable[..., Any]) -> str:
    """Return a command's docstring as its help; an example at its end is moved to the front."""
    paragraphs = [" ".join(text.split()) for text in (command.__doc__ or "").split("\n\n")]
    if paragraphs[-1].startswith("streamq "):
        paragraphs.insert(0, paragraphs.pop())
    return "\n\n".join(paragraphs)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        import streamq

        typer.echo(f"streamq {streamq.__version__}")
        raise typer.Exit


def _root(
    url: UrlOption = None,
    prefix: PrefixOption = None,
    insecure: InsecureOption = None,
    config: ConfigOption = None,
    _: Annotated[
        bool,
        typer.Option("--version", "-V", help="Show the version.", callback=_show_version),
    ] = False,
) -> None:
    """Put a huge input through your function, on a shared fleet, and lose nothing."""
