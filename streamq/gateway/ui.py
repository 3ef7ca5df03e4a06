"""The dashboard beside a run, on a free port of this machine: the first browser is let in."""

import hmac
import logging
import secrets
import threading
from collections.abc import Generator
from contextlib import closing, contextmanager

import uvicorn
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from streamq.driver.connection import Connection
from streamq.gateway import listener as listening
from streamq.gateway.access import Access, Visit, refused_without_key
from streamq.gateway.control import Control
from streamq.gateway.dashboard import DashboardBoard
from streamq.gateway.desk import Desk
from streamq.gateway.http import http_framework_application
from streamq.gateway.listener import listening_socket
from streamq.gateway.loads import Loads
from streamq.gateway.problems import Problem
from streamq.gateway.requests import Requests
from streamq.gateway.roles import LOCAL, Caller
from streamq.gateway.route import Gateway
from streamq.gateway.session import Sessions
from streamq.gateway.ticket import TicketSigner
from streamq.gateway.uploads import Uploads
from streamq.protocol.protocol import Protocol
from streamq.records.splitting import sizes_of_inputs

log = logging.getLogger(__name__)

_COOKIE = "streamq_ui"
HOST = "127.0.0.1"


class UiKey(Access):
    """Lets in the browser that opened the printed URL first; the URL works once."""

    def __init__(self, request_id: str) -> None:
        """``request_id``: the request whose page the URL leads to."""
        super().__init__()
        self._page = f"/r/{request_id}"
        self.key = secrets.token_urlsafe(24)
        self._cookie = secrets.token_urlsafe(32)

    def caller(self, visit: Visit) -> Caller:
        """Return who calls; a problem if it is not that browser."""
        super().caller(visit)  # the checks of host and page
        given = visit.headers.get("cookie", "")
        names = (part.strip().partition("=") for part in given.split(";"))
        found = next((value for name, _, value in names if name == _COOKIE), "")
        if not hmac.compare_digest(found.encode(), self._cookie.encode()):
            raise refused_without_key("open the URL that the command printed; it works once")
        return LOCAL

    async def enter(self, request: Request) -> Response:
        """Take the key of the URL, and let this browser in from now on."""
        given = request.path_params["key"]
        if not self.key or not hmac.compare_digest(given.encode(), self.key.encode()):
            problem = Problem(401, "KEY", "this URL was used already", "the command prints one URL")
            return Response(problem.body(), problem.status, headers=problem.headers())
        self.key = ""
        answer = RedirectResponse(self._page, 303)
        answer.set_cookie(_COOKIE, self._cookie, httponly=True, samesite="strict")
        return answer


@contextmanager
def dashboard_served(url: str, prefix: str, queue: str, request_id: str) -> Generator[str]:
    """Serve the dashboard of one queue in a thread, and yield the URL that lets a browser in.

    The URL leads to the page of the request.
    """
    listener = listening_socket(HOST, 0)
    access = UiKey(request_id)
    with closing(Connection(url)) as connection:
        protocol = Protocol(connection, prefix)
        desk = Desk(protocol, {}, TicketSigner(secrets.token_bytes(32)), f"g{secrets.token_hex(8)}")
        control = Control(protocol, desk, (queue,))
        board = DashboardBoard(
            protocol,
            desk.in_thread,
            [queue],
            queue_of=control.queue_of,
            sizes_of=sizes_of_inputs,
        )
        gateway = Gateway(
            desk,
            Requests(protocol, desk, ""),
            Loads(protocol, desk, ""),
            Uploads(protocol, desk),
            control,
            access,
            Sessions(desk),
            lambda: "",
            board,
        )
        app = http_framework_application(gateway)
        app.router.routes.insert(0, Route("/enter/{key}", access.enter))
        config = uvicorn.Config(
            app,
            http=listening.ListenerConnection,
            loop="uvloop",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name="dashboard", daemon=True
        )
        thread.start()
        try:
            yield f"http://{HOST}:{listener.getsockname()[1]}/enter/{access.key}"
        finally:
            board.feed.is_stopping = True
            server.should_exit = True
            thread.join(5)
            listener.close()
            board.feed.close()
            desk.close()
