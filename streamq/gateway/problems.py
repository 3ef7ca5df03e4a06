"""Errors as callers are told of them: a status, a code word, and a sentence (RFC 9457)."""

from typing import Any

import msgspec

from streamq.errors import (
    CollectorLost,
    Damaged,
    InvalidValue,
    LoadGap,
    PartTooLarge,
    RequestEnded,
    RequestExists,
    RequestOpen,
    RequestUnknown,
    ServerBusy,
    ServerFull,
    ServerRefused,
    ServerUnreachable,
    ServerUnsafe,
    StreamqError,
)
from streamq.gateway.ticket import BadTicket

CONTENT_TYPE = "application/problem+json"
#: An error and its subclasses, the most special first: status, code, title, and after how many
#: seconds to say it again.
_PROBLEMS: tuple[tuple[type[StreamqError], int, str, str, int], ...] = (
    (BadTicket, 410, "TICKET", "the ticket is not valid", 0),
    (PartTooLarge, 413, "LARGE", "a part is too large", 0),
    (InvalidValue, 400, "INVALID", "the call says what cannot be", 0),
    (RequestUnknown, 404, "UNKNOWN", "there is no such request", 0),
    (RequestExists, 409, "EXISTS", "the id is taken by another submission", 0),
    (RequestEnded, 409, "ENDED", "the request has ended", 0),
    (RequestOpen, 409, "NOTENDED", "the request still runs", 0),
    (LoadGap, 409, "SHORT", "the load left parts out", 0),
    (CollectorLost, 409, "FENCED", "another collector has committed meanwhile", 0),
    (Damaged, 500, "DAMAGED", "what the server holds cannot be read", 0),
    (ServerFull, 507, "FULL", "the server is out of memory", 5),
    (ServerRefused, 502, "REFUSED", "the server does not let the gateway in", 0),
    (ServerUnsafe, 502, "REFUSED", "the server does not let the gateway in", 0),
    (ServerBusy, 503, "AWAY", "the server cannot answer now", 1),
    (ServerUnreachable, 503, "AWAY", "the server does not answer", 1),
    (StreamqError, 500, "ERROR", "the gateway could not do it", 0),
)
#: The messages of these errors name the server's address, so callers do not get them.
_QUIET = (ServerRefused, ServerUnsafe, ServerBusy, ServerUnreachable)


class Problem(Exception):
    """Ends a call with an error: its status, its code word, and what is wrong."""

    def __init__(
        self,
        status: int,
        code: str,
        title: str,
        detail: str = "",
        *,
        retry_after_s: int = 0,
        more: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{status} {code}: {detail or title}")
        self.status = status
        self.code = code
        self.title = title
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.more = more or {}

    def body(self) -> bytes:
        """Return the message as JSON."""
        said = {"type": "about:blank", "status": self.status, "code": self.code}
        return msgspec.json.encode(
            {**said, "title": self.title, "detail": self.detail or self.title, **self.more}
        )

    def headers(self) -> dict[str, str]:
        """Return the headers that go with it."""
        headers = {"Content-Type": CONTENT_TYPE}
        if self.retry_after_s:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def problem_of_too_many_takes(detail: str) -> Problem:
    """Return the problem of a caller that has too much open at once."""
    return Problem(429, "MANY", "too many at once", detail, retry_after_s=1)


def problem_of(error: StreamqError) -> Problem:
    """Return an error as a problem for the caller."""
    for kind, status, code, title, retry_after_s in _PROBLEMS:
        if isinstance(error, kind):
            detail = title if isinstance(error, _QUIET) else str(error)
            return Problem(status, code, title, detail, retry_after_s=retry_after_s)
    raise AssertionError("StreamqError is the last of the table")
