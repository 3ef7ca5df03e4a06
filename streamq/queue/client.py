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
    damaged_if_unreadable,
)
from streamq.model import (
    CHUNK_PARTS,
    LAST_LEVEL,
    LEVEL,
    LIMIT,
    MAX_PART,
    POISON,
    PREFIX,
    Failure,
    Spec,
    Status,
)
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Tokens
from streamq.queue.loading import forget, register
from streamq.queue.options import policy
from streamq.queue.results import ResultReader, part_of
from streamq.queue.submission import Submission
from streamq.records import encoding as codec
from streamq.records.about import Place
from streamq.settings import Settings, with_login

#: How often (s) ``wait`` reads the request, if no message of its end comes.
LOOK_EVERY_S = 1.0
#: How often (s) ``wait`` makes sure that its request is registered: a failover may forget that.
REGISTER_EVERY_S = 10.0
#: How many parts are located in one call: the server reads each of them with its payload.
_LOCATED = 50


class Client:
    """Submit requests to a server, find them again and list them.

    Threads may share a client. Close it, or use it in a ``with`` statement.

    Example:
        with Client("redis://localhost") as client:
            request = client.submit(["a", "b"], handler="shout")
            print(request.wait().state)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = PREFIX,
        max_part: str | int = MAX_PART,
        insecure: bool | None = None,
    ) -> None:
        """Connect to the server at the URL, or else at the one that the settings name.

        ``prefix`` begins every key in the server. ``max_part`` is the size of the largest payload.
        ``insecure`` allows a server on another machine that asks for no password.

        Raises:
            SettingsError: no URL is given or set.
            ServerError: the server cannot be used; the subclass says why.
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
        """Submit payloads as a request, each as one part, and return the request.

        Bytes are sent as they are, anything else as JSON. ``payloads`` may be any iterable: parts
        run while later ones are still being read. The same call with the same ``id`` makes no
        second request: it finds the first one, and completes it if it was cut short.

        * ``level``: 0 to 99, 0 first. ``limit``: how many parts run at the same time, at most.
        * ``rate``: how many parts start, such as ``"100/s"``. ``delay`` (a duration) or
          ``start_at`` (seconds since 1970): nothing runs before.
        * ``retries``, ``backoff``, ``timeout``: of each part; without them the handler decides.
        * ``max_failures``: a number or a share (``"2%"``); more failures end the request.
        * ``keep``: how long results are kept after the end. ``poison``: how many workers a part may
          cost before it is given up. ``durable``: return when so many replicas have everything.

        Durations are seconds, or text such as ``"90s"``, ``"5m"``, ``"7d"``.

        If reading the payloads raises an error, the request is taken back. If the server fails,
        what was submitted stays when an ``id`` was given, so that the same call can go on.

        Raises:
            InvalidValue: an option or a payload that cannot be; nothing is submitted.
            RequestExists: the id is taken by another submission.
            RequestEnded: the request was cancelled, or failed, before all was submitted.
            ServerError: the server cannot be used now.
            ServerBehind: the request is submitted, but not on so many replicas.

        Example:
            lines = (f"line {n}" for n in range(1_000))
            request = client.submit(lines, handler="shout", level=10, limit=4, id="nightly")
        """
        if start_at is not None:
            if delay is not None:
                raise InvalidValue("give either delay or start_at")
            delay = max(0.0, units.moment_s(start_at, "start_at") - time.time())
        options: dict[str, Any] = {
            "handler": handler,
            "queue": queue,
            "level": level,
            "limit": limit,
            "rate": rate,
            "delay": delay,
            "retries": retries,
            "backoff": backoff,
            "timeout": timeout,
            "max_failures": max_failures,
            "keep": keep,
            "poison": poison,
        }
        try:
            meant = _cached_policy(**options)
        except TypeError:
            # An option that cannot be hashed cannot be cached. This raises the proper error.
            meant = policy(**options)
        if durable != 0:
            units.whole(durable, "durable", 0)
        # ``list`` is tested first: that a list is iterable takes longer to find out.
        if isinstance(payloads, (str, bytes)) or not isinstance(payloads, (list, Iterable)):
            raise InvalidValue(f"payloads are one {type(payloads).__name__}; give a list of them")
        request_id = os.urandom(8).hex() if id is None else units.name(id, "request id")
        submission = Submission(self._protocol, request_id, meant, self._max_part)
        submission.run(payloads, can_go_on=id is not None)
        if durable:
            submission.replicate(durable)
        return Request(self._protocol, request_id)

    @property
    def protocol(self) -> Protocol:
        """The scripts, on this client's connection."""
        return self._protocol

    def get(self, request_id: str) -> "Request":
        """Return the request with that id.

        Raises:
            RequestUnknown: there is no such request, or it was purged.

        Example:
            client.get("nightly").cancel()
        """
        request = Request(self._protocol, units.name(request_id, "request id"))
        request._register(request.status())
        return request

    def list(self, queue: str = "default", *, ended: bool = False) -> "list[Status]":
        """Return the status of the queue's unfinished requests, or of the ended ones, oldest first.

        Example:
            failed = [each.id for each in client.list(ended=True) if each.state == "failed"]
        """
        ids = self._protocol.ids(units.name(queue, "queue"))
        if ended:
            # Requests among the open ones may have ended since the janitor last looked.
            ids = [*self._protocol.ids(queue, closed=True), *ids]
        found = []
        for request_id in dict.fromkeys(ids):
            # It was registered and never opened, or just purged; or nobody can read it.
            with suppress(RequestUnknown, Damaged):
                found.append(Request(self._protocol, request_id).status())
        kept = [status for status in found if status.state.is_live != ended]
        return sorted(kept, key=lambda status: (status.created_ms, status.id))

    def close(self) -> None:
        """Close the connections."""
        self._protocol.connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: Most requests of a program have the same options.
