"""The one table of routes: method, path, role, what the body is, what the answers are.

The application is made from it (``http.py``), and so are the OpenAPI document and the tests of
roles. A route without a line here does not exist.
"""

from importlib.metadata import version
from typing import Any

import msgspec

from streamq.gateway import openapi, operations
from streamq.gateway.control import STATES
from streamq.gateway.dashboard_routes import DASHBOARD_ROUTES
from streamq.gateway.messages import (
    MOST_WAIT_S,
    Ask,
    Beat,
    Changes,
    Commit,
    Committed,
    Controlled,
    ErrorPage,
    Granted,
    Health,
    Leave,
    Left,
    Listed,
    Loaded,
    LogIn,
    MoreParts,
    NewRequest,
    QueueTold,
    Report,
    ResultLine,
    Seal,
    Uploaded,
    Verdict,
    Version,
    Who,
)
from streamq.gateway.operations import MOST_RESULTS
from streamq.gateway.roles import Role
from streamq.gateway.route import Answer, Call, Gateway, Param, Route
from streamq.model import Status

_PART = {"type": "integer", "minimum": 1, "maximum": 2**53}
_SWITCH = {"type": "integer", "enum": [0, 1]}
_NAME = {"type": "string", "minLength": 1, "maxLength": 64, "pattern": r"^[A-Za-z0-9_.-]+$"}
_FOLLOW = {
    "from": Param("the number of the first part to tell of; 1 if not given", _PART),
    "most": Param(
        "end after so many results; all that are there if not given",
        {"type": "integer", "minimum": 1, "maximum": MOST_RESULTS},
    ),
    "follow": Param("1: wait for results until the request has ended", _SWITCH),
}
_WAIT = {
    "wait_s": Param(
        "how long to wait, up to 50 seconds; 25 if not given",
        {"type": "number", "minimum": 0, "maximum": MOST_WAIT_S},
    )
}
_PAGE = {
    "after": Param("tell of parts behind this one", {**_PART, "minimum": 0}),
    "most": Param(
        "so many at most; 100 if not given", {"type": "integer", "minimum": 1, "maximum": 10_000}
    ),
}
_LIST = {
    "queue": Param("the queue; default if not given", _NAME),
    "state": Param("only requests of this state", {"type": "string", "enum": list(STATES)}),
    "handler": Param("only requests of this handler", _NAME),
    "ended": Param("0: only requests that have not ended", _SWITCH),
    "most": Param(
        "so many at most; 50 if not given", {"type": "integer", "minimum": 1, "maximum": 1_000}
    ),
}


_TEXT = {"type": "string", "maxLength": 1_000}
_COUNT = {"type": "integer", "minimum": 0}
_UPLOAD = {
    "handler": Param("the function of the workers' app that is called", _NAME),
    "format": Param("lines, csv, jsonl or file", {"type": "string"}),
    "queue": Param("the queue; default if not given", _NAME),
    "bytes": Param("a part holds whole records up to this size, such as 256KiB", _TEXT),
    "lines": Param("a part holds so many records", _COUNT),
    "level": Param("the priority: 0 goes first, 99 last", _COUNT),
    "weight": Param("the share among requests of the same level", _COUNT),
    "limit": Param("run at most so many parts at once", _COUNT),
    "rate": Param("at most so many starts in a time, such as 100/s", _TEXT),
    "retries": Param("attempts after the first", _COUNT),
    "timeout": Param("the longest time that a record may take, or a part of a handler: 30s", _TEXT),
    "max_failures": Param("more failures than this end the request: 10 or 2%", _TEXT),
    "keep": Param("keep the request and its results so long after its end", _TEXT),
    "delimiter": Param("of a CSV: the character between fields", _TEXT),
    "quote": Param("of a CSV: the character around fields", _TEXT),
    "escape": Param("of a CSV: the character before one that is meant literally", _TEXT),
    "header": Param("of a CSV without a header: the names of its columns", _TEXT),
    "no_header": Param("1: the CSV has no header, and rows come as lists", _SWITCH),
    "skip_rows": Param("of a CSV: rows that are left out at the beginning", _COUNT),
    "encoding": Param("how the file is encoded; UTF-8 if not given", _TEXT),
}


