"""Finds what is wrong with a server or a queue, and tells how to mend it.

Looking changes nothing. With ``--fix`` it mends what a janitor would mend anyway, and a server's
eviction policy.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from streamq.admin.probe import Probe, ProbedBooks
from streamq.admin.server_checks import FAIL, MOST_QUEUES, OK, WARN, Examiner, Finding, ServerChecks
from streamq.errors import Damaged, RequestNewer, RequestUnknown, ServerError
from streamq.model import State
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Tokens
from streamq.queue import backlog
from streamq.queue.janitor import Janitor

#: If the first look is overdue by more than this, no janitor sweeps the queue.
UNSWEPT_MS = 30_000
#: The counts of a live request are read up to 5 times, 0.1 s apart, until they add up.
_READINGS = 5
_PAUSE_S = 0.1


class Doctor(Examiner):
    """Examines a server, and queues in it."""

    def __init__(
        self,
        protocol: Protocol,
        prefix: str,
        *,
        is_mending: bool = False,
        backlog_of: Callable[[str], backlog.Backlog] | None = None,
        most_books: int | None = None,
    ) -> None:
        """``backlog_of`` returns what a queue has to do, where that is known already.

        ``most_books``: of so many requests of a queue the books are checked, the oldest.
        """
        super().__init__(Probe(protocol.connection, prefix), is_mending=is_mending)
        self._protocol = protocol
        self._backlog_of = backlog_of or partial(backlog.read_backlog, protocol)
        self._most_books = most_books

    def examine(self, queues: list[str]) -> Iterator[Finding]:
        """Yield all findings as they are made; without queues, those of every queue there is."""
        chosen = queues or self._queues()
        server = ServerChecks(self._probe, chosen[:MOST_QUEUES], is_mending=self._is_mending)
        for name, check in server.all():
            yield from _check_or_say_why_not(name, check)
        for queue in chosen:
            yield from _check_or_say_why_not("queue", partial(self._queue, queue))
        if not queues:
            yield from _check_or_say_why_not("orphans", self._orphans)

    def _queues(self) -> list[str]:
        try:
            return sorted(
                set(self._probe.names("q", "open")) | set(self._probe.names("q", "workers"))
            )
        except ServerError:
            return ["default"]

    def _queue(self, queue: str) -> Iterator[Finding]:
        found = self._backlog_of(queue)
        yield from self._care(queue, found)
        wrong = 0
        for finding in self._requests(queue, found):
            wrong += 1
            yield finding
        if not wrong:
            says = f"queue {queue}: {len(found.requests)} open, {len(found.workers)} live workers"
            yield Finding(check="requests", verdict=OK, says=says)

    def _care(self, queue: str, found: backlog.Backlog) -> Iterator[Finding]:
        """Check the versions of the queue's workers, and that a janitor sweeps it."""
        versions = Counter(worker.version for worker in found.workers)
        if len(versions) > 1:
            says = f"queue {queue}: workers of versions {', '.join(sorted(versions))}"
            remedy = "an upgrade is under way, or one was forgotten: streamq workers"
            yield Finding(check="workers", verdict=WARN, says=says, remedy=remedy)
        overdue_ms = self._probe.overdue_ms(queue, found.now_ms)
        if overdue_ms > UNSWEPT_MS:
            yield self.mend(
                "janitor",
                f"queue {queue}: nobody has swept it for {overdue_ms / 1e3:.0f} s",
                "run a worker or streamq janitor",
                lambda: self._sweep(queue),
            )

    def _requests(self, queue: str, found: backlog.Backlog) -> Iterator[Finding]:
        """Check the queue's requests."""
        for request_id, error in found.damaged:
            yield _unreadable_request(request_id, error)
        for status in found.unserved():
            yield Finding(
                check="handler",
                verdict=FAIL,
                says=f"request {status.id}: no live worker of queue {queue} has its handler, "
                f"{status.handler}",
                remedy="start a worker with it; if the name is wrong, cancel the request",
            )
        for status in found.requests[: self._most_books]:
            try:
                yield from self._request(queue, status.id)
            except Damaged as error:
                yield _unreadable_request(status.id, error)
        if self._most_books and len(found.requests) > self._most_books:
            yield Finding(
                check="books",
                verdict=OK,
                says=f"queue {queue}: those of the {self._most_books} oldest of "
                f"{len(found.requests):,} requests were checked; streamq doctor checks all",
            )

    def _sweep(self, queue: str) -> None:
        janitor = Janitor(self._protocol, queue)
        while janitor.sweep() == 0:
            pass

    def _request(self, queue: str, request_id: str) -> Iterator[Finding]:
        """Check one request."""
        for kind, says in self._lasting_complaints(request_id):
            what = f"request {request_id}: {says}"
            if kind in ("token", "lease"):
                yield self.mend(
                    kind,
                    what,
                    "a worker or streamq janitor mends it at its next look",
                    lambda: self._look(queue, request_id),
                    verdict=WARN if kind == "token" else FAIL,
                )
            else:
                remedy = (
                    "save what streamq status and errors say, and report it; cancel the request"
                )
                yield Finding(check=kind, verdict=FAIL, says=what, remedy=remedy)

    def _lasting_complaints(self, request_id: str) -> list[tuple[str, str]]:
        """Return complaints that every reading showed: a single one may be work in progress."""
        try:
            lasting = set(_request_complaints(self._probe.books(request_id)))
            for _ in range(_READINGS - 1):
                if not lasting:
                    break
                time.sleep(_PAUSE_S)
                lasting &= set(_request_complaints(self._probe.books(request_id)))
        except RequestUnknown:
            return []
        return sorted(lasting)

    def _look(self, queue: str, request_id: str) -> None:
        """Do what a janitor does with a request."""
        score = self._protocol.registered(queue, request_id) or 0.0
        tick = self._protocol.tick(queue, limit=0)
        janitor = Janitor(self._protocol, queue)
        janitor.look(request_id, score, tick)
        janitor.sweep_out()

    def _orphans(self) -> Iterator[Finding]:
        lost = []
        for request_id in self._probe.names("r", "meta"):
            try:
                queue = self._protocol.inspect(request_id).optional_text("queue")
            except (RequestUnknown, Damaged):  # just purged; or damaged, and reported already
                continue
            if not queue:
                yield _damage_found(request_id, "it does not say which queue it is of")
            elif not self._probe.indexed(queue, request_id):
                lost.append((queue, request_id))
        for queue, request_id in lost:
            yield self.mend(
                "orphan",
                f"request {request_id} is in no index of queue {queue}: nobody looks at it",
                "it is registered again by streamq doctor --fix, and by workers that touch it",
                lambda queue=queue, id_=request_id: self._protocol.mint(  # type: ignore[misc]
                    queue, id_, Tokens(), register="again"
                ),
                verdict=WARN,
            )
        if not lost:
            yield Finding(check="orphans", verdict=OK, says="every request is in its queue's index")


