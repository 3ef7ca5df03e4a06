"""The nouns, as plain data. No I/O."""

import hashlib
import re
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec

#: Namespace of every key, unless set otherwise.
PREFIX = "sq"
#: Of a request, unless it says otherwise.
LEVEL = 50
LIMIT = 8
RETRIES = 3
#: Workers a part may cost before it is given up as poison.
POISON = 3
#: Levels are 0 (first) to this.
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
    """What came instead of a token: a list has come into use that a process may not know."""

    #: ``HANDLER:LL``, the end of its name.
    to: str


class Spec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker needs to know of a request; fixed for its life."""

    #: None: as the handler says.
    retries: int | None = None
    backoff_ms: int = 1_000
    backoff_max_ms: int = 300_000
    #: 0: as the handler says.
    timeout_ms: int = 0
    #: How parts hold their records: lines, jsonl, csv, file; "" for one payload, one record.
    format: str = ""
    #: Of a CSV: its first row if that is a header, the names given instead of one, and what it
    #: is written with; "" for no quotes, no escapes.
    header: str = ""
    names: tuple[str, ...] = ()
    delimiter: str = ","
    quote: str = '"'
    escape: str = ""
    #: Names of the files that parts came from, for those who read failures.
    files: tuple[str, ...] = ()
    #: Parts do not hold their bytes but say where in these files they are.
    by_reference: bool = False


class Policy(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """How a request is to be treated. Everything is checked and in the protocol's units."""

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

    @cached_property
    def digest(self) -> str:
        """Tells it from another. A delay counts from the first submission, so it is left out."""
        lasting = msgspec.structs.replace(self, delay_ms=0)
        return hashlib.blake2b(msgspec.json.encode(lasting), digest_size=16).hexdigest()

    @cached_property
    def fields(self) -> tuple[bytes, ...]:
        """As the server keeps it, but for the delay: names and values in turn."""
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
        return tuple(str(value).encode() for pair in kept.items() for value in pair)


class Part(msgspec.Struct):
    """A part in a worker's hands."""

    number: int
    payload: bytes
    #: How many records it has, and where it came from: ``records/about.py`` writes and reads it.
    about: bytes
    #: 1 for the first run, one more for each error since.
    attempt: int = 1
    #: It was there when a worker died: it is to run with nothing beside it.
    is_suspect: bool = False
    #: Outcomes of records that already have one.
    partial: bytes = b""

    @property
    def records(self) -> int | None:
        """How many records it holds, where that is said."""
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
    #: The file, and the line there; the first line where the whole part failed.
    source: str = ""
    line: int = 0
    traceback: str = ""
    #: Where a part of several records failed as a whole: its last line, and how many they are.
    last_line: int = 0
    records: int = 0


class PartCounts(msgspec.Struct, frozen=True):
    """Parts of a request by state; the last five make up the first."""

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
    #: Seconds until the end at this rate, while it runs and the load is complete.
    eta_s: float | None
