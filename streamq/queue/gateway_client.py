"""Submitting requests to a gateway and following them, for ``Client("https://...")``."""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from streamq import units
from streamq.errors import (
    InvalidValue,
    PartTooLarge,
    RequestExists,
    RequestUnknown,
    ServerBusy,
    ServerUnreachable,
    StreamqError,
    WaitTimeout,
    damaged_if_unreadable,
)
from streamq.model import CHUNK_BYTES, CHUNK_PARTS, Failure, State, Status
from streamq.queue.gateway_calls import GatewayCalls
from streamq.queue.request import Request

#: How long one call waits for the end of a request.
_WAIT_S = 25.0
_LISTED = 1_000
#: Options of a request that a gateway takes.
_TAKEN = (
    "handler",
    "queue",
    "level",
    "limit",
    "weight",
    "rate",
    "delay",
    "retries",
    "backoff",
    "timeout",
    "max_failures",
    "keep",
    "poison",
    "labels",
)


T = TypeVar("T")


class _Value(msgspec.Struct):
    """A result in one of the forms that JSON can carry."""

    json: Any = None
    text: str | None = None
    base64: bytes | None = None
    lines: str | None = None

    def value(self) -> Any:
        """Return what it stands for."""
        if self.text is not None:
            return self.text
        if self.base64 is not None:
            return self.base64
        if self.lines is not None:
            return self.lines.encode()
        return self.json


class _Line(msgspec.Struct):
    """A line of results: a part with its result, or where to go on."""

    part: int = 0
    result: _Value | None = None
    results: list[_Value | None] | None = None
    next: int = 0
    is_over: bool = False

    def value(self) -> Any:
        """Return the result of the part."""
        if self.results is not None:
            return [each and each.value() for each in self.results]
        return self.result and self.result.value()


class _Controlled(msgspec.Struct):
    parts: int


class _Errors(msgspec.Struct):
    errors: list[Failure]
    after: int | None


class _Entry(msgspec.Struct):
    id: str
    state: State


class _Listed(msgspec.Struct):
    requests: list[_Entry]


