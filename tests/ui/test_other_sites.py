"""A page of another site, in the browser of somebody who may do everything, can do nothing."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from streamq import Client
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.ui.test_pages import Open

pytestmark = ONE_KIND


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>elsewhere</title><p>Win a prize</p>")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """The port of another site."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_page_of_another_site_changes_and_reads_nothing(
    open_page: Open, client: Client, queue: str, request_id: str, gate: Gate, elsewhere: int
) -> None:
    request = client.submit([1, 2], handler="h", queue=queue, id=request_id)
    page = open_page(f"http://127.0.0.1:{elsewhere}/", ours=elsewhere)
    page.wrong.allow("")  # the browser complains of each try
    # It posts as a page can without asking: with fetch, and with a form.
    for verb in ("pause", "cancel"):
        page.evaluate(
            "url => fetch(url, {method: 'POST', mode: 'no-cors', credentials: 'include'})",
            f"{gate.url}/v1/requests/{request_id}/{verb}",
        )
    with page.expect_response(lambda each: each.url.endswith("/cancel")) as answer:
        page.evaluate(
            """url => { const form = document.createElement('form');
            form.method = 'POST'; form.action = url;
            document.body.append(form); form.submit(); }""",
            f"{gate.url}/v1/requests/{request_id}/cancel",
        )
    assert (answer.value.status, answer.value.json()["code"]) == (403, "SITE")
    page.goto(f"http://127.0.0.1:{elsewhere}/")
    # It asks for what only a page of the gateway may send, and for what it could read.
    for method, path in (
        ("PATCH", f"/v1/requests/{request_id}"),
        ("DELETE", f"/v1/requests/{request_id}"),
        ("GET", f"/v1/requests/{request_id}"),
        ("GET", f"/v1/live?once&topic=q:{queue}"),
    ):
        told = page.evaluate(
            """([method, url]) => fetch(url, {method}).then(answer => answer.text(), () => null)""",
            [method, gate.url + path],
        )
        assert told is None, (method, path)
    # Streams are not bound to a site by browsers: the gateway has to refuse them itself.
    for path in (f"/v1/live?topic=q:{queue}", "/v1/work"):
        told = page.evaluate(
            """url => new Promise(resolve => { const socket = new WebSocket(url);
            socket.onmessage = event => resolve(event.data);
            socket.onclose = event => resolve(event.reason); })""",
            gate.url.replace("http", "ws") + path,
        )
        assert "SITE" in told, path
    # It shows the dashboard in a frame, to lay something over it.
    page.evaluate(
        """url => new Promise(resolve => { const frame = document.createElement('iframe');
        frame.onload = resolve; frame.src = url; document.body.append(frame); })""",
        f"{gate.url}/r/{request_id}",
    )
    # Without its policy it would be there: what is shown is the browser's own page of errors.
    assert [each.url for each in page.frames[1:]] == ["chrome-error://chromewebdata/"]
    status = request.status()
    assert (status.state, status.paused) == ("open", False)
