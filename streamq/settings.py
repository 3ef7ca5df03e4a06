"""Settings: gathered from options, variables and files.

A value comes from the first of these that has one: an option of the command, a variable
``STREAMQ_...``, the project's file, the user's file, a variable that other programs use too (for
the URL only), the default. The project's file is the nearest ``streamq.toml``, or
``pyproject.toml`` with its table ``[tool.streamq]``, from the working directory upwards.

``Settings.from_env`` reads the variables and files anew at each call. Commands call it, and so do
the classes and functions that a Python program begins with, such as ``Client``. Three modules below
them call it for times that their callers do not pass on: ``protocol/connecting.py``,
``worker/options.py`` and ``worker/service.py``. ``runs/options.py`` calls it for the team.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import msgspec

from streamq import units
from streamq.errors import InvalidValue, SettingsError
from streamq.model import PREFIX

#: Settings that hold a secret. Each may be read from a file that another setting names, such as
#: ``password_file``.
SECRETS = ("url", "password", "key")
#: Variables that begin with ``STREAMQ_`` and are no settings.
_OTHER_VARIABLES = (
    "STREAMQ_CONFIG",
    "STREAMQ_SERVER_BIN",
    "STREAMQ_WEBHOOK_SECRET",
    "STREAMQ_TEST_",
    "STREAMQ_BENCH_",
    "STREAMQ_GATEWAY",
)
#: Settings that are names, and what checks them.
_CHECKS = {"prefix": units.name, "queue": units.name, "team": units.team}
_TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def _described_setting(text: str) -> Any:
    return msgspec.Meta(description=text)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Hold every setting, with its default. ``STREAMQ_LEASE_MS`` sets ``lease_ms``.

    Example:
        url = Settings.from_env().full_url
    """

    url: Annotated[str, _described_setting("The URL of the server.")] = ""
    username: Annotated[
        str, _described_setting("The user to log in as, if the URL names none.")
    ] = ""
    password: Annotated[str, _described_setting("The user's password, if the URL has none.")] = ""
    key: Annotated[str, _described_setting("The key for a gateway, if the URL is one's.")] = ""
    tls_ca_file: Annotated[
        str, _described_setting("File with the CA certificates that the server's is checked with.")
    ] = ""
    tls_cert_file: Annotated[
        str, _described_setting("File with the certificate that we show to the server.")
    ] = ""
    tls_key_file: Annotated[str, _described_setting("File with the key of that certificate.")] = ""
    insecure: Annotated[
        bool, _described_setting("Use a server on another machine that asks for no password.")
    ] = False
    prefix: Annotated[str, _described_setting("What every key begins with.")] = PREFIX
    queue: Annotated[str, _described_setting("The queue of commands that name none.")] = "default"
    team: Annotated[
        str,
        _described_setting("The team whose users we are: ids of new requests begin with its name."),
    ] = ""
    patience_ms: Annotated[
        int, _described_setting("How long a command waits for a server that fails over or starts.")
    ] = 30_000
    lease_ms: Annotated[
        int, _described_setting("How long a lease holds without being renewed.")
    ] = 20_000
    beat_ms: Annotated[
        int, _described_setting("Most time between heartbeats; 4 s with leases of 20 s.")
    ] = 5_000
    audit_ms: Annotated[
        int, _described_setting("Time between two looks of a janitor at an open request.")
    ] = 5_000
    processes: Annotated[int, _described_setting("Processes of a worker pool.")] = 1
    concurrency: Annotated[int, _described_setting("Slots of each process.")] = 1
    grace: Annotated[
        str, _described_setting("Time for running parts to end after a stop signal.")
    ] = "25s"
    health_port: Annotated[
        str, _described_setting("Address of the health and metrics pages: [HOST:]PORT.")
    ] = ""
    log_level: Annotated[
        str, _described_setting("Lowest level that is logged: debug, info, warning or error.")
    ] = "info"
    log_format: Annotated[str, _described_setting("Form of log lines: text, json or auto.")] = (
        "text"
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ, cwd: Path | None = None) -> "Settings":
        """Return the settings that hold here, from variables and files.

        Raises:
            SettingsError: a value or a key is not allowed, or a file cannot be read.
        """
        return gather_settings(env, cwd).settings

    @property
    def full_url(self) -> str:
        """The URL, with the user, password and certificates that were set beside it."""
        return url_with_login(self.url, self)


