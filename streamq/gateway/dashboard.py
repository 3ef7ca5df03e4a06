"""The dashboard's part of the gateway: topics to watch, details, and changes by operators."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from streamq import units
from streamq.dashboard import failures
from streamq.dashboard.feed import MOST_TOPICS, MOST_TOPICS_IN_ALL, Feed
from streamq.dashboard.report import make_report
from streamq.errors import InvalidValue, StreamqError
from streamq.gateway.messages import Controlled
from streamq.gateway.problems import Problem
from streamq.gateway.roles import Caller, Role
from streamq.model import Failure, Spec, Status
from streamq.protocol import glances
from streamq.protocol.protocol import Protocol
from streamq.queue.changes import Change, note_change, read_changes
from streamq.queue.flow_status import place_of_flow_stage
from streamq.queue.request import Request

log = logging.getLogger(__name__)

#: How many bytes of a payload are shown.
SHOWN_BYTES = 4_096


class Retry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which failed parts run again: those of a range, or those of a group."""

    first: int = 0
    last: int = 0
    error: str | None = None
    pattern: str = ""
    #: Of a flow: the number of the stage; 0 for a request that is none.
    stage: int = 0


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a part's payload."""

    part: int
    #: How many bytes it has; -1: the server no longer has it.
    bytes: int
    text: str = ""
    source: str = ""
    line: int = 0


