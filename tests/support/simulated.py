"""Workers as the server sees them: they take tokens, claim, finish, and push tokens.

They make the calls themselves, without ``Taker`` and ``HeldLease``: a test says how many parts they
ask for, no token is dropped unclaimed, and every error reaches the test at once.
"""

import secrets
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from streamq import Janitor, Protocol
from streamq.errors import RequestUnknown
from streamq.model import Failure, Part
from streamq.protocol.keys import QueueKeys, token_list_of
from streamq.protocol.replies import Grant, Terms
from streamq.records.encoding import encode_result
from tests.support.by_hand import CAN_RUN
from tests.support.waiting import wait_until

#: Turns a part into its result; an exception gives the part up.
Handler = Callable[[Part], bytes]
#: A request and the number of one of its parts.
Ran = tuple[str, int]


def shout(part: Part) -> bytes:
    return part.payload.upper()


def refuse(part: Part) -> bytes:
    raise ValueError(f"no {part.number}")


class Worker:
    """One slot. It runs one part at a time, and never waits for long."""

    def __init__(
        self, protocol: Protocol, queue: str, handler: Handler = shout, *, most: int = 100
    ) -> None:
        self.protocol = protocol
        self.queue = queue
        self.handler = handler
        self.terms = Terms(most)
        self.ran: list[Ran] = []

    def step(self, block_s: float = 0.01) -> bool:
        """Take one token and do what it invites to. False when there was none."""
        token = self.protocol.take(self.queue, ("h",), block_s)
        if token is None:
            return False
        self.work_on(token.request_id, token.level)
        return True

    def _claim(self, request_id: str, holder: str, level: int) -> Grant:
        """As a process does: a token may come before its request, which is then registered."""
        for pause_s in (0.001, 0.01, 0.1, 1.0):
            try:
                return self.protocol.claim(request_id, holder, self.terms, CAN_RUN, level=level)
            except RequestUnknown:
                if self.protocol.registered(self.queue, request_id) is None:
                    raise
                time.sleep(pause_s)
        raise RequestUnknown(request_id)

    def work_on(self, request_id: str, level: int = -1) -> str:
        """One lease of the request, until it is over. Returns the word that ended it."""
        holder = f"w{secrets.token_hex(6)}"
        try:
            grant = self._claim(request_id, holder, level)
        except RequestUnknown:
            return "unknown"
        call, created_ms = 0, grant.created_ms
        while True:
            self.protocol.push(self.queue, request_id, grant.tokens)
            if grant.word != "ok":
                return grant.word
            results: list[bytes | int] = []
            for part in grant.parts:
                self.ran.append((request_id, part.number))
                try:
                    results += (part.number, encode_result([self.handler(part)]))
                except ValueError as error:
                    call += 1
                    self._fail(request_id, holder, call, part, error)
            call += 1
            grant = self.protocol.finish(
                request_id, holder, call, results, len(results) // 2, self.terms, created_ms
            )

    def drain(self) -> list[Ran]:
        """Work until no token comes; what should be out is looked after. Returns what ran."""
        before = len(self.ran)
        for _ in range(100):
            while self.step():
                pass
            if not self.sweep():
                return self.ran[before:]
        raise AssertionError("tokens come again and again, and nothing ends")

    def sweep(self) -> bool:
        """Look after every request of the queue. Says whether tokens are out then."""
        make_due(self.protocol, self.queue)
        Janitor(self.protocol, self.queue).sweep()
        return bool(tokens(self.protocol, self.queue))

    def _fail(self, request_id: str, holder: str, call: int, part: Part, error: ValueError) -> None:
        failure = Failure(error=type(error).__name__, message=str(error), attempts=part.attempt)
        outcome = self.protocol.fail(
            request_id, holder, call, part.number, [failure], kind="abandon"
        )
        self.protocol.push(self.queue, request_id, outcome.tokens)


@contextmanager
def working(worker: Worker) -> Generator[Worker]:
    """The worker works in a thread as long as the block lasts."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            worker.step(0.05)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield worker
    finally:
        stop.set()
        thread.join()


def make_due(protocol: Protocol, queue: str) -> None:
    """Let every open request of the queue be due for a look now."""
    ids = protocol.ids(queue)
    if ids:
        protocol.connection.redis.zadd(QueueKeys(queue).due, dict.fromkeys(ids, 1))


def tokens(protocol: Protocol, queue: str) -> list[str]:
    """All tokens of the queue that are out, those next to be taken first."""
    with protocol.connection.redis.pipeline(transaction=False) as pipe:
        for level in range(100):
            pipe.lrange(QueueKeys(queue, to=token_list_of("h", level)).tokens, 0, -1)
        return [request_id.decode() for out in pipe.execute() for request_id in reversed(out)]


def indexes(protocol: Protocol, queue: str, request_id: str) -> set[str]:
    """In which of the queue's indexes a request stands."""
    redis, keys = protocol.connection.redis, QueueKeys(queue)
    names = {"due": keys.due, "open": keys.open, "closed": keys.closed}
    return {name for name, key in names.items() if redis.zscore(key, request_id) is not None}


def wait_for_keys_to_go(protocol: Protocol, request_id: str) -> None:
    """No key of the request is left on any node."""
    redis = protocol.connection.redis
    wait_until(lambda: not list(redis.scan_iter(match=f"*{{r:{request_id}}}*", count=10_000)))
