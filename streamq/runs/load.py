"""Loads files: parts go to the server while the files are read, and the cursor with them.

The cursor moves in the same step as the parts, so a load that is killed at any moment and
run again with the same id goes on at the byte where it stood, and every record is there
once. An input that has changed meanwhile is refused.
"""

import hashlib
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from math import inf

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
from streamq.model import MAX_PART, Failure, Policy, State
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Opened
from streamq.queue.key_index import KeyIndex
from streamq.queue.loading import Loading
from streamq.records import about
from streamq.records.arrow_tables import TABLE_FORMATS
from streamq.records.decoding import TEXT_FORMATS
from streamq.records.inputs import MARK, STDIN, BadInput, Input, InputIdentity, open_input, stdin
from streamq.records.references import Reference
from streamq.records.remote import RemoteUnreachable
from streamq.records.sizes import AS_LARGE_AS_ALLOWED, MOST_RECORDS, PartSize, Sizing, Step
from streamq.records.splitting import (
    Chunk,
    Cursor,
    beginning_of_csv,
    input_as_one_part,
    refuse_to_split_strange,
    split_by_steps,
    split_input,
)
from streamq.records.table_files import table_chunks
from streamq.runs.fleet_size import sized_by_fleet
from streamq.runs.input_differences import InputDifferences
from streamq.runs.window import Window

#: How often (s) a load that is ahead of the workers looks whether it may go on.
_WINDOW_S = 0.05
#: A load that waits until it knows how large to cut parts looks this often: soon at first.
_SOON_S = 0.002
_SELDOM_S = 0.02

#: After these errors what is loaded stays in the server: the same command can go on with it.
_STAYS = (ServerBusy, ServerFull, ServerUnreachable, RemoteUnreachable, RequestEnded, LoadGap)


class _Stopped(Exception):
    """The caller has told the load to stop."""


