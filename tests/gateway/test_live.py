"""The live feed over WebSocket: the frames of the stream of events, and who may have them."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamq.gateway import keys
from streamq.gateway.live import live_frames_as_messages
from streamq.gateway.roles import Role
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate

exceptions = pytest.importorskip("websockets.exceptions")
client = pytest.importorskip("websockets.sync.client")


def test_messages_are_the_events_of_a_stream() -> None:
    frames = b'event: r\ndata: {"topic":"r:a","told":{"x":"a: b"}}\n\nevent: bye\nretry: 500\n'
    frames += b"data: {}\n\n: still here\n\n"
    assert [json.loads(each) for each in live_frames_as_messages(frames)] == [
        {"event": "r", "topic": "r:a", "told": {"x": "a: b"}},
        {"event": "bye"},
    ]


def until(socket: Any, event: str) -> Any:
    while (message := json.loads(socket.recv(timeout=20)))["event"] != event:
        pass
    return message


@ONE_KIND
def test_frames_come_live_until_the_gateway_stops(gate: Gate) -> None:
    request_id = gate.submit(["a", "b"])
    address = f"ws://127.0.0.1:{gate.port}/v1/live?topic=r:{request_id}&topic=q:{gate.queue}"
    with client.connect(address) as socket:
        assert until(socket, "hello")["queues"] == [gate.queue]
        assert until(socket, "q")["told"]["open"] == 1
        gate.post(f"/v1/requests/{request_id}/cancel", None)
        while until(socket, "r")["told"]["status"]["state"] != "cancelled":
            pass
        gate.process.terminate()
        # A gateway that stops says bye, or ends the connection with "service restart".
        with suppress(exceptions.ConnectionClosed):
            until(socket, "bye")
    assert gate.process.wait(20) == 0


@pytest.mark.parametrize(
    ("topics", "headers", "reason"),
    [
        ("topic=z:1", {}, "INVALID"),
        ("", {}, "INVALID"),
        ("topic=q:elsewhere", {}, "INVALID"),
        ("topic=q:{queue}", {"Origin": "http://evil.example"}, "SITE"),
        ("topic=q:{queue}", {"Sec-Fetch-Site": "cross-site"}, "SITE"),
    ],
)
@ONE_KIND
def test_who_may_not_is_told_why(
    gate: Gate, topics: str, headers: dict[str, str], reason: str
) -> None:
    address = f"ws://127.0.0.1:{gate.port}/v1/live?{topics.format(queue=gate.queue)}"
    connected = client.connect(address, additional_headers=headers)
    with connected as socket, pytest.raises(Exception, match=reason):
        socket.recv(timeout=20)


@ONE_KIND
def test_key_is_needed_where_there_are_keys(serve: Callable[..., Gate], tmp_path: Path) -> None:
    file = tmp_path / "streamq.keys"
    text = keys.add_key(file, "al", Role.READER)
    gate = serve("--keys", str(file))
    address = f"ws://127.0.0.1:{gate.port}/v1/live?topic=q:{gate.queue}"
    with client.connect(address) as socket, pytest.raises(Exception, match="KEY"):
        socket.recv(timeout=20)
    headers = {"Authorization": f"Bearer {text}"}
    with client.connect(address, additional_headers=headers) as socket:
        assert until(socket, "q")["told"]["open"] == 0
