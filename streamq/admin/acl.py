"""Users of the server by role, each with the rights its work needs and no others.

The rights of a role are worked out from the scripts it runs, not listed. The headers of these
scripts name the keys and their bodies the commands, because a server checks each command of a
script against the rights of its caller. Scripts are allowed by digest, so a user can load any
script but run only ours.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from streamq.model import PREFIX
from streamq.protocol import lua
from streamq.protocol.keys import QueueKeys, RequestKeys

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
_FOLLOW = ("hget", "hscan", "zrange", "zrevrange", "zscore", "ssubscribe", "sunsubscribe")
#: Commands to wait for tokens, and to end such a wait.
_TAKE = ("brpop", "client|id", "client|unblock")
#: Commands to see whether keys of the queue have another type.
_ASIDE = ("type",)
_JANITOR = ("tick", "audit", "reap", "close", "purge", "mint", "inspect", "aside")
_LOADER = (
    "submit",
    "open",
    "append",
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
)
_WORKER = ("claim", "finish", "fail", "handback", "release", "renew", "beat", *_JANITOR)
_CALL = re.compile(r'redis\.p?call\("([A-Z]+)"(?:,\s*"([A-Z]+)")?')
_WITH_SUBCOMMANDS = ("XGROUP",)
_DIGEST = re.compile(r"\+evalsha\|([0-9a-f]{40})")


class Role(msgspec.Struct, frozen=True):
    """What users of a role do, and what they need for it."""

    says: str
    scripts: tuple[str, ...]
    commands: tuple[str, ...]
    #: Keys that the role's commands touch outside of scripts.
    keys: tuple[str, ...] = ()
    #: Whether the role can work without the right to load scripts, once other users have loaded
    #: them.
    only_looks: bool = False


ROLES: dict[str, Role] = {
    "loader": Role(
        "submits and collects requests: load, results, set, pause, resume, cancel, retry, purge",
        _LOADER,
        (*_FOLLOW, "hmget", "wait", "set", "memory|usage"),
        ("open", "closed", "workers", "worker", "failed", "results", "sync", "queue_sync"),
    ),
    "worker": Role(
        "runs parts, and does a janitor's work: worker",
        _WORKER,
        (*_TAKE, "zrange", "hget", *_ASIDE),
        ("tokens", "used", "news", "open", "workers", "worker", "aside"),
    ),
    "janitor": Role(
        "takes back the parts of dead workers: janitor",
        _JANITOR,
        ("zrange", "hget", *_ASIDE),
        ("used", "workers", "worker", "aside"),
    ),
    "reader": Role(
        "looks, and changes nothing: status, ls, top, workers, wait, errors, doctor",
        ("inspect", "locate"),
        (
            *_FOLLOW,
            "role",
            "cluster|info",
            "cluster|nodes",
            "script|exists",
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
        ),
        (
            "open",
            "closed",
            "due",
            "tokens",
            "used",
            "workers",
            "worker",
            "failed",
            "parts",
            "holders",
        ),
        only_looks=True,
    ),
    "runner": Role(
        "is loader and worker at once: run --url",
        (*_LOADER, *_WORKER),
        (*_FOLLOW, "hmget", "wait", "set", "memory|usage", *_TAKE, *_ASIDE),
        (
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
        ),
    ),
}
#: Users beside the roles: the administrator, the replicas of a primary, and sentinels.
ADMIN, REPLICA, SENTINEL = "admin", "replica", "sentinel"
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
USERS = (*ROLES, *OTHERS)


def file_text(
    passwords: Mapping[str, str],
    prefix: str = PREFIX,
    queues: Iterable[str] = (),
    kept: str = "",
    *,
    readers_load: bool = True,
) -> str:
    """Return an ACL file with a user for each role that has a password.

    Without ``readers_load`` a reader may not load scripts: another user has to. ``kept`` is an
    earlier file: scripts that it allows a role stay allowed, for as long as workers of two versions
    run side by side.
    """
    lines = ["user default off resetkeys resetchannels -@all"]
    for user, password in passwords.items():
        login = f"user {user} on #{hashlib.sha256(password.encode()).hexdigest()}"
        if user in OTHERS:
            _, rights = OTHERS[user]
        else:
            digests = _kept_digests(kept, user)
            loads = readers_load or not ROLES[user].only_looks
            rights = " ".join(rights_of(user, prefix, queues, digests, loads=loads))
        lines.append(f"{login} {rights}")
    return "\n".join(lines) + "\n"


def rights_of(
    name: str,
    prefix: str = PREFIX,
    queues: Iterable[str] = (),
    digests: Iterable[str] = (),
    *,
    loads: bool = True,
) -> list[str]:
    """Return a role's rights, in the words of the server's ACL."""
    role = ROLES[name]
    allowed = sorted({*map(lua.digest, role.scripts), *digests})
    patterns, channels = _patterns(role, prefix, tuple(queues))
    return [
        "resetkeys",
        "resetchannels",
        "-@all",
        *(f"~{pattern}" for pattern in patterns),
        *(f"&{channel}" for channel in channels),
        *(f"+{command}" for command in commands_of(role) if loads or command != _LOAD),
        *(f"+evalsha|{digest}" for digest in allowed),
    ]


def commands_of(role: Role) -> list[str]:
    """Return the commands a role uses, in scripts and outside of them."""
    used = {*_EVERYBODY, _LOAD, *role.commands}
    for script in role.scripts:
        for command, word in _CALL.findall(lua.source(script)):
            is_two = command in _WITH_SUBCOMMANDS
            used.add((f"{command}|{word}" if is_two else command).lower())
    return sorted(used)


class Trial(msgspec.Struct, frozen=True):
    """A call that a role makes: what it is for, how it begins, and with what to fill it up."""

    what: str
    words: tuple[str, ...]
    filling: str = ""


def trials_of(name: str, prefix: str, queue: str) -> Iterator[Trial]:
    """Yield a call for each script, key and command of a role."""
    role = ROLES[name]
    request = RequestKeys("ID", prefix)
    keys = QueueKeys(queue, prefix, worker="WORKER", spoilt="due")
    for script in role.scripts:
        own = [_key(key, request, keys) for key in lua.signature(script)[0]]
        words = ("EVALSHA", lua.digest(script), str(len(own)), *own)
        yield Trial(f"run {script}", words)
    for key in role.keys:
        spelt = _key(key, request, keys)
        yield Trial(f"read {spelt}", ("HGET", spelt, "field"))
    for command in commands_of(role):
        if role.only_looks and command == _LOAD:
            continue
        filling = request.events if "subscribe" in command or command == "spublish" else spelt
        yield Trial(command, tuple(command.split("|")), filling)


def _key(name: str, request: RequestKeys, keys: QueueKeys) -> str:
    is_queue = not hasattr(request, name)
    return str(getattr(keys, name.removeprefix("queue_")) if is_queue else getattr(request, name))


def _patterns(role: Role, prefix: str, queues: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return patterns of the keys and of the channels that a role touches."""
    names = {key for script in role.scripts for key in lua.signature(script)[0]} | {*role.keys}
    names.discard("spoilt")  # it is one of the other keys
    request = RequestKeys("ID", prefix)
    found, channels = set(), set()
    for name in names:
        if name == "events" or "ssubscribe" in role.commands:
            channels.add(request.events.replace("{r:ID}", "{r:*}"))
        if hasattr(request, name):
            found.add(getattr(request, name).replace("{r:ID}", "{r:*}"))
        for queue in queues or ("ANY",):
            keys = QueueKeys(queue, prefix, worker="WORKER")
            if name != "sync" and hasattr(keys, name.removeprefix("queue_")):
                key = getattr(keys, name.removeprefix("queue_"))
                key = key.replace("worker:WORKER", "worker:*")
                key += "*" if key.endswith(":") else ""
                found.add(key if queues else key.replace("{q:ANY}", "{q:*}"))
    return sorted(found), sorted(channels)


def _kept_digests(text: str, user: str) -> list[str]:
    lines = (line for line in text.splitlines() if line.startswith(f"user {user} "))
    return [digest for line in lines for digest in _DIGEST.findall(line)]