class Load:
    """One load of files into one request."""

    def __init__(  # noqa: PLR0913  what a run, a command and a gateway need differs
        self,
        protocol: Protocol,
        request_id: str,
        policy: Policy,
        size: PartSize,
        *,
        sizing: Sizing | None = None,
        window_bytes: int = 0,
        counts_results: bool = False,
        checks_complete: bool = True,
        begins_at: int = 0,
        spooled: Callable[[], int] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare a load.

        ``sizing`` decides how large parts are, where the size is automatic; without it, what the
        workers of the queue say of the handler does.
        ``counts_results``: results are collected meanwhile, and those that are not collected yet
        fill the window too. ``checks_complete``: standard input is compared even if all of it was
        loaded before. ``begins_at``: standard input has no bytes before that one, which is where
        the load stands. ``spooled`` says how many bytes of results wait in spools, where processes
        keep them so: they fill the window, too.
        """
        #: Whether there is something in the server to go on with.
        self.is_begun = False
        self._protocol = protocol
        self._id = request_id
        self._policy = policy
        self._size = size
        is_sized = size.is_automatic is True
        self._sizing = (sizing or sized_by_fleet(protocol, policy)) if is_sized else None
        #: How many parts were cut, and how many of them were handed to slots when last looked at.
        self._cut = self._delivered = 0
        counts = counts_results
        self._window = (
            Window(protocol, request_id, window_bytes, counts_results=counts, spooled=spooled)
            if window_bytes
            else None
        )
        self._checks_complete = checks_complete
        self._should_stop = should_stop
        self._files = policy.spec.files
        #: Workers compare checksums of parts by reference, but of no tables and whole files.
        may_grow = not policy.spec.by_reference or policy.spec.format in TEXT_FORMATS
        self._differences = InputDifferences(may_grow=may_grow)
        self._loading = Loading(protocol, request_id, policy)
        #: By which keys its parts are found.
        self.keys = KeyIndex(protocol, request_id, policy)
        self._identities: list[InputIdentity] = []
        self._cursor = Cursor()
        #: The cursor as the server has it, when all that was sent is there.
        self._stands = ""
        self._waiting: Chunk | None = None
        #: Why files were counted as failures, in words that name them.
        self.refused: list[str] = []
        #: Files that cannot be read, and why, which are not counted as failures yet.
        self._bad: list[tuple[int, BadInput]] = []
        self._begins_at = begins_at
        is_whole = STDIN in self._files and not begins_at
        #: Of all that was taken from standard input.
        self._content = hashlib.blake2b(digest_size=16) if is_whole else None
        #: Whether the bytes of standard input are not those that were sent.
        self._is_unpacked = False

    def run(self, on_open: Callable[[], None] = lambda: None) -> int:
        """Load what is not loaded yet. Returns how many parts the request has.

        Raises:
            BadInput: a file cannot be read or split; nothing of a new request is left.
            RequestExists: the id has another submission, or a file has changed since.
        """
        now = self._identities = [InputIdentity.of(name) for name in self._files]
        opened = self._open(now)
        self.is_begun = True
        on_open()
        try:
            while not self._load_and_seal(opened, now):
                opened = self._catch_up(opened)
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

    @property
    def blank_lines(self) -> int:
        """How many lines of the files were blank, and no records."""
        return self._cursor.blank

    def _load_and_seal(self, opened: Opened, now: list[InputIdentity]) -> bool:
        """Load the rest. Return whether it is done; it is not if somebody else loads it too."""
        try:
            self._load(opened)
            self._seal(now)
        except (LoadGap, RequestEnded) as error:
            is_over = isinstance(error, RequestEnded)
            if is_over and not self._protocol.inspect(self._id).is_sealed:
                raise
            if STDIN in self._files:  # standard input cannot be read a second time
                raise
            return False
        return True

    def _catch_up(self, before: Opened) -> Opened:
        """Go on where the server stands: another loader has added parts, perhaps of other sizes.

        Raises:
            LoadGap: the server stands where it stood when this load began to add parts.
        """
        self._loading.close()
        self._waiting = None
        found = self._protocol.inspect(self._id)
        total, cursor = found.known_count("total"), found.text("cursor")
        if (total, cursor) == (before.total, before.cursor):
            raise LoadGap("the server does not stand where it says")
        self._loading.parts = total
        self._begin_at(total, cursor)
        return msgspec.structs.replace(before, state=found.state, total=total, cursor=cursor)

    def _begin_at(self, parts: int, cursor: str) -> None:
        self._cut = self._delivered = parts
        self._stands = cursor
        with damaged_if_unreadable(f"how far {self._id} is loaded"):
            self._cursor = msgspec.json.decode(cursor, type=Cursor) if cursor else Cursor()

    def _seal(self, begun: list[InputIdentity]) -> None:
        self._differences.check_loaded(begun)
        self._loading.seal(self._stands)

    def _named(self, error: Exception) -> Exception:
        """Return the error, with what it means for the request where that is not plain."""
        if isinstance(error, RequestEnded):
            state = self._protocol.inspect(self._id).state
            return RequestEnded(f"request {self._id} is {state}: the rest is not loaded")
        if isinstance(error, LoadGap):
            return LoadGap(f"request {self._id} is being loaded by somebody else too")
        return error

    def _open(self, now: list[InputIdentity]) -> Opened:
        # Of an automatic size only that it is automatic: two loads may cut different parts.
        size = "automatic" if self._size.is_automatic is True else self._size
        text = msgspec.json.encode([self._policy.lasting, size])
        digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        try:
            opened = self._loading.open(digest, msgspec.json.encode(now))
        except RequestExists:
            if self._size.is_automatic is True:
                # Versions before automatic sizes loaded parts of the largest size.
                self._size = msgspec.structs.replace(self._size, is_automatic=msgspec.UNSET)
                self._sizing = None
                return self._open(now)
            self._compare(now)
            raise RequestExists(f"request {self._id} was submitted with other options") from None
        if not opened.is_new:
            self._compare(now)
            self.keys.go_on()
        self._begin_at(opened.total, opened.cursor)
        return opened

    def _compare(self, now: list[InputIdentity]) -> None:
        """Refuse to go on if the request was made of other files or options."""
        snapshot = self._protocol.inspect(self._id)
        kept = snapshot.optional_text("source")
        with damaged_if_unreadable(f"what {self._id} was loaded from"):
            then = msgspec.json.decode(kept, type=list[InputIdentity]) if kept else []
        # After a complete load nothing would ever read what was added. A run goes on with its work.
        may_grow = not (snapshot.is_sealed and self._checks_complete)
        if changed := self._differences.difference(then, now, may_grow=may_grow):
            raise self._other(changed)

    def _other(self, what: str) -> RequestExists:
        return RequestExists(f"request {self._id} was loaded from another input: {what}")

    def _load(self, opened: Opened) -> None:
        if not opened.state.is_live or self._protocol.inspect(self._id).is_sealed:
            if self._content and self._checks_complete:
                self._check_complete()
            return
        for index in range(self._cursor.file, len(self._files)):
            self._load_file(index)
        self._flush()
        if self._bad:  # no file could be read at all
            raise self._bad[0][1]
        self._loading.wait()

    def _load_file(self, index: int) -> None:
        """Load a file. One that cannot be read is a failure, unless all have to be good."""
        try:
            if self._policy.spec.format in TABLE_FORMATS:
                for chunk in self._table_chunks(index):
                    self._put(chunk)
                return
            with closing(self._file(index)) as source:
                for chunk in self._chunks_of(source, index):
                    self._put(chunk)
        except BadInput as error:
            # A flow cannot count a part of its first stage that was never loaded.
            if self._policy.spec.is_strict or self._policy.flow or STDIN in self._files:
                raise
            self._flush()
            self._bad.append((index, error))
            if self._loading.parts:
                self._refuse_bad()

    def _refuse_bad(self) -> None:
        """Count files that cannot be read as failures: something else can be loaded."""
        for file, error in self._bad:
            is_begun = self._cursor.file == file and self._cursor.offset > 0
            failure = Failure(
                error="BadInput",
                message=str(error),
                part=self._loading.parts + 1,
                source=self._files[file],
                line=self._cursor.record if is_begun else 0,
            )
            after, self._cursor = self._stands, Cursor(file + 1, blank=self._cursor.blank)
            self._stands = self._cursor.text
            self._loading.refuse(failure, after, self._stands)
            self.refused.append(str(error))
        self._bad.clear()

    def _input(self, name: str) -> Input:
        source = stdin(self._while_waiting) if name == STDIN else open_input(name)
        source.decode_from(self._policy.spec.encoding)
        return source

    def _file(self, index: int) -> Input:
        """Return a file as it was when the load began: it may grow meanwhile."""
        source, then = self._input(self._files[index]), self._identities[index]
        if then.mtime_ns:
            source.end_at(then.size)
        return source

    def _chunks_of(self, source: Input, file: int) -> Iterator[Chunk]:
        spec = self._policy.spec
        if spec.format == "file":
            return iter([self._whole_file(source, file)])
        if spec.by_reference and source.is_compressed:
            raise BadInput(
                f"{source.name} is compressed, and nobody can begin to read in its middle: load it "
                "without --by-reference, or as a whole with --format file"
            )
        if not self._begins_at:
            refuse_to_split_strange(source, spec)
        start = self._start(source, file)
        self._is_unpacked = source.is_compressed or bool(spec.encoding)
        if self._begins_at:
            self._check_begin(source, start)
        elif self._content:
            self._skip_seen(source, start)
        elif start.offset:
            source.seek(start.offset)
        if self._sizing or self._canary_left():
            chunks = split_by_steps(source, spec, self._size_of_steps(), start, self._next_step)
        else:
            chunks = split_input(source, spec, self._size, start)
        return map(self._referred, chunks) if spec.by_reference else chunks

    def _table_chunks(self, file: int) -> Iterator[Chunk]:
        start = Cursor(file, blank=self._cursor.blank)
        start = self._cursor if self._cursor.file == file else start
        steer = self._next_step if self._sizing or self._canary_left() else None
        form = self._policy.spec.format
        return table_chunks(self._identities[file], form, start, self._size, steer)

    def _canary_left(self) -> int:
        """Return how many parts of one record each are still to be cut for the canary."""
        waiting = len(self._waiting.payloads) if self._waiting else 0
        return max(0, (self._policy.canary or 0) - self._loading.parts - waiting)

    def _size_of_steps(self) -> PartSize:
        """Return the size with bytes that do not cut a part of so many records short."""
        size = self._size
        return msgspec.structs.replace(size, bytes=size.most) if size.records else size

    def _next_step(self) -> Step:
        """Return what to cut next. Wait while the workers have enough."""
        if left := self._canary_left():
            return Step(1, left)
        if not self._sizing:
            return Step(self._size.records or MOST_RECORDS, AS_LARGE_AS_ALLOWED.parts)
        pause_s = _SOON_S
        while True:
            step = self._sizing.step(self._cut - self._delivered, self._fitting())
            if step.parts:
                self._cut += step.parts
                return step
            self._flush()
            # Fewer parts may have been cut than the step allowed: what was read held no more.
            self._cut = self._loading.parts
            if not self._cut:
                time.sleep(_SOON_S)
                continue
            self._loading.wait()
            found = self._protocol.inspect(self._id)
            if found.state is not State.LOADING:
                return AS_LARGE_AS_ALLOWED  # ``append`` says what is wrong
            delivered, self._delivered = self._delivered, found.count("delivered")
            if delivered == self._delivered:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _SELDOM_S)

    def _fitting(self) -> float:
        """Return about how many records fit into a part, by those read so far of this file."""
        records = self._cursor.record - 1
        return self._size.bytes * records / max(1, self._cursor.offset) if records else inf

    def _whole_file(self, source: Input, file: int) -> Chunk:
        if not self._policy.spec.by_reference:
            return input_as_one_part(source, file, self._size.most)
        found = self._identities[file]
        if found.size > self._size.most:
            raise BadInput(f"{source.name} is larger than the {self._size.most} bytes of a part")
        payload = Reference.payload(found, 0, found.size)
        return Chunk(
            [payload], [about.about_of_whole_file(file)], 1, len(payload), Cursor(file + 1)
        )

    def _referred(self, chunk: Chunk) -> Chunk:
        """Return the chunk with where the bytes are, instead of the bytes."""
        found, offset = self._identities[chunk.end.file], chunk.end.offset - chunk.size
        for index, payload in enumerate(chunk.payloads):
            check = zlib.crc32(payload)
            chunk.payloads[index] = Reference.payload(found, offset, len(payload), check)
            offset += len(payload)
        chunk.input_size, chunk.size = chunk.size, sum(map(len, chunk.payloads))
        return chunk

    def _start(self, source: Input, file: int) -> Cursor:
        """Return where to begin with a file: where the load stood, or after mark and header."""
        if self._cursor.file == file and self._cursor.offset:
            return self._cursor
        spec, blank = self._policy.spec, self._cursor.blank
        if spec.format != "csv":
            return Cursor(file, len(source.mark()), blank=blank)
        found = beginning_of_csv(source, spec, MAX_PART, has_header=bool(spec.header))
        if found.header.strip() != spec.header.encode().removeprefix(MARK).strip():
            raise BadInput(
                f"{source.name}: line {found.lines}: another header than the first file has"
            )
        return Cursor(file, found.size, found.lines + 1, blank=blank)

    def _check_begin(self, source: Input, start: Cursor) -> None:
        """Make sure that a rest of standard input begins where the load stands."""
        if start.is_unpacked or self._is_unpacked:
            raise BadInput("it is compressed, or encoded otherwise: give all of it again")
        if start.offset != self._begins_at:
            raise LoadGap(f"it is loaded up to byte {start.offset}, not {self._begins_at}")

    def _skip_seen(self, source: Input, start: Cursor) -> None:
        """Pass over what was taken from standard input before, if it is the same."""
        assert self._content
        passed = source.skip(start.offset, self._see)
        if passed < start.offset:
            raise self._other(
                f"standard input ends after {passed} bytes, and {start.offset} were loaded: "
                "give the same input again"
            )
        if start.digest and start.digest != self._content.hexdigest():
            raise self._other(f"the first {passed} bytes of standard input are not what they were")

    def _see(self, data: bytes) -> None:
        """Add to the digest of what was taken from standard input."""
        assert self._content
        # A row of a CSV that ended in a carriage return alone ends in a newline in its part.
        is_csv = self._policy.spec.format == "csv"
        self._content.update(data.replace(b"\r", b"\n") if is_csv else data)

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
            self._refuse_bad()
            self._append(chunk)

    def _while_waiting(self) -> None:
        """Send what came from standard input, since nothing more comes at the moment."""
        self._flush()
        self._loading.wait()

    def _append(self, chunk: Chunk) -> None:
        entries: list[bytes | int] = [b""] * (2 * len(chunk.payloads))
        entries[::2], entries[1::2] = chunk.payloads, chunk.abouts
        after, self._cursor = self._stands, chunk.end
        if self._content:
            self._see(b"".join(chunk.payloads))
            digest = self._content.hexdigest()
            self._cursor = msgspec.structs.replace(
                chunk.end, digest=digest, is_unpacked=self._is_unpacked
            )
        self._stands = self._cursor.text
        self.keys.note(self._loading.parts + 1, chunk.payloads)
        self._loading.append_ahead(entries, after, self._stands, chunk.records)
        if self._window:
            self._window.add(len(chunk.payloads), chunk.input_size or chunk.size)
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Wait while more bytes wait to be done or written than the window allows."""
        assert self._window
        while self._window.is_full:
            self._loading.wait()
            if self._window.look() is not State.LOADING or not self._window.is_full:
                return
            if self._should_stop():
                raise _Stopped
            time.sleep(_WINDOW_S)
