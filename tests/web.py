"""A web server of files, as much of one as readers of objects ask for."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[str]:
    """The URL under which the files are, also those that change meanwhile."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool) -> None:
            data = files.get(self.path.removeprefix("/"))
            if data is None:
                self.send_error(404)
                return
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            body = data
            if asked:
                last = min(len(data), int(asked[2]) + 1) if asked[2] else len(data)
                body = data[int(asked[1]) : last]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {asked[1]}-{last - 1}/{len(data)}")
            else:
                self.send_response(200)
            self.send_header("ETag", f'"{md5(data, usedforsecurity=False).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if has_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
