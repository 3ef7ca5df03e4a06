"""The bodies of calls and of their answers, as typed JSON."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from streamq.model import CHUNK_BYTES, CHUNK_PARTS, LEVEL, LIMIT, POISON, WEIGHT, State, Status
from streamq.protocol.replies import FailKind
from streamq.queue.pace import MOST_PARTS
from streamq.worker.options import LONGEST_LEVELS

#: Proxies cut a call after 60 s, so no call waits longer than 50 s.
MOST_WAIT_S = 50.0
WAIT_S = 25.0
#: The shortest lease is that of a pool; the longest is a day.
_LEASE_S = (0.5, 86_400.0)

Seconds = Annotated[float, Meta(ge=0, le=MOST_WAIT_S)]
Levels = Annotated[str, Meta(max_length=LONGEST_LEVELS)]
PartNumber = Annotated[int, Meta(ge=1, le=2**53)]
#: The form of payloads in an answer: ``auto`` is JSON as values and others as text or base64; or
#: all in one form.
As = Literal["auto", "text", "json", "base64"]


class Offer(msgspec.Struct, forbid_unknown_fields=True):
    """A handler that a worker has."""

    name: str
    #: How often a part is run again, where its request does not say.
    retries: Annotated[int, Meta(ge=0, le=10**6)] | UnsetType = UNSET


class Ask(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename={"as_": "as"}):
    """Asks for parts: of which queue and handlers, how many, and for how long."""

    queue: str = "default"
    handlers: Annotated[list[str | Offer], Meta(max_length=100)] = []
    levels: Levels = "0-99"
    most: Annotated[int, Meta(ge=1, le=MOST_PARTS)] = 1
    max_bytes: Annotated[int, Meta(ge=1, le=CHUNK_BYTES)] = CHUNK_BYTES
    wait_s: Seconds = WAIT_S
    lease_s: Annotated[float, Meta(ge=_LEASE_S[0], le=_LEASE_S[1])] = 20.0
    quantum_ms: Annotated[int, Meta(ge=1, le=60_000)] = 50
    as_: As = "auto"
    #: What the worker calls itself, how many slots it has, and its version: for people.
    name: Annotated[str, Meta(max_length=64)] = ""
    slots: Annotated[int, Meta(ge=1, le=100_000)] = 1
    version: Annotated[str, Meta(max_length=100)] = ""


class Value(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A payload or a result in one of the forms that JSON can carry."""

    json: msgspec.Raw | UnsetType = UNSET
    text: str | UnsetType = UNSET
    base64: str | UnsetType = UNSET
    #: Of results only: lines that are written to an output as they are.
    lines: str | UnsetType = UNSET