_cached_policy = lru_cache(64, typed=True)(policy)


class Request:
    """Follow a request and steer it. ``Client.submit`` and ``Client.get`` return one.

    The attribute ``id`` is the request's id.

    Example:
        request = client.get("nightly")
        for part, result in request.results():
            print(part, result)
    """

    def __init__(self, protocol: Protocol, request_id: str) -> None:
        self._protocol = protocol
        self.id = request_id

    def __repr__(self) -> str:
        return f"Request({self.id!r})"

    @property
    def protocol(self) -> Protocol:
        """The scripts, on the connection that it was made with."""
        return self._protocol

    def status(self) -> Status:
        """Return where the request stands now, and its counts.

        Raises:
            RequestUnknown: there is no such request, or it was purged.
            RequestNewer: a later version of streamq made it.
        """
        return self._protocol.inspect(self.id).status()

    def wait(self, timeout: str | float | None = None) -> Status:
        """Wait until the request has ended, and return its last status.

        Raises:
            WaitTimeout: it did not end in time.

        Example:
            assert request.wait(timeout="1h").parts.failed == 0
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
        # Most requests end before this moment, and need not be asked for in the queue.
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
        """Yield part numbers and results in input order, as they come, until the request ends.

        A result is what the handler returned: bytes and text as they were, anything else as
        JSON has it. The result of a part with several records is a list. Parts that failed have no
        result. Results of retried parts come after the others.

        Raises:
            WaitTimeout: no result came for that long.

        Example:
            for part, result in request.results(timeout="5m"):
                print(part, result)
        """
        for number, result in self.raw_results(timeout):
            with damaged_if_unreadable(f"the result of part {number} of {self.id}"):
                items, _ = codec.decode_result(result)
                values = [codec.decode_item(item) for item in items]
            yield number, values[0] if len(values) == 1 else values

    def raw_results(self, timeout: str | float | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield the same as ``results``, but the bytes that workers recorded, not decoded.

        Raises:
            WaitTimeout: no result came for that long.
        """
        patience = None if timeout is None else _seconds(timeout)
        self.status()  # Raises if there is no request. Later the server may be away for a while.
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
        """Return what was given up, ordered by part and record.

        A failure of something loaded from a file has the file and the line. Where a part failed
        as a whole, it has the first and last line, and the number of records.

        Example:
            for failure in request.errors():
                print(failure.source, failure.line, failure.error, failure.message)
        """
        found = []
        for number, text in self._protocol.failures(self.id):
            for failure in _failures(text):
                found.append(msgspec.structs.replace(failure, part=number))
        return sorted(self._located(found), key=lambda failure: (failure.part, failure.record))

    def _located(self, failures: list[Failure]) -> list[Failure]:
        """Return the failures, those of whole parts with where they came from.

        A janitor that gives a part up does not know that.
        """
        whole = sorted({each.part for each in failures if not each.record and not each.records})
        if not whole:
            return failures
        spec = self._protocol.inspect(self.id).spec
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
        """Change level, limit or rate while the request runs. ``rate="off"`` lifts the rate.

        Raises:
            RequestEnded: the request has ended.

        Example:
            request.set(level=0, limit=40)
        """
        if level is not None:
            units.whole(level, "level", 0, LAST_LEVEL)
        if limit is not None:
            units.whole(limit, "limit", 1)
        rate_ms = None if rate is None else 0.0 if rate == "off" else units.rate_ms(rate)
        _, tokens = self._protocol.set(self.id, level, limit, rate_ms)
        self._push(tokens)

    def pause(self) -> None:
        """Start no more parts. Parts that run go on to their end."""
        self._protocol.pause(self.id)

    def resume(self) -> None:
        """Start parts again."""
        _, tokens = self._protocol.resume(self.id)
        self._push(tokens)

    def cancel(self) -> int:
        """End the request now, and return how many parts will not be finished."""
        return self._protocol.cancel(self.id)

    def retry(self) -> int:
        """Run the failed parts again, under the same id, and return how many they are.

        Raises:
            RequestEnded: the request was cancelled.
        """
        queue = self._queue()
        # Before it reopens: "again" changes its score among the open ones, so that a janitor that
        # saw it ended cannot take it out of them.
        self._protocol.mint(queue, self.id, Tokens(), register="again")
        failed = [number for number, _ in self._protocol.failures(self.id)]
        redriven = 0
        for start in range(0, len(failed), CHUNK_PARTS) or [0]:
            count, _, tokens = self._protocol.redrive(self.id, failed[start : start + CHUNK_PARTS])
            # And after it reopened: a janitor that looked in between still found it ended.
            self._protocol.mint(queue, self.id, tokens, register="again")
            redriven += count
        return redriven

    def purge(self) -> None:
        """Remove the ended request and its results from the server now.

        Raises:
            RequestOpen: the request still runs; cancel it first.
        """
        queue = self._queue()
        forget(self._protocol, queue, self.id)

    def _register(self, status: Status) -> None:
        """See that janitors look at a request that lives."""
        if status.state.is_live:
            # A user of the server that may only read is refused, and leaves it as it is.
            with suppress(ServerError):
                register(self._protocol, status.queue, self.id)

    def _push(self, tokens: Tokens) -> None:
        if tokens:
            self._protocol.push(self._queue(), self.id, tokens)

    def _queue(self) -> str:
        return self._protocol.inspect(self.id).text("queue")


def _failures(text: bytes) -> list[Failure]:
    try:
        return msgspec.json.decode(text, type=list[Failure])
    except UNREADABLE as error:
        return [Failure(error="Damaged", message=f"what is kept of it cannot be read: {error}")]


def _located(failure: Failure, about: bytes, spec: Spec) -> Failure:
    """Return the failure of a whole part, with where the part came from, if that is known."""
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
