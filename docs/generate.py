"""Writes docs/reference.md (commands, settings, metrics, exit codes), docs/python.md,
docs/modules.md, the man pages in docs/man, and cli/words.json, from which shells complete.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import typer

import streamq
from cli import panels
from cli.app import ALONE, COMMANDS, application
from cli.exits import EXIT_MEANINGS
from cli.help_text import (
    help_default_of_parameter,
    help_name_of_argument,
    help_panels_of_command,
    help_value_of_parameter,
)
from docs import man_pages as man
from docs import modules_page, python_page
from streamq.admin import acl
from streamq.gateway import openapi
from streamq.gateway.routes import ROUTES
from streamq.settings import FIELDS, SECRETS, Settings, variable_of
from streamq.telemetry.metrics import METRICS

FOLDER = Path(__file__).parent
OPENAPI = FOLDER.parent / "proto" / "openapi.json"
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

A time in `..._ms` is milliseconds, or has a unit: `20s`. A key that is not in this table is an
error. `streamq config show --origin` shows each value, and where it came from.

"""
SETTINGS_END = """
A file has no `password`, but `password_file` and `url_file`, relative to itself.
"""
UNITS = """## Times and sizes

A TIME is a number with a unit: `500ms`, `90s`, `5m`, `1.5h`, `7d`. Words will do (`90 min`,
`2 days`), and several amounts, the largest first: `1h30m`. Without a unit it is seconds.

A SIZE is a number with a unit. `k`, `M` and `G` are the same as `KiB`, `MiB` and `GiB`: `64k` is
65,536 bytes. `KB`, `MB` and `GB` are powers of 1,000. Without a unit it is bytes.

A rate is a number per second, minute or hour: `100/s`, `30/m`, `1000/h`.
"""
ROUTES_HEAD = """## Routes of the gateway

What `streamq serve` answers ([the gateway](gateway.md)). A running gateway tells all of it, with
the members of each body, at `/v1/openapi.json`; `proto/openapi.json` in the checkout is a copy.

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
    sections += [UNITS, _settings(), _exit_codes(), _routes(), _metrics(), _roles()]
    return "\n".join(sections)


def _words(name: str, command: Any) -> list[tuple[str, Any]]:
    """A command by its words; of one that has second words, each of these."""
    seconds = getattr(command, "commands", {})
    own = [(name, command)] if not seconds or name in ALONE else []
    return own + [(f"{name} {word}", second) for word, second in seconds.items()]


def _common(command: Any) -> str:
    options = [each for each in command.params if each.name in COMMON]
    return (
        "Commands that speak to a server take these options, before or after the command.\n\n"
        + _table(("option", "does"), (_option(each) for each in options))
    )


def _command(name: str, panel: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [
        each
        for each in command.params
        if each.param_type_name == "option" and each.name not in (*COMMON, "help")
    ]
    words = " ".join(help_name_of_argument(each) for each in arguments)
    lines = [
        f"### streamq {name}\n",
        f"`streamq {name} {words}`".replace(" `", "`") + f" · {panel}\n",
    ]
    lines += [f"{paragraph}\n" for paragraph in command.help.split("\n\n")]
    lines += [f"```\n{command.epilog}\n```\n"]
    rows = [
        (f"`{help_name_of_argument(each).strip('[]')}`", each.help.rstrip("."))
        for each in arguments
    ]
    if rows:
        lines.append(_table(("argument", "is"), rows))
    for title, some in help_panels_of_command(options).items():
        head = "option" if title == panels.OTHERS else f"option · {title}"
        lines.append(_table((head, "does"), (_option(each) for each in some)))
    return "\n".join(lines)


def _option(option: Any) -> tuple[str, str]:
    names = ", ".join(
        f"`{name}`" for name in (*option.opts, *option.secondary_opts) if name.strip()
    )
    says = (option.help or "").rstrip(".")
    if default := help_default_of_parameter(option):
        says += f" (default {default})"
    if option.envvar:
        says += f" · `{option.envvar}`"
    return f"{names} {help_value_of_parameter(option)}".strip(), says


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


def _routes() -> str:
    rows = (
        (
            f"`{route.method} {route.path}`",
            route.role.value,
            route.summary.rstrip("."),
            ", ".join(f"`{name}`: {param.says}" for name, param in route.query.items()),
        )
        for route in ROUTES
    )
    return ROUTES_HEAD + _table(("route", "role", "does", "query"), rows)


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


def words() -> str:
    """The words of all commands, for completion in a shell: options, and what they take."""
    group: Any = typer.main.get_command(application(COMMANDS))
    table = {}
    for name in COMMANDS:
        for typed, command in _words(name, group.commands[name]):
            options: dict[str, str] = {}
            arguments = []
            for each in command.params:
                if each.param_type_name == "argument":
                    arguments.append(help_name_of_argument(each).strip("[].").removesuffix("..."))
                else:
                    names = filter(str.strip, (*each.opts, *each.secondary_opts))
                    options |= dict.fromkeys(names, help_value_of_parameter(each))
            table[typed] = {"arguments": arguments, "options": options | {"--help": ""}}
    return json.dumps(table, indent=1) + "\n"


def man_pages() -> dict[str, str]:
    """The man pages, by the names of their files."""
    group: Any = typer.main.get_command(application(COMMANDS))
    return man.pages(group, streamq.__version__)


def generated() -> dict[Path, str]:
    """Every file that is made from the code."""
    return {
        FOLDER / "reference.md": text(),
        FOLDER / "python.md": python_page.text(),
        FOLDER / "modules.md": modules_page.text(),
        FOLDER.parent / "cli" / "words.json": words(),
        OPENAPI: openapi.encoded_openapi(ROUTES, "1").decode() + "\n",
        **{FOLDER / "man" / name: page for name, page in man_pages().items()},
    }


if __name__ == "__main__":
    for path, made in generated().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(made)
