"""Files sent as the body of one call, split into parts while they come: ``curl -T big.csv``.

An upload is a load from standard input, which is the body. So a call that was cut goes on when the
same bytes are sent again: those that are loaded are compared and passed over. ``PATCH`` sends only
the rest.
"""

import asyncio
import concurrent.futures
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect

from streamq import units
from streamq.errors import InvalidValue, LoadGap, RequestUnknown, damaged_if_unreadable
from streamq.gateway.desk import Desk
from streamq.gateway.messages import Uploaded, UploadOptions
from streamq.gateway.problems import Problem, problem_of_too_many_takes
from streamq.gateway.roles import LOCAL, Caller
from streamq.protocol.protocol import Protocol
from streamq.protocol.snapshot import Snapshot
from streamq.queue.flow_status import status_of_request_or_flow
from streamq.records.inputs import STDIN, ArrivingInput, input_as_stdin
from streamq.records.remote import RemoteUnreachable
from streamq.records.splitting import Cursor
from streamq.runs.load import Load
from streamq.runs.options import Source, describe_source

#: How many uploads are read at the same time.
MOST_UPLOADS = 8
#: How many of these may be of one key, so that a caller that sends byte by byte does not keep all
#: others out.
MOST_OF_KEY = 4
#: How long a caller may send no byte before its upload is given up.
SILENT_S = 30.0


class UploadCut(RemoteUnreachable):
    """The caller left, or sent nothing for too long, before the body was complete."""