def _check_or_say_why_not(check: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Make a check. If it cannot be made, yield a finding about that, and go on with the others."""
    try:
        yield from look()
    except Damaged as error:
        yield _damage_found(check, str(error))
    except ServerError as error:
        remedy = "ask as a user that may: admin, or reader of streamq acl"
        yield Finding(check=check, verdict=WARN, says=f"cannot look: {error}", remedy=remedy)


def _unreadable_request(request_id: str, error: Damaged) -> Finding:
    """Tell of a request that cannot be read here: a later version made it, or it is damaged."""
    if not isinstance(error, RequestNewer):
        return _damage_found(request_id, str(error))
    return Finding(
        check="version",
        verdict=WARN,
        says=f"request {request_id}: {error}",
        remedy="workers and janitors of this version leave it alone: finish the upgrade, "
        "docs/upgrading.md",
    )


def _damage_found(what: str, error: str) -> Finding:
    return Finding(
        check="damage",
        verdict=FAIL,
        says=f"{what} is damaged: {error}",
        remedy="somebody else wrote to streamq's keys; janitors pass it over, cancel or purge it",
    )


def _request_complaints(books: ProbedBooks) -> Iterator[tuple[str, str]]:
    """Yield what does not add up in the counts of a live request, and what stands still."""
    if books.request.state.is_live:
        yield from _request_miscounts(books)
        yield from _request_standstills(books)


def _request_miscounts(books: ProbedBooks) -> Iterator[tuple[str, str]]:
    count = books.request.count
    total, done, failed = count("total"), count("done"), count("failed")
    left = total - done - failed + (books.request.state is State.LOADING)
    said = count("left")
    if said != left:
        yield "count", f"{said} parts are said to be left, and {left} are"
    if books.entries != total - done:
        yield "parts", f"{books.entries} parts are stored, and {total - done} should be"
    handed = count("delivered") - done - failed
    if books.pending != handed:
        yield "parts", f"{books.pending} parts are in somebody's hands, and {handed} were given out"
    for holder in books.without_lease:
        yield "parts", f"holder {holder} has parts and no lease"


def _request_standstills(books: ProbedBooks) -> Iterator[tuple[str, str]]:
    for holder, ms in books.expired.items():
        # A janitor looks every few seconds.
        if ms > UNSWEPT_MS:
            yield "lease", f"the lease of {holder} has expired, and nobody took its parts back"
    count = books.request.count
    is_held = books.request.is_held or count("rate_at_ms") > count("now_ms")
    free = count("limit") - count("leases")
    ready = books.request.startable - count("delivered") + books.retry_due
    if min(free, ready) > 0 and not books.tokens and not is_held:
        yield "token", "parts could run, but no token invites a worker: it was lost"
