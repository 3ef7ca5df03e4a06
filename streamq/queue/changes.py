"""The log of a queue: who changed what of its requests. Commands and gateways write it."""

import getpass
import logging
import socket
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from streamq.errors import UNREADABLE, ServerRefused, StreamqError
from streamq.model import Status
from streamq.protocol import glances
from streamq.protocol.protocol import Protocol

log = logging.getLogger(__name__)

#: After how many characters a name, or a description of a change, is cut.
_MOST_CHARS = 200


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What somebody changed of a request."""

    #: When (ms since 1970), by the server's clock.
    t: int = 0
    who: str
    #: Such as ``pause``, or ``set limit 8 to 40``.
    what: str
    request: str
    #: The address that it came from; "" where that is not known.
    address: str = ""


def note_change(protocol: Protocol, queue: str, change: Change) -> None:
    """Write a change down. It is made already, so nothing that goes wrong here is raised."""
    cut = {name: getattr(change, name)[:_MOST_CHARS] for name in ("who", "what", "address")}
    try:
        protocol.note(queue, msgspec.json.encode(msgspec.structs.replace(change, **cut)))
    except StreamqError as error:  # the server is away, or its ACL is of an earlier version
        log.debug("the change of %s is not in the log: %s", change.request, error)


def read_changes(protocol: Protocol, queue: str, most: int = 1_000) -> list[Change]:
    """Return what was changed, the last first; nothing, if this user may not read the log.

    Raises:
        ServerError: the server does not answer.
    """
    changes = []
    entries: list[tuple[int, bytes]] = []
    # A user file of before knows no log.
    with suppress(ServerRefused):
        entries = glances.glance_at_changes(protocol, queue, most)
    for at_ms, text in entries:
        with suppress(*UNREADABLE):
            change = msgspec.json.decode(text, type=Change)
            changes.append(msgspec.structs.replace(change, t=at_ms))
    return changes


def describe_change(before: Status, changes: Mapping[str, object]) -> str:
    """Return what ``Request.set`` changes, in words: ``set limit 8 to 40``."""
    was: dict[str, object] = {"limit": before.limit, "level": before.level, "weight": before.weight}
    was["rate"] = "off" if before.rate_limit is None else f"{before.rate_limit:.4g}/s"
    given = {name: value for name, value in changes.items() if value is not None}
    return "set " + ", ".join(
        f"{name} {was.get(name, '?')} to {now}" for name, now in given.items()
    )


def user_who_changes() -> str:
    """Return who runs this process: the user and the machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = "?"
    return f"{user}@{socket.gethostname()}"
