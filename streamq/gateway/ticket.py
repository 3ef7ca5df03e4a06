"""The ticket: a lease as a signed string, which a worker sends with its next call.

A ticket holds everything that a later call under the lease needs, so a gateway keeps nothing that
matters, and any gateway with the same secret can answer. Calls under a lease are numbered
(``lua/README.md``, rule 2), and the numbers follow from the ticket's own: the same call with the
same ticket is the same call.
"""

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence

import msgspec

from streamq.errors import StreamqError
from streamq.model import Part
from streamq.queue.outcomes import PartNotDone

_VERSION = "t1"
_SIGNATURE_BYTES = 16
#: Calls that carry out the report of ticket ``n`` have the numbers ``1000 n + 1`` to ``1000 n +
#: 499``. Calls that the gateway makes by itself before that report have ``1000 n - 500`` to ``1000
#: n - 1``.
STEP = 1_000
#: A report may tell of this many failures: a call for each comes before the other two.
MOST_FAILURES = 400
HANDBACK = 450
FINISH = 499
GATEWAY = -500


class BadTicket(StreamqError):
    """The text is no ticket, or it was signed with another secret or given to another key."""


class PackedNumbers(msgspec.Struct, frozen=True, array_like=True):
    """Whole numbers in a few bytes: each run is a first number, a step of 0 or 1, and a length."""

    runs: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[int]) -> "PackedNumbers":
        """Return the numbers, in their order."""
        numbers = list(numbers)
        if len(numbers) > 1 and (step := numbers[1] - numbers[0]) in (0, 1):
            first, length = numbers[0], len(numbers)
            if numbers == ([first] * length if step == 0 else [*range(first, first + length)]):
                # Numbers are nearly always in a row: this is much faster than the loop below.
                return cls(((first, step, length),))
        runs: list[tuple[int, int, int]] = []
        for number in numbers:
            if runs:
                first, step, length = runs[-1]
                if length == 1 and number - first in (0, 1):
                    runs[-1] = (first, number - first, 2)
                    continue
                if length > 1 and number == first + step * length:
                    runs[-1] = (first, step, length + 1)
                    continue
            runs.append((number, 1, 1))
        return cls(tuple(runs))

    def numbers(self) -> list[int]:
        """Return the numbers again."""
        return [first + step * at for first, step, length in self.runs for at in range(length)]


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a lease, and of the parts that were handed out with it."""

    request_id: str
    holder: str
    queue: str
    handler: str
    #: The number of this ticket under the lease, from 1.
    number: int
    #: When the request was created: tells it from a later one with the same id.
    created_ms: int
    lease_ms: int
    #: Numbers of the parts, and how many records each has.
    parts: PackedNumbers
    records: PackedNumbers
    #: Which attempt this is, of the parts that failed before.
    attempts: dict[int, int]
    #: How long parts wait for their next attempt: at first, and at most.
    backoff_ms: int
    backoff_max_ms: int
    #: How long a batch should take, how long a part took so far (s), when the batch was handed out,
    #: and when other requests are to have a turn (ms since 1970, by the gateway's clock).
    quantum_ms: int
    part_s: float
    handed_ms: int
    late_ms: int
    #: The name of the key that it was given to.
    key: str
    #: Of a stage of a flow: what the scripts know of it, and what each part says of itself.
    facts: str = ""
    abouts: tuple[bytes, ...] = ()

    def about_of(self, number: int) -> bytes:
        """Return what a part says of itself."""
        return self.abouts[self.parts.numbers().index(number)] if self.abouts else b""

    def with_parts(self, parts: Sequence[Part]) -> "Ticket":
        """Return the ticket of the same lease with these parts."""
        # Many parts say the same of themselves.
        one_of = {part.about: part for part in parts}
        records = {about: part.records or 1 for about, part in one_of.items()}
        return msgspec.structs.replace(
            self,
            parts=PackedNumbers.of([part.number for part in parts]),
            records=PackedNumbers.of([records[part.about] for part in parts]),
            attempts={part.number: part.attempt for part in parts if part.attempt > 1},
            abouts=tuple(part.about for part in parts) if self.facts else (),
        )

    def records_by_part(self) -> dict[int, int]:
        """Return the number of records of each part."""
        return dict(zip(self.parts.numbers(), self.records.numbers(), strict=True))


class TicketSigner:
    """Makes tickets that nobody else can make, and reads them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def use(self, secret: bytes) -> None:
        """Use another secret: tickets of the one before end."""
        self._secret = secret

    def seal(self, ticket: Ticket) -> str:
        """Return the ticket as text."""
        body = _ticket_base64(msgspec.msgpack.encode(ticket))
        return f"{_VERSION}.{body}.{self._signature(body)}"

    def open(self, text: str, key: str) -> Ticket:
        """Read a ticket from its text. It must have been given to that key.

        Raises:
            BadTicket: it was not, or the text is none of ours.
        """
        version, _, rest = text.partition(".")
        body, _, signature = rest.rpartition(".")
        if version != _VERSION or not hmac.compare_digest(
            signature.encode(), self._signature(body).encode()
        ):
            raise BadTicket("it is no ticket of this gateway: take again")
        try:
            ticket = msgspec.msgpack.decode(_ticket_bytes(body), type=Ticket)
        except ValueError as error:  # another version of streamq with the same secret signed it
            raise BadTicket(f"the ticket cannot be read: {error}") from None
        if ticket.key != key:
            raise BadTicket("the ticket was given to another key: take again")
        return ticket

    def _signature(self, body: str) -> str:
        made = hmac.new(self._secret, f"{_VERSION}.{body}".encode(), hashlib.sha256).digest()
        return _ticket_base64(made[:_SIGNATURE_BYTES])


class TicketBook:
    """The ``LeaseBook`` of a ticket: numbers calls by the ticket's number, and notes nothing.

    Nobody can speak for a worker that is elsewhere. When it dies its lease ends by itself.
    """

    name = "w"

    def __init__(self, number: int, place: int = GATEWAY) -> None:
        self._base = number * STEP
        self._next = self._base + place
        #: The lease that was about to be claimed.
        self.holder = self.request_id = ""

    def at(self, place: int) -> None:
        """Give the next call the number that belongs to this place under the ticket."""
        self._next = self._base + place

    def hold(self, holder: str, request_id: str) -> None:
        """Note the name, for a release if the claim is not answered."""
        self.holder, self.request_id = holder, request_id

    def deal(self, numbers: Sequence[int]) -> None:
        """Note nothing: the next ticket has the numbers."""

    def next_call(self) -> int:
        """Return the number of the next call."""
        return self._next

    def answered(self) -> None:
        """Go on to the next number."""
        self._next += 1

    def drop(self) -> None:
        """Forget the name."""
        self.holder = self.request_id = ""

    def count_finished(self, handler: str, parts: int, records: int) -> None:
        """Count nothing."""

    def count_failed(self, handler: str, part: Part, outcome: PartNotDone, word: str) -> None:
        """Count nothing."""


def _ticket_base64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _ticket_bytes(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
