"""Putting the parts of a request into the server.

It may be run again with the same id at any time, also after it was killed: it goes on
where the server's cursor stands, and the server has every part once.
"""

import hashlib
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Self

import msgspec

from streamq.errors import (
    InvalidValue,
    LoadGap,
    PartTooLarge,
    ProtocolError,
    RequestEnded,
    RequestExists,
    RequestUnknown,
    ServerBehind,
    ServerBusy,
    ServerFull,
    ServerUnreachable,
    StreamqError,
)
from streamq.model import Policy
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Opened, Tokens
from streamq.records import about

#: One call to the server carries at most so many parts, and about so many bytes.
CHUNK_PARTS = 500
CHUNK_BYTES = 2**20
#: What has no more takes no time to be sent.
_SOON_PARTS = 50
_SOON_BYTES = 2**14
#: A part that was made alone waits so long for company.
LINGER_S = 0.01
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
        #: Of all payloads so far and of their sizes, whatever the chunks were: they tell one
        #: submission from another.
        self._content, self._frames = (
            hashlib.blake2b(digest_size=16),
            hashlib.blake2b(digest_size=8),
        )

    def run(self, payloads: Iterable[Any], *, can_go_on: bool) -> None:
        """Submit, as far as it is not done yet. ``can_go_on``: the caller knows the id."""
        encoded = self._encoded(payloads)
        # Lists are named, though they are collections: it takes a while to find that out.
        is_ready = isinstance(payloads, (list, Collection))
        if can_go_on:
            if self._is_there(encoded):
                return
        elif isinstance(payloads, (list, Collection)) and 0 < len(payloads) <= CHUNK_PARTS:
            parts = list(encoded)
            size = sum(map(len, parts))
            if parts and size <= CHUNK_BYTES:
                self._submit_at_once(parts, size)
                return
            encoded = iter(parts)
        self._submit_in_chunks(encoded, is_ready, can_go_on)

    def _submit_in_chunks(self, encoded: Iterator[bytes], is_ready: bool, can_go_on: bool) -> None:
        opened = self._open()
        try:
            self._skip(encoded, opened.total, opened.cursor)
            if is_ready:
                for chunk in _chunks(encoded):
                    self._append(chunk)
            else:
                with _Sender(self._append) as sender:
                    for payload in encoded:
                        sender.put(payload)
            self._seal()
        except BaseException as error:
            stays = self._stays(error, can_go_on)
            if opened.is_new and not stays:
                self._take_back()
            if stays and isinstance(error, _NOT_NOW):
                raise type(error)(
                    f"{error}. Request {self._id} is submitted in part: submit the same to go on"
                ) from None
            raise

    def _submit_at_once(self, parts: list[bytes], size: int) -> None:
        """All of it, and nobody else knows the id: what one call can carry."""

        def content() -> tuple[str, list[bytes]]:
            self._count(parts)
            return self._cursor, _entries(parts)

        is_soon = len(parts) <= _SOON_PARTS and size <= _SOON_BYTES
        try:
            self._protocol.submit(self._id, self._policy, content, is_soon=is_soon)
        except BaseException:
            self._take_back()
            raise

    def content(self, parts: list[bytes]) -> tuple[str, list[bytes]]:
        """All of its parts as the server keeps them, and the cursor behind them."""
        encoded = list(self._encoded(parts))
        self._count(encoded)
        return self._cursor, _entries(encoded)

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

    def _is_there(self, encoded: Iterator[bytes]) -> bool:
        """Whether an earlier run has submitted all of it. One of something else is an error."""
        try:
            found = self._protocol.inspect(self._id)
        except RequestUnknown:
            return False
        digest, cursor = found.text("digest"), found.text("cursor")
        total = found.known_count("total")
        if digest != self._policy.digest:
            raise RequestExists(f"request {self._id} was submitted with other options")
        self._skip(encoded, total, cursor)
        if not found.is_sealed:
            return False
        if next(encoded, None) is not None:
            raise RequestExists(f"request {self._id} was submitted with fewer parts")
        if found.state.is_live:
            register(self._protocol, self._policy.queue, self._id)
        return True

    def _open(self) -> Opened:
        queue = self._policy.queue
        # Again: whoever saw it ended, or registered and not opened, cannot close it any more.
        self._protocol.mint(queue, self._id, Tokens(), register="again")
        try:
            return self._protocol.open(self._id, self._policy.digest, self._policy)
        except (RequestExists, ServerFull):
            unregister(self._protocol, queue, self._id)
            raise

    @property
    def _cursor(self) -> str:
        if not self._parts:
            return ""
        return f"{self._parts}:{self._content.hexdigest()}:{self._frames.hexdigest()}"

    def _encoded(self, payloads: Iterable[Any]) -> Iterator[bytes]:
        try:
            for number, value in enumerate(payloads, 1):
                yield self._encode(number, value)
        except Exception:
            self._has_bad_payloads = True
            raise

    def _encode(self, number: int, value: Any) -> bytes:
        try:
            payload = value if isinstance(value, bytes) else _Json(msgspec.json.encode(value))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidValue(f"part {number} cannot be written as JSON: {error}") from None
        if len(payload) > self._max_part:
            raise PartTooLarge(
                f"part {number} has {len(payload)} bytes, more than the {self._max_part} allowed"
            )
        return payload

    def _count(self, payloads: list[bytes]) -> None:
        self._parts += len(payloads)
        self._content.update(b"".join(payloads))
        frames = [2 * len(payload) + (type(payload) is _Json) for payload in payloads]
        self._frames.update(struct.pack(f"<{len(frames)}Q", *frames))

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

    def _append(self, chunk: list[bytes]) -> None:
        while chunk:
            first, before = self._parts + 1, (self._content.copy(), self._frames.copy())
            self._count(chunk)
            try:
                total, cursor, tokens = self._protocol.append(
                    self._id, first, self._cursor, len(chunk), _entries(chunk)
                )
            except LoadGap:
                # Somebody else submits the same at the same time, in other chunks.
                self._parts = first - 1
                self._content, self._frames = before
                chunk = self._catch_up(chunk)
                continue
            except RequestEnded:
                if self._protocol.inspect(self._id).is_sealed:
                    raise RequestExists(
                        f"request {self._id} was submitted with fewer parts"
                    ) from None
                raise
            if total == self._parts:
                self._compare(cursor)
            self._protocol.push(self._policy.queue, self._id, tokens)
            return

    def _catch_up(self, chunk: list[bytes]) -> list[bytes]:
        """Pass over those of the parts that the server has. Returns the others."""
        found = self._protocol.inspect(self._id)
        ahead = found.known_count("total") - self._parts
        if ahead < 0:
            raise LoadGap("the server has lost its last moments, and parts with them")
        self._count(chunk[:ahead])
        if ahead <= len(chunk):
            self._compare(found.text("cursor"))
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
            try:
                self._protocol.cancel(self._id)
                forget(self._protocol, self._policy.queue, self._id)
            except RequestUnknown:  # it was registered, and then refused
                unregister(self._protocol, self._policy.queue, self._id)


