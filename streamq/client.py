"""Submitting requests and following them.

``submit`` may be run again with the same id at any time, also after it was killed:
it goes on where the server's cursor stands, and the server has every part once.
"""

import hashlib
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import msgspec

from streamq import units
from streamq.connection import Connection
from streamq.errors import (
    LoadGap,
    PartTooLarge,
    RequestExists,
    ServerBusy,
    ServerUnreachable,
    StreamqError,
    WaitTimeout,
)
from streamq.model import (
    LAST_LEVEL,
    LEVEL,
    LIMIT,
    MAX_PART,
    POISON,
    PREFIX,
    RETRIES,
    Failure,
    PartCounts,
    Policy,
    RecordCounts,
    Spec,
    State,
    Status,
    Tokens,
)
from streamq.protocol import Protocol

#: One call to the server carries at most so many parts, and about so many bytes.
CHUNK_PARTS = 500
CHUNK_BYTES = 2**20
#: A waiter that is told nothing looks for itself this often.
LOOK_EVERY_S = 1.0


class Client:
    """A connection to a queue's server, for those who submit and follow requests."""

    def __init__(self, url: str, *, prefix: str = PREFIX, max_part: str | int = MAX_PART) -> None:
        self._max_part = units.size_bytes(max_part, "max_part")
        self._protocol = Protocol(Connection(url), units.name(prefix, "prefix"))
        try:
            self._protocol.connection.check()
        except StreamqError:
            self.close()
            raise

    def submit(  # noqa: PLR0913  the options of a request are many and flat
        self,
        payloads: Iterable[Any],
        *,
        handler: str,
        id: str | None = None,
        queue: str = "default",
        level: int = LEVEL,
        limit: int = LIMIT,
        rate: str | None = None,
        delay: str | float | None = None,
        start_at: float | None = None,
        retries: int = RETRIES,
        backoff: str | float = "1s",
        timeout: str | float | None = None,
        max_failures: str | int | None = None,
        keep: str | float = "7d",
        poison: int = POISON,
    ) -> "Request":
        """Submit payloads as a request, one part each, and return it.

        Bytes go as they are, anything else as JSON. Parts run while later ones are still
        being submitted. The same call with the same id again makes no second request: it
        completes the first.

        Raises:
            InvalidValue: an option that cannot be; nothing was submitted.
            RequestExists: the id is taken by another submission.
        """
        tolerated, percent = units.tolerance(max_failures)
        if start_at is not None:
            delay = max(0.0, start_at - time.time())
        policy = Policy(
            handler=units.name(handler, "handler"),
            queue=units.name(queue, "queue"),
            level=units.whole(level, "level", 0, LAST_LEVEL),
            limit=units.whole(limit, "limit", 1),
            poison=units.whole(poison, "poison", 1),
            max_failures=tolerated,
            max_percent=percent,
            keep_ms=units.duration_ms(keep, "keep"),
            rate_ms=0.0 if rate is None else units.rate_ms(rate),
            delay_ms=0 if delay is None else units.duration_ms(delay, "delay"),
            spec=Spec(
                retries=units.whole(retries, "retries", 0),
                backoff_ms=units.duration_ms(backoff, "backoff"),
                timeout_ms=0 if timeout is None else units.duration_ms(timeout, "timeout"),
            ),
        )
        request_id = secrets.token_hex(8) if id is None else units.name(id, "request id")
        _Load(self._protocol, request_id, policy, self._max_part).run(payloads)
        return Request(self._protocol, request_id)

    def get(self, request_id: str) -> "Request":
        """The request of that id.

        Raises:
            RequestUnknown: there is none.
        """
        request = Request(self._protocol, units.name(request_id, "request id"))
        request.status()
        return request

    def list(self, queue: str = "default", *, ended: bool = False) -> "list[Status]":
        """The queue's requests that are not finished, or those that are, oldest first."""
        found = []
        for request_id in self._protocol.ids(units.name(queue, "queue"), closed=ended):
            with suppress(StreamqError):  # registered and never opened, or just purged
                found.append(Request(self._protocol, request_id).status())
        return found

    def close(self) -> None:
        """Drop the connections."""
        self._protocol.connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Load:
    """One submission: opens, appends in chunks, seals; goes on where the server stands."""

    def __init__(self, protocol: Protocol, request_id: str, policy: Policy, max_part: int) -> None:
        self._protocol = protocol
        self._id = request_id
        self._policy = policy
        self._max_part = max_part
        self._parts = 0
        #: Of all payloads so far, whatever the chunks were: tells one submission from another.
        self._content = hashlib.blake2b(digest_size=16)

    def run(self, payloads: Iterable[Any]) -> None:
        self._protocol.mint(self._policy.queue, self._id, Tokens(), register="yes")
        # A delay is counted from the first submission, so it is no part of what is the same.
        lasting = msgspec.structs.replace(self._policy, delay_ms=0)
        digest = hashlib.blake2b(msgspec.json.encode(lasting), digest_size=16).hexdigest()
        opened = self._protocol.open(self._id, digest, self._policy)
        try:
            encoded = (self._encode(number, value) for number, value in enumerate(payloads, 1))
            self._skip(encoded, opened.total, opened.cursor)
            while chunk := self._chunk(encoded):
                self._append(chunk)
            _, tokens = self._protocol.seal(self._id, self._parts, self._cursor)
            self._protocol.push(self._policy.queue, self._id, tokens)
        except (ServerBusy, ServerUnreachable):
            raise
        except BaseException:
            if opened.is_new:
                self._abandon()
            raise

    @property
    def _cursor(self) -> str:
        return f"{self._parts}:{self._content.hexdigest()}" if self._parts else ""

    def _encode(self, number: int, value: Any) -> bytes:
        payload = value if isinstance(value, bytes) else msgspec.json.encode(value)
        if len(payload) > self._max_part:
            raise PartTooLarge(
                f"part {number} has {len(payload)} bytes, more than the {self._max_part} allowed"
            )
        return payload

    def _count(self, payloads: list[bytes]) -> None:
        self._parts += len(payloads)
        self._content.update(
            b"".join([piece for p in payloads for piece in (len(p).to_bytes(4, "big"), p)])
        )

    def _skip(self, payloads: Iterator[bytes], total: int, cursor: str) -> None:
        """Pass over what the server has already, and make sure that it is the same."""
        while self._parts < total:
            found = list(islice(payloads, min(CHUNK_PARTS, total - self._parts)))
            if not found:
                break
            self._count(found)
        if self._cursor != cursor:
            raise RequestExists(f"request {self._id} was submitted with other parts")

    def _chunk(self, payloads: Iterator[bytes]) -> list[bytes]:
        chunk: list[bytes] = []
        size = 0
        for payload in payloads:
            chunk.append(payload)
            size += len(payload)
            if len(chunk) == CHUNK_PARTS or size >= CHUNK_BYTES:
                break
        return chunk

    def _append(self, chunk: list[bytes]) -> None:
        first = self._parts + 1
        self._count(chunk)
        while True:
            entries = [value for payload in chunk for value in (payload, b"1")]
            try:
                _, _, tokens = self._protocol.append(
                    self._id, first, self._cursor, len(chunk), entries
                )
                break
            except LoadGap:
                # Somebody else submits the same at the same time, in other chunks.
                total = int(self._protocol.inspect(self._id)["total"])
                if total < first:
                    raise
                chunk, first = chunk[total - first + 1 :], total + 1
                if not chunk:
                    return
        self._protocol.push(self._policy.queue, self._id, tokens)

    def _abandon(self) -> None:
        """Leave nothing of a submission that went wrong for good."""
        with suppress(StreamqError):
            self._protocol.cancel(self._id)
            self._protocol.purge(self._id, force=True)


