"""``Client("http://...")``: requests over a gateway, with the types and errors of the server's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamq import (
    Client,
    InvalidValue,
    PartTooLarge,
    RequestEnded,
    RequestExists,
    RequestOpen,
    RequestUnknown,
    ServerRefused,
    ServerUnreachable,
    WaitTimeout,
)
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.support.command import run

pytestmark = ONE_KIND


@pytest.fixture
def gate(url: str, queue: str) -> Iterator[Gate]:
    gate = Gate(url, queue)
    yield gate
    gate.end()


def work(gate: Gate) -> None:
    """Run all parts: 13 is given up, others are returned as they came."""
    reply = gate.take(wait_s=5, most=500).json
    while reply.get("ticket"):
        done, failed = [], []
        for part in reply["parts"]:
            value = {name: part[name] for name in ("json", "text", "base64") if name in part}
            if value == {"json": 13}:
                failed.append({"part": part["number"], "kind": "abandon", "error": "Unlucky"})
            else:
                done.append({"part": part["number"], "result": value})
        said = {
            "ticket": reply["ticket"],
            "done": done,
            "failed": failed,
            "next": gate.ask(wait_s=1),
        }
        reply = gate.post("/v1/report", said).json


def test_requests_over_a_gateway(gate: Gate, client: Client, queue: str, request_id: str) -> None:
    with Client(gate.url) as remote:
        assert repr(remote) == f"Client({gate.url!r})"
        payloads = ["a", {"n": 1}, b"plain", b"\xff\x00", 13, None]
        request = remote.submit(payloads, handler="h", queue=queue, id=request_id, limit=3)
        again = remote.submit(payloads, handler="h", queue=queue, id=request_id, limit=3)
        assert (request.id, again.id) == (request_id, request_id)
        with pytest.raises(RequestExists):
            remote.submit(["b"], handler="h", queue=queue, id=request_id, limit=3)
        assert request.status() == client.get(request_id).status()
        with pytest.raises(WaitTimeout):
            request.wait(0.1)
        with pytest.raises(RequestOpen):
            request.purge()
        request.pause()
        assert request.status().paused
        request.resume()
        request.set(level=7, limit=4)
        found = request.status()
        assert (found.paused, found.level, found.limit) == (False, 7, 4)
        assert [each.id for each in remote.list(queue)] == [request_id]

        work(gate)

        assert request.wait(20).parts.failed == 1
        assert [*request.results()] == [
            (1, "a"),
            (2, {"n": 1}),
            (3, "plain"),
            (4, b"\xff\x00"),
            (6, None),
        ]
        (failure,) = request.errors()
        assert (failure.part, failure.error) == (5, "Unlucky")
        assert [each.id for each in remote.list(queue, ended=True)] == [request_id]
        assert request.retry() == 1
        assert request.cancel() == 1
        with pytest.raises(RequestEnded):
            request.set(level=1)
        request.purge()
        with pytest.raises(RequestUnknown):
            remote.get(request_id)


def test_many_payloads_go_in_chunks(gate: Gate, client: Client, queue: str) -> None:
    with Client(gate.url) as remote:
        for _ in range(2):  # the same call again makes no second request
            request = remote.submit(
                (f"{n}" for n in range(1_200)), handler="h", queue=queue, id=f"{queue}.many"
            )
        with pytest.raises(RequestExists):
            remote.submit(map(str, range(1_300)), handler="h", queue=queue, id=f"{queue}.many")
        status = request.status()
    assert (status.state, status.parts.total) == ("open", 1_200)


def test_what_a_gateway_cannot_is_refused(gate: Gate, queue: str) -> None:
    with Client(gate.url) as remote:
        bad: tuple[tuple[list[Any], dict[str, Any]], ...] = (
            ([{"text": "x"}], {}),
            (["x"], {"canary": 1}),
            (["x"], {"durable": 1}),
            (["x"], {"level": 100}),
            ([object()], {}),
        )
        for payloads, options in bad:
            with pytest.raises(InvalidValue):
                remote.submit(payloads, handler="h", queue=queue, **options)
        with pytest.raises(PartTooLarge):
            remote.submit([b"x" * (2**20 + 1)], handler="h", queue=queue)
        with pytest.raises(InvalidValue):
            _ = remote.protocol
        assert remote.list(queue) == []


def test_errors_of_the_way(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMQ_PATIENCE_MS", "200")
    with Client("http://127.0.0.1:1") as remote, pytest.raises(ServerUnreachable):
        remote.get("x")
    with pytest.raises(InvalidValue):
        Client("http://")


def test_wrong_key_is_refused(
    url: str, queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMQ_KEY", "sqk_wrong")
    keys = str(tmp_path / "keys")
    run("serve", "key", "mill", "--role", "reader", "--keys", keys)
    gate = Gate(url, queue, "--keys", keys)
    try:
        with Client(gate.url) as remote, pytest.raises(ServerRefused):
            remote.get("x")
    finally:
        gate.end()
