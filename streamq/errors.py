"""The errors of streamq, as one tree.

StreamqError
├── ProtocolError          a script refused, and said so with a code word
│   ├── RequestExists      EXISTS    the id is taken by another submission
│   ├── RequestUnknown     UNKNOWN   no such request, or it was purged
│   ├── RequestEnded       ENDED     the request is done, failed or cancelled
│   ├── RequestOpen        NOTENDED  the request still runs
│   ├── LoadGap            SHORT     the load left parts out
│   ├── SubmissionLate     LATE      a callback is started too late to be surely the first
│   ├── CollectorLost      FENCED    another collector has committed meanwhile
│   └── Damaged            (any other reply)  what is in the server is not what was put there
│       ├── RequestNewer   NEWER     a later version of streamq made the request
│       └── FlowUntold     FLOW      the caller does not know that it is a flow
├── InvalidValue           a name, level, limit, size, duration or URL that cannot be
│   └── PartTooLarge       a part over the size limit
├── PartlySubmitted        some of many requests were not submitted
├── FleetTooOld            a live worker cannot run what was to be submitted
├── AppLoadError           the app or the function cannot be imported, or is not one
├── RecordError            a record fails for good, before or after its handler ran
│   ├── DecodeError        the record is not what the handler asks for
│   └── EncodeError        what the handler returned cannot be kept
│       └── ResultTooLarge the result has too many bytes
├── SettingsError          the environment or a file of settings cannot be read
├── ServerError            the server cannot be used
│   ├── ServerUnreachable  no server answers at the URL
│   ├── ServerBusy         it loads data, fails over, moves slots or has no disk left
│   ├── ServerRefused      it does not let us in
│   ├── ServerFull         it is out of memory
│   ├── ServerUnsafe       it may drop keys, or anybody who reaches it could use it
│   ├── ServerBehind       fewer of its replicas have the request than were asked for
│   └── ServerMissing      no server program was found to start
└── WaitTimeout            the time given to wait is over

Modules that read inputs, write outputs, load the user's code or run programs add errors of their
own below ``InvalidValue`` and ``StreamqError``, such as ``records/inputs.py: BadInput``.

Outcomes of normal running (nothing to run, at the limit, lease lost) are return
values. An exception means that a caller broke a rule or that something is missing.
"""

from contextlib import AbstractContextManager
from typing import Any, ClassVar


class StreamqError(Exception):
    """Base of everything streamq raises on purpose."""


class ProtocolError(StreamqError):
    """A script on the server refused, and said why with the code word of a subclass."""

    code: ClassVar[str]


class RequestExists(ProtocolError):
    """The request id is taken by another submission."""

    code = "EXISTS"


class RequestUnknown(ProtocolError):
    """There is no such request, or it was purged after its retention."""

    code = "UNKNOWN"


class RequestEnded(ProtocolError):
    """The request is done, failed or cancelled, and this can no longer be done with it."""

    code = "ENDED"


class RequestOpen(ProtocolError):
    """The request still runs."""

    code = "NOTENDED"


class LoadGap(ProtocolError):
    """The load left parts out: the loader must go on after those that the server has."""

    code = "SHORT"


class SubmissionLate(ProtocolError):
    """A callback is started so late that another process may have started it long ago."""

    code = "LATE"


class CollectorLost(ProtocolError):
    """Another collector has committed results of this request meanwhile."""

    code = "FENCED"


class Damaged(ProtocolError):
    """A key, a field or a member in the server is not as streamq writes it."""

    code = ""


class RequestNewer(Damaged):
    """A later version of streamq made the request, and this one leaves it alone.

    The message names the request's protocol version and the latest one that is known here. It is a
    kind of ``Damaged``, so code that passes over unreadable requests passes over this one, too.
    """

    code = "NEWER"


class PartlySubmitted(StreamqError):
    """Some of many requests were not submitted.

    ``requests`` has those that were submitted, and ``errors`` says why the others were not; both by
    the requests' ids.
    """

    def __init__(self, requests: dict[str, Any], errors: dict[str, StreamqError]) -> None:
        request_id, error = next(iter(errors.items()))
        total = len(requests) + len(errors)
        what = f"{len(errors)} of {total} requests were not submitted"
        super().__init__(f"{what}; the first, {request_id}: {error}")
        self.requests = requests
        self.errors = errors


class FleetTooOld(StreamqError):
    """A live worker of the queue is of a version that cannot run what was to be submitted."""


class FlowUntold(Damaged):
    """The caller of a script does not know that the request is a flow, or knows another shape.

    ``Protocol`` reads the shape from the message and makes the call again: callers see this only if
    the flow is replaced by another again and again.
    """

    code = "FLOW"


#: The errors that decoding raises for data that are not what they must be.
UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class damaged_if_unreadable(AbstractContextManager[None]):  # noqa: N801  it is used as a function
    """Raise ``Damaged`` in place of the errors that reading damaged data raises.

    No generator: it is entered for each result, and costs a third of one.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        is_ours = isinstance(error, StreamqError) and not isinstance(error, InvalidValue)
        if error is not None and not is_ours and isinstance(error, (InvalidValue, *UNREADABLE)):
            raise Damaged(f"{self._what} cannot be read: {error}") from error


class InvalidValue(StreamqError, ValueError):
    """A name, level, limit, size, duration or URL is not valid; the message says which."""


class PartTooLarge(InvalidValue):
    """A part is over the size limit."""


class AppLoadError(StreamqError):
    """The user's module cannot be loaded. ``trace`` is its own traceback, if there is one."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class RecordError(StreamqError):
    """A record fails for good: another attempt would end in the same way."""


class DecodeError(RecordError):
    """The record is not what the handler asks for."""


class EncodeError(RecordError):
    """The value that the handler returned cannot be kept as a result."""


class ResultTooLarge(EncodeError):
    """The value that the handler returned has more bytes than a result may have."""


class SettingsError(StreamqError):
    """A setting is missing or malformed."""


class ServerError(StreamqError):
    """The server cannot be used."""


class ServerUnreachable(ServerError):
    """No server answers at the URL."""


class ServerBusy(ServerError):
    """The server cannot answer now: it loads data, fails over, moves slots or has no disk left."""


class ServerRefused(ServerError):
    """The server does not let us in, or forbids what we need."""


class ServerFull(ServerError):
    """The server is out of memory and takes no new parts."""


class ServerUnsafe(ServerError):
    """The server may drop keys, or anybody who can reach it could use it."""


class ServerBehind(ServerError):
    """The request is there, but on fewer replicas than were asked for."""


class ServerMissing(ServerError):
    """No server program was found to start."""


class WaitTimeout(StreamqError, TimeoutError):
    """The time given to wait is over."""


BY_CODE: dict[str, type[ProtocolError]] = {
    e.code: e for e in (*ProtocolError.__subclasses__(), *Damaged.__subclasses__()) if e.code
}
