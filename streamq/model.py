"""The nouns, as plain data. No I/O."""

import hashlib
import re
from collections.abc import Iterator
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

import msgspec

#: What the name of every key begins with, unless the setting ``prefix`` says otherwise.
PREFIX = "sq"
#: Defaults of a request.
LEVEL = 50
LIMIT = 8
#: How many tokens of a request are out at most: its share among requests of its level.
WEIGHT = 8
RETRIES = 3
#: After so many workers have died while they ran a part, it is given up as poison.
POISON = 3
#: Levels go from 0, which is served first, to this one.
LAST_LEVEL = 99
#: The protocol version of requests with fields that earlier versions must not ignore.
GUARDED = 2
#: A callback is kept for at least this long after its end, so that nobody starts it again.
OUTLIVE_MS = 600_000
#: Largest weight.
MOST_WEIGHT = 64
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
    #: How parts hold their records: lines, jsonl, csv, parquet, arrow, file; "" for one payload,
    #: one record.
    format: str = ""
    #: For CSV: the first row if it is a header, the names given in place of one, and the dialect.
    #: An empty quote or escape means that there is none.
    header: str = ""
    names: tuple[str, ...] = ()
    delimiter: str = ","
    quote: str = '"'
    escape: str = ""
    #: Rows of a CSV that are left out at the beginning of each file.
    skip_rows: int = 0
    #: A file that cannot be read ends the load; else it is a failure of its own.
    is_strict: bool = False
    #: How the files are encoded; "" for UTF-8. The loader makes UTF-8 of it.
    encoding: str = ""
    #: Names of the files that parts came from; reports of failures show them.
    files: tuple[str, ...] = ()
    #: Parts hold no bytes of their own: each says where in these files its bytes are.
    by_reference: bool = False
    #: Workers that may write to this folder keep results in spools there, as lines of this form.
    spool: str = ""
    spool_form: str = ""
    #: Of a stage of a flow: which one it is, from 1; the kinds of all stages; what the scripts know
    #: of this one (``flows/shape.py``); and what a join or reduce does without some of its inputs.
    stage: int = 0
    shape: str = ""
    facts: str = ""
    on_failure: str = "fail"
    #: Of a reduce: how many results a part of its tree has; 0: it is no tree.
    width: int = 0


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of a flow, checked, and in the units of the protocol."""

    kind: str
    #: How its parts are treated. That of the first stage is the request's own.
    policy: "Policy"
    #: How many parts and bytes may be unfinished in it; 0 parts: any number.
    window: tuple[int, int] = (0, 0)

    @property
    def fields(self) -> tuple[bytes, ...]:
        """What the server stores of the stage besides its policy: names and values in turn."""
        spec = self.policy.spec
        kept: dict[str, Any] = {
            "kind": self.kind,
            "shape": spec.shape,
            "facts": spec.facts,
            "window": self.window[0],
            "window_bytes": self.window[1],
            "on_failure": spec.on_failure,
        }
        if spec.width:
            kept["width"] = spec.width
        return tuple(str(value).encode() for pair in kept.items() for value in pair)


class FlowPlan(msgspec.Struct, frozen=True):
    """A flow, checked, as a request keeps it."""

    name: str
    stages: tuple[StagePlan, ...]

    @property
    def shape(self) -> str:
        """The kinds of the stages, as ``flows/shape.py`` writes them."""
        return self.stages[0].policy.spec.shape or ",".join(each.kind for each in self.stages)


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
    #: Its share among requests of its level; UNSET for ``WEIGHT``, which most have.
    weight: int | msgspec.UnsetType = msgspec.UNSET
    #: So many parts run, and the others when the request is released; UNSET: all run.
    canary: int | msgspec.UnsetType = msgspec.UNSET
    #: The stages of a flow; UNSET for a plain request.
    flow: FlowPlan | msgspec.UnsetType = msgspec.UNSET
    #: What is started when the request has ended; UNSET where nothing is.
    calls: "tuple[Callback, ...] | msgspec.UnsetType" = msgspec.UNSET
    #: Moment (ms since 1970) at which it fails if it has not ended; UNSET: it may take any time.
    deadline_ms: int | msgspec.UnsetType = msgspec.UNSET
    #: The same as a time from its creation (ms), which only the server's clock counts.
    deadline_in_ms: int | msgspec.UnsetType = msgspec.UNSET
    #: By which field of a record it is found (``records/keys.py``); UNSET: by none.
    key: str | msgspec.UnsetType = msgspec.UNSET
    #: Of a callback: the request whose end it is about, when that was created, and its run.
    parent: str | msgspec.UnsetType = msgspec.UNSET
    #: Of a callback: after this moment (ms) it is not created any more.
    not_after: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def lasting(self) -> "Policy":
        """What tells the policy from others: all but the moments, which count from the first
        submission, and the labels, which change nothing of what is done.
        """
        unset = msgspec.UNSET
        return msgspec.structs.replace(
            self,
            delay_ms=0,
            labels=unset,
            deadline_ms=unset,
            deadline_in_ms=unset,
            not_after=unset,
        )

    @cached_property
    def digest(self) -> str:
        """A digest to compare policies."""
        return hashlib.blake2b(msgspec.json.encode(self.lasting), digest_size=16).hexdigest()

    @cached_property
    def fields(self) -> tuple[bytes, ...]:
        """The policy as the server stores it, without the delay: names and values in turn."""
        # The scripts look for these in the first place only. A callback has no deadline.
        fence = {"not_after": self.not_after} if self.not_after else {}
        first = {"deadline_in_ms": self.deadline_in_ms} if self.deadline_in_ms else fence
        kept: dict[str, Any] = first | {
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
        optional = {
            "weight": self.weight,
            "ceiling": self.canary,
            "key": self.key,
            "deadline_ms": self.deadline_ms,
        }
        kept |= {name: value for name, value in optional.items() if value}
        if self.calls:
            kept["calls"] = msgspec.json.encode(self.calls).decode()
            kept["owes"] = len(self.calls)
        if self.parent:
            kept |= {"parent": self.parent, "outlive_ms": OUTLIVE_MS}
        if self.canary or self.calls or self.parent or self.key:
            kept["protocol"] = GUARDED
        return tuple(str(value).encode() for pair in kept.items() for value in pair)


#: When a callback is started: the request is done; it failed or was cancelled; in any case.
Event = Literal["then", "failure", "finally"]


class Callback(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is started when a request has ended, as the request keeps it."""

    event: Event
    policy: Policy
    #: Payloads of the request that is started; None: one, which tells of the end.
    payloads: list[Any] | None = None
    #: Where a webhook is posted to; "" where it is none.
    url: str = ""

    def fits(self, state: State) -> bool:
        """Return whether it is started after an end in this state."""
        if self.event == "finally":
            return not state.is_live
        return (state is State.DONE) if self.event == "then" else state in _FAILURES

    def id_of(self, request_id: str, run: int) -> str:
        """Return the id of what is started, which is made from that of the request."""
        return f"{request_id}.{self.event}" + (f".{run}" if run else "")


