"""Loading files: parts go to the server while the files are read, and the cursor with them.

The cursor moves in the same step as the parts, so a load that is killed at any moment and
run again with the same id goes on at the byte where it stood, and every record is there
once. An input that has changed meanwhile is refused.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec

from streamq.errors import (
    LoadGap,
    RequestEnded,
    RequestExists,
    ServerBusy,
    ServerFull,
    ServerUnreachable,
    damaged_if_unreadable,
)
from streamq.model import MAX_PART, Policy, State
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Opened
from streamq.protocol.snapshot import Snapshot
from streamq.queue.loading import Loading
from streamq.records import about
from streamq.records.boundaries import mask_of
from streamq.records.inputs import MARK, STDIN, BadInput, Identity, Input, open_input, stdin
from streamq.records.references import Reference
from streamq.records.remote import RemoteUnreachable
from streamq.records.splitting import Chunk, Cursor, PartSize, first_record, split, whole

#: How often (s) a load that is ahead of the workers looks whether it may go on.
_WINDOW_S = 0.05
#: How many times it looks while it fills the window once, where results fill it too.
_LOOKS = 8


#: After these errors what is loaded stays in the server: the same command can go on with it.
_STAYS = (ServerBusy, ServerFull, ServerUnreachable, RemoteUnreachable, RequestEnded, LoadGap)


class _Stopped(Exception):
    """The caller of the load wants no more of it now."""


class Load:
    """One load of files into one request."""

    def __init__(
        self,
        protocol: Protocol,
        request_id: str,
        policy: Policy,
        size: PartSize,
        *,
        window_bytes: int = 0,
        counts_results: bool = False,
        checks_complete: bool = True,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare a load.

        ``counts_results``: results are collected meanwhile, and those that are not collected yet
        fill the window too. ``checks_complete``: standard input is compared even if all of it was
        loaded before.
        """
        #: Whether there is something in the server to go on with.
        self.is_begun = False
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
        self._loading = Loading(protocol, request_id, policy)
        self._identities: list[Identity] = []
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
        now = self._identities = [Identity.of(name) for name in self._files]
        opened = self._open(now)
        self.is_begun = True
        on_open()
        try:
            self._load(opened)
            self._seal(now)
        except _Stopped:
            pass
        except _STAYS as error:
            raise self._named(error) from None
        except Exception:
            if opened.is_new:
                self._loading.take_back()
            raise
        finally:
            self._loading.close()
        return self._loading.parts

    def _seal(self, begun: list[Identity]) -> None:
        for old in begun:
            if changed := Identity.of(old.name).difference(old):
                raise BadInput(f"the input changed while it was loaded: {changed}")
        self._loading.seal(_encode(self._cursor))

    def _named(self, error: Exception) -> Exception:
        """Return the error, with what it means for the request where that is not plain."""
        if isinstance(error, RequestEnded):
            state = self._protocol.inspect(self._id).state
            return RequestEnded(f"request {self._id} is {state}: the rest is not loaded")
        if isinstance(error, LoadGap):
            return LoadGap(f"request {self._id} is being loaded by somebody else too")
        return error

    def _open(self, now: list[Identity]) -> Opened:
        text = msgspec.json.encode([self._policy.lasting, self._size])
        digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        try:
            opened = self._loading.open(digest, msgspec.json.encode(now))
        except RequestExists:
            self._compare(now)
            raise RequestExists(f"request {self._id} was submitted with other options") from None
        if not opened.is_new:
            self._compare(now)
        if opened.cursor:
            with damaged_if_unreadable(f"how far {self._id} is loaded"):
                self._cursor = msgspec.json.decode(opened.cursor, type=Cursor)
        return opened

    def _compare(self, now: list[Identity]) -> None:
        """Refuse to go on when the request was made of something else."""
        kept = self._protocol.inspect(self._id).optional_text("source")
        with damaged_if_unreadable(f"what {self._id} was loaded from"):
            then = msgspec.json.decode(kept, type=list[Identity]) if kept else []
        if len(now) != len(then):
            raise self._other(f"it was {len(then)} files, and is {len(now)}")
        for new, old in zip(now, then, strict=True):
            if changed := new.difference(old):
                raise self._other(changed)

    def _other(self, what: str) -> RequestExists:
        return RequestExists(f"request {self._id} was loaded from another input: {what}")

    def _load(self, opened: Opened) -> None:
        if not opened.state.is_live or self._protocol.inspect(self._id).is_sealed:
            if self._content and self._checks_complete:
                self._check_complete()
            return
        for index in range(self._cursor.file, len(self._files)):
            with closing(self._input(self._files[index])) as source:
                for chunk in self._chunks_of(source, index):
                    self._put(chunk)
        self._flush()
        self._loading.wait()

    def _input(self, name: str) -> Input:
        return stdin(self._while_waiting) if name == STDIN else open_input(name)

    def _chunks_of(self, source: Input, file: int) -> Iterator[Chunk]:
        spec = self._policy.spec
        if spec.format == "file":
            return iter([self._whole_file(source, file)])
        if spec.by_reference and source.is_compressed:
            raise BadInput(
                f"{source.name} is compressed, and nobody can begin to read in its middle: load it "
                "without --by-reference, or as a whole with --format file"
            )
        start = self._start(source, file)
        if self._content:
            self._skip_seen(source, start)
        elif start.offset:
            source.seek(start.offset)
        chunks = split(source, spec, self._size, start)
        return map(self._referred, chunks) if spec.by_reference else chunks

    def _whole_file(self, source: Input, file: int) -> Chunk:
        if not self._policy.spec.by_reference:
            return whole(source, file, self._size.most)
        size = self._identities[file].size
        if size > self._size.most:
            raise BadInput(f"{source.name} is larger than the {self._size.most} bytes of a part")
        payload = self._reference(file, 0, size)
        return Chunk([payload], [about.of_whole_file(file)], 1, len(payload), Cursor(file + 1))

    def _referred(self, chunk: Chunk) -> Chunk:
        """Return the chunk with where the bytes are, instead of the bytes."""
        file, offset = chunk.end.file, chunk.end.offset - chunk.size
        for index, payload in enumerate(chunk.payloads):
            chunk.payloads[index] = self._reference(file, offset, len(payload))
            offset += len(payload)
        chunk.size = sum(map(len, chunk.payloads))
        return chunk

    def _reference(self, file: int, offset: int, length: int) -> bytes:
        found = self._identities[file]
        return msgspec.json.encode(Reference(offset, length, found.size, found.version))

    def _start(self, source: Input, file: int) -> Cursor:
        """Return where to begin with a file: where the load stood, or after mark and header."""
        if self._cursor.file == file and self._cursor.offset:
            return self._cursor
        header = self._policy.spec.header
        if not header:
            return Cursor(file, len(source.mark()))
        own = first_record(source, self._mask, MAX_PART)
        if own.removeprefix(MARK).strip() != header.encode().removeprefix(MARK).strip():
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
        """Make sure that standard input is what all parts were made of."""
        source = self._input(STDIN)
        self._skip_seen(source, self._cursor)
        if source.read(1):
            raise self._other(f"standard input had {self._cursor.offset} bytes, and has more")

    def _put(self, chunk: Chunk) -> None:
        """Have a chunk sent, together with its neighbours where they are small."""
        if self._waiting and self._waiting.has_room_for(chunk):
            self._waiting.add(chunk)
            return
        self._flush()
        self._waiting = chunk

    def _flush(self) -> None:
        """Send what waits for neighbours, unless the caller wants no more."""
        chunk, self._waiting = self._waiting, None
        if self._should_stop():
            raise _Stopped
        if chunk:
            self._append(chunk)

    def _while_waiting(self) -> None:
        """Send what came from standard input, since nothing more comes at the moment."""
        self._flush()
        self._loading.wait()

    def _append(self, chunk: Chunk) -> None:
        entries: list[bytes | int] = [b""] * (2 * len(chunk.payloads))
        entries[::2], entries[1::2] = chunk.payloads, chunk.abouts
        self._cursor = chunk.end
        if self._content:
            self._content.update(b"".join(chunk.payloads))
            digest = self._content.hexdigest()
            self._cursor = msgspec.structs.replace(chunk.end, digest=digest)
        self._loading.append_ahead(entries, _encode(self._cursor), chunk.records)
        if self._window:
            self._room -= chunk.size
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Wait while more bytes are in the server than the window allows."""
        while self._room <= 0:
            self._loading.wait()
            found = self._protocol.inspect(self._id)
            with damaged_if_unreadable(f"what the server has of {self._id}"):
                self._room = self._room_now(found)
            if self._room > 0 or found.state is not State.LOADING:
                return
            if self._should_stop():
                raise _Stopped
            time.sleep(_WINDOW_S)

    def _room_now(self, found: Snapshot) -> int:
        """Return how many bytes may go into the server before the next look."""
        total, done = found.known_count("total"), found.count("done")
        left = total - done - found.count("failed")
        size = found.known_count("bytes") / total
        if not self._counts_results:
            return self._window - round(left * size)
        # Parts that wait become results, which may be larger: as large as those that are there.
        kept, results = self._protocol.result_bytes(self._id), found.count("results")
        self._result_size = max(self._result_size, kept / results if results else 0.0)
        held = round(left * max(size, self._result_size)) + kept
        step = max(1, self._window // _LOOKS)
        return min((self._window if done else step) - held, step)


def _encode(cursor: Cursor) -> str:
    return "" if cursor == Cursor() else msgspec.json.encode(cursor).decode()
