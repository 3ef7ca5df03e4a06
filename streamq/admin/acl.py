"""Users of the server by role, each with the rights its work needs and no others.

The rights of a role are worked out from the scripts it runs, not listed. The headers of these
scripts name the keys and their bodies the commands, because a server checks each command of a
script against the rights of its caller. Scripts are allowed by digest, so a user can load any
script but run only ours.

Users of a team have the rights of their role on the team's queues, and on requests whose ids begin
with the team's name. The keys of a request carry its id and not its queue, so the id is what a
server can tell teams apart by.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from streamq import units
from streamq.model import PREFIX
from streamq.protocol import lua
from streamq.protocol.keys import MORE, QueueKeys, RequestKeys

#: What every connection needs: commands to check the server, and to find nodes of a cluster.
_EVERYBODY = (
    "ping",
    "info",
    "select",
    "client|setname",
    "cluster|slots",
    "command",
    "readonly",
    "asking",
    "time",
    "acl|whoami",
    "acl|dryrun",
)
#: The right to load scripts that a server does not have. A user with it can fill a server's memory
#: with scripts.
_LOAD = "script|load"
#: The right to ask which scripts a server has.
_LOADED = "script|exists"
#: Commands that tell the names of all keys: users of a team may not use them.
_OF_ALL_TEAMS = ("scan",)
_FOLLOW = ("hget", "hscan", "zrange", "zrevrange", "zscore", "ssubscribe", "sunsubscribe")
#: What finding one item reads besides.
_FIND = ("keys", "items", "trace", "kids", "groups", "retry", "tries", "parts")
#: Commands to wait for tokens, and to end such a wait.
_TAKE = ("brpop", "client|id", "client|unblock")
#: Commands to see whether keys of the queue have another type.
_ASIDE = ("type",)
#: To settle a request is to submit its callbacks.
_SETTLE = ("settle", "submit")
_JANITOR = (
    "tick",
    "audit",
    "reap",
    "close",
    "purge",
    "mint",
    "inspect",
    "aside",
    "expire",
    *_SETTLE,
)
_LOADER = (
    "submit",
    "open",
    "lay",
    "index",
    "append",
    "refuse",
    "seal",
    "mint",
    "inspect",
    "locate",
    "collect",
    "set",
    "pause",
    "resume",
    "cancel",
    "redrive",
    "purge",
    "close",
    "note",
)
#: Those who show a dashboard read what readers do, and say that somebody looks.
_WATCH = ("watch",)
_WORKER = (
    "claim",
    "finish",
    "pass_on",
    "fail",
    "keep",
    "handback",
    "release",
    "renew",
    "beat",
    "show",
    *_JANITOR,
)
#: What readers use outside of scripts, and those who show a dashboard: commands and keys.
_LOOK = (
    *_FOLLOW,
    "role",
    "cluster|info",
    "cluster|nodes",
    _LOADED,
    "xinfo|groups",
    "xinfo|consumers",
    "xpending",
    "xrange",
    "xlen",
    "zcard",
    "zcount",
    "zrangebyscore",
    "llen",
    "lpos",
    "lrange",
    "hlen",
    "hmget",
    "hgetall",
    "get",
    "exists",
    "scan",
    "hrandfield",
    "xrevrange",
)
_LOOKED_AT = (
    "open",
    "closed",
    "due",
    "tokens",
    "used",
    "workers",
    "worker",
    "failed",
    "holders",
    *_FIND,
    "pace",
    "log",
    "spans",
)
_CALL = re.compile(r'redis\.p?call\("([A-Z]+)"(?:,\s*"([A-Z]+)")?')
_WITH_SUBCOMMANDS = ("XGROUP",)
_DIGEST = re.compile(r"\+evalsha\|([0-9a-f]{40})")


class AclRole(msgspec.Struct, frozen=True):
    """What users of a role do, and what they need for it."""

    says: str
    scripts: tuple[str, ...]
    commands: tuple[str, ...]
    #: Keys that the role's commands touch outside of scripts.
    keys: tuple[str, ...] = ()
    #: Whether the role changes nothing. It can do without the right to load scripts.
    only_looks: bool = False


ROLES: dict[str, AclRole] = {
    "loader": AclRole(
        "submits and collects requests: load, results, find, set, pause, cancel, retry, purge",
        _LOADER,
        (*_FOLLOW, "hmget", "xpending", "wait", "set", "memory|usage"),
        (
            "open",
            "closed",
            "workers",
            "worker",
            "failed",
            "results",
            "sync",
            "queue_sync",
            *_FIND,
        ),
    ),
    "worker": AclRole(
        "runs parts, and does a janitor's work: worker",
        _WORKER,
        (*_TAKE, "zrange", "hget", "hmget", "hscan", *_ASIDE),
        ("tokens", "used", "news", "open", "workers", "worker", "aside", "got", "groups", "kids"),
    ),
    "janitor": AclRole(
        "takes back the parts of dead workers: janitor",
        _JANITOR,
        ("zrange", "hget", _LOADED, *_ASIDE),
        ("used", "workers", "worker", "aside"),
    ),
    "reader": AclRole(
        "looks, and changes nothing: status, ls, top, workers, wait, errors, find, doctor",
        ("inspect", "locate"),
        _LOOK,
        _LOOKED_AT,
        only_looks=True,
    ),
    "gateway": AclRole(
        "serves workers and loaders elsewhere: serve",
        (*_LOADER, *_WORKER, *_WATCH),
        (*_LOOK, "wait", "set", "memory|usage", *_TAKE, *_ASIDE),
        (
            *_LOOKED_AT,
            "aside",
            "tokens",
            "used",
            "news",
            "open",
            "closed",
            "workers",
            "worker",
            "failed",
            "results",
            "sync",
            "queue_sync",
        ),
    ),
    "runner": AclRole(
        "is loader and worker at once: run --url",
        (*_LOADER, *_WORKER, *_WATCH),
        (*_LOOK, "wait", "set", "memory|usage", *_TAKE, *_ASIDE),
        (
            *_LOOKED_AT,
            "aside",
            "tokens",
            "open",
            "closed",
            "workers",
            "worker",
            "failed",
            "results",
            "sync",
            "queue_sync",
            "got",
            "groups",
            "kids",
        ),
    ),
}
#: Users beside the roles: the administrator, the replicas of a primary, and sentinels.
ADMIN, REPLICA, SENTINEL = "admin", "replica", "sentinel"
#: The role that loads scripts for all others, if they may not.
JANITOR = "janitor"
OTHERS: dict[str, tuple[str, str]] = {
    ADMIN: ("may do everything: to load this file, and for emergencies", "~* &* +@all"),
    REPLICA: (
        "for replicas: masteruser and masterauth",
        "resetkeys resetchannels -@all +ping +psync +replconf",
    ),
    SENTINEL: (
        "for sentinels: sentinel auth-user and auth-pass",
        "resetkeys resetchannels -@all &__sentinel__:hello +ping +info +role +publish +subscribe "
        "+multi +exec +slaveof +config|rewrite +client|setname +client|kill +script|kill",
    ),
}
DEFAULT = "user default off resetkeys resetchannels -@all"


class AclScope(msgspec.Struct, frozen=True):
    """What the rights of users extend to."""

    prefix: str = PREFIX
    #: The only queues that users may touch; none: all queues.
    queues: tuple[str, ...] = ()
    #: The team whose requests users may touch; "": all requests.
    team: str = ""
    #: The roles that may load scripts.
    loading: tuple[str, ...] = tuple(ROLES)

    @property
    def users(self) -> list[str]:
        """The users to write: those of the team, or those of the whole server."""
        return [f"{self.team}-{role}" for role in ROLES] if self.team else [*ROLES, *OTHERS]


def acl_file_text(
    passwords: Mapping[str, str], scope: AclScope, before: str, *, is_keeping: bool
) -> str:
    """Return an ACL file with the users that have a password, and those of other scopes.

    ``before`` is the earlier file. Its users that have no password here stay as they are. With
    ``is_keeping`` scripts that it allows a user stay allowed, for as long as workers of two
    versions run side by side.
    """
    lines = [DEFAULT]
    for user, password in passwords.items():
        login = f"user {user} on #{hashlib.sha256(password.encode()).hexdigest()}"
        if user in OTHERS:
            _, rights = OTHERS[user]
        else:
            digests = _digests_in_acl_file(before, user) if is_keeping else []
            rights = " ".join(acl_rights_of_role(role_of_acl_user(user)[0], scope, digests))
        lines.append(f"{login} {rights}")
    mine = {"default", *passwords}
    lines += [
        line for line in before.splitlines() if (user_of_acl_line(line) or "default") not in mine
    ]
    return "\n".join(lines) + "\n"


def teams_in_acl_file(text: str) -> set[str]:
    """Return the teams whose users are in an ACL file."""
    return {role_of_acl_user(user_of_acl_line(line))[1] for line in text.splitlines()} - {""}


def user_of_acl_line(line: str) -> str:
    """Return the user that a line of an ACL file is about; "" for other lines."""
    word, _, rest = line.partition(" ")
    return rest.partition(" ")[0] if word == "user" else ""


def role_of_acl_user(user: str) -> tuple[str, str]:
    """Return the role that a user is named after, "" if none, and the user's team, if any."""
    team, _, role = user.rpartition("-")
    return (role, team) if role in ROLES else ("", "")


