"""The OpenAPI document of the gateway, made from the table of routes.

``/v1/openapi.json`` serves it, and ``proto/openapi.json`` is a copy of it for people who write
clients; ``make docs`` writes the copy.
"""

from functools import cache
from inspect import cleandoc
from typing import Any

import msgspec

from streamq.gateway.problems import CONTENT_TYPE
from streamq.gateway.roles import Role
from streamq.gateway.route import Route

_REF = "#/components/schemas/{name}"
_ID = {"type": "string", "minLength": 1, "maxLength": 64, "pattern": r"^[A-Za-z0-9_.-]+$"}
#: Answers that every route may give, besides its own.
_ERRORS = {
    400: "the call says what cannot be",
    401: "a key is needed",
    403: "the key may not do this",
    408: "the call did not come in time",
    413: "the body or a part is too large",
    421: "the call names another host",
    429: "too many calls at once, or too many wrong keys",
    500: "the gateway stumbled, or the server holds what cannot be read",
    502: "the server does not let the gateway in",
    503: "the server does not answer, or the gateway stops: say it again",
    507: "the server is out of memory: say it again later",
}
_OF_REQUEST = {404: "there is no such request", 409: "the request stands otherwise"}
_OF_TICKET = {410: "the ticket is not valid: take again"}
_CONTENTS = {"results": "application/x-ndjson", "proto": "text/plain"}
_SAYS = {
    200: "done",
    201: "made",
    202: "not yet",
    204: "nothing to say",
}


class ProblemTold(msgspec.Struct, kw_only=True):
    """An error (RFC 9457): a word to act on, and a sentence to read."""

    type: str
    status: int
    code: str
    title: str
    detail: str
    #: Of SHORT: the number of the part to go on with.
    next: int | msgspec.UnsetType = msgspec.UNSET
    #: Of SHORT for an upload: the byte to go on with.
    offset: int | msgspec.UnsetType = msgspec.UNSET


def openapi_document(routes: tuple[Route, ...], version: str) -> dict[str, Any]:
    """Return the document."""
    kinds = [kind for route in routes for kind in (route.body, *route.answers.values()) if kind]
    schemas, components = msgspec.json.schema_components([*kinds, ProblemTold], ref_template=_REF)
    for told in components.values():
        if "description" in told:  # Python 3.12 and older keep the indentation of a docstring
            told["description"] = cleandoc(told["description"])
    by_kind = dict(zip(map(repr, [*kinds, ProblemTold]), schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _openapi_operation(route, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "streamq gateway",
            "version": version,
            "description": "Workers and loaders in any language. Times are in ms and named so.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {
                f"Error{status}": {
                    "description": says,
                    "content": {CONTENT_TYPE: {"schema": by_kind[repr(ProblemTold)]}},
                }
                for status, says in (_ERRORS | _OF_REQUEST | _OF_TICKET).items()
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "streamq_session"},
            },
        },
    }


@cache
def encoded_openapi(routes: tuple[Route, ...], version: str) -> bytes:
    """Return the document as JSON."""
    return msgspec.json.format(msgspec.json.encode(openapi_document(routes, version)), indent=1)


def _openapi_operation(route: Route, by_kind: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": f"Role: {route.role}.",
        "responses": _openapi_answers(route, by_kind),
    }
    if parameters := _openapi_parameters(route):
        told["parameters"] = parameters
    if route.body:
        content = {"application/json": {"schema": by_kind[repr(route.body)]}}
        told["requestBody"] = {"required": True, "content": content}
    if route.takes_file:
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        told["requestBody"] = {"required": True, "content": content}
    if route.role is not Role.ANYBODY:
        told["security"] = [{"key": []}, {"session": []}, {}]
    return told


def _openapi_parameters(route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if "{id}" in route.path:
        found.append({"name": "id", "in": "path", "required": True, "schema": _ID})
    if route.name == "upload_rest":
        at = {"type": "integer", "minimum": 0}
        found.append({"name": "Upload-Offset", "in": "header", "required": True, "schema": at})
    for name, param in route.query.items():
        schema = {"schema": param.schema, "description": param.says}
        found.append({"name": name, "in": "query", "required": False, **schema})
    return found


def _openapi_answers(route: Route, by_kind: dict[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for status, kind in route.answers.items():
        answers[str(status)] = {"description": _SAYS[status]}
        if kind:
            name = _CONTENTS.get(route.name, "application/json")
            answers[str(status)]["content"] = {name: {"schema": by_kind[repr(kind)]}}
    errors = [*_ERRORS]
    if "{id}" in route.path or route.name in ("submit", "log_in"):
        errors += _OF_REQUEST
    if route.name in ("report", "beat", "leave"):
        errors += _OF_TICKET
    for status in errors:
        answers[str(status)] = {"$ref": f"#/components/responses/Error{status}"}
    return answers
