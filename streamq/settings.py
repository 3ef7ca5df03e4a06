"""Settings, read once at the edge and passed down as values."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from streamq.errors import SettingsError
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
        """Read the environment.

        Raises:
            SettingsError: a value has the wrong type, or a file cannot be read.
        """
        found = {
            name: env[variable]
            for name in cls.__struct_fields__
            if (variable := f"STREAMQ_{name.upper()}") in env
        }
        if "url" not in found and "STREAMQ_URL_FILE" in env:
            try:
                found["url"] = Path(env["STREAMQ_URL_FILE"]).read_text("utf-8").strip()
            except OSError as error:
                raise SettingsError(f"STREAMQ_URL_FILE cannot be read: {error}") from None
        found.setdefault("url", env.get("REDIS_URL") or env.get("VALKEY_URL") or "")
        try:
            return msgspec.convert(found, cls, strict=False)
        except msgspec.ValidationError as error:
            raise SettingsError(f"bad STREAMQ_ variable: {error}") from None
