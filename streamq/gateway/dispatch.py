"""Waiting calls: one thread takes tokens for all workers that ask for the same.

Workers that ask for the same handlers and levels of a queue are a line. A line has a thread with
one blocking take while somebody waits, however many wait: a thousand idle workers cost the server
as much as one. The worker that has waited longest gets the next lease.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from streamq.errors import Damaged, ServerError, StreamqError
from streamq.gateway import stages
from streamq.gateway.problems import problem_of_too_many_takes
from streamq.gateway.ticket import TicketBook
from streamq.model import Spec
from streamq.protocol.keys import token_list_of
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Grant, Terms, Tokens
from streamq.queue.lease_keeper import LeaseKeeper
from streamq.queue.renewals import Holding
from streamq.queue.taker import Claimed, Host, Invitation, Taker

log = logging.getLogger(__name__)

#: How long one take blocks at the server. A gateway that stops wakes its takes.
BLOCK_S = 10.0
#: How long the thread of a line outlives the last worker that waited.
LINGER_S = 60.0
#: The most lines of a gateway: each has a thread and a connection.
MOST_LINES = 64
#: Calls of one key wait in so many lines at most.
MOST_LINES_OF_KEY = 32
#: How long a line rests after an error of the server, before it takes again.
REST_S = 0.5
#: How long requests are left to other hosts whose parts are in files that the gateway cannot read.
LEAVE_S = 60.0
#: How often tokens of those requests are given back.
GIVE_BACK_S = 1.0


class Wanted(msgspec.Struct, frozen=True):
    """What the workers of one line ask for."""

    queue: str
    levels: tuple[int, ...]
    #: Handlers, as ``claim`` is told of them, in their order.
    offers: tuple[tuple[str, str], ...]


def _dispatch_gives_nothing_back() -> None:
    """Do nothing: no lease was given yet."""


class DispatchedTake:
    """One call that waits for a lease. Its future belongs to the event loop."""

    # There may be thousands.
    __slots__ = ("_give_back", "_loop", "granted", "is_over", "terms")

    def __init__(self, loop: asyncio.AbstractEventLoop, terms: Callable[[str, int], Terms]) -> None:
        """``terms`` says what to ask of a request, of which so many parts take about a quantum."""
        self._loop = loop
        self.terms = terms
        #: The lease; None if none came in time.
        self.granted: asyncio.Future[Claimed[Spec] | None] = loop.create_future()
        #: Whether the call was answered, or its caller has left. Written by the event loop.
        self.is_over = False
        self._give_back: Callable[[], None] = _dispatch_gives_nothing_back

    def give(self, claimed: Claimed[Spec], unwanted: Callable[[], None]) -> None:
        """Answer the call with a lease, from another thread. If the caller left, give it back."""

        def give() -> None:
            if self.granted.done():
                unwanted()
            else:
                self._give_back = unwanted
                self.granted.set_result(claimed)

        try:
            self._loop.call_soon_threadsafe(give)
        except RuntimeError:  # the loop is closed: the gateway ends
            unwanted()

    def expire(self) -> None:
        """Wait no more, and answer that nothing came."""
        if not self.granted.done():
            self.granted.set_result(None)

    def leave(self) -> None:
        """Wait no more. A lease that was just given, and that nobody heard of, goes back."""
        self.granted.cancel()
        self._give_back()

    def refuse(self, error: StreamqError) -> None:
        """Answer the call with an error, from another thread."""

        def refuse() -> None:
            if not self.granted.done():
                self.granted.set_exception(error)

        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(refuse)


class DispatchLine:
    """The workers that ask for the same, and the thread that takes tokens for them."""

    def __init__(
        self, protocol: Protocol, keeper: LeaseKeeper, name: str, wanted: Wanted, lease_ms: int
    ) -> None:
        self._protocol = protocol
        self._keeper = keeper
        self._wanted = wanted
        host = Host(
            name=name,
            queue=wanted.queue,
            levels=wanted.levels,
            offers=dict(wanted.offers),
            lease_ms=lease_ms,
            quantum_s=0.05,
            is_insisting=False,
        )
        self._taker: Taker[Spec] = Taker(protocol, host, _spec_for_dispatch, keeper.expect)
        self._waiting: deque[DispatchedTake] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._give_back_at = 0.0

    @property
    def is_running(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def end_if_unused(self) -> bool:
        """Take no more tokens if nobody waits. Returns whether that is so."""
        with self._changed:
            if self._drop_over():
                return False
            self._is_stopping = True
            self._changed.notify()
            return True

    def join(self, waiter: DispatchedTake) -> None:
        """Wait behind the calls that wait already."""
        with self._changed:
            self._waiting.append(waiter)
            if self._thread is None:
                name = f"line {self._wanted.queue}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self) -> threading.Thread | None:
        """Take no more tokens. The caller wakes the take that waits, and joins the thread."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
            return self._thread

    def _run(self) -> None:
        while self._has_work():
            try:
                self._take()
            except (ServerError, Damaged) as error:
                log.warning("queue %s: %s", self._wanted.queue, error)
                if isinstance(error, ServerError):
                    self._refuse_all(error)
                time.sleep(REST_S)
            except Exception:
                log.exception("queue %s: the line goes on after", self._wanted.queue)
                time.sleep(REST_S)

    def _has_work(self) -> bool:
        """Wait until somebody waits. If nobody does for long, the thread is forgotten and ends."""
        with self._changed:
            until = time.monotonic() + LINGER_S
            while not self._is_stopping and not self._drop_over():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    self._thread = None
                    return False
                self._changed.wait(min(left_s, GIVE_BACK_S))
                self._give_back()
            return not self._is_stopping

    def _take(self) -> None:
        self._give_back()
        invitation = self._taker.next_token(BLOCK_S)
        if invitation is None:
            return
        with self._changed:
            waiter = self._waiting.popleft() if self._drop_over() else None
        if waiter is None or self._is_stopping:
            token = invitation.token
            self._taker.push(token.request_id, Tokens(1, token_list_of(token.handler, token.level)))
            if waiter:
                self._put_first(waiter)
            return
        try:
            is_served = self._claim_for(waiter, invitation)
        except BaseException:
            self._put_first(waiter)  # refuse() below answers this call, too
            raise
        if not is_served:
            self._put_first(waiter)

    def _claim_for(self, waiter: DispatchedTake, invitation: Invitation) -> bool:
        book = TicketBook(number=1)
        try:
            claimed = self._taker.claim(
                invitation, book, partial(waiter.terms, invitation.token.request_id)
            )
        except ServerError:
            # The claim may have been granted, or may be so later.
            if book.holder:
                held = Holding(request_id=book.request_id, holder=book.holder)
                self._keeper.release(held, book.next_call(), None)
            raise
        if claimed is None:
            return False
        lease, grant, known = claimed
        if known.work.by_reference or stages.is_stage_left_to_native_workers(known.work):
            self._release(claimed)
            self._taker.leave_to_others(lease.request_id, LEAVE_S)
            why = "refers to files" if known.work.by_reference else "is a join or a reduce"
            log.warning(
                "%s %s, which a gateway cannot read: other workers run it", lease.request_id, why
            )
            return False
        lease.begin(grant)
        waiter.give(claimed, lambda: self._release(claimed))
        return True

    def _release(self, claimed: Claimed[Spec]) -> None:
        """Give back parts that no worker was told of."""
        lease = claimed.lease
        held = Holding(request_id=lease.request_id, holder=lease.holder)
        self._keeper.release(held, lease.book.next_call(), None)

    def _drop_over(self) -> bool:
        """Forget calls at the front that wait no more. Returns whether others wait."""
        while self._waiting and self._waiting[0].is_over:
            self._waiting.popleft()
        return bool(self._waiting)

    def _put_first(self, waiter: DispatchedTake) -> None:
        with self._changed:
            self._waiting.appendleft(waiter)

    def _refuse_all(self, error: ServerError) -> None:
        with self._changed:
            refused, self._waiting = self._waiting, deque()
        for waiter in refused:
            waiter.refuse(error)

    def _give_back(self) -> None:
        if time.monotonic() > self._give_back_at:
            self._give_back_at = time.monotonic() + GIVE_BACK_S
            self._taker.give_back_tokens()


