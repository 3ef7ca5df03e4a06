"""A web server of files, as much of one as readers of objects ask for."""

import hmac
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import md5, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/(?P<scope>\S+), ?"
    r"SignedHeaders=(?P<headers>\S+), ?Signature=(?P<signature>\w+)"
)


class Login(NamedTuple):
    """Who is let in, as S3 does it: requests are signed with the secret."""

    key: str
    secret: str


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    login: Login | None

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self._is_refused():
            return
        self.files[self._name] = data
        self.send_response(200)
        self.send_header("ETag", '"new"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        """Delete objects, as S3 does it for many at once."""
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self._is_refused():
            return
        bucket = self.path.removeprefix("/").partition("?")[0]
        keys = re.findall("<Key>(.*?)</Key>", asked)
        for key in keys:
            self.files.pop(f"{bucket}/{key}", None)
        found = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        answer = f"<DeleteResult>{found}</DeleteResult>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    @property
    def _name(self) -> str:
        """Which file is asked for. The names of objects may have any characters."""
        name = self.path.removeprefix("/")
        return unquote(name) if self.login else name

    def _is_refused(self) -> bool:
        """Refuse what is not signed; without a login nothing is written."""
        if self.login and _is_signed(self, self.login):
            return False
        self.send_error(403)
        return True

    def _answer(self, *, has_body: bool) -> None:
        if self.login and not _is_signed(self, self.login):
            self.send_error(403)
            return
        if self.login and "list-type=2" in self.path:
            self._list()
            return
        data = self.files.get(self._name)
        if data is None:
            self.send_error(404)
            return
        asked = self.headers.get("Range", "")
        first, end = _range(asked, len(data))
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{len(data)}")
        self.send_header("ETag", f'"{md5(data, usedforsecurity=False).hexdigest()}"')
        self.send_header("Content-Length", str(end - first))
        self.end_headers()
        if has_body:
            self.wfile.write(data[first:end])

    def _list(self) -> None:
        """Tell what is in a bucket, as S3 does: all of it at once."""
        bucket, _, query = self.path.removeprefix("/").partition("?")
        prefix = parse_qs(query).get("prefix", [""])[0]
        keys = (name.partition("/")[2] for name in self.files if name.startswith(f"{bucket}/"))
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z"
            f"</LastModified><ETag>e</ETag><Size>1</Size></Contents>"
            for key in sorted(keys)
            if key.startswith(prefix)
        )
        data = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(data.encode())))
        self.end_headers()
        self.wfile.write(data.encode())


@contextmanager
def serve(files: dict[str, bytes], login: Login | None = None) -> Iterator[str]:
    """The URL under which the files are, also those that change meanwhile.

    With a login it is an S3: files are named ``bucket/key``, only who has the secret gets them, and
    a bucket can be listed.
    """
    handler = type("Handler", (_Handler,), {"files": files, "login": login})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _range(asked: str, size: int) -> tuple[int, int]:
    """Where what is asked for begins and ends: everything if nothing is said."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
    if not found:
        return 0, size
    return int(found[1]), min(size, int(found[2]) + 1) if found[2] else size


def _is_signed(request: BaseHTTPRequestHandler, login: Login) -> bool:
    """Whether a request has the signature that only the secret gives (AWS Signature Version 4)."""
    said = _AUTHORIZATION.fullmatch(request.headers.get("Authorization", ""))
    if not said or said["key"] != login.key:
        return False
    path, _, query = request.path.partition("?")
    query = "&".join(each if "=" in each else f"{each}=" for each in query.split("&") if each)
    names = said["headers"].split(";")
    lines = [f"{name}:{request.headers.get(name, '').strip()}\n" for name in names]
    content = request.headers.get("x-amz-content-sha256", "")
    parts = [request.command or "", path, query, "".join(lines), said["headers"], content]
    digest = sha256("\n".join(parts).encode()).hexdigest()
    moment = request.headers.get("x-amz-date", "")
    text = "\n".join(["AWS4-HMAC-SHA256", moment, said["scope"], digest])
    key = f"AWS4{login.secret}".encode()
    for word in [*said["scope"].split("/"), text]:
        key = hmac.digest(key, word.encode(), "sha256")
    return hmac.compare_digest(key.hex(), said["signature"])
