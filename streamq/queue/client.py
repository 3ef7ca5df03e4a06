"""Submitting requests and following them."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec

from streamq import units
from streamq.driver.connection import Connection
from streamq.errors import (
    UNREADABLE,
    Damaged,
    InvalidValue,
    RequestUnknown,
    ServerBusy,
    ServerError,
    ServerUnreachable,
    SettingsError,
    StreamqError,
    WaitTimeout,
    reading,
)
from streamq.model import (
    LAST_LEVEL,
    LEVEL,
    LIMIT,
    MAX_PART,
    POISON,
    PREFIX,
    Failure,
    PartCounts,
    Policy,
    RecordCounts,
    Spec,
    State,
    Status,
    Tokens,
)
from streamq.protocol.protocol import Protocol
from streamq.queue.results import ResultReader, part_of
from streamq.queue.submission import CHUNK_PARTS, Submission, forget, register
from streamq.records import encoding as codec
from streamq.records.decoding import Place
from streamq.settings import Settings, with_login

#: A waiter that is told nothing looks for itself this often.
LOOK_EVERY_S = 1.0
#: How often a waiter makes sure that its request is registered: a failover may forget that.
REGISTER_EVERY_S = 10.0
#: Where so many parts came from is asked at once: the server reads each with its payload.
_LOCATED = 50


class Client:
    """A connection to a queue's server, for those who submit and follow requests."""

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = PREFIX,
        max_part: str | int = MAX_PART,
        insecure: bool | None = None,
    ) -> None:
        """Connect to the server at the URL, or at the one that the settings name.

        ``insecure`` lets it be one on another machine that asks for no password.
        """
        settings = Settings.from_env()
        url = with_login(url or settings.url, settings)
        if not url:
            raise SettingsError("which server? Give a URL, or set STREAMQ_URL")
        self._max_part = units.size_bytes(max_part, "max_part")
        units.name(prefix, "prefix")
        self._protocol = Protocol(Connection(url), prefix)
        try:
            self._protocol.connection.check(
                is_insecure=settings.insecure if insecure is None else insecure
            )
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
        retries: int | None = None,
        backoff: str | float = "1s",
        timeout: str | float | None = None,
        max_failures: str | int | None = None,
        keep: str | float = "7d",
        poison: int = POISON,
        durable: int = 0,
    ) -> "Request":
        """Submit payloads as a request, one part each, and return it.

        Bytes go as they are, anything else as JSON. Parts run while later ones are still
        being submitted. The same call with the same id again makes no second request: it
        completes the first. With ``durable`` it returns when so many replicas have it all.

        When the payloads end in an error, what was submitted of them is taken back. When the
        server does, it stays if an id was given, so that the same call can go on.

        Raises:
            InvalidValue: an option or a payload that cannot be; nothing is submitted.
            RequestExists: the id is taken by another submission.
            RequestEnded: it was cancelled, or failed, before all was submitted.
            ServerError: not now. ServerBehind: it is submitted, but not on so many replicas.
        """
        if start_at is not None:
            if delay is not None:
                raise InvalidValue("give either delay or start_at")
            delay = max(0.0, units.moment_s(start_at, "start_at") - time.time())
        options = (handler, queue, level, limit, rate, delay, retries, backoff, timeout)
        try:
            policy = _policy(*options, max_failures, keep, poison)
        except TypeError:  # one that cannot be remembered is none that can be
            policy = _policy.__wrapped__(*options, max_failures, keep, poison)
        if durable != 0:
            units.whole(durable, "durable", 0)
        # Lists are named, though they are iterable: it takes a while to find that out.
        if isinstance(payloads, (str, bytes)) or not isinstance(payloads, (list, Iterable)):
            raise InvalidValue(f"payloads are one {type(payloads).__name__}; give a list of them")
        request_id = os.urandom(8).hex() if id is None else units.name(id, "request id")
        submission = Submission(self._protocol, request_id, policy, self._max_part)
        submission.run(payloads, can_go_on=id is not None)
        if durable:
            submission.replicate(durable)
        return Request(self._protocol, request_id)

    def get(self, request_id: str) -> "Request":
        """The request of that id.

        Raises:
            RequestUnknown: there is none.
        """
        request = Request(self._protocol, units.name(request_id, "request id"))
        request._register(request.status())
        return request

    def list(self, queue: str = "default", *, ended: bool = False) -> "list[Status]":
        """The queue's requests that are not finished, or those that are, oldest first."""
        ids = self._protocol.ids(units.name(queue, "queue"))
        if ended:
            # Some may have ended since the janitor last looked.
            ids = [*self._protocol.ids(queue, closed=True), *ids]
        found = []
        for request_id in dict.fromkeys(ids):
            # Registered and never opened, or just purged; or nobody can read it.
            with suppress(RequestUnknown, Damaged):
                found.append(Request(self._protocol, request_id).status())
        kept = [status for status in found if status.state.is_live != ended]
        return sorted(kept, key=lambda status: (status.created_ms, status.id))

    def close(self) -> None:
        """Drop the connections."""
        self._protocol.connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@lru_cache(64, typed=True)  # most requests of a program have the same options
