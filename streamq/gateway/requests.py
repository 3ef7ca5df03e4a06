"""Submits requests for loaders; follows them and reads their results for readers."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec

from streamq import units
from streamq.errors import RequestUnknown, ServerError, damaged_if_unreadable
from streamq.gateway import payloads
from streamq.gateway.desk import Desk
from streamq.gateway.messages import NewRequest, ResultLine, ResultsEnd
from streamq.gateway.roles import Caller
from streamq.model import MAX_PART, Policy, State, Status
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import part_of_field
from streamq.queue.loading import keep_registered
from streamq.queue.options import policy_of_options
from streamq.queue.request import Request
from streamq.queue.results import ResultReader
from streamq.queue.submission import Submission
from streamq.records import encoding as codec

log = logging.getLogger(__name__)

#: How long a call that waits for the end of a request pauses between two looks (s): at first, and
#: later at most.
LOOK_S = (0.02, 0.5)


class Requests:
    """Serves loaders and readers. Calls of the server run in the desk's threads."""

    def __init__(
        self, protocol: Protocol, desk: Desk, team: str = "", *, is_read_only: bool = False
    ) -> None:
        """``team``: the one whose ids new requests get, if any."""
        self._protocol = protocol
        self._desk = desk
        self._team = team
        self._is_read_only = is_read_only

    async def submit(self, caller: Caller, new: NewRequest) -> tuple[Status, bool]:
        """Make a request, or find the one of the same submission. Tells whether it is new."""
        self._desk.check_queue(caller, new.queue)
        raw, request_id, meant = new.parts, new.id, policy_of_new_request(new)
        name = units.request_id(request_id, self._team)

        def submit() -> tuple[Status, bool]:
            parts = [payloads.submitted_payload(each, number) for number, each in enumerate(raw, 1)]
            is_new = request_id is None or self._is_unknown(name)
            submission = Submission(self._protocol, name, meant, MAX_PART)
            submission.run(parts, can_go_on=request_id is not None)
            return Request(self._protocol, name).status(), is_new

        return await self._desk.in_thread(submit)

    def _is_unknown(self, request_id: str) -> bool:
        try:
            self._protocol.inspect(request_id)
        except RequestUnknown:
            return True
        return False

    async def status(self, caller: Caller, request_id: str) -> Status:
        """Return where a request stands."""
        name = units.name(request_id, "request id")
        self._desk.check_again(caller)

        def status() -> Status:
            found = Request(self._protocol, name).status()
            caller.check_queue(found.queue)
            if not self._is_read_only:
                keep_registered(self._protocol, found)
            return found

        return await self._desk.in_thread(status)

    async def wait(self, caller: Caller, request_id: str, wait_s: float) -> Status:
        """Return the status of a request when it has ended, or when the time is over."""
        until = time.monotonic() + wait_s
        pause_s, most_s = LOOK_S
        self._desk.check_waits(caller)
        with self._desk.counted(caller):
            while True:
                status = await self.status(caller, request_id)
                left_s = until - time.monotonic()
                if not status.state.is_live or left_s <= 0 or self._desk.is_stopping:
                    return status
                await asyncio.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, most_s)

    async def results(
        self, caller: Caller, request_id: str, first: int, most: int, is_following: bool
    ) -> AsyncIterator[bytes]:
        """Return lines with the results of a request in input order, from a part on.

        They end with a line that says where to go on. ``is_following``: wait for results until the
        request has ended.
        """
        # This raises if there is no such request, or if it is in another queue.
        status = await self.status(caller, request_id)
        lines = self._lines(caller, request_id, first, most, is_following, status.state)
        if not is_following:
            return lines
        self._desk.check_waits(caller)
        return self._counted(caller, lines)

    async def _counted(self, caller: Caller, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        with self._desk.counted(caller):
            async for some in lines:
                yield some

    async def _lines(
        self,
        caller: Caller,
        request_id: str,
        first: int,
        most: int,
        is_following: bool,
        state: State,
    ) -> AsyncIterator[bytes]:
        # Earlier results are not forgotten: reading them again would tell of them twice.
        reader = ResultReader(self._protocol, request_id, first=first, goes_back=False)
        reader.is_following = is_following
        left, pause_s = most, LOOK_S[0]
        #: Where to go on, if fewer results are wanted than were read.
        next_number = 0
        while left > 0 and not self._desk.is_key_over(caller):
            try:
                found = await self._desk.in_thread(reader.read)
            except ServerError as error:
                # The caller has the results so far, and asks for the others with a new call.
                log.warning("results of %s end early: %s", request_id, error)
                end = ResultsEnd(next=reader.next, state=state, is_over=False)
                yield msgspec.json.encode(end) + b"\n"
                return
            if found:
                if len(found) > left and "." not in found[-1][0]:
                    next_number = part_of_field(found[left][0])
                    del found[left:]
                yield b"".join(
                    _result_line_of_request(part_of_field(field), result) for field, result in found
                )
                left -= len(found)
            if found is not None:
                pause_s = LOOK_S[0]
                continue
            if reader.is_over or not is_following or self._desk.is_stopping:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S[1])
        with suppress(ServerError):  # then the answer is the status that the call found
            status = await self._desk.in_thread(Request(self._protocol, request_id).status)
            state = status.state
        end = ResultsEnd(
            next=next_number or reader.next,
            state=state,
            is_over=reader.is_over and not next_number,
        )
        yield msgspec.json.encode(end) + b"\n"


def policy_of_new_request(new: NewRequest) -> Policy:
    """Return the policy that a new request asks for."""
    options = msgspec.structs.asdict(new)
    for name in ("parts", "id", "state"):
        del options[name]
    return policy_of_options(**options)


def _result_line_of_request(number: int, result: bytes) -> bytes:
    with damaged_if_unreadable(f"the result of part {number}"):
        items, _ = codec.decode_result(result)
        values = [payloads.shown_result_payload(item) for item in items]
    line = ResultLine(part=number)
    if len(values) == 1:
        line.result = values[0]
    else:
        line.results = values
    return msgspec.json.encode(line) + b"\n"