_FAILURES = (State.FAILED, State.CANCELLED)


class CallbackStatus(msgspec.Struct, frozen=True):
    """Show what is started at the end of a request."""

    event: Event
    #: The handler's name, or the URL.
    target: str
    #: The id of the request that it runs as; None while it is not started.
    id: str | None


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
    #: What an earlier attempt noted of the records that ran when it ended (``worker/marks.py``).
    mark: bytes = b""
    #: How often the part was redriven; how many workers died while they ran it; and after how many
    #: a record is given up, if any died.
    run: int = 0
    crashes: int = 0
    poison: int = 0
    #: What the payload was before the bytes it refers to took its place; "" for a plain payload.
    reference: bytes = b""

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
    #: The record itself, or the part that failed as a whole, up to 64 KiB: in the file of failures.
    #: In base64 where it is not UTF-8.
    input: str = ""
    input_base64: str = ""
    input_is_cut: bool = False
    #: Of a flow: the name of the stage, and the item, such as ``17/3`` for child 3 of input 17.
    stage: str = ""
    item: str = ""


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
    #: Its share of the turns among requests of its level: a 4 gets half as many as an 8.
    weight: int = WEIGHT
    #: So many of its first parts run before it is released; None: it has no canary, or not any
    #: more.
    canary: int | None = None
    #: Whether these parts have ended, and the others wait for the release.
    waits_for_release: bool = False
    #: Moment (ms since 1970) at which it fails if it has not ended; None: it may take any time.
    deadline_ms: int | None = None
    #: Why it failed, where that is not the number of failures: ``deadline``.
    reason: str = ""
    #: What is started when it has ended.
    callbacks: list[CallbackStatus] = []

    #: Of a flow: its name, its stages, and how many groups of children are open, and how many of
    #: these have failed children.
    flow: str | msgspec.UnsetType = msgspec.UNSET
    stages: "list[StageStatus] | msgspec.UnsetType" = msgspec.UNSET
    groups: dict[str, int] | msgspec.UnsetType = msgspec.UNSET

    @property
    def has_failures(self) -> bool:
        """Whether a part or a record of the request failed."""
        return self.parts.failed > 0 or self.records.failed > 0

    @property
    def is_all_failed(self) -> bool:
        """Whether the request has ended and not one of its records is done."""
        return not self.state.is_live and self.records.done == 0 and self.has_failures

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain dicts, numbers and text, for JSON.

        ``dict(status)`` is the same, so FastAPI takes a status that a function returns.

        Example:
            json.dumps(request.status().to_dict())
        """
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield what ``to_dict`` has, so that a web framework such as FastAPI takes a status."""
        return iter(self.to_dict().items())


class StageStatus(Status, frozen=True, kw_only=True):
    """Show one stage of a flow at one moment. ``Status.stages`` has these."""

    #: Its place among the stages, from 1; the name of its handler; map, spread, join or reduce.
    number: int
    name: str
    kind: str
    #: How the server calls it: ``ID`` or ``ID/2``.
    place: str
    #: How many leases stand.
    leases: int
    #: Why it starts nothing now, in some words; "" if nothing holds it.
    held_by: str = ""