def _policy(  # noqa: PLR0913, PLR0917  the options of a request are many and flat
    handler: str,
    queue: str,
    level: int,
    limit: int,
    rate: str | None,
    delay: str | float | None,
    retries: int | None,
    backoff: str | float,
    timeout: str | float | None,
    max_failures: str | int | None,
    keep: str | float,
    poison: int,
) -> Policy:
    """Options as people give them, checked and in the protocol's units."""
    tolerated, percent = units.tolerance(max_failures)
    return Policy(
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
            retries=None if retries is None else units.whole(retries, "retries", 0),
            backoff_ms=units.duration_ms(backoff, "backoff"),
            timeout_ms=0 if timeout is None else units.duration_ms(timeout, "timeout"),
        ),
    )


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
        return status_of(self.id, self._protocol.inspect(self.id))

    def wait(self, timeout: str | float | None = None) -> Status:
        """Wait for the end and return the last status.

        The end is known from the request itself; a published message only makes it quick.

        Raises:
            WaitTimeout: it did not come in time.
        """
        deadline = None if timeout is None else time.monotonic() + _seconds(timeout)
        status = self.status()
        while status.state.is_live:
            with suppress(ServerBusy, ServerUnreachable):
                return self._await_end(deadline)
            _pause(deadline, self.id)
        return status

    def _await_end(self, deadline: float | None) -> Status:
        events = self._protocol.listen(self.id)
        # Most requests end before that, and are spared the question.
        register_at = time.monotonic() + LOOK_EVERY_S
        try:
            while True:
                status = self.status()
                if not status.state.is_live:
                    return status
                left = LOOK_EVERY_S if deadline is None else deadline - time.monotonic()
                if left <= 0 or time.monotonic() > register_at:
                    self._register(status)
                    register_at = time.monotonic() + REGISTER_EVERY_S
                if left <= 0:
                    raise WaitTimeout(f"request {self.id} is not finished")
                events.wait(min(left, LOOK_EVERY_S))
        finally:
            events.close()

    def results(self, timeout: str | float | None = None) -> Iterator[tuple[int, Any]]:
        """Part numbers and results in input order, as they come; ends with the request.

        A result is what the handler returned: bytes and text as they were, anything else as
        JSON has it. A part of several records has a list of them. Parts that failed have no
        result. What a retry yielded comes after the others.

        Raises:
            WaitTimeout: there was nothing new for that long.
        """
        for number, result in self.raw_results(timeout):
            with reading(f"the result of part {number} of {self.id}"):
                items, _ = codec.decode_result(result)
                values = [codec.decode_item(item) for item in items]
            yield number, values[0] if len(values) == 1 else values

    def raw_results(self, timeout: str | float | None = None) -> Iterator[tuple[int, bytes]]:
        """Like ``results``, but the bytes that workers recorded.

        Raises:
            WaitTimeout: there was nothing new for that long.
        """
        patience = None if timeout is None else _seconds(timeout)
        self.status()  # From here on the server may be away for a while.
        reader, fallow = ResultReader(self._protocol, self.id), 0.0
        while True:
            found = None
            with suppress(ServerBusy, ServerUnreachable):
                found = reader.read()
            if found is not None:
                yield from ((part_of(field), result) for field, result in found)
                fallow = 0.0
                continue
            if reader.is_over:
                return
            if patience is not None and fallow >= patience:
                raise WaitTimeout(f"request {self.id}: no result for {patience:g} s")
            pause = min(0.2, 0.005 + fallow / 4)
            time.sleep(pause)
            fallow += pause

    def errors(self) -> list[Failure]:
        """What was given up, by part and record.

        What was loaded from a file has the file and the line; a part that failed as a whole has
        its first and last line, and how many records it has.
        """
        found = []
        for number, text in self._protocol.failures(self.id):
            for failure in _failures(text):
                found.append(msgspec.structs.replace(failure, part=number))
        return sorted(self._located(found), key=lambda failure: (failure.part, failure.record))

    def _located(self, failures: list[Failure]) -> list[Failure]:
        """The same, each whole part with where it came from: who gives it up may not know."""
        whole = sorted({each.part for each in failures if not each.record and not each.records})
        if not whole:
            return failures
        with reading(f"the options of {self.id}"):
            spec = msgspec.json.decode(self._protocol.inspect(self.id)["spec"], type=Spec)
        if not spec.files:
            return failures
        abouts: dict[int, bytes] = {}
        for first in range(0, len(whole), _LOCATED):
            some = whole[first : first + _LOCATED]
            abouts |= zip(some, self._protocol.locate(self.id, some), strict=True)
        return [
            _located(each, abouts[each.part], spec)
            if not each.record and each.part in abouts
            else each
            for each in failures
        ]

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
        queue = self._queue()
        # Before it reopens, so that nobody who saw it ended can take it from the open ones.
        self._protocol.mint(queue, self.id, Tokens(), register="again")
        failed = [number for number, _ in self._protocol.failures(self.id)]
        redriven = 0
        for start in range(0, len(failed), CHUNK_PARTS) or [0]:
            count, _, tokens = self._protocol.redrive(self.id, failed[start : start + CHUNK_PARTS])
            # And after it did, for who looked in between still found it ended.
            self._protocol.mint(queue, self.id, tokens, register="again")
            redriven += count
        return redriven

    def purge(self) -> None:
        """Forget it now, without waiting for the end of its retention.

        Raises:
            RequestOpen: it still runs.
        """
        queue = self._queue()
        forget(self._protocol, queue, self.id)

    def _register(self, status: Status) -> None:
        """See that somebody looks at a request that lives; who may only read leaves it."""
        if status.state.is_live:
            with suppress(ServerError):
                register(self._protocol, status.queue, self.id)

    def _push(self, tokens: Tokens) -> None:
        if tokens:
            self._protocol.push(self._queue(), self.id, tokens)

    def _queue(self) -> str:
        with reading(f"the queue of {self.id}"):
            return self._protocol.inspect(self.id)["queue"]