def acl_rights_of_role(name: str, scope: AclScope, digests: Iterable[str] = ()) -> list[str]:
    """Return a role's rights, in the words of the server's ACL."""
    role = ROLES[name]
    allowed = sorted({*map(lua.script_digest, role.scripts), *digests})
    patterns, channels = _acl_patterns_of_role(role, scope)
    not_allowed = {*(_OF_ALL_TEAMS if scope.team else ())}
    if name not in scope.loading:
        not_allowed.add(_LOAD)
    return [
        "resetkeys",
        "resetchannels",
        "-@all",
        *(f"~{pattern}" for pattern in patterns),
        *(f"&{channel}" for channel in channels),
        *(f"+{command}" for command in acl_commands_of_role(role) if command not in not_allowed),
        *(f"+evalsha|{digest}" for digest in allowed),
    ]


def acl_commands_of_role(role: AclRole) -> list[str]:
    """Return the commands a role uses, in scripts and outside of them."""
    used = {*_EVERYBODY, _LOAD, *role.commands}
    for script in role.scripts:
        for command, word in _CALL.findall(lua.script_source(script)):
            is_two = command in _WITH_SUBCOMMANDS
            used.add((f"{command}|{word}" if is_two else command).lower())
    return sorted(used)


class AclTrial(msgspec.Struct, frozen=True):
    """A call that a role makes: what it is for, how it begins, and with what to fill it up."""

    what: str
    words: tuple[str, ...]
    filling: str = ""


