"""Writes the help of commands: plain text in panels. Importing rich would double its time."""

import inspect
import shutil
import textwrap
from collections.abc import Iterable
from enum import Enum
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from . import panels, render

#: Where explanations begin, and the widest line: longer ones are hard to read.
_COLUMN = 30
_WIDEST = 100


class CommandWithHelp(TyperCommand):
    """A command whose help is in panels."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the command."""
        formatter.write(_help_in_words(self, ctx))


class GroupWithHelp(TyperGroup):
    """A command with commands of its own, which its help lists."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the group."""
        formatter.write(_help_in_words(self, ctx))


def help_names_of_parameter(option: Any) -> str:
    """Return the names of an option and its value: ``-o, --output FILE``."""
    names = sorted(
        [*option.opts, *filter(str.strip, option.secondary_opts)], key=_help_leading_dashes
    )
    return ", ".join(names) + (f" {value}" if (value := help_value_of_parameter(option)) else "")


def help_value_of_parameter(option: Any) -> str:
    """Return what stands for the value of an option; "" for one without."""
    if option.metavar or option.is_flag:
        return option.metavar or ""
    choices = getattr(option.type, "choices", None)
    if choices:
        return "|".join(str(getattr(each, "value", each)) for each in choices)
    return "N" if option.type.name.startswith("int") else "TEXT"


def help_default_of_parameter(option: Any) -> str:
    """Return the default of an option, as it is typed or in words; "" if there is none to tell."""
    if isinstance(option.show_default, str):
        return option.show_default
    default = option.default
    if option.is_flag:
        pair = [name for name in option.secondary_opts if name.strip()]
        return (option.opts[0] if default else pair[0]) if pair else ""
    is_told = default not in (None, "", []) and not inspect.isfunction(default)
    if not is_told or option.show_default is False:
        return ""
    values = default if isinstance(default, list | tuple) else [default]
    return ", ".join(str(each.value if isinstance(each, Enum) else each) for each in values)


def help_panels_of_command(params: Iterable[Any]) -> dict[str, list[Any]]:
    """Return options and arguments by panel, in the order of the panels."""
    found: dict[str, list[Any]] = {}
    for each in params:
        if not getattr(each, "hidden", False):
            usual = panels.OTHERS if each.param_type_name == "option" else panels.ARGUMENTS
            found.setdefault(getattr(each, "rich_help_panel", None) or usual, []).append(each)
    return {panel: found[panel] for panel in panels.ORDER if panel in found}


def help_name_of_argument(argument: Any) -> str:
    """Return an argument as the usage shows it: ``ID``, ``[ID]`` or ``FILE...``."""
    name = str(argument.metavar or argument.name.upper()).strip("[]")
    name += "..." if argument.nargs == -1 and not name.endswith("...") else ""
    return name if argument.required else f"[{name}]"


def help_usage_of_command(command: Any) -> str:
    """Return what may follow the command's words."""
    arguments = [
        help_name_of_argument(each) for each in command.params if each.param_type_name == "argument"
    ]
    seconds = ["COMMAND ..."] if getattr(command, "commands", None) else []
    return " ".join(["[OPTIONS]", *arguments, *seconds])


def _help_in_words(command: Any, ctx: typer.Context) -> str:
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    lines = [f"Usage: {ctx.command_path} {help_usage_of_command(command)}", ""]
    for paragraph in (command.help or "").split("\n\n"):
        lines += [*textwrap.wrap(paragraph, width, break_on_hyphens=False), ""]
    if command.epilog:
        lines += [render.heading("Example:"), f"  {command.epilog}", ""]
    params = help_panels_of_command(command.get_params(ctx))
    named = {name: [_help_row_of_parameter(each) for each in some] for name, some in params.items()}
    listed: dict[str, list[tuple[str, str]]] = {}
    for name, each in getattr(command, "commands", {}).items():
        panel = each.rich_help_panel if isinstance(each.rich_help_panel, str) else "Commands"
        listed.setdefault(panel, []).append((name, each.short_help or ""))
    for title, rows in (listed | named).items():
        lines += [render.heading(f"{title}:"), *_help_columns(rows, width), ""]
    return "\n".join(lines[:-1])


def _help_row_of_parameter(param: Any) -> tuple[str, str]:
    """Return a parameter, and what it does with its default and its variable."""
    if param.param_type_name == "argument":
        return help_name_of_argument(param).strip("[]"), param.help or ""
    names = help_names_of_parameter(param)
    more = []
    if default := help_default_of_parameter(param):
        more.append(f"default: {default}")
    if param.envvar:
        more.append(f"variable {param.envvar}")
    if param.required:
        more.append("required")
    says = f"{param.help or ''} [{'; '.join(more)}]" if more else param.help or ""
    return names, says.strip()


def _help_columns(rows: Iterable[tuple[str, str]], width: int) -> Iterable[str]:
    rows = list(rows)
    column = min(_COLUMN, 4 + max(len(name) for name, _ in rows))
    for name, says in rows:
        wrapped = textwrap.wrap(says, max(20, width - column), break_on_hyphens=False) or [""]
        if len(name) + 4 > column:
            yield f"  {name}"
        else:
            yield f"  {name:<{column - 2}}{wrapped.pop(0)}".rstrip()
        yield from (f"{'':<{column}}{line}" for line in wrapped)


def _help_leading_dashes(name: str) -> int:
    return 2 if name.startswith("--") else 1