async def openapi_json(gateway: Gateway, call: Call) -> Answer:
    """Tell all routes."""
    return Answer(200, msgspec.Raw(openapi.encoded_openapi(ROUTES, version("streamq"))))


ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/take",
        role=Role.WORKER,
        operation=operations.take,
        summary="Wait for parts to run.",
        body=Ask,
        answers={200: Granted, 204: None},
    ),
    Route(
        method="POST",
        path="/v1/report",
        role=Role.WORKER,
        operation=operations.report,
        summary="Tell what became of parts, and ask for the next.",
        body=Report,
        answers={200: Granted},
    ),
    Route(
        method="POST",
        path="/v1/beat",
        role=Role.WORKER,
        operation=operations.beat,
        summary="Say that a worker lives, and what it runs.",
        body=Beat,
        answers={200: Verdict},
    ),
    Route(
        method="POST",
        path="/v1/leave",
        role=Role.WORKER,
        operation=operations.leave,
        summary="Give back what a worker holds, because it goes.",
        body=Leave,
        answers={200: Left},
    ),
    Route(
        method="POST",
        path="/v1/requests",
        role=Role.LOADER,
        operation=operations.submit,
        summary="Make a request with its parts, or find the one of the same submission.",
        body=NewRequest,
        answers={200: Status, 201: Status},
        is_change=True,
    ),
    Route(
        method="POST",
        path="/v1/requests/{id}/parts",
        role=Role.LOADER,
        operation=operations.append,
        summary="Add parts to a request that is loading. The same call again adds nothing.",
        body=MoreParts,
        answers={200: Loaded},
    ),
    Route(
        method="POST",
        path="/v1/requests/{id}/seal",
        role=Role.LOADER,
        operation=operations.seal,
        summary="Say that a load is complete.",
        body=Seal,
        answers={200: Status},
        is_change=True,
    ),
    Route(
        method="PUT",
        path="/v1/requests/{id}/input",
        role=Role.LOADER,
        operation=operations.upload,
        summary="Send a file, which is split into parts as it comes. The same call again goes on.",
        takes_file=True,
        answers={200: Uploaded, 201: Uploaded},
        query=_UPLOAD,
        is_change=True,
    ),
    Route(
        method="PATCH",
        path="/v1/requests/{id}/input",
        role=Role.LOADER,
        operation=operations.upload_rest,
        summary="Send the rest of a file, from the byte that the header Upload-Offset says.",
        takes_file=True,
        answers={200: Uploaded},
        query=_UPLOAD,
        is_change=True,
    ),
    Route(
        method="GET",
        path="/v1/requests/{id}/input",
        role=Role.READER,
        operation=operations.uploaded,
        summary="Tell how many bytes of a file are loaded.",
        answers={200: Uploaded},
    ),
    Route(
        method="GET",
        path="/v1/requests",
        role=Role.READER,
        operation=operations.requests,
        summary="List requests of a queue, the newest first.",
        answers={200: Listed},
        query=_LIST,
    ),
    Route(
        method="GET",
        path="/v1/requests/{id}",
        role=Role.READER,
        operation=operations.status,
        summary="Tell where a request stands.",
        answers={200: Status},
    ),
    Route(
        method="GET",
        path="/v1/requests/{id}/wait",
        role=Role.READER,
        operation=operations.wait,
        summary="Wait until a request has ended; 202 if it has not.",
        answers={200: Status, 202: Status},
        query=_WAIT,
    ),
    Route(
        method="GET",
        path="/v1/requests/{id}/results",
        role=Role.LOADER,
        operation=operations.results,
        summary="Read results in input order, a JSON object in each line.",
        answers={200: ResultLine},
        query=_FOLLOW,
    ),
    Route(
        method="POST",
        path="/v1/requests/{id}/results/commit",
        role=Role.LOADER,
        operation=operations.commit,
        summary="Have the server forget results that are safely written.",
        body=Commit,
        answers={200: Committed},
        is_change=True,
    ),
    Route(
        method="GET",
        path="/v1/requests/{id}/errors",
        role=Role.READER,
        operation=operations.errors,
        summary="Tell what was given up, in the order of parts.",
        answers={200: ErrorPage},
        query=_PAGE,
    ),
    Route(
        method="PATCH",
        path="/v1/requests/{id}",
        role=Role.OPERATOR,
        operation=operations.change,
        summary="Change level, limit, rate or weight of a request that runs.",
        body=Changes,
        answers={200: Status},
        is_change=True,
    ),
    Route(
        method="POST",
        path="/v1/requests/{id}/pause",
        role=Role.OPERATOR,
        operation=operations.pause,
        summary="Start no more parts of a request; running parts go on.",
        answers={200: Controlled},
        is_change=True,
    ),
    Route(
        method="POST",
        path="/v1/requests/{id}/resume",
        role=Role.OPERATOR,
        operation=operations.resume,
        summary="Start parts of a request again.",
        answers={200: Controlled},
        is_change=True,
    ),
    Route(
        method="POST",
        path="/v1/requests/{id}/cancel",
        role=Role.OPERATOR,
        operation=operations.cancel,
        summary="End a request now.",
        answers={200: Controlled},
        is_change=True,
    ),
    Route(
        method="POST",
        path="/v1/requests/{id}/retry",
        role=Role.OPERATOR,
        operation=operations.retry,
        summary="Run the failed parts of a request again.",
        answers={200: Controlled},
        is_change=True,
    ),
    Route(
        method="POST",
        path="/v1/requests/{id}/release",
        role=Role.OPERATOR,
        operation=operations.release,
        summary="Let all parts of a request run that was submitted with a canary.",
        answers={200: Controlled},
        is_change=True,
    ),
    Route(
        method="DELETE",
        path="/v1/requests/{id}",
        role=Role.OPERATOR,
        operation=operations.purge,
        summary="Remove an ended request and its results.",
        answers={204: None},
        is_change=True,
    ),
    Route(
        method="GET",
        path="/v1/queues",
        role=Role.READER,
        operation=operations.queues,
        summary="List the queues that this gateway serves.",
        answers={200: list[QueueTold]},
    ),
    Route(
        method="POST",
        path="/v1/session",
        role=Role.ANYBODY,
        operation=operations.log_in,
        is_of_all=True,
        summary="Log a browser in with a key: the answer sets a cookie for 12 hours.",
        body=LogIn,
        answers={200: Who},
    ),
    Route(
        method="GET",
        path="/v1/session",
        role=Role.READER,
        operation=operations.whoami,
        is_of_all=True,
        summary="Tell who calls: the name, the role and the queues of the key.",
        answers={200: Who},
    ),
    Route(
        method="DELETE",
        path="/v1/session",
        role=Role.READER,
        operation=operations.log_out,
        is_of_all=True,
        summary="Log a browser out.",
        answers={204: None},
    ),
    Route(
        method="GET",
        path="/v1/version",
        role=Role.READER,
        operation=operations.version,
        is_of_all=True,
        summary="Tell the version of the gateway.",
        answers={200: Version},
    ),
    Route(
        method="GET",
        path="/v1/openapi.json",
        role=Role.READER,
        operation=openapi_json,
        summary="Tell all of this, for programs.",
        answers={200: dict[str, Any]},
    ),
    Route(
        method="GET",
        path="/v1/streamq.proto",
        role=Role.READER,
        operation=operations.proto,
        summary="Tell the messages of gRPC, for generators of stubs.",
        answers={200: str},
    ),
    Route(
        method="GET",
        path="/livez",
        role=Role.ANYBODY,
        operation=operations.livez,
        is_of_all=True,
        summary="Tell that the gateway answers.",
        answers={200: Health},
    ),
    Route(
        method="GET",
        path="/healthz",
        role=Role.ANYBODY,
        operation=operations.healthz,
        is_of_all=True,
        summary="Tell that the gateway answers, as /livez does.",
        answers={200: Health},
    ),
    Route(
        method="GET",
        path="/readyz",
        role=Role.ANYBODY,
        operation=operations.readyz,
        is_of_all=True,
        summary="Tell whether the gateway can serve: not while it stops or the server is away.",
        answers={200: Health},
    ),
    *DASHBOARD_ROUTES,
)
