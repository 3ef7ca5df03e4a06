"""Writes docs/reference.md (commands, settings, metrics, exit codes) and docs/python.md.

``make docs`` writes both; with ``--print`` and its name one is only shown, for the test that it is
not stale.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import typer

from cli.app import COMMANDS, application
from cli.exits import EXIT_MEANINGS
from docs import python_page
from streamq.admin import acl
from streamq.settings import FIELDS, SECRETS, Settings, variable_of
from streamq.telemetry.metrics import METRICS

FOLDER = Path(__file__).parent
#: Options that every command with a server has; they are told once.
COMMON = ("url", "prefix", "insecure", "config")
HEAD = """# Reference

This page is written by `make docs` from the code.
"""


SETTINGS = """## Settings

A setting can come from several places. The first of these that has a value counts:

1. the option of the command,
2. the environment variable,
3. the nearest `streamq.toml`, or `pyproject.toml` with a table `[tool.streamq]`, from the working
   folder upwards; or the file that `--config` or `STREAMQ_CONFIG` names,
4. `streamq/config.toml` in `XDG_CONFIG_HOME`,
5. for the URL also `REDIS_URL` and `VALKEY_URL`.

A key that is not in this table is an error. `streamq config show --origin` shows each value, and
where it came from.

"""
SETTINGS_END = """
A file has no `password`, but `password_file` and `url_file`, relative to itself.
"""
METRICS_HEAD = """## Metrics

Workers and janitors answer with these at `/metrics` of `--health-port`. Every pool and janitor of
a queue reports the same figures about that queue: take one of them, or the maximum.

"""


def text() -> str:
    """The page."""
    group: Any = typer.main.get_command(application(COMMANDS))
    sections = [HEAD, "## Commands\n", _common(group.commands["ls"])]
    for name, (panel, _) in COMMANDS.items():
        for words, command in _words(name, group.commands[name]):
            sections.append(_command(words, panel, command))
    sections += [_settings(), _exit_codes(), _metrics(), _roles()]
    return "\n".join(sections)


def _words(name: str, command: Any) -> list[tuple[str, Any]]:
    """A command by its words; of one that has second words, each of these."""
    seconds = getattr(command, "commands", {})
    return [(f"{name} {word}", second) for word, second in seconds.items()] or [(name, command)]


def _common(command: Any) -> str:
    options = [each for each in command.params if each.name in COMMON]
    return (
        "Commands that speak to a server take these options, before or after the command.\n\n"
        + _table(("option", "does"), (_option(each) for each in options))
    )


def _command(name: str, panel: str, command: Any) -> str:
    example, *paragraphs = command.help.split("\n\n")
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [
        each
        for each in command.params
        if each.param_type_name == "option" and each.name not in (*COMMON, "help")
    ]
    words = " ".join(_argument(each) for each in arguments)
    lines = [
        f"### streamq {name}\n",
        f"`streamq {name} {words}`".replace(" `", "`") + f" · {panel}\n",
    ]
    lines += [f"{paragraph}\n" for paragraph in paragraphs]
    lines += [f"```\n{example}\n```\n"]
    if options:
        lines.append(_table(("option", "does"), (_option(each) for each in options)))
    return "\n".join(lines)


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _option(option: Any) -> tuple[str, str]:
    names = ", ".join(f"`{name}`" for name in option.opts)
    metavar = option.metavar or ""
    says = option.help or ""
    says = says if says.endswith("...") else says.rstrip(".")
    default = option.default
    if option.is_flag and option.secondary_opts:
        names += "".join(f", `{name}`" for name in option.secondary_opts if name.strip())
    elif default not in (None, "", 0, (), []) and not callable(default) and "[default" not in says:
        shown = ", ".join(map(str, default)) if isinstance(default, list) else default
        says += f" (default {getattr(shown, 'value', shown)})"
    if option.envvar:
        says += f" · `{option.envvar}`"
    return f"{names} {metavar}".strip(), says.strip(" ·")


def _settings() -> str:
    rows = []
    for name, field in FIELDS.items():
        variable = f"`{variable_of(name)}`"
        if name in SECRETS:
            variable += f", `{variable_of(name)}_FILE`"
        meta = msgspec.inspect.type_info(Settings).fields  # type: ignore[attr-defined]
        says = next(each.type for each in meta if each.name == name).extra_json_schema[
            "description"
        ]
        default = field.default
        shown = f"`{str(default).lower() if isinstance(default, bool) else default}`"
        rows.append((f"`{name}`", variable, shown if default != "" else "", says.rstrip(".")))
    return SETTINGS + _table(("key", "variable", "default", "says"), rows) + SETTINGS_END


def _exit_codes() -> str:
    rows = ((str(code), meaning) for code, meaning in EXIT_MEANINGS.items())
    return "## Exit codes\n\n" + _table(("code", "means"), rows)


def _metrics() -> str:
    rows = (
        (f"`{name}`", metric.kind, metric.labels, metric.says.rstrip("."))
        for name, metric in METRICS.items()
    )
    return METRICS_HEAD + _table(("name", "kind", "labels", "says"), rows)


def _roles() -> str:
    rows = (
        (f"`{name}`", role.says, " ".join(sorted(set(role.scripts))))
        for name, role in acl.ROLES.items()
    )
    return "## Roles\n\nThe users of `streamq acl`.\n\n" + _table(
        ("user", "does", "may run the scripts"), rows
    )


def _table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(headers), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    pages = {"reference.md": text, "python.md": python_page.text}
    if "--print" in sys.argv:
        sys.stdout.write(pages[sys.argv[-1]]())
    else:
        for name, page in pages.items():
            (FOLDER / name).write_text(page())
