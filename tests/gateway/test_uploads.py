"""Files sent to a gateway as the body of one call, whole or cut off on the way."""

import gzip
import random
import shutil
import socket
import subprocess
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from streamq import Protocol
from streamq.gateway import keys
from streamq.gateway.roles import Role
from streamq.gateway.uploads import MOST_OF_KEY, MOST_UPLOADS
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate, Reply
from tests.gateway.test_roles import Serve
from tests.support.by_hand import RequestByHand
from tests.support.waiting import wait_until

pytestmark = ONE_KIND

LINES = b"".join(b"line %d\n" % n for n in range(20_000))
CSV = b"a,b\n" + b"".join(b'%d,"x\ny"\n' % n for n in range(2_000))


class Upload:
    """A file that is sent to one request."""

    def __init__(self, gate: Gate, request_id: str, **options: Any) -> None:
        self.gate = gate
        self.path = f"/v1/requests/{request_id}/input"
        query = {"handler": "h", "queue": gate.queue, "format": "lines", "lines": 100, **options}
        self.query = urllib.parse.urlencode(query)

    def put(self, data: bytes) -> Reply:
        return self.gate.call("PUT", f"{self.path}?{self.query}", data)

    def rest(self, data: bytes, offset: int) -> Reply:
        headers = {"Upload-Offset": str(offset)}
        return self.gate.call("PATCH", f"{self.path}?{self.query}", data, headers)

    def begin(self, data: bytes, total: int) -> socket.socket:
        """Send the beginning of a body, and return the connection."""
        connection = socket.create_connection(("127.0.0.1", self.gate.port))
        head = f"PUT {self.path}?{self.query} HTTP/1.1\r\nHost: localhost\r\n"
        head += "".join(f"{name}: {text}\r\n" for name, text in self.gate.headers.items())
        connection.sendall(f"{head}Content-Length: {total}\r\n\r\n".encode() + data)
        return connection

    def offset(self) -> int:
        reply = self.gate.get(self.path)
        if reply.status == 404:
            return 0
        assert reply.headers["upload-offset"] == str(reply.json["offset"])
        return int(reply.json["offset"])

    def cut(self, data: bytes, total: int) -> int:
        """Send the beginning, break off when some of it is loaded, and tell how much is."""
        with self.begin(data, total):
            wait_until(self.offset, 20)
        # What had come is still being loaded: the end of it is known when it stands still.
        seen = [0]

        def stands() -> bool:
            seen.append(self.offset())
            return seen[-1] == seen[-2]

        wait_until(stands, 20)
        return seen[-1]


@pytest.fixture
def upload(gate: Gate, request_id: str) -> Upload:
    return Upload(gate, request_id)


