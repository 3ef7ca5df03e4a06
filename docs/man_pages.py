"""Makes the man pages docs/man/*.1 from the commands."""

from collections.abc import Iterator
from typing import Any

from cli import panels
from cli.app import ALONE
from cli.help_text import (
    help_default_of_parameter,
    help_name_of_argument,
    help_names_of_parameter,
    help_panels_of_command,
    help_usage_of_command,
)

_FOOT = """.SH SEE ALSO
.BR streamq (1).
Every option is also explained by
.BR "streamq help" .
"""


def pages(group: Any, version: str) -> dict[str, str]:
    """Return the text of each page, by the name of its file."""
    made = {"streamq.1": _overview(group, version)}
    for name, command in group.commands.items():
        seconds = getattr(command, "commands", {})
        own = [(name, command)] if not seconds or name in ALONE else []
        for words, each in [*own, *((f"{name} {word}", one) for word, one in seconds.items())]:
            made[f"streamq-{words.replace(' ', '-')}.1"] = _page(words, each, version)
    return made


def _overview(group: Any, version: str) -> str:
    lines = [*_head("streamq", version, group.help), ".SH SYNOPSIS", ".B streamq", "COMMAND ..."]
    for panel in dict.fromkeys(str(each.rich_help_panel) for each in group.commands.values()):
        lines.append(f".SH {_quoted(panel.upper())}")
        for name, command in group.commands.items():
            if command.rich_help_panel == panel:
                lines += [".TP", f".BR {_text(f'streamq-{name}')} (1)", _text(command.short_help)]
    return "\n".join(lines) + "\n"


def _page(words: str, command: Any, version: str) -> str:
    name = f"streamq-{words.replace(' ', '-')}"
    summary, *paragraphs = (command.help or "").split("\n\n")
    lines = [*_head(name, version, summary), ".SH SYNOPSIS", f".B streamq {words}"]
    lines += [_text(help_usage_of_command(command)), ".SH DESCRIPTION", _text(summary)]
    for paragraph in paragraphs:
        lines += [".PP", _text(paragraph)]
    for title, some in help_panels_of_command(command.params).items():
        heading = "OPTIONS" if title == panels.OTHERS else title.upper()
        lines.append(f".SH {_quoted(heading)}")
        lines += [line for each in some for line in _parameter(each)]
    if command.epilog:
        lines += [".SH EXAMPLE", ".nf", _text(command.epilog), ".fi"]
    return "\n".join(lines) + "\n" + _FOOT


def _head(name: str, version: str, summary: str) -> list[str]:
    title = f'.TH {_quoted(name.upper())} 1 "" {_quoted(f"streamq {version}")}'
    return [title, ".SH NAME", f"{_text(name)} \\- {_text(summary.rstrip('.'))}"]


def _parameter(each: Any) -> Iterator[str]:
    yield ".TP"
    if each.param_type_name == "argument":
        yield f".I {_text(help_name_of_argument(each).strip('[]'))}"
        yield _text(each.help or "")
        return
    yield f".B {_text(help_names_of_parameter(each))}"
    more = [f"default: {default}"] if (default := help_default_of_parameter(each)) else []
    more += [f"variable {each.envvar}"] if each.envvar else []
    yield _text(f"{each.help or ''}{f' [{chr(59).join(more)}]' if more else ''}")


def _quoted(text: str) -> str:
    return f'"{_text(text)}"'


def _text(text: str) -> str:
    """Return text in which troff finds no commands, and dashes stay dashes."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text
