"""Renewing the leases of a host: a thread for each node that has some of them.

These threads do nothing else, and no call takes long. So a node that hangs costs its own leases and
no others, and no other call of the host delays a renewal. Requests of one node are renewed
together: with one round trip for each, many requests on a server that is far away would take longer
than their leases stand.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from streamq.errors import RequestUnknown, ServerError, ServerUnreachable, StreamqError
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Renewed
from streamq.queue.outages import OutageLog, Outages
from streamq.telemetry.metrics import StopwatchMetric

log = logging.getLogger(__name__)

#: Leases are renewed this often, and cancelled requests seen; for short leases more often.
RENEW_EVERY_S = 1.0
#: A thread ends when its node had no lease for 60 rounds.
LINGER_ROUNDS = 60
#: Holders that are renewed in one round trip, and calls in it, one for each request: a few
#: milliseconds of the server's time. The leases that a pool holds of 800 requests take eight round
#: trips.
MOST_HOLDERS = 1_000
MOST_CALLS = 100

#: Of each request: its holders, and the part that each runs.
_Share = dict[str, dict[str, int | None]]
#: A request, and some of its holders.
_Call = tuple[str, dict[str, int | None]]


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What one holder has, as its host sees it: a lease, and the part that runs under it."""

    request_id: str
    holder: str
    handler: str = ""
    #: The number of the part that runs, if one does, and since when (ms of the monotonic clock).
    running: int | None = None
    since_ms: int = 0
    #: How far its handler says that it is, in percent.
    progress: int = 0
    #: The time limit of the part that runs, or 0; which attempt it is; and how long the part waits
    #: for the next one if it is stopped.
    timeout_ms: int = 0
    attempt: int = 0
    retry_ms: int = 0
    #: Which record of the part runs, from 1, where records are timed one by one; 0 elsewhere.
    record: int = 0
    #: The process that runs it, or 0.
    pid: int = 0


class Renewals:
    """Renews what the holders of a host have."""

    def __init__(
        self,
        protocol: Protocol,
        hasty: Callable[[], Protocol],
        lease_ms: int,
        outages: Outages,
        availability: OutageLog,
    ) -> None:
        """``protocol`` knows the nodes; calls go by ``hasty``."""
        self._protocol = protocol
        self._hasty = hasty
        self._lease_ms = lease_ms
        self._every_s = min(RENEW_EVERY_S, lease_ms / 4e3)
        self._outages = outages
        self._availability = availability
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._unwanted: dict[str, set[str]] = {}
        self._is_over = threading.Event()
        self.holdings: list[Holding] = []
        #: How long the server takes to answer.
        self.trips = StopwatchMetric()

    def hold(self, holdings: list[Holding]) -> None:
        """Renew these from now on, and no others."""
        nodes = {self._protocol.node_of(each) for each in {held.request_id for held in holdings}}
        with self._lock:
            self.holdings = holdings
            for node in nodes - self._threads.keys():
                name = f"renewals {node}".strip()
                thread = threading.Thread(target=self._run, args=(node,), name=name, daemon=True)
                self._threads[node] = thread
                thread.start()

    def is_unwanted(self, holder: str) -> bool:
        """Tell whether the lease is lost, or its request cancelled."""
        return any(holder in unwanted for unwanted in list(self._unwanted.values()))

    def stop(self) -> None:
        """End the threads."""
        self._is_over.set()

    def _run(self, node: str) -> None:
        who = threading.current_thread().name
        rounds = 0
        last: set[str] = set()
        while not self._is_over.wait(self._every_s):
            rounds += 1
            share = self._share(node)
            if share:
                rounds = 0
                try:
                    last = self._renew(node, share, last, who)
                except Exception:
                    log.exception("renewals go on after")
            elif rounds > LINGER_ROUNDS and self._is_left(node):
                self._availability.worked(who)
                return

    def _share(self, node: str) -> _Share:
        """Return what is held of requests on the node."""
        requests: _Share = defaultdict(dict)
        for held in self.holdings:
            requests[held.request_id][held.holder] = held.running
        of = self._protocol.node_of
        return {each: running for each, running in requests.items() if of(each) == node}

    def _is_left(self, node: str) -> bool:
        """Tell whether the node has no leases. If so, its thread is forgotten, for it ends."""
        with self._lock:
            if self._share(node):
                return False
            self._unwanted.pop(node, None)
            del self._threads[node]
            return True

    def _renew(self, node: str, share: _Share, last: set[str], who: str) -> set[str]:
        """Renew the share of a node, those last that failed before. Returns those that fail now."""
        failed = last & share.keys()
        unwanted: set[str] = set()
        is_well = True
        for batch in _renewal_batches(share, sorted(share, key=failed.__contains__)):
            failed -= {request_id for request_id, _ in batch}
            errors: dict[int, ServerError] = {}  # one may be that of all requests of a batch
            for (request_id, running), answer in zip(batch, self._ask(batch), strict=True):
                if isinstance(answer, ServerError):
                    failed.add(request_id)
                    errors[id(answer)] = answer
                else:
                    unwanted |= unwanted_holders(request_id, running, answer)
            for error in errors.values():
                is_well = False
                self._outages.saw(node)
                self._availability.failed(who, error)
            if any(isinstance(error, ServerUnreachable) for error in errors.values()):
                break  # the other requests are on this node, too: each would wait as long
        self._unwanted[node] = unwanted
        if is_well:
            self._availability.worked(who)
        return failed

    def _ask(self, batch: list[_Call]) -> Sequence[Renewed | StreamqError]:
        """Renew leases of some requests in one round trip. Returns an answer for each request."""
        begun = time.monotonic()
        try:
            answers = self._hasty().renew_all(self._lease_ms, batch)
        except ServerError as error:
            return [error] * len(batch)
        self.trips.saw(time.monotonic() - begun)
        return answers


def _renewal_batches(share: _Share, order: Iterable[str]) -> Iterator[list[_Call]]:
    """Yield what is renewed in each round trip. A request of very many holders is in several."""
    batch: list[_Call] = []
    room = MOST_HOLDERS
    for request_id in order:
        holders = list(share[request_id].items())
        while holders:
            if not room or len(batch) >= MOST_CALLS:
                yield batch
                batch, room = [], MOST_HOLDERS
            batch.append((request_id, dict(holders[:room])))
            holders, room = holders[room:], room - len(batch[-1][1])
    if batch:
        yield batch


def unwanted_holders(
    request_id: str, running: dict[str, int | None], answer: Renewed | StreamqError
) -> set[str]:
    """Return the holders nobody wants any more, by what the server answered."""
    if isinstance(answer, RequestUnknown):
        return set(running)
    if isinstance(answer, StreamqError):
        # The error says nothing about the leases. A holder that finishes a part gets the same
        # error.
        log.warning("request %s cannot be renewed: %s", request_id, answer)
        return set()
    state, _, stands = answer
    if not state.is_live:
        return set(running)
    return {holder for holder, is_standing in stands.items() if not is_standing}
