"""Callers that do not read, do not speak, or are too many: others do not feel them."""

import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from streamq import Client
from streamq.gateway import keys
from streamq.gateway.courier import FIRST_LEASE_MS
from streamq.gateway.roles import Role
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.support.by_hand import RequestByHand
from tests.support.waiting import wait_until

pytestmark = ONE_KIND

#: So much that no buffer of the system takes all of it.
PARTS, RESULT = 60, "x" * 500_000


@pytest.fixture
def hasty(serve: Callable[..., Gate]) -> Gate:
    """A gateway that waits for a second where others wait for half a minute."""
    return serve(
        hasty="from streamq.gateway import http, listener, session; "
        "listener.READ_S = listener.HEAD_S = http.BODY_S = session.SEND_S = 1.0"
    )


def is_answered(gate: Gate) -> bool:
    """Whether another caller is answered, however busy the machine is."""
    begun = time.monotonic()
    return gate.get("/v1/queues").status == 200 and time.monotonic() - begun < 10


def with_small_buffer(gate: Gate) -> socket.socket:
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    raw.settimeout(30)
    raw.connect(("127.0.0.1", gate.port))
    return raw


def is_cut_off(raw: socket.socket) -> bool:
    """Whether the other side has closed the connection: what it said is not waited for."""
    raw.setblocking(False)
    try:
        raw.send(b"x")
    except (ConnectionResetError, BrokenPipeError):
        return True
    except BlockingIOError:
        pass
    return False


@pytest.fixture
def large(hasty: Gate) -> str:
    """A request whose results are large."""
    request_id = hasty.submit([""] * PARTS)
    for _ in range(PARTS):
        granted = hasty.take().json
        done = [{"part": granted["parts"][0]["number"], "result": {"text": RESULT}}]
        assert hasty.post("/v1/report", {"ticket": granted["ticket"], "done": done}).status == 200
    return request_id


def test_caller_who_never_reads_results_is_cut_off(hasty: Gate, large: str) -> None:
    with with_small_buffer(hasty) as raw:
        path = f"/v1/requests/{large}/results"
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert is_answered(hasty)
        wait_until(lambda: is_cut_off(raw), 20)
    assert hasty.get(path).text.count(RESULT) == PARTS


def test_caller_who_reads_slowly_gets_everything(hasty: Gate, large: str) -> None:
    with with_small_buffer(hasty) as raw:
        path = f"/v1/requests/{large}/results"
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        begun, got = time.monotonic(), b""
        # For much longer than a caller may read nothing.
        while time.monotonic() - begun < 4:
            some = raw.recv(20_000)
            assert some, "it was cut off"
            got += some
            assert is_answered(hasty)
        while not got.endswith(b"0\r\n\r\n"):
            some = raw.recv(2**20)
            assert some, "it was cut off"
            got += some
    assert got.count(b"x" * 1_000) >= PARTS


def test_more_waits_than_a_key_may_have_are_told_so(
    serve: Callable[..., Gate], tmp_path: Path
) -> None:
    file = tmp_path / "streamq.keys"
    al, bo = (keys.add_key(file, name, Role.OPERATOR) for name in ("al", "bo"))
    file.write_text(file.read_text().replace('name = "al"', 'name = "al"\nwaits = 2'))
    gate = serve("--keys", str(file))
    of_al, of_bo = ({"Authorization": f"Bearer {text}"} for text in (al, bo))
    gate.headers = of_al
    request_id = gate.submit(["x"])
    path = f"/v1/requests/{request_id}"
    with ExitStack() as stack:
        for what in ("wait?wait_s=50", "results?follow=1"):
            (raw,) = opened(gate, 1, stack)
            head = f"GET {path}/{what} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {al}\r\n\r\n"
            raw.sendall(head.encode())
            if what.startswith("results"):  # the head comes, although there are no results yet
                assert raw.recv(1_000).startswith(b"HTTP/1.1 200 OK")
        wait_until(lambda: gate.get(f"{path}/wait?wait_s=0").status == 429)
        assert gate.get(f"{path}/results?follow=1").status == 429
        assert gate.take(wait_s=0).status == 429
        assert gate.get(f"{path}/results").status == 200
        assert gate.get(f"{path}/wait?wait_s=0", headers=of_bo).status == 202
    wait_until(lambda: gate.get(f"{path}/wait?wait_s=0").status == 202)


