"""Following one request, reading its results, and steering it."""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import msgspec

from streamq import units
from streamq.errors import (
    InvalidValue,
    RequestOpen,
    RequestUnknown,
    ServerBusy,
    ServerUnreachable,
    WaitTimeout,
    damaged_if_unreadable,
)
from streamq.model import CHUNK_PARTS, LAST_LEVEL, MOST_WEIGHT, Failure, Spec, Status
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Tokens, part_of_field
from streamq.protocol.snapshot import Snapshot
from streamq.queue.failures import flow_failures, read_failures
from streamq.queue.find import Item, find_item
from streamq.queue.flow_status import (
    name_of_flow_stage,
    places_of_flow_stages,
    status_of_request_or_flow,
)
from streamq.queue.loading import forget_request, keep_registered
from streamq.queue.results import ResultReader
from streamq.records import encoding as codec
from streamq.records.about import AboutPlace

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
        flow_id, slash, _ = request_id.partition("/")
        if slash:
            # The scripts would change this stage and leave the others as they are.
            raise InvalidValue(
                f"{request_id} is a stage of a flow, and only its settings can be changed by "
                f"themselves: give the whole flow, {flow_id}"
            )
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
        return status_of_request_or_flow(self._protocol, self._protocol.inspect(self.id))

    def wait(self, timeout: str | float | None = None) -> Status:
        """Wait until the request has ended, and return its last status.

        Raises:
            WaitTimeout: it did not end in time.

        Example:
            assert request.wait(timeout="1h").parts.failed == 0
        """
        deadline = None if timeout is None else time.monotonic() + _timeout_seconds(timeout)
        found = self._protocol.inspect(self.id)
        while found.state.is_live:
            with suppress(ServerBusy, ServerUnreachable):
                return status_of_request_or_flow(self._protocol, self._await_end(deadline))
            _pause_before_next_look(deadline, self.id)
        return status_of_request_or_flow(self._protocol, found)

    def _await_end(self, deadline: float | None) -> Snapshot:
        events = self._protocol.listen(self.id)
        # Most requests end before this moment, and need not be asked for in the queue.
        register_at = time.monotonic() + LOOK_EVERY_S
        try:
            while True:
                # Of a flow, too, one read tells whether it has ended.
                found = self._protocol.inspect(self.id)
                if not found.state.is_live:
                    return found
                left = LOOK_EVERY_S if deadline is None else deadline - time.monotonic()
                if left <= 0 or time.monotonic() > register_at:
                    keep_registered(self._protocol, found.status())
                    register_at = time.monotonic() + REGISTER_EVERY_S
                if left <= 0:
                    raise WaitTimeout(f"request {self.id} is not finished")
                events.wait(min(left, LOOK_EVERY_S))
        finally:
            events.close()

    def callbacks(self, timeout: str | float | None = None) -> "list[Request]":
        """Wait until the request has ended and its callbacks are started, and return these.

        They run as requests of their own: each can be waited for, and has results and errors.

        Raises:
            WaitTimeout: they are not started in time.

        Example:
            for callback in request.callbacks(timeout="1h"):
                callback.wait(timeout="5m")
        """
        deadline = None if timeout is None else time.monotonic() + _timeout_seconds(timeout)
        self.wait(timeout)
        while self._protocol.inspect(self.id).is_owed:
            _pause_before_next_look(deadline, self.id, "its callbacks are not started")
        started = self.status().callbacks
        return [Request(self._protocol, each.id) for each in started if each.id is not None]

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
            if result not in (codec.NOTHING, codec.FAILED):
                yield number, decoded_result(result, number, self.id)

    def raw_results(self, timeout: str | float | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield the same as ``results``, but the bytes that workers recorded, not decoded.

        Raises:
            WaitTimeout: no result came for that long.
        """
        patience = None if timeout is None else _timeout_seconds(timeout)
        self.status()  # Raises if there is no request. Later the server may be away for a while.
        reader, fallow = ResultReader(self._protocol, self.id), 0.0
        while True:
            found = None
            with suppress(ServerBusy, ServerUnreachable):
                found = reader.read()
            if found is not None:
                yield from ((part_of_field(field), result) for field, result in found)
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
        """Return what was given up, ordered by part and record. Of an unknown request: nothing.

        A failure of something loaded from a file has the file and the line. Where a part failed
        as a whole, it has the first and last line, and the number of records.

        Example:
            for failure in request.errors():
                print(failure.source, failure.line, failure.error, failure.message)
        """
        try:
            snapshot = self._protocol.inspect(self.id)
        except RequestUnknown:
            return []
        if snapshot.count("stages"):
            return flow_failures(self._protocol, snapshot)
        found = []
        kept = (self._protocol.failures(self.id), self._protocol.refusals(self.id))
        for number, text in chain(*kept):
            for failure in read_failures(text):
                found.append(msgspec.structs.replace(failure, part=number))
        return sorted(self._located(found), key=lambda failure: (failure.part, failure.record))

    def _located(self, failures: list[Failure]) -> list[Failure]:
        """Return the failures; those without a file with where their part came from.

        Workers say in which line a record failed. A pool that stopped a process, and a janitor that
        gives a part up, do not know the place.
        """
        lost = sorted({each.part for each in failures if _has_no_place(each)})
        if not lost:
            return failures
        spec = self._protocol.inspect(self.id).spec
        if not spec.files:
            return failures
        abouts: dict[int, bytes] = {}
        for first in range(0, len(lost), _LOCATED):
            some = lost[first : first + _LOCATED]
            abouts |= zip(some, self._protocol.locate(self.id, some), strict=True)
        return [
            _failure_with_its_place(each, abouts[each.part], spec)
            if _has_no_place(each) and each.part in abouts
            else each
            for each in failures
        ]

    def set(
        self,
        *,
        level: int | None = None,
        limit: int | None = None,
        rate: str | None = None,
        weight: int | None = None,
        stage: str | int | None = None,
    ) -> None:
        """Change level, limit, rate or weight while the request runs.

        ``rate="off"`` lifts the rate. Of a flow, ``stage`` (its number, or the name of its handler)
        is changed; without one, all stages are.

        Raises:
            RequestEnded: the request has ended.

        Example:
            request.set(level=0, limit=40)
        """
        if level is not None:
            units.whole(level, "level", 0, LAST_LEVEL)
        if limit is not None:
            units.whole(limit, "limit", 1)
        if weight is not None:
            units.whole(weight, "weight", 1, MOST_WEIGHT)
        rate_ms = None if rate is None else 0.0 if rate == "off" else units.rate_ms(rate)
        for place in self._places(stage):
            _, tokens = self._protocol.set(place, level, limit, rate_ms, weight)
            self._push(tokens, place)

    def pause(self) -> None:
        """Start no more parts. Parts that run go on to their end."""
        self._protocol.pause(self.id)

    def resume(self) -> None:
        """Start parts again."""
        for place in self._places():
            _, tokens = self._protocol.resume(place)
            self._push(tokens, place)

    def release(self) -> None:
        """Let all parts of a request run that was submitted with a canary.

        Raises:
            RequestEnded: the request has ended.

        Example:
            request = client.submit(payloads, handler="shout", canary=100)
        """
        _, tokens = self._protocol.set(self.id, ceiling=0)
        self._push(tokens)

    def cancel(self) -> int:
        """End the request now, and return how many parts will not be finished."""
        return self._protocol.cancel(self.id)

    def retry(self, parts: Iterable[int] | None = None, *, stage: str | int | None = None) -> int:
        """Run the failed parts again, under the same id, and return how many they are.

        ``parts``: only those of these numbers that failed. Of a flow those of all stages run again,
        or of one ``stage``: its number, or the name of its handler. A part whose join or reduce was
        made without it does not.

        Raises:
            RequestEnded: the request was cancelled.
        """
        places = {place: self._queue(place) for place in self._places()}
        # Before it reopens: "again" changes its score among the open ones, so that a janitor that
        # saw it ended cannot take it out of them.
        self._register(places)
        chosen = self._places(stage)
        redriven = sum(self._redrive(place, places[place], parts) for place in chosen)
        if len(places) > 1:
            # And after it reopened: a janitor that looked in between still found stages ended.
            self._register(places)
        return redriven

    def _register(self, places: dict[str, str]) -> None:
        for place, queue in places.items():
            self._protocol.mint(queue, place, Tokens(), register="again")

    def _redrive(self, place: str, queue: str, parts: Iterable[int] | None) -> int:
        if parts is None:
            parts = (number for number, _ in self._protocol.failures(place))
        failed = list(parts)
        redriven = 0
        for start in range(0, len(failed), CHUNK_PARTS) or [0]:
            count, _, tokens = self._protocol.redrive(place, failed[start : start + CHUNK_PARTS])
            # And after it reopened: a janitor that looked in between still found it ended.
            self._protocol.mint(queue, place, tokens, register="again")
            redriven += count
        return redriven

    def find(self, value: Any = None, *, item: str = "") -> Item | None:
        """Return where the input is that has this key, and what it came to in each stage.

        The request has to be submitted with a ``key``, or loaded with ``--key``. ``item`` instead
        finds an input by its number, or a child of it: ``"17/3"``. Return None if there is none.

        Raises:
            InvalidValue: the request was submitted without a key, or there can be no such item.

        Example:
            request = client.submit(orders, flow=shop, key="sku")
            request.find("B-62").stage
        """
        return find_item(self._protocol, self.id, value, item)

    def purge(self) -> None:
        """Remove the ended request and its results from the server now.

        Raises:
            RequestOpen: the request still runs; cancel it first.
        """
        if self._protocol.inspect(self.id).is_owed:
            raise RequestOpen(f"request {self.id}: its callbacks are not started yet")
        for place, queue in {place: self._queue(place) for place in self._places()}.items():
            forget_request(self._protocol, queue, place)

    def _places(self, stage: str | int | None = None) -> list[str]:
        """Return the places of the request, or of one stage of its flow."""
        found = self._protocol.inspect(self.id)
        places = places_of_flow_stages(found)
        if stage is None:
            return places
        handlers = [name_of_flow_stage(self._protocol.inspect(place)) for place in places]
        names = [{str(number), name} for number, name in enumerate(handlers, 1)]
        chosen = [place for place, own in zip(places, names, strict=True) if str(stage) in own]
        if not chosen:
            known = ", ".join(handlers) if found.count("stages") else "it is no flow"
            raise InvalidValue(f"request {self.id} has no stage {stage!r}: {known}")
        return chosen

    def _push(self, tokens: Tokens, place: str = "") -> None:
        if tokens:
            place = place or self.id
            self._protocol.push(self._queue(place), place, tokens)

    def _queue(self, place: str = "") -> str:
        return self._protocol.inspect(place or self.id).text("queue")


def decoded_result(result: bytes, number: int, request_id: str) -> Any:
    """Return the result of a part as its handler returned it; of several records, as a list.

    Raises:
        Damaged: it is no result.
    """
    with damaged_if_unreadable(f"the result of part {number} of {request_id}"):
        items, _ = codec.decode_result(result)
        values = [codec.decode_item(item) for item in items]
    return values[0] if len(values) == 1 else values


def _has_no_place(failure: Failure) -> bool:
    """Return whether a failure does not say where it was."""
    return not failure.source and not failure.records


def _failure_with_its_place(failure: Failure, about: bytes, spec: Spec) -> Failure:
    """Return the failure with where its part came from, if that is known."""
    place = AboutPlace.of(about, spec)
    if place is None or (failure.record and place.records > 1):
        return failure
    lines: dict[str, Any] = {"source": place.source, "line": place.line}
    if place.records > 1:
        lines |= {"last_line": place.last_line, "records": place.records}
    return msgspec.structs.replace(failure, **lines)


def _timeout_seconds(timeout: str | float) -> float:
    return units.duration_ms(timeout, "timeout") / 1e3


def _pause_before_next_look(
    deadline: float | None,
    request_id: str,
    why: str = "it is not finished, and its server does not answer",
) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise WaitTimeout(f"request {request_id}: {why}")
    time.sleep(0.2)
