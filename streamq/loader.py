"""Loading files: parts go to the server while the files are read, and the cursor with them.

The cursor moves in the same step as the parts, so a load that is killed at any moment and
run again with the same id goes on at the byte where it stood, and every record is there
once. An input that has changed meanwhile is refused.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from streamq.errors import (
    RequestExists,
    ServerBusy,
    ServerFull,
    ServerUnreachable,
    StreamqError,
)
from streamq.model import Opened, Policy, Tokens
from streamq.protocol import Protocol
from streamq.source import BadInput, Cursor, Piece, Size, split, whole_file
from streamq.submission import CHUNK_BYTES, CHUNK_PARTS, forget

#: So much of a file's beginning and end is compared when a load goes on.
_SAMPLE = 2**16
#: How often a load that is ahead of the workers looks whether it may go on.
_WINDOW_S = 0.05


class Identity(msgspec.Struct, frozen=True):
    """What tells a file from a changed one."""

    name: str
    size: int
    mtime_ns: int
    digest: str

    @classmethod
    def of(cls, path: str) -> "Identity":
        """The file as it is now.

        Raises:
            BadInput: it is not there, is no regular file, or cannot be read.
        """
        try:
            if not Path(path).is_file():
                why = "Is a directory" if Path(path).is_dir() else "No such file"
                raise BadInput(f"{path}: {why}")
            state = Path(path).stat()
            with Path(path).open("rb") as file:
                sample = file.read(_SAMPLE)
                file.seek(max(0, state.st_size - _SAMPLE))
                sample += file.read(_SAMPLE)
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}") from None
        digest = hashlib.blake2b(sample, digest_size=16).hexdigest()
        return cls(path, state.st_size, state.st_mtime_ns, digest)

    def difference(self, then: "Identity") -> str:
        """What changed since, in words; "" for nothing."""
        if self.size != then.size:
            return f"{self.name} had {then.size} bytes, and has {self.size}"
        if self.digest != then.digest:
            return f"{self.name} has other content than it had"
        return f"{self.name} was written to since" if self.mtime_ns != then.mtime_ns else ""


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
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._protocol = protocol
        self._id = request_id
        self._policy = policy
        self._size = size
        self._window = window_bytes
        self._should_stop = should_stop
        self._files = policy.spec.files
        self._parts = 0

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
            for chunk in self._chunks(opened):
                if self._should_stop():
                    return self._parts
                self._append(chunk)
            self._check_unchanged(now)
            cursor = _encode(self._cursor)
            _, tokens = self._protocol.seal(self._id, self._parts, cursor)
            self._protocol.push(self._policy.queue, self._id, tokens)
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
            self._compare(now, msgspec.json.decode(kept, type=list[Identity]))
        self._parts = opened.total
        self._cursor = (
            msgspec.json.decode(opened.cursor, type=Cursor) if opened.cursor else Cursor()
        )
        return opened

    def _compare(self, now: list[Identity], then: list[Identity]) -> None:
        for new, old in zip(now, then, strict=True):
            if changed := new.difference(old):
                raise RequestExists(f"request {self._id} was loaded from another input: {changed}")

    def _check_unchanged(self, begun: list[Identity]) -> None:
        for old in begun:
            if changed := Identity.of(old.name).difference(old):
                raise BadInput(f"the input changed while it was loaded: {changed}")

    def _pieces(self) -> Iterator[Piece]:
        start = self._cursor
        for index, name in enumerate(self._files):
            if index < start.file:
                continue
            here = start if index == start.file and start.offset else self._first(index)
            if self._policy.spec.format == "file":
                yield whole_file(name, index, self._size.most)
            else:
                yield from split(name, index, self._policy.spec.format, self._size, here)

    def _first(self, file: int) -> Cursor:
        """The first record of a file: in a CSV it comes after the header."""
        header = self._policy.spec.header
        if not header:
            return Cursor(file)
        own = header_of(self._files[file])
        if own.strip() != header.encode().strip():
            raise BadInput(f"{self._files[file]} has another header than {self._files[0]}")
        return Cursor(file, len(own), 2)

    def _chunks(self, opened: Opened) -> Iterator[list[Piece]]:
        if not opened.state.is_live or "sealed" in self._protocol.inspect(self._id):
            return
        chunk: list[Piece] = []
        size = 0
        for piece in self._pieces():
            chunk.append(piece)
            size += len(piece.payload)
            if len(chunk) >= CHUNK_PARTS or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def _append(self, chunk: list[Piece]) -> None:
        entries: list[bytes | int] = []
        for piece in chunk:
            about = b"%d %d %d" % (piece.records, piece.start.file, piece.start.record)
            entries += (piece.payload, about)
        records = sum(piece.records for piece in chunk)
        self._cursor = chunk[-1].end
        first, cursor = self._parts + 1, _encode(self._cursor)
        _, _, tokens = self._protocol.append(self._id, first, cursor, records, entries)
        self._parts += len(chunk)
        self._protocol.push(self._policy.queue, self._id, tokens)
        if self._window:
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Wait while more bytes are in the server than the window allows."""
        while True:
            found = self._protocol.inspect(self._id)
            total = int(found["total"])
            left = total - int(found.get("done", 0)) - int(found.get("failed", 0))
            is_room = left * int(found["bytes"]) / total <= self._window
            if is_room or found["state"] != "loading" or self._should_stop():
                return
            time.sleep(_WINDOW_S)

    def _take_back(self) -> None:
        """Leave nothing of a load that went wrong for good."""
        with suppress(StreamqError):
            self._protocol.cancel(self._id)
            forget(self._protocol, self._policy.queue, self._id)


def header_of(path: str) -> bytes:
    """The first row of a CSV file, with its line ending."""
    for piece in split(path, 0, "csv", Size(records=1), Cursor()):
        return piece.payload
    return b""


def _encode(cursor: Cursor) -> str:
    return "" if cursor == Cursor() else msgspec.json.encode(cursor).decode()