class PartTold(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part as a worker is told of it, with its payload in one of three forms."""

    number: int
    records: int | UnsetType = UNSET
    attempt: int = 1
    #: A worker died while it ran this part: run nothing else beside it.
    alone: bool = False
    json: msgspec.Raw | UnsetType = UNSET
    text: str | UnsetType = UNSET
    base64: str | UnsetType = UNSET
    #: The file that it was loaded from, and its first line there.
    source: str = ""
    line: int = 0


class Granted(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to ``take`` and ``report``."""

    #: ok: run the parts. over: the lease has ended, take again. lost: the lease was lost. Else the
    #: state of a request that has ended.
    word: str
    parts: list[PartTold]
    #: How many results of the report were counted.
    counted: int | UnsetType = UNSET
    ticket: str = ""
    request: str = ""
    handler: str = ""
    lease_ms: int = 0
    #: Beat at least this often.
    beat_ms: int = 0
    #: The time limit of a part, if there is one: the worker keeps it.
    timeout_ms: int = 0


class Done(msgspec.Struct, forbid_unknown_fields=True):
    """A part that succeeded."""

    part: PartNumber
    result: Value | None = None


class Failed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part that did not succeed."""

    part: PartNumber
    kind: FailKind = "retry"
    error: Annotated[str, Meta(min_length=1, max_length=200)] = "Error"
    message: str = ""
    traceback: str = ""
    #: When to run it again; without it the request's backoff holds.
    after_ms: Annotated[int, Meta(ge=0, le=10**12)] | UnsetType = UNSET


class Report(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Tells what became of the parts of a ticket. Parts that it does not name go back."""

    ticket: str
    done: Annotated[list[Done], Meta(max_length=MOST_PARTS)] = []
    failed: Annotated[list[Failed], Meta(max_length=400)] = []
    back: Annotated[list[PartNumber], Meta(max_length=MOST_PARTS)] = []
    #: The part that was running when a program of the worker died; it ends the lease.
    crashed: PartNumber | None = None
    #: Set to ask for more parts with the same call.
    next: Ask | None = None


class Held(msgspec.Struct, forbid_unknown_fields=True):
    """A ticket that a worker holds, and the part of it that it runs."""

    ticket: str
    part: PartNumber | None = None


class Beat(msgspec.Struct, forbid_unknown_fields=True):
    """Says that a worker lives and what it holds."""

    tickets: Annotated[list[Held], Meta(max_length=1_000)] = []


class Verdict(msgspec.Struct):
    """The answer to a beat: tickets nobody wants any more, and those of paused requests."""

    unwanted: list[str] = []
    paused: list[str] = []


class Leave(msgspec.Struct, forbid_unknown_fields=True):
    """Says that a worker goes, and which tickets it still holds."""

    tickets: Annotated[list[str], Meta(max_length=1_000)] = []


class Left(msgspec.Struct):
    """The answer to ``leave``: how many leases were ended."""

    released: int


Duration = str | float
#: The most parts of one submission: more would keep one of the few threads busy for seconds.
MOST_SUBMITTED = 20_000


class NewRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request to make, with its parts."""

    handler: str
    parts: Annotated[list[msgspec.Raw], Meta(max_length=MOST_SUBMITTED)] = []
    id: str | None = None
    #: loading: parts come with later calls, and run before the load is sealed, too.
    state: Literal["open", "loading"] = "open"
    queue: str = "default"
    level: int = LEVEL
    limit: int = LIMIT
    weight: int = WEIGHT
    rate: str | None = None
    delay: Duration | None = None
    retries: int | None = None
    backoff: Duration = "1s"
    timeout: Duration | None = None
    max_failures: str | int | None = None
    keep: Duration = "7d"
    poison: int = POISON
    labels: dict[str, str] = {}


class MoreParts(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Parts to add to a request that is loading. ``first`` is the number of the first of them."""

    first: PartNumber
    parts: Annotated[list[msgspec.Raw], Meta(max_length=CHUNK_PARTS)]


class Loaded(msgspec.Struct):
    """How many parts a request has."""

    total: int


class UploadOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How a file that is sent becomes a request: the query of an upload."""

    handler: str
    format: str = ""
    queue: str = "default"
    bytes: str | UnsetType = UNSET
    lines: int | UnsetType = UNSET
    level: int | UnsetType = UNSET
    weight: int | UnsetType = UNSET
    limit: int | UnsetType = UNSET
    rate: str | UnsetType = UNSET
    retries: int | UnsetType = UNSET
    timeout: str | UnsetType = UNSET
    max_failures: str | UnsetType = UNSET
    keep: str | UnsetType = UNSET
    delimiter: str | UnsetType = UNSET
    quote: str | UnsetType = UNSET
    escape: str | UnsetType = UNSET
    header: str | UnsetType = UNSET
    no_header: bool | UnsetType = UNSET
    skip_rows: int | UnsetType = UNSET
    encoding: str | UnsetType = UNSET


class Uploaded(msgspec.Struct):
    """How far an upload has come, and where its request stands."""

    #: How many bytes of the file are loaded. A compressed file, or one that is not UTF-8, has to be
    #: sent as a whole again: 0.
    offset: int
    is_complete: bool
    status: Status


class Seal(msgspec.Struct, forbid_unknown_fields=True):
    """Says that a load is complete, and how many parts it has."""

    total: Annotated[int, Meta(ge=0, le=2**53)]


class Commit(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Says that results up to a part are safely written, from behind the last commit on."""

    through: PartNumber
    after: Annotated[int, Meta(ge=0, le=2**53)] = 0


class Committed(msgspec.Struct):
    """Up to which part results are committed."""

    through: int


class Changes(msgspec.Struct, forbid_unknown_fields=True):
    """What to change of a request that runs. ``rate`` may be ``off``."""

    level: int | None = None
    limit: int | None = None
    rate: str | None = None
    weight: int | None = None


class Controlled(msgspec.Struct):
    """The state of a request after it was steered; how many parts were cancelled or are retried."""

    state: State
    parts: int


class FailureTold(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part, or a record of it, that was given up. Operators see the traceback, too."""

    part: int
    error: str
    record: int = 0
    message: str = ""
    attempts: int = 0
    source: str = ""
    line: int = 0
    traceback: str = ""


class ErrorPage(msgspec.Struct):
    """Some of what was given up, and behind which part the next page begins, if there is one."""

    errors: list[FailureTold]
    after: int | None


class RequestListed(msgspec.Struct, kw_only=True):
    """A request in a list."""

    id: str
    state: State
    handler: str
    paused: bool
    created_ms: int
    #: 0 while it lives.
    finished_ms: int
    has_failures: bool
    labels: dict[str, str]


class Listed(msgspec.Struct):
    """Requests, the newest first; how many fit, how many were looked at, and how many there are."""

    requests: list[RequestListed]
    found: int
    looked: int
    total: int
    #: Requests that cannot be read.
    damaged: list[str]


class QueueTold(msgspec.Struct):
    """A queue: how many requests are open, how many have ended, and how many pools it has."""

    name: str
    open: int
    ended: int
    workers: int


class Version(msgspec.Struct):
    """The version of the gateway."""

    version: str


class ResultLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of the results: one part and its result, or one for each record if it has several."""

    part: int
    result: Value | UnsetType | None = UNSET
    results: list[Value | None] | UnsetType = UNSET


class ResultsEnd(msgspec.Struct, kw_only=True):
    """The last line of the results: where to go on, and whether more can come."""

    next: int
    state: State
    is_over: bool


class LogIn(msgspec.Struct, forbid_unknown_fields=True):
    """Asks for a session."""

    key: str


class Who(msgspec.Struct):
    """Who calls. ``queues`` is null for a key of all queues."""

    name: str
    role: str
    queues: list[str] | None


class Health(msgspec.Struct):
    """The answer of the health routes."""

    status: str