class Gathered(msgspec.Struct, frozen=True):
    """The settings, and where each came from."""

    settings: Settings
    #: For each setting: ``STREAMQ_URL``, the path of a file, or ``default``.
    origins: dict[str, str]
    #: Variables that begin with ``STREAMQ_`` and name no setting.
    unknown: list[str]


FIELDS = {field.name: field for field in msgspec.structs.fields(Settings)}


def variable_of(name: str) -> str:
    """Return the name of the environment variable for a setting."""
    return f"STREAMQ_{name.upper()}"


def gather_settings(env: Mapping[str, str] = os.environ, cwd: Path | None = None) -> Gathered:
    """Return every setting and where it came from. An empty variable counts as not set.

    Raises:
        SettingsError: a value or a key is not allowed, or a file cannot be read.
    """
    sources = [
        _settings_from_variables(env),
        *(_settings_from_file(*file) for file in settings_files(env, cwd)),
        _url_setting_from_other_programs(env),
        {name: (field.default, "default") for name, field in FIELDS.items()},
    ]
    merged: dict[str, tuple[Any, str]] = {}
    for source in reversed(sources):
        merged |= source
    origins = {name: origin for name, (_, origin) in merged.items()}
    settings = msgspec.convert({name: value for name, (value, _) in merged.items()}, Settings)
    if settings.beat_ms >= settings.lease_ms:
        raise SettingsError(
            f"{_setting_named('beat_ms', origins)} is {settings.beat_ms}: give less than lease_ms "
            f"({settings.lease_ms}), or leases end before their heartbeat comes"
        )
    return Gathered(settings, origins, _unknown_setting_variables(env))


def settings_files(
    env: Mapping[str, str], cwd: Path | None = None
) -> list[tuple[Path, dict[str, Any]]]:
    """Return the files that settings are read from, and their content. The first one wins."""
    found = []
    if env.get("STREAMQ_CONFIG"):
        path = Path(env["STREAMQ_CONFIG"])
        found.append((path, _settings_table(path, _parsed_settings_file(path))))
    elif project := _nearest_settings_file(cwd or Path.cwd()):
        found.append(project)
    home = env.get("XDG_CONFIG_HOME") or (f"{env['HOME']}/.config" if env.get("HOME") else "")
    if home and (path := Path(home, "streamq", "config.toml")).is_file():
        found.append((path, _parsed_settings_file(path)))
    return found


def url_with_login(url: str, settings: Settings) -> str:
    """Return the URL with user, password and certificates added where it has none itself."""
    if not url or "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    netloc, slash, path = rest.partition("/")
    login, at, host = netloc.rpartition("@")
    has_password = ":" in login or "password=" in url
    if settings.password and not has_password and scheme != "local":
        user = login if at else quote(settings.username, safe="")
        netloc = f"{user}:{quote(settings.password, safe='')}@{host}"
    options = {
        "ssl_ca_certs": settings.tls_ca_file,
        "ssl_certfile": settings.tls_cert_file,
        "ssl_keyfile": settings.tls_key_file,
    }
    missing = {name: v for name, v in options.items() if v and f"{name}=" not in url}
    added = urlencode(missing, safe="/")
    whole = f"{scheme}://{netloc}{slash}{path}"
    is_tls = scheme.partition("+")[0] in ("rediss", "valkeys")
    if not added or not is_tls:
        return whole
    return f"{whole}{'&' if '?' in whole else '?'}{added}"


