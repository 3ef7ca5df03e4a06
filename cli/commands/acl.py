"""``streamq acl``."""

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from streamq import units
from streamq.admin import acl as rights
from streamq.errors import InvalidValue
from streamq.settings import Settings

from .. import render
from ..shared_options import JsonOption

FILE = "users.acl"


def acl(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where the file and the passwords go.")
    ],
    queues: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="NAME", help="Only this queue; may be repeated."),
    ] = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", metavar="NAME", help="What every key begins with.")
    ] = None,
    readers_load: Annotated[
        bool,
        typer.Option(
            "--readers-load/--readers-never-load",
            help="Whether readers may load scripts; if not, run doctor --fix after a restart.",
        ),
    ] = True,
    is_keeping: Annotated[
        bool,
        typer.Option(
            "--keep", help="Allow also the scripts that the file allows now, during an upgrade."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write an ACL file with a user for each role, and a password for each user.

    Passwords that exist already are kept. The server reads the file that its setting aclfile names,
    at its start and after ACL LOAD. Users log in with STREAMQ_USERNAME and STREAMQ_PASSWORD_FILE.

        streamq acl /etc/valkey/streamq --queue default
    """
    name = units.name(prefix or Settings.from_env().prefix, "prefix")
    chosen = [units.name(queue, "queue") for queue in queues or ()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / FILE
    if is_keeping and not file.exists():
        raise InvalidValue(f"--keep: there is no {file} yet")
    kept = file.read_text("utf-8") if is_keeping else ""
    passwords = {user: _password(folder / f"{user}.password") for user in rights.USERS}
    text = rights.file_text(passwords, name, chosen, kept, readers_load=readers_load)
    _write(file, text)
    users = {user: role.says for user, role in rights.ROLES.items()}
    users |= {user: says for user, (says, _) in rights.OTHERS.items()}
    if as_json:
        render.as_json({"file": str(file), "users": users})
        return
    render.data(str(file))
    for user, says in users.items():
        render.note(f"{user:<8} {says}")


def _password(file: Path) -> str:
    """Return the password in the file; if there is no file, make one with a new password."""
    if not file.exists():
        _write(file, secrets.token_urlsafe(32) + "\n")
    password = file.read_text("utf-8").strip()
    if len(password) < 16:
        raise InvalidValue(f"{file}: the password is too short: 16 characters or more")
    return password


def _write(file: Path, text: str) -> None:
    """Replace a file in one step. From its first moment on only its owner can read it."""
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    new.rename(file)