class Request:
    """A request, to follow and to steer."""

    def __init__(self, protocol: Protocol, request_id: str) -> None:
        self._protocol = protocol
        self.id = request_id

    def __repr__(self) -> str:
        return f"Request({self.id!r})"

    def status(self) -> Status:
        """What is counted of the request now.

        Raises:
            RequestUnknown: there is no such request, or it was purged.
        """
        return _status(self.id, self._protocol.inspect(self.id))

    def wait(self, timeout: str | float | None = None) -> Status:
        """Wait for the end and return the last status.

        The end is known from the request itself; a published message only makes it quick.

        Raises:
            WaitTimeout: it did not come in time.
        """
        deadline = None if timeout is None else time.monotonic() + units.duration_ms(timeout) / 1e3
        status = self.status()
        while status.state.is_live:
            with suppress(ServerBusy, ServerUnreachable):
                return self._await_end(deadline)
            _pause(deadline, self.id)
        return status

    def _await_end(self, deadline: float | None) -> Status:
        events = self._protocol.listen(self.id)
        try:
            while True:
                status = self.status()
                if not status.state.is_live:
                    return status
                left = LOOK_EVERY_S if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise WaitTimeout(f"request {self.id} is not finished")
                events.wait(min(left, LOOK_EVERY_S))
        finally:
            events.close()

    def results(self, timeout: str | float | None = None) -> Iterator[tuple[int, bytes]]:
        """Part numbers and results in input order, as they come; ends with the request.

        Parts that failed have none. What a retry yielded comes after the others.

        Raises:
            WaitTimeout: there was nothing new for that long.
        """
        patience = None if timeout is None else units.duration_ms(timeout) / 1e3
        number, fallow = 1, 0.0
        while True:
            batch = self._protocol.collect(self.id, next_number=number)
            yield from batch.results
            if batch.results or batch.next > number:
                number, fallow = batch.next, 0.0
                continue
            if not batch.state.is_live:
                break
            if patience is not None and fallow >= patience:
                raise WaitTimeout(f"request {self.id}: no result for {patience:g} s")
            pause = min(0.2, 0.005 + fallow / 4)
            time.sleep(pause)
            fallow += pause
        yield from self._redriven()

    def _redriven(self) -> Iterator[tuple[int, bytes]]:
        if int(self._protocol.inspect(self.id).get("redrives", 0)):
            late = [(f, r) for f, r in self._protocol.leftovers(self.id) if "." in f]
            for field, result in sorted(late, key=lambda item: float(item[0])):
                yield int(field.partition(".")[0]), result

    def errors(self) -> list[Failure]:
        """What was given up, by part."""
        found = []
        for number, text in self._protocol.failures(self.id):
            failure = msgspec.json.decode(text, type=Failure)
            found.append(msgspec.structs.replace(failure, part=number))
        return sorted(found, key=lambda failure: (failure.part, failure.record))

    def set(
        self, *, level: int | None = None, limit: int | None = None, rate: str | None = None
    ) -> None:
        """Change level, limit or rate while it runs. ``rate="off"`` lifts the rate.

        Raises:
            RequestEnded: it does not run any more.
        """
        if level is not None:
            units.whole(level, "level", 0, LAST_LEVEL)
        if limit is not None:
            units.whole(limit, "limit", 1)
        rate_ms = None if rate is None else 0.0 if rate == "off" else units.rate_ms(rate)
        _, tokens = self._protocol.set(self.id, level, limit, rate_ms)
        self._push(tokens)

    def pause(self) -> None:
        """Start no more parts; what runs goes on to its end."""
        self._protocol.pause(self.id)

    def resume(self) -> None:
        """Start parts again."""
        _, tokens = self._protocol.resume(self.id)
        self._push(tokens)

    def cancel(self) -> int:
        """End it now. Returns how many parts will not be finished."""
        return self._protocol.cancel(self.id)

    def retry(self) -> int:
        """Run again what failed, under the same id. Returns how many parts.

        Raises:
            RequestEnded: it was cancelled.
        """
        queue = self._protocol.inspect(self.id)["queue"]
        # Before it reopens, so that nobody who saw it ended can take it from the open ones.
        self._protocol.mint(queue, self.id, Tokens(), register="again")
        failed = [number for number, _ in self._protocol.failures(self.id)]
        redriven = 0
        for start in range(0, len(failed), CHUNK_PARTS) or [0]:
            count, _, tokens = self._protocol.redrive(self.id, failed[start : start + CHUNK_PARTS])
            self._protocol.push(queue, self.id, tokens)
            redriven += count
        return redriven

    def purge(self) -> None:
        """Forget it now, without waiting for the end of its retention.

        Raises:
            RequestOpen: it still runs.
        """
        queue = self._protocol.inspect(self.id)["queue"]
        self._protocol.purge(self.id, force=True)
        self._protocol.close(queue, self.id, -1, 0)

    def _push(self, tokens: Tokens) -> None:
        if tokens:
            self._protocol.push(self._protocol.inspect(self.id)["queue"], self.id, tokens)


