"""The roles of keys, and the caller that a key stands for."""

from enum import StrEnum

import msgspec

from streamq.gateway.problems import Problem


class Role(StrEnum):
    """The right that a key gives. Each role may do what a reader may, and an operator everything.

    ``ANYBODY`` is no role of a key: it is what a route says that needs none.
    """

    ANYBODY = "anybody"
    READER = "reader"
    WORKER = "worker"
    LOADER = "loader"
    OPERATOR = "operator"

    def allows(self, wanted: "Role") -> bool:
        """Return whether this role may use a route that asks for that one."""
        return wanted is Role.ANYBODY or self in (wanted, Role.OPERATOR) or wanted is Role.READER


#: The roles that a key can have.
KEY_ROLES = tuple(role for role in Role if role is not Role.ANYBODY)


class Caller(msgspec.Struct, frozen=True):
    """The caller of a call: the name of its key, its role, and the queues it may use."""

    name: str
    role: Role
    #: None: every queue.
    queues: frozenset[str] | None = None
    #: How many calls of this caller may wait at once, and how many streams it may have open.
    waits: int = 200
    streams: int = 20
    #: The digest of the key.
    sha256: str = ""
    #: The only request that the caller may see: it came by a share link; "": all of its queues.
    only: str = ""

    def check_request(self, request_id: str) -> None:
        """Raise a problem unless the caller may see the request; "" stands for none at all."""
        if self.only and request_id != self.only:
            raise Problem(
                403, "ROLE", "the link shows one request", f"it is for {self.only} and nothing else"
            )

    def check_role(self, wanted: Role, what: str) -> None:
        """Raise a problem unless the caller's role may use what asks for that one."""
        if not self.role.allows(wanted):
            raise Problem(
                403,
                "ROLE",
                "the role of the key does not fit",
                f"{what} is for the role {wanted}, and {self.name} is a {self.role}",
            )

    def check_queue(self, queue: str) -> None:
        """Raise a problem unless the caller may use the queue."""
        if self.queues is not None and queue not in self.queues:
            raise Problem(
                403,
                "ROLE",
                "the key is not for this queue",
                f"the key {self.name} is not for the queue {queue!r:.80}",
            )


#: The caller of a gateway without keys, which listens on loopback only.
LOCAL = Caller("local", Role.OPERATOR, waits=100_000, streams=100_000)
