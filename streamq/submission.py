"""Putting the parts of a request into the server.

It may be run again with the same id at any time, also after it was killed: it goes on
where the server's cursor stands, and the server has every part once.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import msgspec

from streamq.errors import (
    InvalidValue,
    LoadGap,
    PartTooLarge,
    ProtocolError,
    RequestExists,
    RequestUnknown,
    ServerBehind,
    ServerBusy,
    ServerFull,
    ServerUnreachable,
    StreamqError,
)
from streamq.model import Opened, Policy, Tokens
from streamq.protocol import Protocol

#: One call to the server carries at most so many parts, and about so many bytes.
CHUNK_PARTS = 500
CHUNK_BYTES = 2**20
#: A chunk goes as it is when it took so long to come together: parts are to run, not to wait.
CHUNK_S = 0.1
#: How long a submission waits for the replicas it asked for.
REPLICAS_S = 2.0

# After these the same submission can go on later.
_NOT_NOW = (ServerBusy, ServerUnreachable, ServerFull, LoadGap)


class Submission:
    """One submission: opens, appends in chunks, seals; goes on where the server stands."""

    def __init__(self, protocol: Protocol, request_id: str, policy: Policy, max_part: int) -> None:
        self._protocol = protocol
        self._id = request_id
        self._policy = policy
        self._max_part = max_part
        self._parts = 0
        self._has_bad_payloads = False
        #: Of all payloads so far, whatever the chunks were: tells one submission from another.
        self._content = hashlib.blake2b(digest_size=16)

    def run(self, payloads: Iterable[Any], *, can_go_on: bool) -> None:
        """Submit, as far as it is not done yet. ``can_go_on``: the caller knows the id."""
        opened = self._open()
        try:
            self._load(payloads, opened)
        except BaseException as error:
            stays = self._stays(error, can_go_on)
            if opened.is_new and not stays:
                self._take_back()
            if stays and isinstance(error, _NOT_NOW):
                raise type(error)(
                    f"{error}. Request {self._id} is submitted in part: submit the same to go on"
                ) from None
            raise

    def _stays(self, error: BaseException, can_go_on: bool) -> bool:
        """Whether what was submitted stays in the server after an error."""
        if self._has_bad_payloads:
            return False
        if isinstance(error, _NOT_NOW) or not isinstance(error, Exception):
            return can_go_on
        # Somebody else has the id, or the request has ended: it is not ours to take back.
        return isinstance(error, ProtocolError)

    def replicate(self, wanted: int) -> None:
        """Wait until so many replicas have it all, and see that it is all there."""
        found = self._protocol.replicas(self._policy.queue, self._id, wanted, REPLICAS_S)
        if found < wanted:
            raise ServerBehind(
                f"request {self._id} is submitted, but after {REPLICAS_S:g} s only {found} "
                f"of the {wanted} replicas asked for have it"
            )
        # A failover meanwhile may have taken back the last moments.
        self._seal()

    def _load(self, payloads: Iterable[Any], opened: Opened) -> None:
        encoded = self._encoded(payloads)
        self._skip(encoded, opened.total, opened.cursor)
        while chunk := self._chunk(encoded):
            self._append(chunk)
        self._seal()

    def _open(self) -> Opened:
        # A delay is counted from the first submission, so it is no part of what is the same.
        lasting = msgspec.structs.replace(self._policy, delay_ms=0)
        digest = hashlib.blake2b(msgspec.json.encode(lasting), digest_size=16).hexdigest()
        queue = self._policy.queue
        with suppress(RequestUnknown):
            if self._protocol.inspect(self._id)["digest"] != digest:
                raise RequestExists(f"request {self._id} was submitted with other options")
        # Again: whoever saw it ended, or registered and not opened, cannot close it any more.
        self._protocol.mint(queue, self._id, Tokens(), register="again")
        try:
            return self._protocol.open(self._id, digest, self._policy)
        except (RequestExists, ServerFull):
            self._unregister()
            raise

    def _unregister(self) -> None:
        """Undo the registration, unless the request is there: somebody else was quicker."""
        queue = self._policy.queue
        score = self._protocol.registered(queue, self._id)
        with suppress(RequestUnknown):
            if self._protocol.inspect(self._id)["queue"] == queue:
                return
        if score is not None:
            self._protocol.close(queue, self._id, score, 0)

    @property
    def _cursor(self) -> str:
        return f"{self._parts}:{self._content.hexdigest()}" if self._parts else ""

    def _encoded(self, payloads: Iterable[Any]) -> Iterator[bytes]:
        try:
            for number, value in enumerate(payloads, 1):
                yield self._encode(number, value)
        except Exception:
            self._has_bad_payloads = True
            raise

    def _encode(self, number: int, value: Any) -> bytes:
        try:
            payload = value if isinstance(value, bytes) else msgspec.json.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidValue(f"part {number} cannot be written as JSON: {error}") from None
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
        self._compare(cursor)

    def _compare(self, cursor: str) -> None:
        if self._cursor != cursor:
            raise RequestExists(f"request {self._id} was submitted with other parts")

    def _chunk(self, payloads: Iterator[bytes]) -> list[bytes]:
        chunk: list[bytes] = []
        size, due = 0, time.monotonic() + CHUNK_S
        for payload in payloads:
            chunk.append(payload)
            size += len(payload)
            if len(chunk) == CHUNK_PARTS or size >= CHUNK_BYTES or time.monotonic() >= due:
                break
        return chunk

    def _append(self, chunk: list[bytes]) -> None:
        while chunk:
            first, before = self._parts + 1, self._content.copy()
            self._count(chunk)
            entries = [value for payload in chunk for value in (payload, b"1")]
            try:
                total, cursor, tokens = self._protocol.append(
                    self._id, first, self._cursor, len(chunk), entries
                )
            except LoadGap:
                # Somebody else submits the same at the same time, in other chunks.
                self._parts, self._content = first - 1, before
                chunk = self._catch_up(chunk)
                continue
            if total == self._parts:
                self._compare(cursor)
            self._protocol.push(self._policy.queue, self._id, tokens)
            return

    def _catch_up(self, chunk: list[bytes]) -> list[bytes]:
        """Pass over those of the parts that the server has. Returns the others."""
        found = self._protocol.inspect(self._id)
        ahead = int(found["total"]) - self._parts
        if ahead < 0:
            raise LoadGap("the server has lost its last moments, and parts with them")
        self._count(chunk[:ahead])
        if ahead <= len(chunk):
            self._compare(found["cursor"])
        return chunk[ahead:]

    def _seal(self) -> None:
        try:
            _, tokens = self._protocol.seal(self._id, self._parts, self._cursor)
        except LoadGap:
            self._catch_up([])
            raise RequestExists(f"request {self._id} was submitted with more parts") from None
        self._protocol.push(self._policy.queue, self._id, tokens)

    def _take_back(self) -> None:
        """Leave nothing of a submission that went wrong for good."""
        with suppress(StreamqError):
            self._protocol.cancel(self._id)
            forget(self._protocol, self._policy.queue, self._id)


def forget(protocol: Protocol, queue: str, request_id: str) -> None:
    """Purge a request that has ended, and take it out of its queue's indexes."""
    score = protocol.registered(queue, request_id)
    protocol.purge(request_id, force=True)
    # Not if it was registered anew meanwhile: then the score is another one.
    protocol.close(queue, request_id, -1 if score is None else score, 0)