def acl_trials_of_role(name: str, prefix: str, queue: str, team: str = "") -> Iterator[AclTrial]:
    """Yield a call for each script, key and command that a role, or that of a team, needs.

    A role can do without the right to load scripts, as long as a user who has it loads them.
    """
    role = ROLES[name]
    optional = {_LOAD, *(_OF_ALL_TEAMS if team else ())}
    if name == JANITOR:
        optional.add(_LOADED)
    request = RequestKeys(f"{units.id_head(team)}ID", prefix)
    keys = QueueKeys(queue, prefix, worker="WORKER", spoilt="due")
    for script in role.scripts:
        own = [
            _acl_key_of_request_or_queue(key, request, keys)
            for key in lua.script_signature(script)[0]
        ]
        words = ("EVALSHA", lua.script_digest(script), str(len(own)), *own)
        yield AclTrial(f"run {script}", words)
    for key in role.keys:
        spelt = _acl_key_of_request_or_queue(key, request, keys)
        yield AclTrial(f"read {spelt}", ("HGET", spelt, "field"))
    for command in acl_commands_of_role(role):
        if command in optional:
            continue
        filling = request.events if "subscribe" in command or command == "spublish" else spelt
        yield AclTrial(command, tuple(command.split("|")), filling)


def _acl_key_of_request_or_queue(name: str, request: RequestKeys, keys: QueueKeys) -> str:
    is_queue = not hasattr(request, name)
    return str(getattr(keys, name.removeprefix("queue_")) if is_queue else getattr(request, name))


def _acl_patterns_of_role(role: AclRole, scope: AclScope) -> tuple[list[str], list[str]]:
    """Return patterns of the keys and of the channels that a role touches."""
    names = {key for script in role.scripts for key in lua.script_signature(script)[0]} | {
        *role.keys
    }
    names |= {
        key for script in role.scripts for key in MORE.get(lua.further_script_keys(script), ())
    }
    names.discard("spoilt")  # it is one of the other keys
    prefix, queues = scope.prefix, scope.queues
    request, stage = RequestKeys("ID", prefix), RequestKeys("ID/2", prefix)
    ids = f"{{r:{units.id_head(scope.team)}*}}"
    found, channels = set(), set()
    for name in names:
        if name == "events" or "ssubscribe" in role.commands:
            channels.add(request.events.replace("{r:ID}", ids))
        if hasattr(request, name):
            found.add(getattr(request, name).replace("{r:ID}", ids))
            # A ``*`` in the place of the id does not cover the number of a stage.
            found.add(getattr(stage, name).replace("{r:ID}:2", f"{ids}:*").replace("{r:ID}", ids))
        for queue in queues or ("ANY",):
            keys = QueueKeys(queue, prefix, worker="WORKER")
            if name != "sync" and hasattr(keys, name.removeprefix("queue_")):
                key = getattr(keys, name.removeprefix("queue_"))
                key = key.replace("worker:WORKER", "worker:*")
                key += "*" if key.endswith(":") else ""
                found.add(key if queues else key.replace("{q:ANY}", "{q:*}"))
    return sorted(found), sorted(channels)


def _digests_in_acl_file(text: str, user: str) -> list[str]:
    lines = (line for line in text.splitlines() if user_of_acl_line(line) == user)
    return [digest for line in lines for digest in _DIGEST.findall(line)]
