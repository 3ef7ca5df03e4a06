"""Loading files: parts go to the server while the files are read, and the cursor with them.

The cursor moves in the same step as the parts, so a load that is killed at any moment and
run again with the same id goes on at the byte where it stood, and every record is there
once. An input that has changed meanwhile is refused.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import msgspec

from streamq.errors import (
    RequestExists,
    ServerBusy,
    ServerFull,
    ServerUnreachable,
    StreamqError,
)
from streamq.inputs import STDIN, BadInput, Identity, Input, open_input, stdin
from streamq.model import MAX_PART, Opened, Policy, Spec, Tokens
from streamq.protocol import Protocol
from streamq.rows import mask_of
from streamq.source import Chunk, Cursor, Size, first_record, split, whole
from streamq.submission import forget

#: How often a load that is ahead of the workers looks whether it may go on.
_WINDOW_S = 0.05
#: How often it looks while it fills the window, where results fill it too.
_LOOKS = 8


class _Stopped(Exception):
    """Whoever runs the load wants no more of it now."""


class Load:
    """One load of files into one request."""

    def __init__(
        self,
        protocol: Protocol,
        request_id: str,
        policy: Policy,
        size: Size,
        *,
        window_bytes: int = 0,
        counts_results: bool = False,
        checks_complete: bool = True,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """``counts_results``: somebody collects, and what is not collected fills the window too.
        ``checks_complete``: standard input is compared even if all of it was loaded before."""
        self._protocol = protocol
        self._id = request_id
        self._policy = policy
        self._size = size
        self._window = window_bytes
        self._counts_results = counts_results
        self._checks_complete = checks_complete
        self._should_stop = should_stop
        self._files = policy.spec.files
        self._mask = mask_of(policy.spec)
        self._parts = 0
        self._room = 0
        self._result_size = 0.0
        self._cursor = Cursor()
        self._waiting: Chunk | None = None
        #: Of all that was taken from standard input.
        self._content = hashlib.blake2b(digest_size=16) if STDIN in self._files else None

    def run(self, on_open: Callable[[], None] = lambda: None) -> int:
        """Load what is not loaded yet. Returns how many parts the request has.

        Raises:
            BadInput: a file cannot be read or split; nothing of a new request is left.
            RequestExists: the id has another submission, or a file has changed since.
        """
        now = [Identity.of(name) for name in self._files]
        opened = self._open(now)
        on_open()
        try:
            self._load(opened)
            for old in now:
                if changed := Identity.of(old.name).difference(old):
                    raise BadInput(f"the input changed while it was loaded: {changed}")
            cursor = _encode(self._cursor)
            _, tokens = self._protocol.seal(self._id, self._parts, cursor)
            self._protocol.push(self._policy.queue, self._id, tokens)
        except _Stopped:
            return self._parts
        except (ServerBusy, ServerFull, ServerUnreachable, KeyboardInterrupt):
            raise  # the same command goes on
        except Exception:
            if opened.is_new:
                self._take_back()
            raise
        return self._parts

    def _open(self, now: list[Identity]) -> Opened:
        lasting = msgspec.structs.replace(self._policy, delay_ms=0)
        text = msgspec.json.encode([lasting, self._size])
        digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        self._protocol.mint(self._policy.queue, self._id, Tokens(), register="again")
        opened = self._protocol.open(self._id, digest, self._policy, msgspec.json.encode(now))
        if not opened.is_new:
            kept = self._protocol.inspect(self._id)["source"]
            for new, old in zip(now, msgspec.json.decode(kept, type=list[Identity]), strict=True):
                if changed := new.difference(old):
                    raise self._other(changed)
        self._parts = opened.total
        if opened.cursor:
            self._cursor = msgspec.json.decode(opened.cursor, type=Cursor)
        return opened

    def _other(self, what: str) -> RequestExists:
        return RequestExists(f"request {self._id} was loaded from another input: {what}")

    def _load(self, opened: Opened) -> None:
        if not opened.state.is_live or "sealed" in self._protocol.inspect(self._id):
            if self._content and self._checks_complete:
                self._check_complete()
            return
        for index in range(self._cursor.file, len(self._files)):
            with closing(self._input(self._files[index])) as source:
                for chunk in self._chunks_of(source, index):
                    self._put(chunk)
        self._flush()

    def _input(self, name: str) -> Input:
        return stdin(self._while_waiting) if name == STDIN else open_input(name)

    def _chunks_of(self, source: Input, file: int) -> Iterator[Chunk]:
        if self._policy.spec.format == "file":
            chunk = whole(source, file, self._size.most)
            return iter([chunk])
        start = self._start(source, file)
        if self._content:
            self._skip_seen(source, start)
        elif start.offset:
            source.seek(start.offset)
        return split(source, self._mask, self._size, start)

    def _start(self, source: Input, file: int) -> Cursor:
        """Where to begin with a file: where the load stood, or after the header of a CSV."""
        if self._cursor.file == file and self._cursor.offset:
            return self._cursor
        header = self._policy.spec.header
        if not header:
            return Cursor(file)
        own = first_record(source, self._mask, MAX_PART)
        if own.strip() != header.encode().strip():
            raise BadInput(f"{source.name}: record 1: another header than {self._files[0]} has")
        return Cursor(file, len(own), 2)

    def _skip_seen(self, source: Input, start: Cursor) -> None:
        """Pass over what was taken from standard input before, if it is the same."""
        assert self._content
        passed = source.skip(start.offset, self._content.update)
        if passed < start.offset:
            raise self._other(
                f"standard input ends after {passed} bytes, and {start.offset} were loaded: "
                "give the same input again"
            )
        if start.digest and start.digest != self._content.hexdigest():
            raise self._other(f"the first {passed} bytes of standard input are not what they were")

    def _check_complete(self) -> None:
        """Whether standard input is what all parts were made of."""
        source = self._input(STDIN)
        self._skip_seen(source, self._cursor)
        if source.read(1):
            raise self._other(f"standard input had {self._cursor.offset} bytes, and has more")

    def _put(self, chunk: Chunk) -> None:
        """Have it sent, together with its neighbours where they are small."""
        if self._waiting:
            self._waiting.add(chunk)
        else:
            self._waiting = chunk
        if self._waiting.is_full:
            self._flush()

    def _flush(self) -> None:
        chunk, self._waiting = self._waiting, None
        if self._should_stop():
            raise _Stopped
        if chunk:
            self._append(chunk)

    def _while_waiting(self) -> None:
        """Nothing comes from standard input at the moment: what came is not to wait for more."""
        self._flush()

    def _append(self, chunk: Chunk) -> None:
        entries: list[bytes | int] = [b""] * (2 * len(chunk.payloads))
        entries[::2], entries[1::2] = chunk.payloads, chunk.abouts
        self._cursor = chunk.end
        if self._content:
            self._content.update(b"".join(chunk.payloads))
            digest = self._content.hexdigest()
            self._cursor = msgspec.structs.replace(chunk.end, digest=digest)
        first, cursor = self._parts + 1, _encode(self._cursor)
        _, _, tokens = self._protocol.append(self._id, first, cursor, chunk.records, entries)
        self._parts += len(chunk.payloads)
        self._protocol.push(self._policy.queue, self._id, tokens)
        if self._window:
            self._room -= chunk.size
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Wait while more bytes are in the server than the window allows."""
        while self._room <= 0:
            found = self._protocol.inspect(self._id)
            self._room = self._room_now(found)
            if self._room > 0 or found["state"] != "loading":
                return
            if self._should_stop():
                raise _Stopped
            time.sleep(_WINDOW_S)

    def _room_now(self, found: dict[str, str]) -> int:
        """Bytes that may go into the server before the next look."""
        total, done = int(found["total"]), int(found.get("done", 0))
        left = total - done - int(found.get("failed", 0))
        size = int(found["bytes"]) / total
        if not self._counts_results:
            return self._window - round(left * size)
        # What waits becomes a result, which may be larger: how large is known from those there.
        kept, results = self._protocol.result_bytes(self._id), int(found["results"])
        self._result_size = max(self._result_size, kept / results if results else 0.0)
        held = round(left * max(size, self._result_size)) + kept
        return min(
            (self._window if done else self._window // _LOOKS) - held, self._window // _LOOKS
        )

    def _take_back(self) -> None:
        """Leave nothing of a load that went wrong for good."""
        with suppress(StreamqError):
            self._protocol.cancel(self._id)
            forget(self._protocol, self._policy.queue, self._id)


def header_of(name: str, spec: Spec) -> bytes:
    """The first row of a CSV, with its line ending."""
    source = open_input(name)
    try:
        return first_record(source, mask_of(spec), MAX_PART)
    finally:
        source.close()


def _encode(cursor: Cursor) -> str:
    return "" if cursor == Cursor() else msgspec.json.encode(cursor).decode()
