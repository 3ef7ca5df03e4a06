"""Submits payloads: encodes them, and sends them at once or in chunks while they are read.

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
from streamq.model import CHUNK_BYTES, CHUNK_PARTS, Policy
from streamq.protocol.protocol import Protocol
from streamq.queue.key_index import KeyIndex
from streamq.queue.loading import Loading, register_request, unregister_request
from streamq.records import about
from streamq.records.keys import stored_key

#: A submission of no more than this is sent so quickly that a worker may be woken before.
_SOON_PARTS = 50
_SOON_BYTES = 2**14
#: How long (s) a chunk that is not full waits for more payloads before it is sent.
LINGER_S = 0.01
#: How long a submission waits for the replicas it asked for.
REPLICAS_S = 2.0

# After these the same submission can go on later.
_NOT_NOW = (ServerBusy, ServerUnreachable, ServerFull, LoadGap)


class Submission:
    """One submission: opens, appends in chunks, seals; goes on where the server stands."""

    def __init__(
        self,
        protocol: Protocol,
        request_id: str,
        policy: Policy,
        max_part: int,
        key_of: Callable[[Any], Any] | None = None,
    ) -> None:
        """``key_of`` returns the key of a payload; without it that is a field, if one is named."""
        self._keys = KeyIndex(protocol, request_id, policy)
        self._key_of = key_of
        #: What it returned for payloads that are not submitted yet, by their numbers.
        self._made: dict[int, str | None] = {}
        self._protocol = protocol
        self._id = request_id
        self._policy = policy
        self._max_part = max_part
        self._has_bad_payloads = False
        self._loading = Loading(protocol, request_id, policy)
        #: Of all payloads so far.
        self._content = _SubmittedContent()

    def run(self, payloads: Iterable[Any], *, can_go_on: bool) -> None:
        """Submit, as far as it is not done yet. ``can_go_on``: the caller knows the id."""
        encoded = self._encoded(payloads)
        # ``list`` is tested first: that a list is a collection takes longer to find out.
        is_ready = isinstance(payloads, (list, Collection))
        if can_go_on:
            if self._is_there(encoded):
                return
        elif self._policy.key:
            pass
        elif isinstance(payloads, (list, Collection)) and 0 < len(payloads) <= CHUNK_PARTS:
            parts = list(encoded)
            size = sum(map(len, parts))
            if parts and size <= CHUNK_BYTES:
                if self._policy.flow:
                    self._submit_flow_at_once(parts)
                else:
                    self._submit_at_once(parts, size)
                return
            encoded = iter(parts)
        self._submit_in_chunks(encoded, is_ready, can_go_on)

    def _submit_in_chunks(self, encoded: Iterator[bytes], is_ready: bool, can_go_on: bool) -> None:
        opened = self._loading.open(self._policy.digest)
        try:
            self._skip(encoded, opened.total, opened.cursor)
            if not opened.is_new:
                self._keys.go_on()
            if is_ready:
                for chunk in _payload_chunks(encoded):
                    self._append(chunk)
            else:
                with _ChunkSender(self._append) as sender:
                    for payload in encoded:
                        sender.put(payload)
            self._seal()
        except BaseException as error:
            stays = self._stays(error, can_go_on)
            if opened.is_new and not stays:
                self._loading.take_back()
            if stays and isinstance(error, _NOT_NOW):
                raise type(error)(
                    f"{error}. Request {self._id} is submitted in part: submit the same to go on"
                ) from None
            raise

    def _submit_at_once(self, parts: list[bytes], size: int) -> None:
        """Submit all parts in one call. Nobody else knows the id."""

        def content() -> tuple[str, list[bytes]]:
            self._count(parts)
            return self._content.cursor, _submitted_entries(parts)

        is_soon = len(parts) <= _SOON_PARTS and size <= _SOON_BYTES
        try:
            self._protocol.submit(self._id, self._policy, content, is_soon=is_soon)
        except BaseException:
            self._loading.take_back()
            raise

    def _submit_flow_at_once(self, parts: list[bytes]) -> None:
        """Do the same for a flow: in one round trip where there is one server."""
        self._count(parts)
        try:
            self._loading.load_at_once(
                self._policy, self._content.cursor, _submitted_entries(parts)
            )
        except BaseException:
            self._loading.take_back()
            raise

    def content(self, parts: Iterable[Any]) -> tuple[str, list[bytes]]:
        """Return the cursor behind all of its parts, and the parts as the server keeps them."""
        encoded = list(self._encoded(parts))
        self._count(encoded)
        return self._content.cursor, _submitted_entries(encoded)

    def _stays(self, error: BaseException, can_go_on: bool) -> bool:
        """Return whether what was submitted stays in the server after an error."""
        if self._has_bad_payloads:
            return False
        if isinstance(error, _NOT_NOW) or not isinstance(error, Exception):
            return can_go_on
        # Another submission has the id, or the request has ended: it is not ours to take back.
        return isinstance(error, ProtocolError)

    def replicate(self, wanted: int) -> None:
        """Wait until so many replicas have it all, and see that it is all there.

        Raises:
            ServerBehind: fewer have it after ``REPLICAS_S``.
        """
        found = self._protocol.replicas(self._policy.queue, self._id, wanted, REPLICAS_S)
        if found < wanted:
            raise ServerBehind(
                f"request {self._id} is submitted, but after {REPLICAS_S:g} s only {found} "
                f"of the {wanted} replicas asked for have it"
            )
        # A failover meanwhile may have taken back the last moments.
        self._seal()

    def _is_there(self, encoded: Iterator[bytes]) -> bool:
        """Return whether an earlier run has submitted all of it.

        Raises:
            RequestExists: what was submitted under the id is something else.
        """
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
            register_request(self._protocol, self._policy.queue, self._id)
        return True

    def _encoded(self, payloads: Iterable[Any]) -> Iterator[bytes]:
        try:
            for number, value in enumerate(payloads, 1):
                if self._key_of:
                    self._made[number] = stored_key(self._key_of(value))
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
        """Count payloads that the server has, or gets with the call that is made next."""
        self._content.add(payloads)
        self._loading.parts = self._content.parts

    def _skip(self, payloads: Iterator[bytes], total: int, cursor: str) -> None:
        """Pass over what the server has already, and make sure that it is the same."""
        while self._content.parts < total:
            found = list(islice(payloads, min(CHUNK_PARTS, total - self._content.parts)))
            if not found:
                break
            self._count(found)
        self._compare(cursor)

    def _compare(self, cursor: str) -> None:
        if self._content.cursor != cursor:
            raise RequestExists(f"request {self._id} was submitted with other parts")

    def _note_keys(self, chunk: list[bytes]) -> None:
        first = self._content.parts + 1
        if self._key_of:
            made = [[self._made[number]] for number in range(first, first + len(chunk))]
            self._keys.tell(first, made)
            self._made = {n: key for n, key in self._made.items() if n >= first + len(chunk)}
        else:
            self._keys.note(first, chunk)

    def _append(self, chunk: list[bytes]) -> None:
        while chunk:
            if self._policy.key:
                self._note_keys(chunk)
            before = self._content.copy()
            self._content.add(chunk)
            try:
                total, cursor = self._loading.append(
                    _submitted_entries(chunk), before.cursor, self._content.cursor, len(chunk)
                )
            except LoadGap:
                # Another process submits the same at the same time, in other chunks.
                self._content = before
                chunk = self._catch_up(chunk)
                continue
            except RequestEnded:
                if self._protocol.inspect(self._id).is_sealed:
                    raise RequestExists(
                        f"request {self._id} was submitted with fewer parts"
                    ) from None
                raise
            if total == self._content.parts:
                self._compare(cursor)
            return

    def _catch_up(self, chunk: list[bytes]) -> list[bytes]:
        """Pass over those of the parts that the server has. Returns the others."""
        passed, cursor = self._loading.pass_over(len(chunk))
        self._content.add(chunk[:passed])
        if cursor is not None:
            self._compare(cursor)
        return chunk[passed:]

    def _seal(self) -> None:
        try:
            self._loading.seal(self._content.cursor)
        except LoadGap:
            self._catch_up([])
            raise RequestExists(f"request {self._id} was submitted with more parts") from None


class _SubmittedContent:
    """Digests of payloads and of their sizes, whatever the chunks were.

    They tell one submission from another.
    """

    def __init__(self) -> None:
        self.parts = 0
        self._payloads = hashlib.blake2b(digest_size=16)
        self._frames = hashlib.blake2b(digest_size=8)

    def add(self, payloads: list[bytes]) -> None:
        """Add payloads that follow."""
        self.parts += len(payloads)
        self._payloads.update(b"".join(payloads))
        frames = [2 * len(payload) + (type(payload) is _Json) for payload in payloads]
        self._frames.update(struct.pack(f"<{len(frames)}Q", *frames))

    def copy(self) -> "_SubmittedContent":
        """Return another that goes on from here."""
        other = _SubmittedContent()
        other.parts = self.parts
        other._payloads, other._frames = self._payloads.copy(), self._frames.copy()
        return other

    @property
    def cursor(self) -> str:
        """What the server keeps of them: how many there are, and the digests."""
        if not self.parts:
            return ""
        return f"{self.parts}:{self._payloads.hexdigest()}:{self._frames.hexdigest()}"


def submit_all(
    protocol: Protocol, requests: Iterable[tuple[str, Policy, list[bytes]]], max_part: int
) -> None:
    """Submit many small requests that nobody has submitted yet: id, policy and parts of each.

    It may be repeated, also after it was killed: each request is there once.
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
                unregister_request(protocol, policy.queue, request_id)
        raise