def said(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.json.get("code", "")


def content(protocol: Protocol, driver: RequestByHand) -> bytes:
    """All that the request holds, in order."""
    entries = driver.redis.xrange(driver.keys.parts)
    return b"".join(payload for _, fields in entries for payload in fields.values())


def test_file_is_split_and_sending_it_again_adds_nothing(
    upload: Upload, protocol: Protocol, driver: RequestByHand
) -> None:
    for status in (201, 200):
        reply = upload.put(LINES)

        assert (reply.status, reply.json["is_complete"]) == (status, True)
        assert reply.json["status"]["parts"]["total"] == 200
        assert content(protocol, driver) == LINES
    assert said(upload.put(LINES + b"more\n")) == (409, "EXISTS")
    assert said(upload.put(b"other" + LINES[5:])) == (409, "EXISTS")


def test_curl_sends_a_csv(
    gate: Gate, protocol: Protocol, driver: RequestByHand, tmp_path: Path
) -> None:
    curl = shutil.which("curl")
    if not curl:
        pytest.skip("there is no curl")
    (tmp_path / "big.csv").write_bytes(CSV)
    upload = Upload(gate, driver.id, format="csv")
    url = f"{gate.url}{upload.path}?{upload.query}"

    done = subprocess.run([curl, "-sf", "-T", "big.csv", url], cwd=tmp_path, timeout=60)

    assert done.returncode == 0
    assert content(protocol, driver) == CSV[4:]
    assert protocol.inspect(driver.id).spec.header.strip() == "a,b"


@pytest.mark.parametrize(("form", "data"), [("lines", LINES), ("csv", CSV)])
def test_cut_off_it_goes_on_with_the_rest(
    gate: Gate, protocol: Protocol, driver: RequestByHand, form: str, data: bytes
) -> None:
    upload = Upload(gate, driver.id, format=form)

    offset = upload.cut(data[: len(data) * 2 // 3], len(data))

    assert 0 < offset <= len(data) * 2 // 3
    reply = upload.rest(data[offset + 1 :], offset + 1)
    assert (said(reply), reply.json["offset"]) == ((409, "SHORT"), offset)
    reply = upload.rest(data[offset:], offset)
    assert (reply.status, reply.json["is_complete"], upload.offset()) == (200, True, len(data))
    assert content(protocol, driver) == data[4 if form == "csv" else 0 :]
    assert "the caller left" not in gate.log, "it is no trouble of the gateway"


def test_cut_off_it_goes_on_when_all_is_sent_again(
    upload: Upload, protocol: Protocol, driver: RequestByHand
) -> None:
    upload.cut(LINES[:100_000], len(LINES))

    assert said(upload.put(b"other" + LINES[5:])) == (409, "EXISTS")
    reply = upload.put(LINES)

    assert (reply.status, reply.json["is_complete"]) == (200, True)
    assert content(protocol, driver) == LINES


def test_compressed_file_is_sent_as_a_whole_again(
    upload: Upload, protocol: Protocol, driver: RequestByHand
) -> None:
    noise = random.Random(1)
    data = b"".join(b"%d\n" % noise.getrandbits(200) for _ in range(50_000))
    packed = gzip.compress(data)
    with upload.begin(packed[: len(packed) // 2], len(packed)):
        wait_until(lambda: driver.meta("total") not in ("", "0"), 20)

    assert upload.offset() == 0, "no byte of it can be begun with"
    loaded = len(content(protocol, driver))
    assert said(upload.rest(packed[1_000:], 1_000)) == (409, "SHORT")
    assert upload.put(packed).json["is_complete"]
    assert content(protocol, driver) == data
    assert 0 < loaded <= len(data)


def test_gateway_that_stops_does_not_wait_for_the_rest(
    serve: Serve, protocol: Protocol, driver: RequestByHand
) -> None:
    gate = serve()
    upload = Upload(gate, driver.id)
    with upload.begin(LINES[:100_000], len(LINES)) as connection:
        wait_until(upload.offset, 20)
        assert gate.stop() == 0
        assert b" 503 " in connection.recv(1_000).partition(b"\r\n")[0]
    other = Upload(serve(), driver.id)
    assert other.put(LINES).json["is_complete"]
    assert content(protocol, driver) == LINES


def test_more_uploads_than_threads_are_refused_at_once(gate: Gate, request_id: str) -> None:
    begun = [Upload(gate, f"{request_id}-{n}").begin(b"x\n", 9) for n in range(MOST_UPLOADS)]
    try:
        one_more = Upload(gate, f"{request_id}-more")
        assert wait_until(lambda: said(one_more.put(b"x\n")) == (429, "MANY"), 20)
        assert gate.get("/livez").status == 200
    finally:
        for each in begun:
            each.close()
    assert wait_until(lambda: one_more.put(b"x\n").status in (200, 201), 20)


def test_slow_uploads_of_one_key_leave_room_for_others(
    serve: Serve, tmp_path: Path, request_id: str
) -> None:
    file = tmp_path / "streamq.keys"
    slow, other = (keys.add_key(file, name, Role.LOADER) for name in ("slow", "other"))
    gate = serve("--keys", str(file))
    gate.headers = {"Authorization": f"Bearer {slow}"}
    begun = [Upload(gate, f"{request_id}-{n}").begin(b"x\n", 9) for n in range(MOST_OF_KEY)]
    try:
        one_more = Upload(gate, f"{request_id}-more")
        assert wait_until(lambda: said(one_more.put(b"x\n")) == (429, "MANY"), 20)
        gate.headers = {"Authorization": f"Bearer {other}"}
        assert Upload(gate, f"{request_id}-other").put(b"x\n").status == 201
    finally:
        for each in begun:
            each.close()


@pytest.mark.parametrize(
    ("changes", "data"),
    [
        ({"format": ""}, b"x\n"),
        ({"format": "auto"}, b"x\n"),
        ({"format": "requests"}, b"x\n"),
        ({"handler": "a b"}, b"x\n"),
        ({"limit": "many"}, b"x\n"),
        ({"files": "/etc/passwd"}, b"x\n"),
        ({"by_reference": "1"}, b"x\n"),
        ({"encoding": "morse"}, b"x\n"),
        ({"format": "csv"}, b'a,b\n1,"never closed\n'),
        ({"queue": "another"}, b"x\n"),
        ({}, b"x" * (2**20 + 1)),
        ({}, gzip.compress(b"x\n" * 10, mtime=0)[:-9]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_uploads_leave_nothing(
    gate: Gate, driver: RequestByHand, changes: dict[str, str], data: bytes
) -> None:
    upload = Upload(gate, driver.id, **changes)

    assert said(upload.put(data)) == (400, "INVALID")
    assert gate.get(f"/v1/requests/{driver.id}").status == 404
    assert said(upload.rest(data, 0))[0] in (400, 404)


def test_rest_needs_to_say_where_it_begins(upload: Upload) -> None:
    path = f"{upload.path}?{upload.query}"
    assert said(upload.gate.call("PATCH", path, b"x\n")) == (400, "INVALID")
    assert said(upload.rest(b"x\n", 5)) == (404, "UNKNOWN")