def submit_all(
    protocol: Protocol, requests: Iterable[tuple[str, Policy, list[bytes]]], max_part: int
) -> None:
    """Submit many requests that nobody has submitted yet, small ones: id, policy and parts of each.

    It may be repeated, also when it was killed: each is there once.
    """
    made = [
        (request_id, policy, *Submission(protocol, request_id, policy, max_part).content(parts))
        for request_id, policy, parts in requests
    ]
    try:
        protocol.submit_all(made)
    except ServerFull:
        for request_id, policy, *_ in made:
            with suppress(StreamqError):
                unregister(protocol, policy.queue, request_id)
        raise


def is_small(parts: Sequence[bytes]) -> bool:
    """Whether one call can carry all of the parts."""
    return 0 < len(parts) <= CHUNK_PARTS and sum(map(len, parts)) <= CHUNK_BYTES


class _Json(bytes):
    """A payload that was no bytes."""


def _entries(payloads: list[bytes]) -> list[bytes]:
    return [value for payload in payloads for value in (payload, _about(payload))]


def _about(payload: bytes) -> bytes:
    """One record, and whether it is JSON of ours: a handler that does not say gets the value."""
    return about.ONE_JSON if type(payload) is _Json else about.ONE_PAYLOAD


class _Sender:
    """Sends payloads in chunks. A chunk that does not fill is sent by a thread of its own, so
    that no payload waits until the next is made."""

    def __init__(self, send: Callable[[list[bytes]], None]) -> None:
        self._send = send
        self._waiting: list[bytes] = []
        self._size = 0
        self._since = 0.0
        self._error: BaseException | None = None
        self._adding = threading.Lock()
        # Held from taking a chunk until it is sent: chunks stay in order.
        self._sending = threading.Lock()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="streamq-sender", daemon=True)

    def put(self, payload: bytes) -> None:
        """Have a payload sent. Raises what the sender met."""
        if self._error:
            raise self._error
        with self._adding:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append(payload)
            self._size += len(payload)
            is_full = len(self._waiting) >= CHUNK_PARTS or self._size >= CHUNK_BYTES
        if is_full:
            self._flush()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_closed.set()
        self._thread.join()
        if kind is None:
            if self._error:
                raise self._error
            self._flush()

    def _flush(self) -> None:
        with self._sending:
            with self._adding:
                chunk, self._waiting, self._size = self._waiting, [], 0
            if chunk:
                self._send(chunk)

    def _watch(self) -> None:
        while not self._is_closed.wait(LINGER_S) and not self._error:
            if self._waiting and time.monotonic() - self._since > LINGER_S:
                try:
                    self._flush()
                except BaseException as error:  # noqa: BLE001  raised in the other thread
                    self._error = error


def _chunks(payloads: Iterable[bytes]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    size = 0
    for payload in payloads:
        chunk.append(payload)
        size += len(payload)
        if len(chunk) >= CHUNK_PARTS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    yield chunk


def register(protocol: Protocol, queue: str, request_id: str) -> None:
    """Have a request looked at that lives and that nobody looks at: a failover may have taken
    back its registration and left the request, which is in another slot."""
    if protocol.registered(queue, request_id) is None:
        protocol.mint(queue, request_id, Tokens(), register="yes")


def unregister(protocol: Protocol, queue: str, request_id: str) -> None:
    """Undo a registration, unless the request is there: somebody else was quicker."""
    score = protocol.registered(queue, request_id)
    with suppress(RequestUnknown):
        if protocol.inspect(request_id).text("queue") == queue:
            return
    if score is not None:
        protocol.close(queue, request_id, score, 0)


def forget(protocol: Protocol, queue: str, request_id: str) -> None:
    """Purge a request that has ended, and take it out of its queue's indexes."""
    score = protocol.registered(queue, request_id)
    protocol.purge(request_id, force=True)
    # Not if it was registered anew meanwhile: then the score is another one.
    protocol.close(queue, request_id, -1 if score is None else score, 0)