class Dispatch:
    """All lines of a gateway."""

    def __init__(self, protocol: Protocol, keepers: dict[str, LeaseKeeper], word: str) -> None:
        """``word`` begins the names of holders, and those of no other gateway."""
        self._protocol = protocol
        self._keepers = keepers
        self._word = word
        self._lines: dict[Wanted, DispatchLine] = {}
        #: Lines that nobody waits in and that were ended for others. Their threads may still run.
        self._ending: list[DispatchLine] = []
        self._made = 0

    def line(self, wanted: Wanted) -> DispatchLine:
        """Return the line of those who ask for this, for a call that joins it at once.

        Called on the event loop only.

        Raises:
            Problem: there are too many lines.
        """
        line = self._lines.get(wanted)
        if line is None:
            if self._is_full():
                for key in [key for key, each in self._lines.items() if each.end_if_unused()]:
                    self._ending.append(self._lines.pop(key))
            if self._is_full():
                raise problem_of_too_many_takes(
                    f"workers wait for {MOST_LINES} different sets of handlers and levels already"
                )
            self._made += 1
            name = f"{self._word}{self._made}"
            line = DispatchLine(self._protocol, self._keepers[wanted.queue], name, wanted, 20_000)
            self._lines[wanted] = line
        return line

    def _is_full(self) -> bool:
        self._ending = [line for line in self._ending if line.is_running]
        return len(self._lines) + len(self._ending) >= MOST_LINES

    def stop(self) -> None:
        """End all threads."""
        threads = [line.stop() for line in (*self._lines.values(), *self._ending)]
        end = time.monotonic() + 2.0
        while any(thread and thread.is_alive() for thread in threads):
            # A thread may be just about to wait.
            self._protocol.connection.wake()
            for thread in threads:
                if thread:
                    thread.join(0.05)
            if time.monotonic() > end:
                return


def _spec_for_dispatch(request_id: str, grant: Grant) -> Spec:
    return msgspec.json.decode(grant.spec, type=Spec)
