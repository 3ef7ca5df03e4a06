"""The lines of the table of routes that the dashboard needs: what operators change, and details."""

from importlib.metadata import version
from typing import Annotated

import msgspec
from msgspec import Meta

from streamq.gateway.cookies import MOST_SHARE_DAYS, SHARE_DAYS
from streamq.gateway.dashboard import DashboardBoard, Payload, Retry
from streamq.gateway.messages import Controlled
from streamq.gateway.roles import Role
from streamq.gateway.route import Answer, Call, Gateway, Param, Route
from streamq.model import Failure
from streamq.queue.changes import Change

_MOST_FAILURES = 200
_LAST_PART = 2**53


class Me(msgspec.Struct, frozen=True, kw_only=True):
    """Who calls, what they may do, and which queues there are."""

    name: str
    role: Role
    queues: list[str]
    version: str
    #: Whether callers log in.
    session: bool = False
    #: The only request that may be seen, by a link; "" for all of the queues.
    only: str = ""


def _board_of_gateway(gateway: Gateway) -> DashboardBoard:
    assert gateway.board is not None
    return gateway.board


async def me(gateway: Gateway, call: Call) -> Answer:
    """Tell who calls."""
    caller = call.caller
    role = Role.READER if _board_of_gateway(gateway).is_read_only else caller.role
    told = Me(
        name=caller.name,
        role=role,
        queues=_board_of_gateway(gateway).queues_of(caller),
        version=version("streamq"),
        session=gateway.access.has_keys and not caller.only,
        only=caller.only,
    )
    return Answer(200, told)


async def retry_some(gateway: Gateway, call: Call) -> Answer:
    """Run failed parts of a range or a group again."""
    done, noted = await _board_of_gateway(gateway).retry(call.caller, call.path["id"], call.body)
    return Answer(200, done, noted=noted)


async def changes(gateway: Gateway, call: Call) -> Answer:
    """Tell who changed what."""
    queue = call.text("queue", "default")
    return Answer(200, await _board_of_gateway(gateway).changes(call.caller, queue))


async def share(gateway: Gateway, call: Call) -> Answer:
    """Make a link that shows one request to everybody who has it."""
    request_id, days = call.path["id"], call.body.days
    await _board_of_gateway(gateway).check_request(call.caller, request_id)
    link = gateway.access.share(call.caller, request_id, days)
    return Answer(200, Shared(path=f"/s/{link}", days=days), noted=f"share for {days} days")


async def failures(gateway: Gateway, call: Call) -> Answer:
    """Tell of failures in a range of parts."""
    first = int(call.number("from", 1, 1, _LAST_PART))
    last = int(call.number("to", _LAST_PART, 1, _LAST_PART))
    most = int(call.number("most", 50, 1, _MOST_FAILURES))
    found = await _board_of_gateway(gateway).failures(
        call.caller, call.path["id"], first, last, most
    )
    return Answer(200, found)


async def payload(gateway: Gateway, call: Call) -> Answer:
    """Show the beginning of a part's payload."""
    part = int(call.number("part", 1, 1, _LAST_PART))
    return Answer(200, await _board_of_gateway(gateway).payload(call.caller, call.path["id"], part))


class Days(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many days a link is good for."""

    days: Annotated[int, Meta(ge=1, le=MOST_SHARE_DAYS)] = SHARE_DAYS


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """A link: what comes behind the address of the gateway, and how many days it is good for."""

    path: str
    days: int


_PART = {"type": "integer", "minimum": 1, "maximum": 2**53}
_OF_REQUEST = "/v1/requests/{id}"

DASHBOARD_ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path="/v1/me",
        role=Role.READER,
        operation=me,
        is_of_all=True,
        summary="Tell who calls, what they may do, and which queues there are.",
        answers={200: Me},
    ),
    Route(
        method="GET",
        path="/v1/changes",
        role=Role.READER,
        operation=changes,
        summary="Tell who changed what of the requests of a queue, the last first.",
        answers={200: list[Change]},
        query={"queue": Param("the queue; default if not given", {"type": "string"})},
    ),
    Route(
        method="POST",
        path=f"{_OF_REQUEST}/share",
        role=Role.LOADER,
        operation=share,
        summary="Make a link that shows this request, read-only, to whoever has it.",
        body=Days,
        answers={200: Shared},
        is_change=True,
    ),
    Route(
        method="POST",
        path=f"{_OF_REQUEST}/retry/some",
        role=Role.OPERATOR,
        operation=retry_some,
        summary="Run failed parts of a range (first, last) or a group (error, pattern) again.",
        body=Retry,
        answers={200: Controlled},
        is_change=True,
    ),
    Route(
        method="GET",
        path=f"{_OF_REQUEST}/failures",
        role=Role.READER,
        operation=failures,
        summary="Tell of failures in a range of parts; tracebacks to operators only.",
        answers={200: list[Failure]},
        query={
            "from": Param("the first part; 1 if not given", _PART),
            "to": Param("the last part", _PART),
            "most": Param(
                "so many failures at most, up to 200; 50 if not given",
                {"type": "integer", "minimum": 1, "maximum": _MOST_FAILURES},
            ),
        },
    ),
    Route(
        method="GET",
        path=f"{_OF_REQUEST}/payload",
        role=Role.OPERATOR,
        operation=payload,
        summary="Show the first 4 KiB of a part's payload.",
        answers={200: Payload},
        query={"part": Param("the number of the part; 1 if not given", _PART)},
    ),
)