def _pause(deadline: float | None, request_id: str) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise WaitTimeout(f"request {request_id} is not finished, and its server does not answer")
    time.sleep(0.2)


def _status(request_id: str, found: dict[str, str]) -> Status:
    def number(field: str) -> int:
        return int(float(found.get(field) or 0))

    total, done, failed, retry = (number(f) for f in ("total", "done", "failed", "retry"))
    # One lease runs one part; the others in its hands still wait.
    held = number("delivered") - done - failed - retry
    running = min(number("leases"), held) if found["state"] != State.CANCELLED else 0
    finished_ms = number("finished_ms") or None
    started_ms = number("started_ms") or None
    records = RecordCounts(number("records"), number("records_done"), number("records_failed"))
    seconds = ((finished_ms or number("now_ms")) - started_ms) / 1e3 if started_ms else 0.0
    rate = (records.done + records.failed) / seconds if seconds > 0 else 0.0
    is_running = found["state"] == State.OPEN and rate > 0
    left = records.total - records.done - records.failed
    return Status(
        id=request_id,
        queue=found["queue"],
        handler=found["handler"],
        state=State(found["state"]),
        paused=found.get("paused") == "1",
        level=number("level"),
        limit=number("limit"),
        parts=PartCounts(
            total, total - done - failed - retry - running, running, retry, done, failed
        ),
        records=records,
        created_ms=number("created_ms"),
        started_ms=started_ms,
        finished_ms=finished_ms,
        rate=round(rate, 3),
        eta_s=round(left / rate, 1) if is_running else None,
    )
