"""Callers that do not read, do not speak, or are too many: others do not feel them."""

import json
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from streamq import Client
from streamq.gateway import keys
from streamq.gateway.courier import FIRST_LEASE_MS
from streamq.gateway.roles import Role
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.gateway.test_health import asked_of
from tests.support.by_hand import RequestByHand
from tests.support.waiting import wait_until

pytestmark = ONE_KIND

#: So much that no buffer of the system takes all of it.
PARTS, RESULT = 60, "x" * 500_000


@pytest.fixture
def hasty(serve: Callable[..., Gate]) -> Gate:
    """A gateway that waits for a second where others wait for half a minute."""
    return serve(
        hasty="from streamq.gateway import bodies, listener, session; "
        "listener.READ_S = listener.HEAD_S = bodies.BODY_S = session.SEND_S = 1.0"
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


def all_are_cut_off(raws: list[socket.socket]) -> bool:
    return all(is_cut_off(raw) for raw in raws)


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


#: The head with which a stream begins.
STREAM = (
    b"GET /v1/work HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"Sec-WebSocket-Version: 13\r\n\r\n"
)


@pytest.mark.long
def test_stream_that_never_reads_is_cut_off_and_its_parts_run_elsewhere(
    hasty: Gate, client: Client
) -> None:
    request_id = hasty.submit(["x" * 200_000] * PARTS)
    with with_small_buffer(hasty) as raw:
        raw.sendall(STREAM)
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


def waits(gate: Gate, stack: ExitStack) -> socket.socket:
    """Make a call of a worker that waits for parts."""
    (raw,) = opened(gate, 1, stack)
    body = json.dumps(gate.ask(wait_s=50)).encode()
    head = f"POST /v1/take HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    raw.sendall(head.encode() + body)
    return raw


def test_more_connections_than_allowed_are_told_so_and_others_go_on(
    serve: Callable[..., Gate],
) -> None:
    gate = serve("--max-connections", "20", "--health-port", "127.0.0.1:0")
    asked = asked_of(gate)
    with ExitStack() as stack:
        waiting = [waits(gate, stack) for _ in range(20)]
        wait_until(lambda: asked.metrics()["streamq_gateway_calls_waiting"] == 20)
        others = [*opened(gate, 100, stack)]
        for one in others:
            answer = one.recv(1_000)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"Retry-After: 1" in answer
        waiting.pop().close()
        wait_until(lambda: is_answered(gate))
        gate.submit(["x"] * 19, limit=19)
        assert all(one.recv(1_000).startswith(b"HTTP/1.1 200") for one in waiting)


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


def with_head_of(gate: Gate, path: str, size: int, key: str, stack: ExitStack) -> socket.socket:
    """Begin a call with a body, and send no byte of it."""
    (raw,) = opened(gate, 1, stack)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n"
    raw.sendall(f"{head}Authorization: Bearer {key}\r\n\r\n".encode())
    return raw


def memory_mb(gate: Gate) -> int:
    status = Path(f"/proc/{gate.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) // 1024


def test_body_of_a_login_is_short(serve: Callable[..., Gate], tmp_path: Path) -> None:
    file = tmp_path / "streamq.keys"
    keys.add_key(file, "al", Role.WORKER)
    gate = serve("--keys", str(file))
    assert gate.post("/v1/session", {"key": "x" * 5_000}).status == 413
    assert gate.post("/v1/session", {"key": "x" * 3_000}).status == 401


def test_bodies_that_are_not_whole_take_little_memory(
    serve: Callable[..., Gate], tmp_path: Path
) -> None:
    file = tmp_path / "streamq.keys"
    al, bo = (keys.add_key(file, name, Role.WORKER) for name in ("al", "bo"))
    gate = serve("--keys", str(file))
    before, size, sent = memory_mb(gate), 16_000_000, b" " * 15_000_000
    with ExitStack() as stack:
        refused = 0
        for number in range(20):
            raw = with_head_of(gate, "/v1/take", size, al, stack)
            try:
                raw.sendall(sent)
            except OSError:  # it was answered before all was sent
                assert number >= 4
            raw.settimeout(0.2)
            with suppress(TimeoutError, OSError):
                refused += raw.recv(100).startswith(b"HTTP/1.1 429")
        assert refused >= 8
        assert memory_mb(gate) < before + 200
        ask = gate.ask(wait_s=0)
        # Its small calls go on, and so do large ones of others.
        assert gate.post("/v1/take", ask, headers={"Authorization": f"Bearer {al}"}).status == 204
        large = json.dumps(ask).encode() + sent
        assert gate.post("/v1/take", large, headers={"Authorization": f"Bearer {bo}"}).status == 204
    of_al = {"Authorization": f"Bearer {al}"}
    wait_until(lambda: gate.post("/v1/take", large, headers=of_al).status == 204)


def test_silent_connections_make_room_for_callers(serve: Callable[..., Gate]) -> None:
    gate = serve("--max-connections", "20")
    with ExitStack() as stack:
        first = next(opened(gate, 1, stack))
        assert is_alive(first)  # it needs no key, so nobody knows who it is
        waiting = waits(gate, stack)
        assert gate.get("/v1/queues").status == 200
        silent = [*opened(gate, 100, stack)]
        for _ in range(5):
            assert gate.get("/v1/queues").status == 200
        assert first.recv(1_000).startswith(b"HTTP/1.1 503")
        answers = [each.recv(1_000) for each in silent[:75]]
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers)
        # The worker that waits is a caller, and stays.
        gate.submit(["x"])
        assert waiting.recv(1_000).startswith(b"HTTP/1.1 200")


def test_streams_and_logins_of_strangers_make_room_for_callers(
    serve: Callable[..., Gate], tmp_path: Path
) -> None:
    file = tmp_path / "streamq.keys"
    text = keys.add_key(file, "al", Role.WORKER)
    gate = serve("--keys", str(file), "--max-connections", "20")
    gate.headers = {"Authorization": f"Bearer {text}"}
    login = b"POST /v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
    for said in (STREAM, login):
        with ExitStack() as stack:
            strangers = [*opened(gate, 40, stack)]
            for raw in strangers:
                raw.sendall(said)
            assert gate.get("/v1/queues").status == 200
            if said is STREAM:  # they do not answer when they are told that they have no key
                wait_until(partial(all_are_cut_off, strangers), 20)


#: Opens connections, every second one with half of a head, and counts those that are turned away.
CROWD = """
import resource, select, socket, sys
port, count = map(int, sys.argv[1:])
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
crowd = []
for number in range(count):
    crowd.append(socket.create_connection(("127.0.0.1", port), 60))
    if number % 2:
        crowd[-1].sendall(b"POST /v1/take HTTP/1.1\\r\\nHost: loc")
print("open", flush=True)
sys.stdin.readline()
away = 0
for each in crowd:
    each.setblocking(False)
    try:
        away += each.recv(1_000)[:12] in (b"", b"HTTP/1.1 503", b"HTTP/1.1 408")
    except BlockingIOError:
        pass  # it is still there
    except OSError:
        away += 1
print(away, flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_twenty_thousand_connections_are_not_felt_by_workers(serve: Callable[..., Gate]) -> None:
    gate = serve("--health-port", "127.0.0.1:0")
    asked = asked_of(gate)
    times: list[float] = []
    command = [sys.executable, "-c", CROWD, str(gate.port), "5000"]
    with ExitStack() as stack:
        waiting = [waits(gate, stack) for _ in range(500)]
        wait_until(lambda: asked.metrics()["streamq_gateway_calls_waiting"] == 500, 60)
        crowds = [
            stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
                )
            )
            for _ in range(4)
        ]

        def is_open(crowd: "subprocess.Popen[str]") -> bool:
            assert crowd.stdout
            return crowd.stdout.readline() == "open\n"

        with ThreadPoolExecutor(4) as threads:
            opening = [threads.submit(is_open, crowd) for crowd in crowds]
            while not all(each.done() for each in opening) or len(times) < 200:
                begun = time.monotonic()
                assert gate.take(handlers=["other"], wait_s=0).status == 204
                times.append(time.monotonic() - begun)
        assert all(each.result() for each in opening)
        # All who wait are still there, and a gateway that is full still gives them parts. On a
        # machine that is very busy their time was over before: they were told so.
        gate.submit(["x"] * 501, limit=501)
        answers = {raw.recv(1_000)[:12] for raw in waiting}
        assert answers <= {b"HTTP/1.1 200", b"HTTP/1.1 204"}
        assert gate.take().status == 200
        said = [crowd.communicate("\n", 60)[0] for crowd in crowds]
    times.sort()
    median, most_s = times[len(times) // 2], times[len(times) * 95 // 100]
    print(f"{len(times)} calls: median {median:.4f} s, 95 % {most_s:.4f} s, max {times[-1]:.3f} s")
    assert sum(map(int, said)) >= 8_000
    assert most_s < 2
    assert "Traceback" not in gate.log


@pytest.fixture
def with_tls(serve: Callable[..., Gate], tmp_path: Path) -> Gate:
    """A gateway with TLS that may have few connections, and few open files."""
    certificate, key = tmp_path / "own.crt", tmp_path / "own.key"
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=x"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    gate = serve(
        *("--tls-cert", str(certificate), "--tls-key", str(key), "--max-connections", "20"),
        hasty="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (276, 276)); "
        "from streamq.gateway import tls_door; tls_door.HANDSHAKE_S = 8.0",
    )
    gate.tls = ssl.create_default_context(cafile=certificate)
    return gate


def open_files(gate: Gate) -> int:
    return len([*Path(f"/proc/{gate.process.pid}/fd").iterdir()])


def test_handshakes_that_do_not_end_make_room_for_callers(with_tls: Gate) -> None:
    before = open_files(with_tls)
    with ExitStack() as stack:
        silent = [*opened(with_tls, 400, stack)]
        for _ in range(5):
            assert with_tls.get("/v1/queues", timeout=6).status == 200
        assert open_files(with_tls) < before + 130
        assert silent[0].recv(100) == b""
        # The others are cut off in time.
        assert silent[-1].recv(100) == b""
    wait_until(lambda: open_files(with_tls) < before + 20)
    assert "Traceback" not in with_tls.log
    assert with_tls.stop() == 0


def test_as_many_callers_as_allowed_get_in_over_tls_and_the_next_is_told(with_tls: Gate) -> None:
    call = b"GET /v1/queues HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert with_tls.tls
    with ExitStack() as stack:

        def answer() -> bytes:
            raw = next(opened(with_tls, 1, stack))
            assert with_tls.tls
            caller = stack.enter_context(with_tls.tls.wrap_socket(raw, server_hostname="127.0.0.1"))
            caller.sendall(call)
            return caller.recv(12)

        # They keep their connections.
        assert [answer() for _ in range(20)] == [b"HTTP/1.1 200"] * 20
        assert [answer() for _ in range(3)] == [b"HTTP/1.1 503"] * 3
    wait_until(lambda: with_tls.get("/v1/queues").status == 200)


def test_plain_words_at_the_door_of_tls(with_tls: Gate) -> None:
    before = open_files(with_tls)
    with ExitStack() as stack:
        for raw in opened(with_tls, 30, stack):
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionResetError):
                while raw.recv(1_000):
                    pass
    assert with_tls.get("/v1/queues").status == 200
    wait_until(lambda: open_files(with_tls) < before + 20)
    assert "Traceback" not in with_tls.log


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