class Uploads:
    """Serves loaders that send a file. Each upload is read in a thread of its own."""

    def __init__(self, protocol: Protocol, desk: Desk, team: str = "") -> None:
        self._protocol = protocol
        self._desk = desk
        self._team = team
        self._threads = ThreadPoolExecutor(MOST_UPLOADS, "upload")
        #: How many uploads are open.
        self.open = 0
        self._of_key: Counter[str] = Counter()

    def close(self) -> None:
        """End the threads: uploads stop where they stand when the gateway does."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def put(
        self,
        caller: Caller,
        request_id: str,
        options: UploadOptions,
        body: AsyncIterator[bytes],
        begins_at: int | None = None,
    ) -> tuple[Uploaded, bool]:
        """Load the body into a request. Tells whether the request is new.

        ``begins_at``: the body is the rest of the file, from this byte on.

        Raises:
            Problem: too many uploads are open, the rest begins elsewhere, or the gateway stops.
        """
        self._desk.check_queue(caller, options.queue)
        name = units.request_id(request_id, self._team)
        if self.open >= MOST_UPLOADS:
            raise problem_of_too_many_takes(f"{MOST_UPLOADS} uploads are open already")
        if caller is not LOCAL and self._of_key[caller.name] >= MOST_OF_KEY:
            raise problem_of_too_many_takes(
                f"{MOST_OF_KEY} uploads of the key {caller.name} are open already"
            )
        loop = asyncio.get_running_loop()
        stream = _UploadBody(body, loop)
        self.open += 1
        self._of_key[caller.name] += 1
        try:
            return await loop.run_in_executor(
                self._threads, lambda: self._load(caller, name, options, stream, begins_at)
            )
        except UploadCut as cut:
            detail = f"{cut}. What came is loaded: send the same again, or the rest with PATCH"
            raise Problem(408, "SLOW", "the body did not come whole", detail) from None
        finally:
            self.open -= 1
            self._of_key[caller.name] -= 1

    async def stands(self, caller: Caller, request_id: str) -> Uploaded:
        """Tell how far an upload has come."""
        name = units.name(request_id, "request id")
        return await self._desk.in_thread(lambda: self._uploaded(self._found(caller, name)))

    def _load(
        self,
        caller: Caller,
        name: str,
        options: UploadOptions,
        stream: "_UploadBody",
        begins_at: int | None,
    ) -> tuple[Uploaded, bool]:
        before = self._found_or_none(caller, name)
        if begins_at is not None:
            self._check_begin(name, before, begins_at)
        with input_as_stdin(stream):
            policy, size = _request_of_upload(options)
            if begins_at and before:
                # The header of a CSV is not in the rest.
                policy = msgspec.structs.replace(policy, spec=before.spec)
            load = Load(
                self._protocol,
                name,
                policy,
                size,
                begins_at=begins_at or 0,
                should_stop=lambda: self._desk.is_stopping or self._desk.is_key_over(caller),
            )
            try:
                load.run()
            except LoadGap as gap:
                raise self._elsewhere(name, str(gap)) from None
        found = self._protocol.inspect(name)
        if not found.is_sealed and found.state.is_live:
            self._desk.check_again(caller)
            raise Problem(
                503,
                "AWAY",
                "the gateway stops",
                "what came is loaded: send the same again",
                retry_after_s=1,
            )
        return self._uploaded(found), before is None

    def _check_begin(self, name: str, before: Snapshot | None, begins_at: int) -> None:
        if before is None:
            raise RequestUnknown(f"there is no request {name}: send all of the file with PUT")
        if begins_at != _bytes_of_upload_loaded(before):
            raise self._elsewhere(name, f"the rest does not begin at byte {begins_at}")

    def _elsewhere(self, name: str, why: str) -> Problem:
        offset = _bytes_of_upload_loaded(self._protocol.inspect(name))
        return Problem(409, "SHORT", "the upload stands elsewhere", why, more={"offset": offset})

    def _found(self, caller: Caller, name: str) -> Snapshot:
        found = self._protocol.inspect(name)
        caller.check_queue(found.text("queue"))
        return found

    def _uploaded(self, found: Snapshot) -> Uploaded:
        status = status_of_request_or_flow(self._protocol, found)
        return Uploaded(
            offset=_bytes_of_upload_loaded(found), is_complete=found.is_sealed, status=status
        )

    def _found_or_none(self, caller: Caller, name: str) -> Snapshot | None:
        try:
            return self._found(caller, name)
        except RequestUnknown:
            return None


def _request_of_upload(options: UploadOptions) -> Source:
    """Return the request that an upload describes. For a CSV this reads the header."""
    if options.format in ("", "auto"):
        raise InvalidValue("which format? Say format=lines, format=csv or format=jsonl")
    given: dict[str, Any] = {
        name: value
        for name, value in msgspec.structs.asdict(options).items()
        if value is not msgspec.UNSET
    }
    return describe_source([STDIN], **given)


def _bytes_of_upload_loaded(found: Snapshot) -> int:
    """Return how many bytes of a file are loaded; 0 if they were not loaded as they were sent."""
    text = found.optional_text("cursor")
    with damaged_if_unreadable("how far the request is loaded"):
        cursor = msgspec.json.decode(text, type=Cursor) if text.startswith("{") else Cursor()
    return 0 if cursor.is_unpacked else cursor.offset


class _UploadBody(ArrivingInput):
    """The body of a call, read in a thread while the event loop receives it.

    The thread asks for one piece at a time, so a body comes no faster than it is loaded.
    """

    def __init__(self, body: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._body = body
        self._loop = loop
        self._asked: concurrent.futures.Future[bytes] | None = None
        self._here: memoryview = memoryview(b"")
        self._is_over = False

    def is_ready(self, within_s: float = 0.0) -> bool:
        """Return whether bytes, or the end, are there or come within that time."""
        if self._here or self._is_over:
            return True
        if self._asked is None:
            self._asked = asyncio.run_coroutine_threadsafe(
                _next_chunk_of_upload(self._body), self._loop
            )
        try:
            found = self._asked.result(within_s)
        except concurrent.futures.TimeoutError:
            return False
        self._asked = None
        self._here, self._is_over = memoryview(found), not found
        return True

    def read_ready(self, buffer: Any) -> int:
        """Read the bytes that are there, up to the buffer's size; none at the end."""
        count = min(len(buffer), len(self._here))
        buffer[:count] = self._here[:count]
        self._here = self._here[count:]
        return count


async def _next_chunk_of_upload(body: AsyncIterator[bytes]) -> bytes:
    """Return the next bytes of a body; none at its end.

    Raises:
        UploadCut: the caller left, or sends nothing.
    """
    try:
        async with asyncio.timeout(SILENT_S):
            async for some in body:
                if some:
                    return some
    except TimeoutError:
        raise UploadCut(f"nothing came for {SILENT_S:g} s") from None
    except ClientDisconnect:
        raise UploadCut("the caller left") from None
    return b""
