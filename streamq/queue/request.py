"""Following one request, reading its results, and steering it."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from streamq import units
from streamq.errors import (
    UNREADABLE,
    ServerBusy,
    ServerUnreachable,
    WaitTimeout,
    damaged_if_unreadable,
)
from streamq.model import CHUNK_PARTS, LAST_LEVEL, Failure, Spec, Status
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Tokens
from streamq.queue.loading import forget, keep_registered
from streamq.queue.results import ResultReader, part_of
from streamq.records import encoding as codec
from streamq.records.about import Place

#: How often (s) ``wait`` reads the request, if no message of its end comes.
LOOK_EVERY_S = 1.0
#: How often (s) ``wait`` makes sure that its request is registered: a failover may forget that.
REGISTER_EVERY_S = 10.0
#: How many parts are located in one call: the server reads each of them with its payload.
_LOCATED = 50


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
                    keep_registered(self._protocol, status)
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