class GatewayRequest(Request):
    """A request that is followed and steered over a gateway."""

    def __init__(self, calls: GatewayCalls, request_id: str) -> None:
        self._calls = calls
        self._path = f"/v1/requests/{quote(request_id, safe='')}"
        self.id = request_id

    def status(self) -> Status:
        """Return where the request stands now, and its counts."""
        return _read_answer(self._calls.call("GET", self._path), Status)

    def wait(self, timeout: str | float | None = None) -> Status:
        """Wait until the request has ended, and return its last status."""
        limit_s = None if timeout is None else units.duration_ms(timeout, "timeout") / 1e3
        until = None if limit_s is None else time.monotonic() + limit_s
        while True:
            left_s = _WAIT_S if until is None else until - time.monotonic()
            path = f"{self._path}/wait?wait_s={max(0.0, min(_WAIT_S, left_s)):.3f}"
            with suppress(ServerBusy, ServerUnreachable):
                status = _read_answer(self._calls.call("GET", path), Status)
                if not status.state.is_live:
                    return status
            if left_s <= 0:
                raise WaitTimeout(f"request {self.id} is not finished")

    def results(self, timeout: str | float | None = None) -> Iterator[tuple[int, Any]]:
        """Yield part numbers and results in input order, as they come, until the request ends."""
        patience_s = None if timeout is None else units.duration_ms(timeout, "timeout") / 1e3
        self.status()
        following, fallow_s = 1, 0.0
        while True:
            *lines, end = self._lines(following)
            for line in lines:
                yield line.part, line.value()
            following = end.next
            if end.is_over:
                return
            if lines:
                fallow_s = 0.0
                continue
            if patience_s is not None and fallow_s >= patience_s:
                raise WaitTimeout(f"request {self.id}: no result for {patience_s:g} s")
            pause_s = min(0.5, 0.02 + fallow_s / 4)
            time.sleep(pause_s)
            fallow_s += pause_s

    def _lines(self, first: int) -> list[_Line]:
        while True:
            with suppress(ServerBusy, ServerUnreachable):
                text = self._calls.call("GET", f"{self._path}/results?from={first}&most=1000")
                with damaged_if_unreadable(f"the results of {self.id}"):
                    return [msgspec.json.decode(line, type=_Line) for line in text.splitlines()]

    def raw_results(self, timeout: str | float | None = None) -> Iterator[tuple[int, bytes]]:
        """Refuse: a gateway decodes results."""
        raise InvalidValue("a gateway does not tell results as workers recorded them")

    def errors(self) -> list[Failure]:
        """Return what was given up, ordered by part and record."""
        found: list[Failure] = []
        after: int | None = 0
        while after is not None:
            path = f"{self._path}/errors?after={after}&most=1000"
            page = _read_answer(self._calls.call("GET", path), _Errors)
            found += page.errors
            after = page.after
        return found

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

        Raises:
            InvalidValue: a stage was named, which a gateway does not take.
        """
        if stage is not None:
            raise InvalidValue("a gateway does not take stages; use the URL of the server")
        changes = {"level": level, "limit": limit, "rate": rate, "weight": weight}
        given = {name: value for name, value in changes.items() if value is not None}
        self._calls.call("PATCH", self._path, given)

    def pause(self) -> None:
        """Start no more parts. Parts that run go on to their end."""
        self._act("pause")

    def resume(self) -> None:
        """Start parts again."""
        self._act("resume")

    def release(self) -> None:
        """Refuse: no request of a gateway has a canary."""
        raise InvalidValue("a gateway does not release requests; use the server's URL")

    def cancel(self) -> int:
        """End the request now, and return how many parts will not be finished."""
        return self._act("cancel")

    def retry(self, parts: Iterable[int] | None = None, *, stage: str | int | None = None) -> int:
        """Run the failed parts again, under the same id, and return how many they are.

        Raises:
            InvalidValue: only some parts or a stage were named, which a gateway does not take.
        """
        if parts is not None or stage is not None:
            raise InvalidValue("a gateway retries all failed parts; use the URL of the server")
        return self._act("retry")

    def purge(self) -> None:
        """Remove the ended request and its results from the server now."""
        self._calls.call("DELETE", self._path)

    def _act(self, word: str) -> int:
        return _read_answer(self._calls.call("POST", f"{self._path}/{word}"), _Controlled).parts


class GatewayQueue:
    """Submit requests to a gateway, find them again and list them."""

    def __init__(self, calls: GatewayCalls, max_part: int) -> None:
        self._calls = calls
        self._max_part = max_part

    def submit(
        self, payloads: Iterable[Any], request_id: str, options: dict[str, Any], durable: int
    ) -> Request:
        """Submit payloads as a request.

        Raises:
            InvalidValue: an option that a gateway does not take.
        """
        said = {
            name: value for name, value in options.items() if name in _TAKEN and value is not None
        }
        others = {"durable": durable, **options}
        if refused := [name for name in others if name not in _TAKEN and others[name]]:
            raise InvalidValue(f"a gateway does not take {refused[0]}; use the URL of the server")
        said |= {"id": request_id, "labels": dict(options["labels"])}
        parts = (self._part(number, each) for number, each in enumerate(payloads, 1))
        # Which way is gone depends on the payloads alone, so that the same call finds the same.
        chunks = _chunks_for_gateway(parts)
        first, second = next(chunks, []), next(chunks, None)
        if second is None:
            self._calls.call("POST", "/v1/requests", {**said, "parts": first})
        else:
            self._load(said, request_id, chain((first, second), chunks))
        return GatewayRequest(self._calls, request_id)

    def _load(
        self, said: dict[str, Any], request_id: str, chunks: Iterator[list[msgspec.Raw]]
    ) -> None:
        text = self._calls.call("POST", "/v1/requests", {**said, "state": "loading"})
        status = _read_answer(text, Status)
        request = GatewayRequest(self._calls, request_id)
        path, there, total = request._path, status.parts.total, 0
        try:
            for parts in chunks:
                missing = parts[max(0, there - total) :]
                total += len(parts)
                if missing and status.state == State.LOADING:
                    more = {"first": total - len(missing) + 1, "parts": missing}
                    self._calls.call("POST", f"{path}/parts", more)
        except StreamqError as error:
            if isinstance(error, InvalidValue) and not there:
                with suppress(StreamqError):  # a loader may not; an operator may
                    request.cancel()
            raise
        if status.state == State.LOADING:
            self._calls.call("POST", f"{path}/seal", {"total": total})
        elif total != there:
            raise RequestExists(f"request {request_id} was submitted with {there} parts")

    def _part(self, number: int, value: Any) -> msgspec.Raw:
        """Return a payload as the gateway wants it."""
        if isinstance(value, dict) and len(value) == 1 and {"text", "base64"} & value.keys():
            raise InvalidValue(
                f"part {number}: a gateway takes {value!r:.80} for bytes; give it another member"
            )
        size = len(value) if isinstance(value, bytes) else 0
        try:
            said = msgspec.json.encode(
                _text_or_base64_for_gateway(value) if isinstance(value, bytes) else value
            )
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidValue(f"part {number} cannot be written as JSON: {error}") from None
        if (size or len(said)) > self._max_part:
            raise PartTooLarge(f"part {number} has more than the {self._max_part} bytes allowed")
        return msgspec.Raw(said)

    def known(self, request_id: str) -> Request:
        """Return a request that is known to be there."""
        return GatewayRequest(self._calls, request_id)

    def get(self, request_id: str) -> Request:
        """Return the request with that id."""
        request = GatewayRequest(self._calls, request_id)
        request.status()
        return request

    def list(self, queue: str, *, ended: bool) -> list[Status]:
        """Return the status of unfinished requests, or of the ended ones, oldest first."""
        asked = urlencode({"queue": queue, "ended": int(ended), "most": _LISTED})
        listed = _read_answer(self._calls.call("GET", f"/v1/requests?{asked}"), _Listed)
        found = []
        for entry in listed.requests:
            if entry.state.is_live != ended:
                with suppress(RequestUnknown):
                    found.append(GatewayRequest(self._calls, entry.id).status())
        return sorted(found, key=lambda status: (status.created_ms, status.id))

    def close(self) -> None:
        """Close the connections."""
        self._calls.close()

    @property
    def url(self) -> str:
        """The URL of the gateway."""
        return self._calls.url


def _text_or_base64_for_gateway(value: bytes) -> dict[str, Any]:
    try:
        return {"text": value.decode()}
    except UnicodeDecodeError:
        return {"base64": value}


def _chunks_for_gateway(parts: Iterator[msgspec.Raw]) -> Iterator[list[msgspec.Raw]]:
    """Yield parts in lists that one call can carry."""
    chunk: list[msgspec.Raw] = []
    size = 0
    for part in parts:
        length = len(bytes(part))
        if len(chunk) == CHUNK_PARTS or (chunk and size + length > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(part)
        size += length
    if chunk:
        yield chunk


def _read_answer(text: bytes, kind: type[T]) -> T:
    with damaged_if_unreadable("what the gateway answered"):
        return msgspec.json.decode(text, type=kind)
