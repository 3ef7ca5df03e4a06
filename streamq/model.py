"""The nouns, as plain data. No I/O."""

import hashlib
import re
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec

#: What the name of every key begins with, unless the setting ``prefix`` says otherwise.
PREFIX = "sq"
#: Defaults of a request.
LEVEL = 50
LIMIT = 8
RETRIES = 3
#: After so many workers have died while they ran a part, it is given up as poison.
POISON = 3
#: Levels go from 0, which is served first, to this one.
LAST_LEVEL = 99
#: Largest part, in bytes.
MAX_PART = 2**20
#: One call to the server carries at most so many parts, and about so many bytes.
CHUNK_PARTS = 500
CHUNK_BYTES = 2**20
#: Largest result of a part, in bytes, unless set otherwise.
MAX_RESULT = 2**22

_LEADING_DIGITS = re.compile(rb"\d{1,15}")


class State(StrEnum):
    """Name where a request stands; each is equal to its text.

    Example:
        assert State.DONE == "done"
        assert not State.DONE.is_live
    """

    LOADING = "loading"
    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_live(self) -> bool:
        """Whether parts of the request may still run."""
        return self in (State.LOADING, State.OPEN)


class News(msgspec.Struct, frozen=True):
    """Comes from a take instead of a token: a list came into use that the process may not know."""

    #: The list: the end of its key's name, ``HANDLER:LL``.
    to: str


class Spec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker needs to know of a request; fixed for its life."""

    #: None: the handler's own.
    retries: int | None = None
    backoff_ms: int = 1_000
    backoff_max_ms: int = 300_000
    #: 0: the handler's own.
    timeout_ms: int = 0
    #: How parts hold their records: lines, jsonl, csv, file; "" for one payload, one record.
    format: str = ""
    #: For CSV: the first row if it is a header, the names given in place of one, and the dialect.
    #: An empty quote or escape means that there is none.
    header: str = ""
    names: tuple[str, ...] = ()
    delimiter: str = ","
    quote: str = '"'
    escape: str = ""
    #: Names of the files that parts came from; reports of failures show them.
    files: tuple[str, ...] = ()
    #: Parts hold no bytes of their own: each says where in these files its bytes are.
    by_reference: bool = False


class Policy(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """How a request is to be treated. Values are checked, and in the units of the protocol."""

    handler: str
    queue: str = "default"
    level: int = LEVEL
    limit: int = LIMIT
    poison: int = POISON
    max_failures: int = -1
    max_percent: float = -1.0
    keep_ms: int = 7 * 86_400_000
    rate_ms: float = 0.0
    delay_ms: int = 0
    spec: Spec = Spec()
    #: Names and values that users gave the request to find it by; UNSET where there are none.
    labels: tuple[tuple[str, str], ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def lasting(self) -> "Policy":
        """What tells the policy from others: all but the delay, which counts from the first
        submission, and the labels, which change nothing of what is done.
        """
        return msgspec.structs.replace(self, delay_ms=0, labels=msgspec.UNSET)

    @cached_property
    def digest(self) -> str:
        """A digest to compare policies."""
        return hashlib.blake2b(msgspec.json.encode(self.lasting), digest_size=16).hexdigest()

    @cached_property
    def fields(self) -> tuple[bytes, ...]:
        """The policy as the server stores it, without the delay: names and values in turn."""
        kept: dict[str, Any] = {
            "handler": self.handler,
            "queue": self.queue,
            "level": self.level,
            "limit": self.limit,
            "retries": -1 if self.spec.retries is None else self.spec.retries,
            "poison": self.poison,
            "max_failures": self.max_failures,
            "max_percent": self.max_percent,
            "keep_ms": self.keep_ms,
            "rate_ms": self.rate_ms,
            "spec": msgspec.json.encode(self.spec).decode(),
        }
        if self.labels:
            kept["labels"] = msgspec.json.encode(dict(self.labels)).decode()
        return tuple(str(value).encode() for pair in kept.items() for value in pair)


class Part(msgspec.Struct):
    """A part that a worker has claimed."""

    number: int
    payload: bytes
    #: How many records the part has and where it came from; ``records/about.py`` reads and writes
    #: it.
    about: bytes
    #: 1 for the first run, one more for each error since.
    attempt: int = 1
    #: A worker died while it held this part: nothing else may run beside it.
    is_suspect: bool = False
    #: Outcomes of the part's records that were finished in an earlier attempt.
    partial: bytes = b""

    @property
    def records(self) -> int | None:
        """How many records the part holds; None where ``about`` does not say."""
        digits = _LEADING_DIGITS.match(self.about)
        return int(digits[0]) if digits else None


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Describe a part, or one record of it, that was given up. ``Request.errors`` returns these.

    Example:
        worst = Counter(failure.error for failure in request.errors()).most_common(3)
    """

    #: The name of the exception, or ``Poison``, ``Timeout`` and the like.
    error: str
    message: str = ""
    #: The part's number, from 1; and that of the record in it, or 0 for the whole part.
    part: int = 0
    record: int = 0
    attempts: int = 0
    #: The file, and the line in it; where the whole part failed, its first line.
    source: str = ""
    line: int = 0
    traceback: str = ""
    #: Where a part of several records failed as a whole: its last line, and how many records it
    #: has.
    last_line: int = 0
    records: int = 0


class PartCounts(msgspec.Struct, frozen=True):
    """Parts of a request by state; ``total`` is the sum of the other five."""

    total: int
    waiting: int
    running: int
    retry: int
    done: int
    failed: int


class RecordCounts(msgspec.Struct, frozen=True):
    """Records of a request."""

    total: int
    done: int
    failed: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Show a request at one moment. ``Request.status`` and ``Client.list`` return these.

    Example:
        status = request.status()
        print(f"{status.parts.done} of {status.parts.total}, {status.eta_s} s to go")
    """

    id: str
    queue: str
    handler: str
    state: State
    paused: bool
    level: int
    limit: int
    parts: PartCounts
    records: RecordCounts
    #: Moments in ms since 1970, by the server's clock; None for what has not happened yet.
    created_ms: int
    started_ms: int | None
    finished_ms: int | None
    #: Records finished per second since the start.
    rate: float
    #: Seconds until the end at this rate; None unless the request runs and is loaded completely.
    eta_s: float | None
    #: What the request was labelled with when it was submitted.
    labels: dict[str, str] = {}
    #: Until when nothing starts (ms since 1970), because of a delay or a snooze; None: not held.
    held_until_ms: int | None = None
    #: At most so many starts a second; None: no rate was set.
    rate_limit: float | None = None
    #: More failures than this number, or this percentage, end the request; None: no such bound.
    max_failures: int | None = None
    max_percent: float | None = None
    #: How often failed parts were run again by ``retry``.
    retried: int = 0
    #: Results that the server has now: those that were collected into a file are gone.
    results: int = 0
    #: How long the request is kept after its end.
    keep_ms: int = 0

    @property
    def has_failures(self) -> bool:
        """Whether a part or a record of the request failed."""
        return self.parts.failed > 0 or self.records.failed > 0

    @property
    def is_all_failed(self) -> bool:
        """Whether the request has ended and not one of its records is done."""
        return not self.state.is_live and self.records.done == 0 and self.has_failures

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain dicts, numbers and text, for JSON or a web framework.

        Example:
            json.dumps(request.status().to_dict())
        """
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found
