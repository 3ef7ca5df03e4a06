"""Settings, read once at the edge and passed down as values."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from streamq import units
from streamq.errors import InvalidValue, SettingsError
from streamq.model import PREFIX


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every knob, with its default. ``STREAMQ_LEASE_MS`` sets ``lease_ms``."""

    #: Where the server is; ``STREAMQ_URL_FILE`` names a file that holds it.
    url: str = ""
    #: What every key begins with.
    prefix: str = PREFIX
    queue: str = "default"
    #: How long a lease stands without a heartbeat, and how often that comes.
    lease_ms: int = 20_000
    beat_ms: int = 5_000
    #: How often each open request is looked at by a janitor.
    audit_ms: int = 5_000

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Settings":
        """Read the environment. An empty variable counts as none.

        Raises:
            SettingsError: a value cannot be, or a file cannot be read.
        """
        found: dict[str, str | int] = {}
        for field in msgspec.structs.fields(cls):
            variable = f"STREAMQ_{field.name.upper()}"
            if env.get(variable):
                found[field.name] = _value(variable, env[variable], field)
        if "url" not in found:
            found["url"] = _url_elsewhere(env)
        settings = msgspec.convert(found, cls)
        if settings.beat_ms >= settings.lease_ms:
            raise SettingsError(
                f"STREAMQ_BEAT_MS is {settings.beat_ms}: a lease of {settings.lease_ms} ms "
                "would be over before its heartbeat"
            )
        return settings


def _value(variable: str, text: str, field: msgspec.structs.FieldInfo) -> str | int:
    try:
        if field.type is int:
            return units.whole(int(text), variable, 1)
        return text if field.name == "url" else units.name(text, variable)
    except InvalidValue as error:
        raise SettingsError(str(error)) from None
    except ValueError:
        raise SettingsError(f"{variable} {text!r} is not a whole number") from None


def _url_elsewhere(env: Mapping[str, str]) -> str:
    """The URL from a file, or from the variables that others use."""
    if not env.get("STREAMQ_URL_FILE"):
        return env.get("REDIS_URL") or env.get("VALKEY_URL") or ""
    try:
        return Path(env["STREAMQ_URL_FILE"]).read_text("utf-8").strip()
    except OSError as error:
        raise SettingsError(f"STREAMQ_URL_FILE cannot be read: {error}") from None
    except ValueError:
        raise SettingsError("STREAMQ_URL_FILE names a file that is not text") from None