def _settings_from_variables(env: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for name in FIELDS:
        variable = variable_of(name)
        if env.get(variable):
            found[name] = _setting_value(name, env[variable], variable), variable
        elif name in SECRETS and env.get(f"{variable}_FILE"):
            origin = f"{variable}_FILE"
            found[name] = _secret_setting_from_file(Path(env[origin]), origin), origin
    return found


def _url_setting_from_other_programs(env: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return the URL from the variables that other programs use too."""
    named = next((name for name in ("REDIS_URL", "VALKEY_URL") if env.get(name)), None)
    return {"url": (env[named], named)} if named else {}


def _settings_from_file(path: Path, table: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for key, value in table.items():
        name = key.removesuffix("_file") if key.removesuffix("_file") in SECRETS else key
        what = f"{key} in {path}"
        if name not in FIELDS:
            raise SettingsError(f"{path}: there is no setting {key!r}{_nearest_setting(key)}")
        if key in ("password", "key"):
            raise SettingsError(
                f"{path}: others may read this file, so it must not hold a {key}: "
                f"put it into a file of its own and name that with {key}_file"
            )
        if name != key:
            found[name] = _secret_setting_from_file(path.parent / str(value), what), str(path)
        else:
            found[name] = _setting_value(name, value, what), str(path)
    return found


def _nearest_settings_file(start: Path) -> tuple[Path, dict[str, Any]] | None:
    for folder in (start, *start.parents):
        own, project = folder / "streamq.toml", folder / "pyproject.toml"
        if own.is_file():
            return own, _parsed_settings_file(own)
        if project.is_file():
            table = _settings_table(project, _parsed_settings_file(project))
            return (project, table) if table else None
    return None


def _settings_table(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in a parsed file: the whole file, or a table of ``pyproject.toml``."""
    if path.name != "pyproject.toml":
        return document
    table = document.get("tool", {}).get("streamq", {})
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: tool.streamq is not a table")
    return table


def _parsed_settings_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None


def _nearest_setting(key: str) -> str:
    near = difflib.get_close_matches(key, [*FIELDS, *(f"{name}_file" for name in SECRETS)], 1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(FIELDS)}"


def _unknown_setting_variables(env: Mapping[str, str]) -> list[str]:
    known = {variable_of(name) for name in FIELDS}
    known |= {f"{variable_of(name)}_FILE" for name in SECRETS}
    return sorted(
        name
        for name in env
        if name.startswith("STREAMQ_")
        and name not in known
        and not name.startswith(_OTHER_VARIABLES)
    )


def _setting_named(name: str, origins: Mapping[str, str]) -> str:
    origin = origins[name]
    return origin if origin.startswith("STREAMQ_") else f"{name} of {origin}"


def _setting_value(name: str, value: Any, what: str) -> str | int | bool:
    """Return a value in the type of its setting, from text or from TOML."""
    kind = type(FIELDS[name].default)
    try:
        if kind is bool:
            return _setting_truth(value, what)
        if kind is int:
            return units.whole(_setting_number(name, value, what), what, 1)
        if name == "health_port" and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise SettingsError(f"{what} is not text")
        check = _CHECKS.get(name)
        return check(value, what) if check else value
    except InvalidValue as error:
        raise SettingsError(str(error)) from None
    except ValueError:
        raise SettingsError(f"{what} {value!r} is not a whole number") from None


def _setting_number(name: str, value: Any, what: str) -> Any:
    """Return a number that is given as text; a time may have a unit, and is in ms without one."""
    if not isinstance(value, str):
        return value
    if name.endswith("_ms") and value.strip()[-1:].isalpha():
        return units.duration_ms(value, what)
    return int(value)


def _setting_truth(value: Any, what: str) -> bool:
    truth = value if isinstance(value, bool) else _TRUTHS.get(str(value).lower())
    if truth is None:
        raise SettingsError(f"{what} {value!r} is neither true nor false")
    return truth


def _secret_setting_from_file(path: Path, what: str) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError as error:
        raise SettingsError(f"{what} cannot be read: {error}") from None
    except ValueError:
        raise SettingsError(f"{what} names a file that is not text") from None
