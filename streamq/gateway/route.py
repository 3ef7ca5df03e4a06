"""The shape of a route: a line of the table in ``routes.py``, a call of it, and an answer."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from streamq.errors import InvalidValue
from streamq.gateway.access import Access, Visit
from streamq.gateway.bodies import Bodies
from streamq.gateway.control import Control
from streamq.gateway.courier import WasLost
from streamq.gateway.desk import Desk
from streamq.gateway.loads import Loads
from streamq.gateway.requests import Requests
from streamq.gateway.roles import Caller, Role
from streamq.gateway.session import Sessions
from streamq.gateway.tallies import Tallies
from streamq.gateway.uploads import Uploads

if TYPE_CHECKING:
    from streamq.gateway.dashboard import DashboardBoard

#: The largest body, in bytes, unless a route says otherwise.
MOST_BODY = 2**24


class Gateway(msgspec.Struct):
    """Everything that the operations of routes work with."""

    desk: Desk
    requests: Requests
    loads: Loads
    uploads: Uploads
    control: Control
    access: Access
    sessions: Sessions
    #: Why the gateway is not ready; "" when it is.
    unready: Callable[[], str]
    #: The dashboard; None where there is none.
    board: "DashboardBoard | None" = None
    tallies: Tallies = msgspec.field(default_factory=Tallies)
    bodies: Bodies = msgspec.field(default_factory=Bodies)


class Call(msgspec.Struct):
    """One call: who makes it, the names in its path, its query, and its body."""

    caller: Caller
    path: Mapping[str, str]
    query: Mapping[str, str]
    visit: Visit
    scheme: str = "http"
    body: Any = None
    #: The body as it comes, of a route that takes one of any size.
    stream: AsyncIterator[bytes] | None = None

    def text(self, name: str, default: str = "") -> str:
        """Return a text of the query.

        Raises:
            InvalidValue: it is there, and empty.
        """
        found = self.query.get(name, default)
        if not found and name in self.query:
            raise InvalidValue(f"{name} is empty: leave it out")
        return found

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Return a number of the query.

        Raises:
            InvalidValue: it is none, or out of range.
        """
        text = self.query.get(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            raise InvalidValue(f"{name} {text!r:.80} is no number") from None
        if not least <= value <= most:
            raise InvalidValue(f"{name} {text:.80} is out of range: {least:g} to {most:g}")
        return value


class Answer(msgspec.Struct):
    """What a call is answered: a status, and a value that becomes JSON, or lines as they come."""

    status: int = 200
    body: Any = None
    lines: Any = None
    #: Text that is sent as it is, instead of a value as JSON.
    text: str = ""
    headers: dict[str, str] = {}
    #: The change in words, for the log of the queue; "" if there is nothing to write there.
    noted: str = ""
    #: Called when the answer is out, with what tells whether its connection was reset since.
    delivered: Callable[[WasLost], None] | None = None


class Param(msgspec.Struct, frozen=True):
    """A member of a query: what it means, and what it may be, as a JSON schema."""

    says: str
    schema: dict[str, Any]


Operation = Callable[[Gateway, Call], Awaitable[Answer]]


class Route(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One line of the table."""

    method: str
    path: str
    role: Role
    operation: Operation
    summary: str
    #: Types of the JSON that comes in, and of that which goes out, by status.
    body: Any = None
    answers: Mapping[int, Any]
    query: Mapping[str, "Param"] = {}
    #: Whether the body is a file of any size, which the operation reads as it comes.
    takes_file: bool = False
    #: Whether it changes what the server holds, and is told of in the log.
    is_change: bool = False
    #: Whether callers that may see only one request may use it, too.
    is_of_all: bool = False

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.operation.__name__
