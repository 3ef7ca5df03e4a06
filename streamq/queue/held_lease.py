"""A lease that a host holds: finishes parts, fails them, hands them back, and ends.

A host is a process of a pool, or another program that runs parts or passes them on. Its ``Taker``
(``queue/taker.py``) claims leases. A ``HeldLease`` keeps these rules (``lua/README.md``,
section 4):

* The host's ``LeaseBook`` has the numbers of the parts before one of them is run. So the parent
  of a pool can speak for a process that dies.
* Calls under a lease are numbered. A call is repeated, number and all, until the server answers it.
* The tokens that a reply asks for are pushed before the parts that came with it are run.
"""

import logging
import time
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from streamq.errors import Damaged, ProtocolError, ServerError, StreamqError
from streamq.model import Part
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Grant, Outcome, Terms, Tokens
from streamq.queue.lease_book import LeaseBook
from streamq.queue.outages import Outage
from streamq.queue.outcomes import PartDone, PartNotDone
from streamq.queue.pace import MOST_PARTS

log = logging.getLogger(__name__)

T = TypeVar("T")

#: What ``fail`` answers when the lease goes on.
_GOES_ON = ("retry", "failed")


class LeaseGone(Exception):
    """The lease is over, or its request is gone: what the holder has at hand is dropped."""


class LeaseHost(typing.Protocol):
    """What a lease needs of its host. A ``Taker`` has it."""

    protocol: Protocol

    def terms(self, most: int) -> Terms:
        """Return what to ask the server for: at most so many parts, for the time of a lease."""

    def push(self, request_id: str, tokens: Tokens) -> None:
        """Push the tokens that a reply asks for."""

    def note_end(self, request_id: str, grant: Grant) -> None:
        """Note whether the request has ended."""


class HeldLease:
    """A lease that a host holds: its name, its calls, and the results that are not sent yet.

    One thread at a time uses it.
    """

    def __init__(self, host: LeaseHost, book: LeaseBook, holder: str, request_id: str) -> None:
        self._host = host
        self.book = book
        self.holder = holder
        self.request_id = request_id
        #: Both are known when the claim is granted.
        self.handler = ""
        self.created_ms = 0
        #: When the claim was sent, and when the batch at hand came.
        self.asked_at = self.handed_at = time.monotonic()
        #: Whether parts may be asked for after those at hand.
        self.wants_more = True
        #: Results that are not sent yet, each behind the number of its part; of how many records
        #: they are, and how many bytes they have.
        self.results: list[bytes | int] = []
        self.records = 0
        self.size = 0
        #: The part that runs, or ran last since the last ``finish``.
        self.part: Part | None = None

    def begin(self, grant: Grant) -> None:
        """Write the first batch down, and wake others before it is run."""
        self._deal(grant)
        self._host.push(self.request_id, grant.tokens)

    def record(self, part: Part, outcome: PartDone) -> None:
        """Keep a result until ``finish`` sends it."""
        self.results += (part.number, outcome.result)
        self.records += outcome.records
        self.size += len(outcome.result)

    def finish(self, most: int, *, is_alone: bool) -> Grant:
        """Send the results, and ask for more parts; 0 ends the lease.

        A part that may kill its host is to run alone. Unless the host says that nothing runs beside
        this lease, such a part goes back to the front, and the next claim of it makes room.

        Raises:
            LeaseGone: the request is gone.
        """
        host, book = self._host, self.book
        call = book.next_call()
        results, records, terms = self.results, self.records, host.terms(most)
        grant = insist(
            lambda: host.protocol.finish(
                self.request_id, self.holder, call, results, records, terms, self.created_ms
            )
        )
        book.answered()
        book.count_finished(self.handler, grant.counted, records)
        self.results, self.records, self.size, self.part = [], 0, 0, None
        is_suspect = any(part.is_suspect for part in grant.parts)
        if grant.word == "late" or (is_suspect and not is_alone):
            self.release()
            grant = msgspec.structs.replace(grant, parts=[])
        elif grant.parts:
            if len(grant.parts) > MOST_PARTS:
                # After a lost reply ``finish`` tells of all parts that the lease has. They may be
                # more than a book can hold, if the server forgot its last moments. The others go
                # back when the lease ends, and it ends with these.
                self.wants_more = False
                del grant.parts[MOST_PARTS:]
            self.handed_at = time.monotonic()
            self._deal(grant)
        host.note_end(self.request_id, grant)
        host.push(self.request_id, grant.tokens)
        return grant

    def fail(self, part: Part, outcome: PartNotDone) -> bool:
        """Tell of a part that did not succeed. Returns whether the next of the batch may be begun.

        Raises:
            LeaseGone: the request is gone.
        """
        call = self.book.next_call()
        answer = insist(
            lambda: self._host.protocol.fail(
                self.request_id,
                self.holder,
                call,
                part.number,
                outcome.failures,
                kind=outcome.kind,
                delay_ms=outcome.delay_ms,
                records=outcome.records,
                result=outcome.result,
                partial=outcome.partial,
            )
        )
        self.book.answered()
        self.book.count_failed(self.handler, part, outcome, answer.word)
        self._host.push(self.request_id, answer.tokens)
        if answer.word in _GOES_ON:
            return True
        self.wants_more = False
        return False

    def hand_back(self, numbers: Sequence[int]) -> None:
        """Give back parts that were not begun, and go on with the others.

        Raises:
            LeaseGone: the request is gone.
        """
        self._answered(
            lambda call: self._host.protocol.handback(self.request_id, self.holder, call, numbers)
        )

    def release(self) -> None:
        """End the lease, if it stands. What was not finished goes back to the front."""
        with suppress(LeaseGone):
            self._answered(
                lambda call: self._host.protocol.release(self.request_id, self.holder, call)
            )

    def drop(self) -> None:
        """Note that nobody works under the lease any more."""
        self.book.drop()

    def _answered(self, make: Callable[[int], Outcome]) -> None:
        call = self.book.next_call()
        answer = insist(lambda: make(call))
        self.book.answered()
        self._host.push(self.request_id, answer.tokens)

    def _deal(self, grant: Grant) -> None:
        self.book.deal([part.number for part in grant.parts])


def insist(call: Callable[[], T]) -> T:
    """Make a call until the server answers. Every repeat is the same call, number and all.

    Raises:
        LeaseGone: the answer is that there is nothing to be done under this lease.
    """
    outage = Outage(report_outage)
    while True:
        try:
            return call()
        except ServerError as error:
            time.sleep(outage.failed(error))
        except ProtocolError as error:
            level = logging.WARNING if isinstance(error, Damaged) else logging.INFO
            log.log(level, "dropped: %s", error)
            raise LeaseGone from None


def report_outage(error: StreamqError) -> None:
    """Log why a call had no answer."""
    what = "passed over" if isinstance(error, Damaged) else "waiting for the server"
    log.warning("%s: %s", what, error)