def _failures(text: bytes) -> list[Failure]:
    try:
        return msgspec.json.decode(text, type=list[Failure])
    except UNREADABLE as error:
        return [Failure(error="Damaged", message=f"what is kept of it cannot be read: {error}")]


def _located(failure: Failure, about: bytes, spec: Spec) -> Failure:
    """The failure of a whole part, with where the part came from, where that is known."""
    place = Place.of(about, spec)
    if place is None:
        return failure
    lines: dict[str, Any] = {"source": place.source, "line": place.line}
    if place.records > 1:
        lines |= {"last_line": place.last_line, "records": place.records}
    return msgspec.structs.replace(failure, **lines)


def _seconds(timeout: str | float) -> float:
    return units.duration_ms(timeout, "timeout") / 1e3


def _pause(deadline: float | None, request_id: str) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise WaitTimeout(f"request {request_id} is not finished, and its server does not answer")
    time.sleep(0.2)


def status_of(request_id: str, found: dict[str, str]) -> Status:
    """What ``inspect`` found, as a status.

    Raises:
        Damaged: it is none.
    """
    with reading(f"what the server has of {request_id}"):
        return _status(request_id, found)


def _status(request_id: str, found: dict[str, str]) -> Status:
    def number(field: str) -> int:
        return int(float(found.get(field) or 0))

    total, done, failed, retry = (number(f) for f in ("total", "done", "failed", "retry"))
    # One lease runs one part; the others in its hands still wait.
    held = number("delivered") - done - failed - retry
    running = min(number("leases"), held) if found["state"] != State.CANCELLED else 0
    # Parts that were handed back wait as those do that nobody had: none of their attempts failed.
    retry -= number("handed_back")
    finished_ms = number("finished_ms") or None
    started_ms = number("started_ms") or None
    records = RecordCounts(number("records"), number("records_done"), number("records_failed"))
    seconds = ((finished_ms or number("now_ms")) - started_ms) / 1e3 if started_ms else 0.0
    rate = (records.done + records.failed) / seconds if seconds > 0 else 0.0
    is_running = found["state"] == State.OPEN and rate > 0
    left = records.total - records.done - records.failed
    return Status(
        id=request_id,
        queue=units.name(found["queue"], "queue"),
        handler=found["handler"],
        state=State(found["state"]),
        paused=found.get("paused") == "1" and State(found["state"]).is_live,
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
