"""Lists requests and tells errors to readers; steers requests for operators."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from streamq import units
from streamq.errors import InvalidValue
from streamq.gateway.desk import Desk
from streamq.gateway.messages import (
    Changes,
    Controlled,
    ErrorPage,
    FailureTold,
    Listed,
    QueueTold,
    RequestListed,
)
from streamq.gateway.roles import Caller, Role
from streamq.model import Failure, State, Status
from streamq.protocol.protocol import Protocol
from streamq.queue.changes import describe_change
from streamq.queue.listing import Glimpse, list_requests
from streamq.queue.request import Request

T = TypeVar("T")

#: The verbs that steer a request and take no body.
ACTIONS = ("pause", "resume", "cancel", "retry", "release")
#: How many requests' queues are remembered.
_MOST_KNOWN = 10_000
STATES = (*(state.value for state in State), "paused")


class Control:
    """Serves readers and operators. Calls of the server run in the desk's threads."""

    def __init__(self, protocol: Protocol, desk: Desk, queues: tuple[str, ...]) -> None:
        self._protocol = protocol
        self._desk = desk
        self._queues = queues
        #: The queues of requests that were touched lately: after a purge the server cannot say in
        #: which queue a request was.
        self.queue_of: dict[str, str] = {}

    async def act(self, caller: Caller, request_id: str, action: str) -> Controlled:
        """Pause, resume, cancel or retry a request."""

        def act(request: Request) -> Controlled:
            count = getattr(request, action)()
            return Controlled(request.status().state, count or 0)

        return await self._with(caller, request_id, act)

    async def change(self, caller: Caller, request_id: str, changes: Changes) -> tuple[Status, str]:
        """Change level, limit, rate or weight of a request that runs. Returns also what changed."""

        def change(request: Request) -> tuple[Status, str]:
            before = request.status()
            request.set(
                level=changes.level,
                limit=changes.limit,
                rate=changes.rate,
                weight=changes.weight,
            )
            return request.status(), describe_change(before, msgspec.to_builtins(changes))

        return await self._with(caller, request_id, change)

    async def purge(self, caller: Caller, request_id: str) -> None:
        """Remove an ended request and its results."""
        await self._with(caller, request_id, Request.purge)

    async def errors(self, caller: Caller, request_id: str, after: int, most: int) -> ErrorPage:
        """Return what was given up, in the order of parts, from behind a part on."""
        shows_all = caller.role.allows(Role.OPERATOR)

        def errors(request: Request) -> ErrorPage:
            found = [each for each in request.errors() if each.part > after]
            page = found[:most]
            while page and len(found) > len(page) and found[len(page)].part == page[-1].part:
                page.append(found[len(page)])  # a page ends with a whole part
            following = page[-1].part if len(page) < len(found) else None
            return ErrorPage([_failure_told(each, shows_all=shows_all) for each in page], following)

        return await self._with(caller, request_id, errors)

    async def requests(
        self, caller: Caller, queue: str, *, state: str, handler: str, ended: bool, most: int
    ) -> Listed:
        """Return requests of a queue, the newest first."""
        caller.check_request("")
        caller.check_queue(units.name(queue, "queue"))
        if state and state not in STATES:
            raise InvalidValue(f"state {state!r:.80} is none: {', '.join(STATES)}")
        if handler:
            units.name(handler, "handler")

        def fits(each: Glimpse) -> bool:
            # A request that has just ended may still be in the index of open requests.
            return (
                (not state or each.is_in(state))
                and (not handler or each.handler == handler)
                and (ended or each.state.is_live)
            )

        def requests() -> Listed:
            found = list_requests(self._protocol, queue, fits, ended=ended)
            told = [
                RequestListed(
                    id=each.id,
                    state=each.state,
                    handler=each.handler,
                    paused=each.paused,
                    created_ms=each.created_ms,
                    finished_ms=each.finished_ms,
                    has_failures=each.has_failures,
                    labels=each.labels,
                )
                for each in found.requests[:most]
            ]
            return Listed(told, len(found.requests), found.looked, found.total, found.damaged)

        return await self._desk.in_thread(requests)

    async def queues(self, caller: Caller) -> list[QueueTold]:
        """Return the queues that this gateway serves and the caller may use."""
        caller.check_request("")
        own = caller.queues
        names = [queue for queue in self._queues if own is None or queue in own]

        def queues() -> list[QueueTold]:
            return [
                QueueTold(
                    name,
                    self._protocol.index_size(name),
                    self._protocol.index_size(name, closed=True),
                    len(self._protocol.workers(name)),
                )
                for name in names
            ]

        return await self._desk.in_thread(queues)

    async def _with(self, caller: Caller, request_id: str, do: Callable[[Request], T]) -> T:
        name = units.name(request_id, "request id")

        def work() -> T:
            request = Request(self._protocol, name)
            caller.check_request(name)
            queue = request.status().queue
            caller.check_queue(queue)
            if len(self.queue_of) > _MOST_KNOWN:
                self.queue_of.clear()
            self.queue_of[name] = queue
            return do(request)

        return await self._desk.in_thread(work)


def _failure_told(failure: Failure, *, shows_all: bool) -> FailureTold:
    return FailureTold(
        part=failure.part,
        record=failure.record,
        error=failure.error,
        message=failure.message,
        attempts=failure.attempts,
        source=failure.source,
        line=failure.line,
        # A traceback may show code and data, so only operators see it.
        traceback=failure.traceback if shows_all else "",
    )
