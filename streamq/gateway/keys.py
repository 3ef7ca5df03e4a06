"""The file with the keys of gateways: who may call, and the secret that signs tickets.

A key is ``sqk_`` and 32 random bytes. The file has only its SHA-256 digest, with which nobody can
call. All gateways of a fleet have the same file. They read it again when it has changed.
"""

import datetime
import hashlib
import os
import secrets
import stat
import time
import tomllib
from base64 import urlsafe_b64encode
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from streamq import units
from streamq.errors import InvalidValue, SettingsError
from streamq.gateway.roles import KEY_ROLES, Caller, Role

PREFIX = "sqk_"
_HEAD = """\
# Keys of streamq gateways. "streamq serve key NAME --role ROLE" adds one; delete its lines to take
# it away. The file has digests, not the keys. With the secret anybody could forge tickets and
# sessions: keep the file to its owner.
"""


class Key(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """One key, as the file has it."""

    name: str
    role: Role
    #: The digest of the key, in hex. A client certificate alone needs none.
    sha256: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$")] = ""
    #: None: every queue.
    queues: list[str] | None = None
    expires: datetime.datetime | None = None
    #: How many calls may wait at once with this key, and how many streams may be open.
    waits: Annotated[int, Meta(ge=1)] = 200
    streams: Annotated[int, Meta(ge=1)] = 20

    def is_over(self, now_s: float) -> bool:
        """Return whether the key has expired."""
        return self.expires is not None and self.expires.timestamp() <= now_s

    @property
    def caller(self) -> Caller:
        """The caller that has this key."""
        queues = None if self.queues is None else frozenset(self.queues)
        return Caller(self.name, self.role, queues, self.waits, self.streams, self.sha256)


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of the file."""

    #: The secret that signs tickets and sessions, in hex.
    secret: Annotated[str, Meta(pattern=r"^[0-9a-f]{32,}$")]
    keys: list[Key] = []


class Keys:
    """The keys of one reading of the file."""

    def __init__(self, file: KeyFile) -> None:
        self.secret = bytes.fromhex(file.secret)
        self._by_name = {key.name: key for key in file.keys}
        self._by_digest = {key.sha256: key for key in file.keys if key.sha256}

    def find(self, text: str) -> Key | None:
        """Return the key with this text; None if there is none, or if it has expired."""
        return _key_if_not_over(self._by_digest.get(digest_of_key(text)))

    def named(self, name: str) -> Key | None:
        """Return the key of that name; None if there is none, or if it has expired."""
        return _key_if_not_over(self._by_name.get(name))


def _key_if_not_over(key: Key | None) -> Key | None:
    return None if key is None or key.is_over(time.time()) else key


def digest_of_key(text: str) -> str:
    """Return the digest that the file holds of a key."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_key_file(path: Path) -> KeyFile:
    """Read the file of keys.

    Raises:
        SettingsError: it cannot be read, others may read or change it, or it says what cannot be.
    """
    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            text = stream.read().decode()
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise SettingsError(f"{path}: others may read or change it: chmod 600 {path}")
        found = msgspec.convert(tomllib.loads(text), KeyFile)
        _check_key_file(found)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except (msgspec.ValidationError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None
    except InvalidValue as error:
        raise SettingsError(f"{path}: {error}") from None
    return found


def _check_key_file(file: KeyFile) -> None:
    names = [units.name(key.name, "key") for key in file.keys]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidValue(f"there are two keys {twice}")
    for key in file.keys:
        if key.role not in KEY_ROLES:
            raise InvalidValue(f"key {key.name}: {key.role} is no role of a key")
        if key.expires is not None and key.expires.tzinfo is None:
            raise InvalidValue(f"key {key.name}: the end {key.expires} needs a time zone: ...Z")
        for queue in key.queues or ():
            units.name(queue, "queue")


def add_key(
    path: Path,
    name: str,
    role: Role,
    queues: list[str] | None = None,
    expires_s: float | None = None,
) -> str:
    """Make a key, write its digest to the file, and return it. It is kept nowhere else.

    The file is replaced in one step, and is made if there is none.

    Raises:
        InvalidValue: there is a key of that name.
        SettingsError: the file cannot be read or written.
    """
    found = read_key_file(path) if path.exists() else KeyFile(secret=secrets.token_hex(32))
    if any(key.name == name for key in found.keys):
        raise InvalidValue(f"{path} has a key {name} already: choose another name, or delete it")
    text = PREFIX + urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode()
    expires = None
    if expires_s is not None:
        moment = datetime.datetime.fromtimestamp(time.time() + expires_s, datetime.UTC)
        expires = moment.replace(microsecond=0)
    key = Key(name=name, role=role, sha256=digest_of_key(text), queues=queues, expires=expires)
    _check_key_file(msgspec.structs.replace(found, keys=[*found.keys, key]))
    before = path.read_text("utf-8") if path.exists() else f'{_HEAD}secret = "{found.secret}"\n'
    _write_key_file(path, before + _key_as_toml(key))
    return text


def _key_as_toml(key: Key) -> str:
    lines = ["", "[[keys]]", f'name = "{key.name}"', f'role = "{key.role}"']
    if key.queues is not None:
        lines.append(f"queues = {msgspec.json.encode(key.queues).decode()}")
    if key.expires is not None:
        lines.append(f"expires = {key.expires.isoformat()}")
    return "\n".join([*lines, f'sha256 = "{key.sha256}"']) + "\n"


def _write_key_file(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
        with suppress(OSError):  # the file's own group may be another, if it has one
            os.chown(new, -1, path.stat().st_gid)
        new.rename(path)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
