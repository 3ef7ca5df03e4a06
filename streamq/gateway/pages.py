"""The routes of the dashboard whose answers are no JSON: pages, their files, reports, links."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request as Asked
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from streamq.dashboard.files import POLICY, dashboard_pages
from streamq.errors import StreamqError
from streamq.gateway import cookies
from streamq.gateway.access import Access
from streamq.gateway.dashboard import DashboardBoard
from streamq.gateway.problems import Problem, problem_of
from streamq.gateway.roles import Caller, Role

#: Addresses of pages. All are the same file, which shows a page by its address.
PAGES = ("/", "/q/{rest:path}", "/r/{rest:path}", "/login")
SECURITY = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
#: Returns who calls, or raises a problem; the role is the one that is needed.
Called = Callable[[Asked, Role], Caller]


def page_routes(board: DashboardBoard, access: Access, called: Called) -> list[BaseRoute]:
    """Return the routes."""

    async def report(asked: Asked) -> Response:
        request_id = asked.path_params["id"]
        content = await board.report(called(asked, Role.READER), request_id)
        disposition = f'attachment; filename="{request_id}.html"'
        return Response(
            content,
            media_type="text/html; charset=utf-8",
            headers={**SECURITY, "Content-Disposition": disposition},
        )

    async def enter(asked: Asked) -> Response:
        link = asked.path_params["link"]
        request_id = access.shared(link)
        if not request_id:
            raise Problem(410, "OVER", "this link is over", "ask for another one")
        cookie = cookies.set_cookie_header(
            link,
            is_secure=access.is_secure(asked.url.scheme),
            lasts_s=cookies.MOST_SHARE_DAYS * 86_400,
            name=cookies.SHARE_COOKIE,
        )
        to = {"Set-Cookie": cookie, "Location": f"/r/{request_id}"}
        return Response(status_code=303, headers={**SECURITY, **to})

    return [
        Route("/v1/requests/{id}/report.html", page_with_problems_told(report)),
        Route("/s/{link}", page_with_problems_told(enter)),
        *(Route(path, _page_of_index) for path in PAGES),
        Route("/static/{digest}/{name}", _static_file_of_pages),
        Route("/favicon.ico", _page_icon),
    ]


async def _page_of_index(_: Asked) -> Response:
    return Response(
        dashboard_pages().index,
        media_type="text/html; charset=utf-8",
        headers={**SECURITY, "Cache-Control": "no-cache"},
    )


async def _page_icon(_: Asked) -> Response:
    found = dashboard_pages().files["icon.svg"]
    return Response(found.content, media_type=found.kind, headers=SECURITY)


async def _static_file_of_pages(asked: Asked) -> Response:
    found = dashboard_pages().files.get(asked.path_params["name"])
    if found is None:
        return page_answer_for_problem(Problem(404, "PATH", "there is no such file"))
    lasting = asked.path_params["digest"] == dashboard_pages().digest
    age = "public, max-age=31536000, immutable" if lasting else "no-cache"
    return Response(
        found.content, media_type=found.kind, headers={**SECURITY, "Cache-Control": age}
    )


def page_with_problems_told(
    operation: Callable[[Asked], Awaitable[Response]],
) -> Callable[..., Any]:
    """Return the operation with its errors told as problem+json."""

    async def answer(asked: Asked) -> Response:
        try:
            return await operation(asked)
        except Problem as problem:
            return page_answer_for_problem(problem)
        except StreamqError as error:
            return page_answer_for_problem(problem_of(error))

    return answer


def page_answer_for_problem(problem: Problem) -> Response:
    """Return a problem as an answer."""
    return Response(problem.body(), problem.status, headers=SECURITY | problem.headers())
