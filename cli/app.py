"""Puts the commands together.

A command's module is imported only when that command is typed, so that ``--help`` and
every other command stay quick.
"""

import os
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from .exits import guarded_command
from .help_text import CommandWithHelp, GroupWithHelp
from .shared_options import ConfigOption, InsecureOption, PrefixOption, UrlOption

#: Each command: its panel in the help, and its summary. Its module has the command's name.
COMMANDS = {
    "demo": ("Run", "Show it all in a few seconds, with a worker killed on purpose."),
    "run": ("Run", "Put files through a function, and collect what it returns."),
    "load": ("Run", "Split files into the parts of a request, and print its id."),
    "results": ("Run", "Write the results of a request to a file, each once."),
    "verify": ("Run", "Compare outputs with the manifests that were written with them."),
    "worker": ("Run", "Run the handlers of an app on parts of requests."),
    "status": ("Inspect", "Show the state of a queue, or of one request."),
    "ls": ("Inspect", "List requests, newest first."),
    "top": ("Inspect", "Watch requests, levels and workers live, in a terminal."),
    "workers": ("Inspect", "List the live workers, and what each runs now."),
    "wait": ("Inspect", "Wait until requests have ended."),
    "find": ("Inspect", "Tell where one record is, and what became of it."),
    "errors": ("Inspect", "Show which parts of a request failed, and why."),
    "report": ("Inspect", "Write a request as one HTML file, with its failures."),
    "set": ("Control", "Change level, limit, rate or weight of a request that runs."),
    "pause": ("Control", "Start no more parts of requests; running parts go on."),
    "resume": ("Control", "Start parts of requests again."),
    "release": ("Control", "Let all parts of requests run that wait after a canary."),
    "cancel": ("Control", "End requests now."),
    "retry": ("Control", "Run the failed parts of a request again."),
    "purge": ("Control", "Remove ended requests and their results from the server."),
    "janitor": ("Serve", "Take back the parts of dead workers, as every worker pool does, too."),
    "serve": ("Serve", "Serve workers and loaders in any language, over HTTP and JSON."),
    "server": ("Serve", "Start an embedded server or a real local cluster, for development."),
    "cluster": ("Serve", "Make a cluster of running servers, or show one."),
    "doctor": ("Admin", "Find what is wrong with a server or a queue, and say what to do."),
    "config": ("Admin", "Show the settings that hold here, and where they come from."),
    "acl": ("Admin", "Write an ACL file with a user for each role."),
    "completion": ("Admin", "Let the shell complete commands, options and ids."),
    "help": ("Admin", "List the commands, or explain one."),
}
#: Commands with a second word. Each second word is a function in the module of the first.
GROUPS = {"cluster": ("create", "status"), "serve": ("key",)}
#: Those of them that do something by themselves, too.
ALONE = ("serve",)
#: Options of ``run`` that take an id, or the last run if no id follows.
_OF_A_RUN = ("--resume", "--retry-failed")


def main() -> None:
    """Run the command that was typed."""
    _keep_standard_descriptors()
    words = command_with_last(sys.argv[1:])
    # If the first word is a command, only that one is put together. Else all are listed, and a word
    # that happens to be a command's name only costs its import.
    shown = words[:1] if COMMANDS.keys() & words[:1] else COMMANDS
    application(words, shown)(words, prog_name="streamq")


def command_with_last(words: Sequence[str]) -> list[str]:
    """Return the words of a command, with the last run where an option of ``run`` names none."""
    found = list(words)
    if found[:1] == ["run"]:
        for index in range(len(found) - 1, 0, -1):
            if found[index] in _OF_A_RUN and (found[index + 1 :] or ["-"])[0].startswith("-"):
                found.insert(index + 1, "last")
    return found


def _keep_standard_descriptors() -> None:
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
        cls=GroupWithHelp,
        help="Put a huge input through your function, on a shared fleet, and lose nothing.",
        no_args_is_help=True,
        add_completion=False,
        # Errors and help are plain text: importing rich takes longer than all the rest.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root_command)
    for name in shown:
        panel, summary = COMMANDS[name]
        command = _load_command(name) if name in wanted else _command_stub(summary)
        options: dict[str, Any] = {"rich_help_panel": panel, "short_help": summary}
        options["help"], options["epilog"] = _command_help(command)
        if name in GROUPS and name in wanted:
            app.add_typer(
                _command_group(name), name=name, cls=GroupWithHelp, callback=command, **options
            )
        else:
            app.command(name, cls=CommandWithHelp, **options)(command)
    return app


def _load_command(name: str, second: str = "") -> Callable[..., Any]:
    module = import_module(f".commands.{name}", __package__)
    word = second or name
    # `set` is a name of Python's own, so that function is called `set_`.
    return guarded_command(getattr(module, word, None) or getattr(module, f"{word}_"))


def _command_group(name: str) -> typer.Typer:
    is_alone = name in ALONE
    group = typer.Typer(
        no_args_is_help=not is_alone, invoke_without_command=is_alone, rich_markup_mode=None
    )
    for second in GROUPS[name]:
        command = _load_command(name, second)
        summary = (command.__doc__ or "").partition("\n")[0]
        says, example = _command_help(command)
        group.command(second, cls=CommandWithHelp, short_help=summary, help=says, epilog=example)(
            command
        )
    return group


def _command_stub(summary: str) -> Callable[[], None]:
    def command() -> None:
        raise AssertionError("a command that was not typed was run")

    command.__doc__ = summary
    return command


def _command_help(command: Callable[..., Any]) -> tuple[str, str]:
    """Return a command's docstring as its help, and the example that stands at its end."""
    paragraphs = [" ".join(text.split()) for text in (command.__doc__ or "").split("\n\n")]
    example = paragraphs.pop() if paragraphs[-1].startswith("streamq ") else ""
    return "\n\n".join(paragraphs), example


def _show_version(is_asked: bool) -> None:
    if is_asked:
        import streamq

        typer.echo(f"streamq {streamq.__version__}")
        raise typer.Exit


def _root_command(
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