@pytest.mark.long
def test_stream_that_never_reads_is_cut_off_and_its_parts_run_elsewhere(
    hasty: Gate, client: Client
) -> None:
    request_id = hasty.submit(["x" * 200_000] * PARTS)
    with with_small_buffer(hasty) as raw:
        raw.sendall(
            b"GET /v1/work HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            b"Sec-WebSocket-Version: 13\r\n\r\n"
        )
        assert raw.recv(20).startswith(b"HTTP/1.1 101 ")
        hello = {"queue": hasty.queue, "handlers": ["h"], "slots": PARTS}
        text = json.dumps({"seq": 1, "hello": hello}).encode()
        assert len(text) < 126
        raw.sendall(bytes((0x81, 0x80 | len(text))) + bytes(4) + text)
        wait_until(lambda: client.get(request_id).status().parts.running > 0, 20)
        assert is_answered(hasty)
        # Its leases end soon, although the connection stands at this side.
        wait_until(lambda: client.get(request_id).status().parts.running == 0, 30)
    assert "Traceback" not in hasty.log


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"", b"408"),
        (b"POST /v1/take HTTP/1.1\r\nHost: local", b"408"),
        (b'POST /v1/take HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"handlers":', b"408"),
    ],
)
def test_half_a_call_is_answered_in_time(hasty: Gate, said: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), 20) as raw:
        raw.sendall(said.replace(b"Host: x", b"Host: localhost"))
        assert is_answered(hasty)
        assert raw.recv(1_000).startswith(b"HTTP/1.1 " + status)


def opened(gate: Gate, count: int, stack: ExitStack) -> Iterator[socket.socket]:
    for _ in range(count):
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", gate.port), 20))
        yield raw


def is_alive(raw: socket.socket) -> bool:
    """Whether a call on a connection that stands is answered."""
    raw.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    got = b""
    while not got.endswith(b'{"status":"ok"}'):
        some = raw.recv(1_000)
        if not some:
            return False
        got += some
    return got.startswith(b"HTTP/1.1 200")


def test_more_connections_than_allowed_are_told_so_and_others_go_on(
    serve: Callable[..., Gate],
) -> None:
    gate = serve("--max-connections", "20")
    with ExitStack() as stack:
        first = next(opened(gate, 1, stack))
        assert is_alive(first)
        others = [*opened(gate, 100, stack)]
        for one in others[-80:]:
            answer = one.recv(1_000)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"Retry-After: 1" in answer
        assert is_alive(first)
    wait_until(lambda: gate.get("/livez").status == 200)


def test_the_system_allows_as_many_connections_as_it_can(
    serve: Callable[..., Gate], tmp_path: Path
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard > 2**22:
        pytest.skip("the system allows any number")
    gate = serve("--max-connections", str(hard))
    assert f"the system allows {hard - 256} connections only" in gate.log
    limits = Path(f"/proc/{gate.process.pid}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
    assert line.split()[3] == str(hard)


def taken(gate: Gate, raw: socket.socket) -> None:
    """Send a take, and wait until its answer is there, unread."""
    body = json.dumps(gate.ask()).encode()
    head = f"POST /v1/take HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    raw.sendall(head.encode() + body)
    assert raw.recv(15, socket.MSG_PEEK) == b"HTTP/1.1 200 OK"


def test_lease_stays_short_whose_answer_nobody_read(gate: Gate, driver: RequestByHand) -> None:
    gate.submit(["x", "x"], id=driver.id)

    def longest_ms() -> float:
        return max(driver.leases().values()) - time.time() * 1e3

    with socket.create_connection(("127.0.0.1", gate.port), 20) as unread:
        taken(gate, unread)
    (first,) = driver.leases()
    with socket.create_connection(("127.0.0.1", gate.port), 20) as heard:
        taken(gate, heard)
        heard.recv(100_000)
        wait_until(lambda: longest_ms() > 2 * FIRST_LEASE_MS)
    assert driver.leases()[first] - time.time() * 1e3 <= FIRST_LEASE_MS
    assert f"{first}#" not in driver.holders()
