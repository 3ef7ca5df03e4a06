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
        Path, typer.Argument(metavar="FOLDER", help="Folder for the file and the passwords.")
    ],
    queues: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="NAME", help="Allow only this queue; may be repeated."),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            "--prefix",
            metavar="NAME",
            help="Begin every key in the server with this name.",
            show_default="sq",
        ),
    ] = None,
    team: Annotated[
        str | None,
        typer.Option(
            "--team",
            metavar="NAME",
            help="Add users who may touch only this team's requests: their ids begin with NAME-.",
        ),
    ] = None,
    only_janitors_load: Annotated[
        bool,
        typer.Option(
            "--only-janitors-load",
            help="Let no role load scripts but janitor; then a janitor must run.",
        ),
    ] = False,
    readers_load: Annotated[
        bool,
        typer.Option(
            "--readers-load/--readers-never-load",
            help="Whether readers may load scripts; if not, run a janitor, or doctor --fix after a "
            "restart.",
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

    With --team the command adds users such as shop-worker to the file. They may touch the team's
    queue (the queue of its name, or those of --queue) and the team's requests, and no others.
    Programs of the team set STREAMQ_TEAM, so that new requests get an id of the team.

        streamq acl /etc/valkey/streamq --queue default
        streamq acl /etc/valkey/streamq --team shop
    """
    chosen = [units.name(queue, "queue") for queue in queues or ()]
    scope = rights.AclScope(
        prefix=units.name(prefix or Settings.from_env().prefix, "prefix"),
        queues=tuple(chosen or ([team] if team else [])),
        team=units.team(team, "--team") if team is not None else "",
        loading=_acl_roles_that_load_scripts(
            only_janitors=only_janitors_load, readers=readers_load
        ),
    )
    file = folder / FILE
    before = file.read_text("utf-8") if file.exists() else ""
    if is_keeping and not before:
        raise InvalidValue(f"--keep: there is no {file} yet")
    if scope.team:
        _check_acl_team(scope.team, before, file)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    passwords = {user: _acl_password_of_file(folder / f"{user}.password") for user in scope.users}
    _replace_acl_file(file, rights.acl_file_text(passwords, scope, before, is_keeping=is_keeping))
    users = {user: _acl_comment_of_role(user) for user in scope.users}
    if as_json:
        render.as_json({"file": str(file), "users": users})
        return
    render.data(str(file))
    width = max(map(len, users))
    for user, says in users.items():
        render.note(f"{user:<{width}} {says}")
    if scope.team:
        variables = f"STREAMQ_TEAM={team} STREAMQ_QUEUE={scope.queues[0]}"
        render.note(f"programs of the team need {variables}")


def _acl_roles_that_load_scripts(*, only_janitors: bool, readers: bool) -> tuple[str, ...]:
    """Return the roles that may load scripts."""
    if only_janitors:
        return (rights.JANITOR,)
    return tuple(name for name, role in rights.ROLES.items() if readers or not role.only_looks)


def _check_acl_team(team: str, before: str, file: Path) -> None:
    """Make sure that the team's ids are not those of another team, and that there is an admin."""
    if not before:
        raise InvalidValue(
            f"--team adds users to {file}, which is not there yet: run streamq acl {file.parent} "
            "first, for admin and the users that see every team"
        )
    for other in sorted(rights.teams_in_acl_file(before) - {team}):
        short, long = sorted((team, other), key=len)
        if long.startswith(units.id_head(short)):
            raise InvalidValue(
                f"--team {team}: ids of {long} begin with {units.id_head(short)}, as those of "
                f"{short} do; give one of them another name"
            )


def _acl_comment_of_role(user: str) -> str:
    role, _ = rights.role_of_acl_user(user)
    return rights.ROLES[role].says if role else rights.OTHERS[user][0]


def _acl_password_of_file(file: Path) -> str:
    """Return the password in the file; if there is no file, make one with a new password."""
    if not file.exists():
        _replace_acl_file(file, secrets.token_urlsafe(32) + "\n")
    password = file.read_text("utf-8").strip()
    if len(password) < 16:
        raise InvalidValue(f"{file}: the password is too short: 16 characters or more")
    return password


def _replace_acl_file(file: Path, text: str) -> None:
    """Replace a file in one step. From its first moment on only its owner can read it."""
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    new.rename(file)
