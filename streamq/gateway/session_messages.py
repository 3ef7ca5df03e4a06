"""The messages of a worker and a gateway on a stream. The proto has the same messages."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from streamq.gateway.messages import As, Ask, Beat, Granted, Held, Levels, Offer, Report, Verdict
from streamq.model import CHUNK_BYTES
from streamq.queue.pace import MOST_PARTS


class Hello(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename={"as_": "as"}):
    """The first message of a worker: what it can run, in how many slots, and what it holds."""

    handlers: Annotated[list[str | Offer], Meta(min_length=1, max_length=100)]
    queue: str = "default"
    levels: Levels = "0-99"
    slots: Annotated[int, Meta(ge=0, le=1_000)] = 1
    most: Annotated[int, Meta(ge=1, le=MOST_PARTS)] = 1
    max_bytes: Annotated[int, Meta(ge=1, le=CHUNK_BYTES)] = CHUNK_BYTES
    quantum_ms: Annotated[int, Meta(ge=1, le=60_000)] = 50
    lease_ms: Annotated[int, Meta(ge=500, le=86_400_000)] = 20_000
    as_: As = "auto"
    name: Annotated[str, Meta(max_length=64)] = ""
    version: Annotated[str, Meta(max_length=100)] = ""
    #: After a reconnect: these are renewed before anything else.
    holding: Annotated[list[Held], Meta(max_length=1_000)] = []

    def ask(self) -> Ask:
        """Return what to take for this worker."""
        return Ask(
            queue=self.queue,
            handlers=self.handlers,
            levels=self.levels,
            most=self.most,
            max_bytes=self.max_bytes,
            wait_s=50.0,
            lease_s=self.lease_ms / 1e3,
            quantum_ms=self.quantum_ms,
            as_=self.as_,
        )


class Want(msgspec.Struct, forbid_unknown_fields=True):
    """Changes how many slots a worker has; 0: it is to be given nothing more."""

    slots: Annotated[int, Meta(ge=0, le=1_000)]


class Bye(msgspec.Struct, forbid_unknown_fields=True):
    """The last message of a worker: it goes. Parts that it still holds run elsewhere at once."""

    tickets: Annotated[list[str], Meta(max_length=1_000)] = []


class FromWorker(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message of a worker: a number of its own, and one of the others."""

    seq: Annotated[int, Meta(ge=0, le=2**53)] = 0
    hello: Hello | UnsetType = UNSET
    want: Want | UnsetType = UNSET
    report: Report | UnsetType = UNSET
    beat: Beat | UnsetType = UNSET
    bye: Bye | UnsetType = UNSET


class Welcome(msgspec.Struct, kw_only=True):
    """The answer to ``hello``: how often to beat, and which tickets nobody wants any more."""

    beat_ms: int
    lease_ms: int
    unwanted: list[str]


class GiveBack(msgspec.Struct):
    """Asks for parts that wait behind a slow one: report those not begun as ``back``."""

    ticket: str


class GoAway(msgspec.Struct):
    """Asks the worker to open another stream within this time, and then to end this one."""

    within_ms: int


class Pause(msgspec.Struct):
    """Says that the server does not answer, and that nothing is handed out for a while."""

    for_ms: int


class Trouble(msgspec.Struct):
    """Says that a message could not be done: as an error over HTTP, with its status and code."""

    status: int
    code: str
    title: str
    detail: str


class ToWorker(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of the gateway: which message it answers (0: none), and one of the others."""

    re: int = 0
    welcome: Welcome | UnsetType = UNSET
    grant: Granted | UnsetType = UNSET
    give_back: GiveBack | UnsetType = UNSET
    verdict: Verdict | UnsetType = UNSET
    go_away: GoAway | UnsetType = UNSET
    pause: Pause | UnsetType = UNSET
    error: Trouble | UnsetType = UNSET
