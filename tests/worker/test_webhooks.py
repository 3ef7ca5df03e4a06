"""Posting webhooks: to receivers of every kind, and only where a worker may."""

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from streamq.app import Abandon, Retry, Snooze
from streamq.errors import InvalidValue
from streamq.worker import webhooks
from streamq.worker.webhooks import Post, Poster, check_prefix


class Receiver(ThreadingHTTPServer):
    """Notes every post, and answers as it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.status, self.headers_back = 200, dict[str, str]()
        self.hangs = threading.Event()
        self.got: list[tuple[str, Any, bytes]] = []
        self.base = f"http://127.0.0.1:{self.server_address[1]}"


class _Answering(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, self.headers, body))
        if self.server.status == 0:
            self.server.hangs.wait(5)
        self.send_response(self.server.status or 200)
        for name, value in self.server.headers_back.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve_forever, args=(0.01,))
    thread.start()
    yield receiver
    receiver.hangs.set()
    receiver.shutdown()
    thread.join()
    receiver.server_close()


def post(receiver: Receiver, path: str = "/hooks/a?b=1", allowed: str = "/hooks") -> str:
    message = {"id": "nightly", "state": "done"}
    poster = Poster((receiver.base + allowed,))
    return poster.post(Post(receiver.base + path, "nightly:then:0", message))


def test_is_signed_and_has_a_key(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(webhooks.SECRET, "s3cret")

    assert post(receiver) == "200"

    ((path, headers, body),) = receiver.got
    assert (path, json.loads(body)) == ("/hooks/a?b=1", {"id": "nightly", "state": "done"})
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    wanted = hmac.new(b"s3cret", signed, hashlib.sha256).digest()
    assert headers["webhook-id"] == "nightly:then:0"
    assert headers["webhook-signature"] == "v1," + base64.b64encode(wanted).decode()
    assert headers["host"] == receiver.base.removeprefix("http://")


def test_without_a_secret_it_is_not_signed(receiver: Receiver) -> None:
    post(receiver)

    assert "webhook-signature" not in receiver.got[0][1]


@pytest.mark.parametrize(
    ("status", "after", "raised"),
    [
        (500, "", Retry),
        (404, "", Retry),
        (429, "", Retry),
        (429, "7", Snooze),
        (503, "999999", Snooze),
        (410, "", Abandon),
        (302, "", Abandon),
    ],
)
def test_answers(receiver: Receiver, status: int, after: str, raised: type[Exception]) -> None:
    receiver.status = status
    receiver.headers_back = {"location": "http://127.0.0.1:1/", "retry-after": after}

    with pytest.raises(raised, match=str(status)) as caught:
        post(receiver)

    assert len(receiver.got) == 1, "a redirect is not followed"
    if isinstance(caught.value, Snooze):
        assert caught.value.after_ms == min(int(after), 3_600) * 1_000


def test_one_that_hangs_is_tried_again(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "ANSWER_S", 0.2)
    receiver.status = 0

    with pytest.raises(Retry, match=r"[Tt]imed? ?out"):
        post(receiver)


def test_nobody_listens() -> None:
    with pytest.raises(Retry, match="refused"):
        Poster(("http://127.0.0.1:1/",)).post(Post("http://127.0.0.1:1/x", "k", {}))


@pytest.mark.parametrize(
    "path", ["/other", "/hooksmore", "/hooks/../other", "/hooks/%2e%2e/other", "/hooks/./a"]
)
def test_only_what_is_allowed(receiver: Receiver, path: str) -> None:
    with pytest.raises(Abandon, match="--allow-post does not cover"):
        post(receiver, path)

    assert receiver.got == []


@pytest.mark.parametrize("url", ["https://127.0.0.1", "http://127.0.0.2", "http://127.0.0.1.evil"])
def test_scheme_and_host_are_those_that_are_allowed(receiver: Receiver, url: str) -> None:
    port = receiver.server_address[1]
    with pytest.raises(Abandon, match="does not cover"):
        Poster((receiver.base,)).post(Post(f"{url}:{port}/hooks", "k", {}))


def test_name_of_a_private_address_is_refused(receiver: Receiver) -> None:
    base = receiver.base.replace("127.0.0.1", "localhost")

    with pytest.raises(Abandon, match="no public address"):
        Poster((base,)).post(Post(f"{base}/hooks", "k", {}))

    assert receiver.got == []


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1", True),
        ("10.0.0.1", False),
        ("172.16.3.4", False),
        ("192.168.1.1", False),
        ("169.254.1.1", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("224.0.0.1", False),
    ],
)
def test_which_addresses_are_public(address: str, is_public: bool) -> None:
    assert webhooks._is_public(address) is is_public


@pytest.mark.parametrize("prefix", ["host/path", "ftp://host/", "https://", "https://h/?a=1"])
def test_bad_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidValue, match="--allow-post"):
        check_prefix(prefix, "--allow-post")