def encoded_parts(payloads: Iterable[Any]) -> tuple[str, list[bytes]]:
    """Return the cursor behind payloads that are JSON, and the parts as the server keeps them."""
    content, parts = _SubmittedContent(), [_Json(msgspec.json.encode(each)) for each in payloads]
    content.add(list(parts))
    return content.cursor, _submitted_entries(list(parts))


def is_small_submission(parts: Sequence[bytes]) -> bool:
    """Return whether one call can carry all of the parts."""
    return 0 < len(parts) <= CHUNK_PARTS and sum(map(len, parts)) <= CHUNK_BYTES


class _Json(bytes):
    """A payload that was given as something else than bytes, and is JSON by now."""


def _submitted_entries(payloads: list[bytes]) -> list[bytes]:
    return [value for payload in payloads for value in (payload, _about_payload(payload))]


def _about_payload(payload: bytes) -> bytes:
    """Return what is kept of a part: that it is one record, and whether it is JSON of ours.

    A handler that does not say which type it takes gets the decoded value of JSON of ours.
    """
    return about.ONE_JSON if type(payload) is _Json else about.ONE_PAYLOAD


class _ChunkSender:
    """Sends payloads in chunks.

    A thread of its own sends a chunk that does not fill, so that no payload waits until the next
    is made.
    """

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
        """Have a payload sent. Raises the error that an earlier one met."""
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
        """Send what waits."""
        with self._sending:
            with self._adding:
                chunk, self._waiting, self._size = self._waiting, [], 0
            if chunk:
                self._send(chunk)

    def _watch(self) -> None:
        """Send chunks that have waited for ``LINGER_S``, until it is closed."""
        while not self._is_closed.wait(LINGER_S) and not self._error:
            if self._waiting and time.monotonic() - self._since > LINGER_S:
                try:
                    self._flush()
                except BaseException as error:  # noqa: BLE001  raised in the other thread
                    self._error = error


def _payload_chunks(payloads: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield payloads in chunks that one call can carry; the last may be empty."""
    chunk: list[bytes] = []
    size = 0
    for payload in payloads:
        chunk.append(payload)
        size += len(payload)
        if len(chunk) >= CHUNK_PARTS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    yield chunk