class DashboardBoard:
    """Serves the pages. Calls of the server run in threads."""

    def __init__(
        self,
        protocol: Protocol,
        in_thread: Callable[[Callable[[], Any]], Any],
        queues: list[str],
        *,
        is_read_only: bool = False,
        queue_of: Mapping[str, str] | None = None,
        sizes_of: Callable[[Spec], Sequence[int]] = lambda _: (),
    ) -> None:
        """``queue_of``: the queues of requests that were touched lately, as far as known.
        ``sizes_of``: the sizes of a request's files, where these are on this machine.
        """
        self.is_read_only = is_read_only
        self._protocol = protocol
        self._in_thread = in_thread
        self.queues = queues
        self.feed = Feed(protocol, sizes_of)
        self._queue_of = {} if queue_of is None else queue_of
        self._noting: set[asyncio.Task[None]] = set()
        #: By request: the change that is being noted. The next waits for it.
        self._last_noted: dict[str, asyncio.Task[None]] = {}

    # What is watched

    async def may_watch(self, caller: Caller, topics: list[str]) -> None:
        """Raise an error unless the caller may watch these topics."""
        if not topics or len(topics) > MOST_TOPICS:
            raise InvalidValue(f"name 1 to {MOST_TOPICS} topics: ?topic=q:default")
        if len(self.feed.topics) > MOST_TOPICS_IN_ALL:
            raise Problem(503, "BUSY", "too many topics are watched", retry_after_s=5)
        for topic in topics:
            found = self.feed.sampler(topic)
            caller.check_request(found.request_id)
            if found.queue:
                self._check_queue(caller, found.queue)
            elif caller.queues is not None:
                status = await self._status(found.request_id)
                self._check_queue(caller, status.queue)

    def queues_of(self, caller: Caller) -> list[str]:
        """Return the queues of this gateway that the caller may see."""
        if caller.only:
            return []
        return [each for each in self.queues if caller.queues is None or each in caller.queues]

    def _check_queue(self, caller: Caller, queue: str) -> None:
        caller.check_queue(queue)
        if queue not in self.queues:
            raise InvalidValue(f"this gateway does not serve the queue {queue!r:.80}")

    async def check_request(self, caller: Caller, request_id: str) -> None:
        """Raise an error unless there is such a request, and the caller may see it."""
        caller.check_request(request_id)
        caller.check_queue((await self._status(request_id)).queue)

    async def _status(self, request_id: str) -> Status:
        name = units.name(request_id, "request id")
        status: Status = await self._in_thread(Request(self._protocol, name).status)
        return status

    # What is changed

    def changed(self, who: str, address: str, request_id: str, what: str) -> None:
        """Note a change and its author, and have topics read again. Does not wait for that."""
        if request_id:
            self.feed.hurry(request_id)
        if not (request_id and what):
            return
        change = Change(who=who, what=what, request=request_id, address=address)
        before = self._last_noted.get(request_id)
        task = asyncio.get_running_loop().create_task(self._note(change, before))
        self._noting.add(task)
        self._last_noted[request_id] = task

        def forget(done: asyncio.Task[None]) -> None:
            self._noting.discard(done)
            if self._last_noted.get(request_id) is done:
                del self._last_noted[request_id]

        task.add_done_callback(forget)

    async def _note(self, change: Change, before: asyncio.Task[None] | None) -> None:
        if before:
            await asyncio.wait([before])
        try:
            known = self._queue_of.get(change.request)
            queue = known or (await self._status(change.request)).queue
            await self._in_thread(lambda: note_change(self._protocol, queue, change))
        except StreamqError as error:  # the request was purged meanwhile, or the server is away
            log.debug("the change of %s is not in the log: %s", change.request, error)
        else:
            self.feed.hurry_topic(f"l:{queue}")

    async def changes(self, caller: Caller, queue: str) -> list[Change]:
        """Return the changes of a queue's requests. Only operators see from which addresses."""
        self._check_queue(caller, units.name(queue, "queue"))
        found: list[Change] = await self._in_thread(lambda: read_changes(self._protocol, queue))
        if caller.role is Role.OPERATOR:
            return found
        return [msgspec.structs.replace(each, address="") for each in found]

    async def retry(self, caller: Caller, request_id: str, which: Retry) -> tuple[Controlled, str]:
        """Run failed parts again: those of a range, or of a group. Returns also which, in words."""
        status = await self._status(request_id)
        caller.check_queue(status.queue)

        def retry() -> Controlled:
            request = Request(self._protocol, request_id)
            chosen = self._chosen(place_of_flow_stage(request_id, which.stage), which)
            parts = request.retry(chosen, stage=which.stage or None)
            return Controlled(request.status().state, parts)

        done: Controlled = await self._in_thread(retry)
        if which.last:
            return done, f"retry parts {which.first} to {which.last}"
        return done, f"retry {which.error or ''}: {which.pattern}"

    def _chosen(self, place: str, which: Retry) -> Iterator[int]:
        if which.last:
            some = failures.failures_in_range(self._protocol, place, which.first, which.last)
            return (number for number, _ in some)
        found = self._protocol.failures(place)
        return failures.parts_of_failure_group(found, which.error or "", which.pattern)

    # What is read once

    async def failures(
        self, caller: Caller, request_id: str, first: int, last: int, most: int
    ) -> list[Failure]:
        """Return failures of parts in a range; those of a short range in the order of parts."""
        status = await self._status(request_id)
        caller.check_queue(status.queue)

        def read() -> list[Failure]:
            found: list[Failure] = []
            for number, text in failures.failures_in_range(self._protocol, request_id, first, last):
                found += failures.read_failures_of_part(text, number)
                if len(found) >= most:
                    break
            return found[:most]

        told: list[Failure] = await self._in_thread(read)
        if caller.role is not Role.OPERATOR:
            told = [msgspec.structs.replace(each, traceback="") for each in told]
        return told

    async def report(self, caller: Caller, request_id: str) -> bytes:
        """Return a request as one HTML file."""
        status = await self._status(request_id)
        caller.check_queue(status.queue)
        caller.check_request(request_id)
        told = self.feed.past(f"r:{request_id}")
        page: bytes = await self._in_thread(
            lambda: make_report(self._protocol, request_id, told["points"] if told else None)
        )
        return page

    async def payload(self, caller: Caller, request_id: str, number: int) -> Payload:
        """Return the beginning of a part's payload."""
        status = await self._status(request_id)
        caller.check_queue(status.queue)

        def read() -> Payload:
            from streamq.records.about import AboutPlace

            about, payload, size = glances.glance_at_payload(
                self._protocol, request_id, number, SHOWN_BYTES
            )
            place = AboutPlace.of(about, self._protocol.inspect(request_id).spec)
            return Payload(
                part=number,
                bytes=size,
                text=payload.decode("utf-8", "replace"),
                source=place.source if place else "",
                line=place.line if place else 0,
            )

        shown: Payload = await self._in_thread(read)
        return shown
