"""Submits many requests in few round trips: small ones that are new go together.

Up to 200 requests take three round trips to each node: they are registered, created with all their
parts, and then a token of each is pushed. What cannot go together is submitted by itself: a request
of many parts or none, one that is there already, one with callbacks or keys.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from streamq.errors import (
    RequestExists,
    RequestUnknown,
    ServerBusy,
    ServerError,
    ServerUnreachable,
    StreamqError,
)
from streamq.model import CHUNK_BYTES, Policy
from streamq.protocol.protocol import Protocol
from streamq.queue.loading import unregister_request
from streamq.queue.submission import Submission, is_small_submission

#: So many requests, and about so many parts and bytes, go together.
_MOST_REQUESTS = 200
_MOST_PARTS = 2_000
_MOST_BYTES = CHUNK_BYTES
#: After these nothing more is tried: each call would wait for the server as long.
_AWAY = (ServerBusy, ServerUnreachable)


class New(NamedTuple):
    """A request that is to be submitted: its id, and its payloads."""

    id: str
    payloads: Iterable[Any]


class _Ready(NamedTuple):
    """The same, with the cursor behind its parts, and the parts as the server keeps them."""

    request: New
    cursor: str
    entries: list[bytes]


class ManySubmissionsOneByOne:
    """Submits requests by themselves, as over a gateway."""

    def __init__(self, by_itself: Callable[[str, Iterable[Any]], object]) -> None:
        """``by_itself`` submits one request in the usual way."""
        self._by_itself = by_itself
        #: Why the server cannot be used. Nothing is tried after that.
        self._away: StreamqError | None = None
        #: What went wrong, by the ids of the requests.
        self.errors: dict[str, StreamqError] = {}

    def run(self, requests: Iterable[New]) -> None:
        """Submit requests. Those that could not be submitted are in ``errors``."""
        for request in requests:
            self._try(request)

    def _try(self, request: New) -> None:
        """Submit a request by itself, unless the server was away before."""
        if self._away:
            self.errors[request.id] = self._away
            return
        try:
            self._by_itself(request.id, request.payloads)
        except StreamqError as error:
            self.errors[request.id] = error
            if isinstance(error, _AWAY):
                self._away = error


class ManySubmissions(ManySubmissionsOneByOne):
    """Submits requests that have the same options, many at once."""

    def __init__(
        self,
        protocol: Protocol,
        policy: Policy,
        max_part: int,
        by_itself: Callable[[str, Iterable[Any]], object],
        *,
        can_go_on: bool,
    ) -> None:
        """``can_go_on``: the caller knows the ids, so a request may be there already."""
        super().__init__(by_itself)
        self._protocol = protocol
        self._policy = policy
        self._max_part = max_part
        self._can_go_on = can_go_on

    def run(self, requests: Iterable[New]) -> None:
        """Submit requests. Those that could not be submitted are in ``errors``."""
        for group in self._groups(requests):
            if self._away:
                self.errors |= {each.request.id: self._away for each in group}
            else:
                self._submit(group)

    def _groups(self, requests: Iterable[New]) -> Iterator[list[_Ready]]:
        """Yield requests that can go together. The others are submitted here."""
        group: list[_Ready] = []
        parts = size = 0
        for request in requests:
            ready = self._ready(request)
            if ready is None:
                continue
            group.append(ready)
            parts += len(ready.entries) // 2
            size += sum(map(len, ready.entries))
            if len(group) >= _MOST_REQUESTS or parts >= _MOST_PARTS or size >= _MOST_BYTES:
                yield group
                group, parts, size = [], 0, 0
        if group:
            yield group

    def _ready(self, request: New) -> _Ready | None:
        """Return the request if it can go with others; else submit it and return None."""
        policy, payloads = self._policy, request.payloads
        goes_alone = bool(policy.calls or policy.key or policy.flow)
        if goes_alone or not isinstance(payloads, (list, tuple)):
            self._try(request)
            return None
        try:
            submission = Submission(self._protocol, request.id, policy, self._max_part)
            cursor, entries = submission.content(payloads)
        except StreamqError as error:
            self.errors[request.id] = error
            return None
        if not is_small_submission(entries[::2]):
            self._try(request)
            return None
        return _Ready(request, cursor, entries)

    def _submit(self, group: list[_Ready]) -> None:
        if self._can_go_on:
            group = self._new_ones(group)
        replies = self._protocol.submit_apart(
            self._policy, [(each.request.id, each.cursor, each.entries) for each in group]
        )
        for each, reply in zip(group, replies, strict=True):
            if reply is True:
                continue
            if not isinstance(reply, StreamqError) or (
                self._can_go_on and isinstance(reply, RequestExists)
            ):
                # Another process has submitted it meanwhile, or is about to; or it is ours, and the
                # answer was lost. A repeated call would find the request, so it is looked for now.
                self._try(each.request)
            else:
                self._refused(each.request.id, reply)

    def _new_ones(self, group: list[_Ready]) -> list[_Ready]:
        """Return those that are new. One that is there may be another, or was cut short."""
        new: list[_Ready] = []
        try:
            found = self._protocol.inspect_all([each.request.id for each in group])
        except ServerError:
            # By itself each waits for the server as patiently as usual.
            for each in group:
                self._try(each.request)
            return new
        for each, reply in zip(group, found, strict=True):
            if isinstance(reply, RequestUnknown):
                new.append(each)
            else:
                self._try(each.request)
        return new

    def _refused(self, request_id: str, error: StreamqError) -> None:
        self.errors[request_id] = error
        if isinstance(error, _AWAY):
            self._away = error
            return
        with suppress(StreamqError):
            unregister_request(self._protocol, self._policy.queue, request_id)
