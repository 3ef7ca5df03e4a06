"""``streamq config``."""

import os
from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from streamq.driver.url import mask_passwords_of_url
from streamq.settings import gather_settings, settings_files, variable_of

from .. import render
from ..shared_options import ConfigOption, JsonOption


class Action(StrEnum):
    """What the command does with the settings."""

    SHOW = "show"


class Setting(msgspec.Struct, frozen=True):
    """One setting as it is shown."""

    name: str
    value: str | int | bool
    #: The variable or file it came from, or ``default``.
    origin: str


def config(
    action: Annotated[Action, typer.Argument(help="The word show: list every setting.")],
    with_origin: Annotated[
        bool, typer.Option("--origin", help="Show also where each value comes from.")
    ] = False,
    as_json: JsonOption = False,
    config_file: ConfigOption = None,
) -> None:
    """Show the settings that hold here. Passwords are not shown.

    A setting is taken from the first of these that has it: an option of the command, a variable
    STREAMQ_..., the nearest streamq.toml or pyproject.toml (its table tool.streamq), the file
    streamq/config.toml in XDG_CONFIG_HOME, and for the URL REDIS_URL and VALKEY_URL.

        streamq config show --origin
    """
    gathered = gather_settings()
    values = msgspec.structs.asdict(gathered.settings)
    values["url"] = mask_passwords_of_url(values["url"])
    for secret in ("password", "key"):
        values[secret] = "***" if values[secret] else ""
    settings = [Setting(name, values[name], gathered.origins[name]) for name in values]
    if as_json:
        render.as_json(settings)
        return
    rows = ((each.name, _setting_text(each.value), each.origin) for each in settings)
    headers = ("SETTING", "VALUE", "FROM")
    width = len(headers) if with_origin else 2
    render.data(render.table(headers[:width], [row[:width] for row in rows]))
    for path, _ in settings_files(os.environ):
        render.note(f"read {path}")
    for variable in gathered.unknown:
        render.warning(f"{variable} is no setting; see {variable_of('url')} and the others")


def _setting_text(value: str | int | bool) -> str:
    return f"{value}".lower() if isinstance(value, bool) else f"{value}"
