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
from streamq.protocol.replies import Grant, Outcome, PassedPart, Terms, Token, Tokens
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

    def __init__(
        self,
        host: LeaseHost,
        book: LeaseBook,
        holder: str,
        request_id: str,
        *,
        is_insisting: bool = True,
    ) -> None:
        """``is_insisting``: repeat a call until the server answers. A host whose callers repeat
        what was not answered makes each call once, and passes on the ``ServerError``.
        """
        self._host = host
        self.book = book
        self._insist = insist_for_lease if is_insisting else _ask_once_under_lease
        self.holder = holder
        self.request_id = request_id
        #: As the token said, and then the claim.
        self.handler = ""
        #: It is known when the claim is granted.
        self.created_ms = 0
        #: When the claim was sent, and when the batch at hand came.
        self.asked_at = self.handed_at = time.monotonic()
        #: Whether parts may be asked for after those at hand.
        self.wants_more = True
        #: Results that are not sent yet, each behind the number of its part; of how many records
        #: they are, and how many bytes they have.
        self.results: list[bytes | int] = []
        #: The same of a stage of a flow: what it hands over.
        self.passed: list[PassedPart] = []
        #: What the spec says of the stage that the lease is of; "" for a plain request.
        self.facts = ""
        self.records = 0
        self.size = 0
        #: How many parts for the next stage are among them.
        self.handed = 0
        #: Takes a token for a later stage of the flow out of what is to be pushed. A host sets it
        #: if nothing else was there to be run when its own token came: then it goes on by itself.
        self.keep_one: Callable[[str, Tokens], tuple[Token | None, Tokens]] | None = None
        #: The token that was kept.
        self.follow: Token | None = None
        #: The part that runs, or ran last since the last ``finish``.
        self.part: Part | None = None

    def begin(self, grant: Grant) -> None:
        """Write the first batch down, and wake others before it is run."""
        self._deal(grant)
        self._host.push(self.request_id, grant.tokens)

    def record(self, part: Part, outcome: PartDone) -> None:
        """Keep a result until ``finish`` sends it."""
        if outcome.passed:
            self.passed.append(outcome.passed)
            self.handed += len(outcome.passed.payloads)
        elif self.facts:
            # It would go back with the lease, and run again and again.
            raise TypeError(f"part {part.number} of a stage hands nothing over")
        else:
            self.results += (part.number, outcome.result)
        self.records += outcome.records
        self.size += len(outcome.result) + outcome.children_size

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
        if self.facts:
            grant = self._pass_on(call, terms)
        else:
            grant = self._insist(
                lambda: host.protocol.finish(
                    self.request_id, self.holder, call, results, records, terms, self.created_ms
                )
            )
        book.answered()
        book.count_finished(self.handler, grant.counted, records)
        self.results, self.passed, self.part = [], [], None
        self.records = self.size = self.handed = 0
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
        tokens = grant.tokens
        if self.keep_one and not grant.parts and tokens.others:
            self.follow, tokens = self.keep_one(self.request_id, tokens)
        host.push(self.request_id, tokens)
        return grant

    def _pass_on(self, call: int, terms: Terms) -> Grant:
        protocol, passed, records = self._host.protocol, self.passed, self.records
        return self._insist(
            lambda: protocol.pass_on(
                self.request_id,
                self.holder,
                call,
                passed,
                records,
                terms,
                self.created_ms,
                self.facts,
            )
        )

    def fail(self, part: Part, outcome: PartNotDone) -> bool:
        """Tell of a part that did not succeed. Returns whether the next of the batch may be begun.

        Raises:
            LeaseGone: the request is gone.
        """
        call = self.book.next_call()
        answer = self._insist(
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
        if answer.word == "lost" and outcome.partial:
            self.keep(outcome.partial, b"")
        return False

    def keep(self, partial: bytes, mark: bytes, *, must: bool = False) -> bool:
        """Keep what the records of the running part came to. Returns whether it is still ours.

        ``mark``: which of them run next. ``must``: insist; else a server that does not answer is
        not waited for, since the next call tells it more.

        Raises:
            LeaseGone: the request is gone.
        """
        part, call = self.part, self.book.next_call()
        assert part
        try:
            word = (self._insist if must else _ask_once_under_lease)(
                lambda: self._host.protocol.keep(
                    self.request_id,
                    self.holder,
                    call,
                    part.number,
                    partial,
                    mark,
                    self.created_ms,
                )
            )
        except ServerError:
            word = "ok"
        # A call that was not answered is not repeated, and may have come: the next has another
        # number.
        self.book.answered()
        return word == "ok"

    def hand_back(self, numbers: Sequence[int]) -> None:
        """Give back parts that were not begun, and go on with the others.

        Raises:
            LeaseGone: the request is gone.
        """
        self._answered(
            lambda call: self._host.protocol.handback(self.request_id, self.holder, call, numbers)
        )

    def release(self, crashed: int | None = None) -> None:
        """End the lease, if it stands. Parts that were not finished go back to the front.

        ``crashed``: the part that was running when a process of the holder died.
        """
        with suppress(LeaseGone):
            self._answered(
                lambda call: self._host.protocol.release(
                    self.request_id, self.holder, call, crashed
                )
            )

    def drop(self) -> None:
        """Note that nobody works under the lease any more."""
        self.book.drop()

    def _answered(self, make: Callable[[int], Outcome]) -> None:
        call = self.book.next_call()
        answer = self._insist(lambda: make(call))
        self.book.answered()
        self._host.push(self.request_id, answer.tokens)

    def _deal(self, grant: Grant) -> None:
        self.book.deal([part.number for part in grant.parts])


def insist_for_lease(call: Callable[[], T]) -> T:
    """Make a call until the server answers. Every repeat is the same call, number and all.

    Raises:
        LeaseGone: the answer is that there is nothing to be done under this lease.
    """
    outage = Outage(report_outage_under_lease)
    while True:
        try:
            return call()
        except ServerError as error:
            time.sleep(outage.failed(error))
        except ProtocolError as error:
            raise _lease_gone(error) from None


def _ask_once_under_lease(call: Callable[[], T]) -> T:
    """Make a call, as ``insist`` does, but pass on the error of a server that does not answer."""
    try:
        return call()
    except ProtocolError as error:
        raise _lease_gone(error) from None


def _lease_gone(error: ProtocolError) -> LeaseGone:
    level = logging.WARNING if isinstance(error, Damaged) else logging.INFO
    log.log(level, "dropped: %s", error)
    return LeaseGone()


def report_outage_under_lease(error: StreamqError) -> None:
    """Log why a call had no answer."""
    what = "passed over" if isinstance(error, Damaged) else "waiting for the server"
    log.warning("%s: %s", what, error)
