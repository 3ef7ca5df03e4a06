"""Keys that end while their calls wait and their streams are open."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamq import Client
from streamq.errors import RequestUnknown
from streamq.gateway import keys
from streamq.gateway.access import Access
from streamq.gateway.problems import Problem
from streamq.gateway.roles import LOCAL, Role
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate, Reply
from tests.gateway.test_session import Stream
from tests.support.waiting import wait_until

Serve = Callable[..., Gate]


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


class Held:
    """A gateway with two keys, of which one is taken away."""

    def __init__(self, serve: Serve, folder: Path, role: Role, *words: str) -> None:
        self.role = role
        self.file = folder / "streamq.keys"
        self.boss = keys.add_key(self.file, "boss", Role.OPERATOR)
        self._before = self.file.read_text()
        self.text = keys.add_key(self.file, "mill", role)
        one = self.file.read_text().replace('name = "mill"', 'name = "mill"\nwaits = 1')
        self.file.write_text(one)
        self.gate = serve("--keys", str(self.file), *words)
        self.gate.headers = bearer(self.boss)

    def take_away(self) -> None:
        self.file.write_text(self._before)
        # Somebody calls, as on every gateway that is used: the file is looked at then.
        wait_until(
            lambda: self.gate.get("/v1/session", headers=bearer(self.text)).status in (401, 429)
        )

    def _is_waiting(self) -> bool:
        """Whether a call waits: one more of the key is too many."""
        said = bearer(self.text)
        if self.role is Role.WORKER:
            return self.gate.post("/v1/take", self.gate.ask(wait_s=0), headers=said).status == 429
        return self.gate.get("/v1/requests/any/wait?wait_s=0", headers=said).status == 429

    def call(self, method: str, path: str, body: Any = None) -> Callable[[], Reply]:
        """Make a call with the key in a thread. Returns what waits for the answer."""
        answers: list[Reply] = []

        def make() -> None:
            while True:  # the look whether it waits may be what is one too many
                found = self.gate.call(method, path, body, headers=bearer(self.text))
                if found.status != 429:
                    break
            answers.append(found)

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        wait_until(self._is_waiting, 20)

        def answer() -> Reply:
            thread.join(20)
            assert answers, "it still waits"
            return answers[0]

        return answer


@ONE_KIND
def test_call_that_waits_for_parts_gets_none(serve: Serve, tmp_path: Path, client: Client) -> None:
    held = Held(serve, tmp_path, Role.WORKER)
    answer = held.call("POST", "/v1/take", held.gate.ask(wait_s=50))
    held.take_away()
    request_id = held.gate.submit(["x"])
    assert answer().status == 401
    # The part runs elsewhere at once, and nobody is charged.
    (part,) = held.gate.take().json["parts"]
    assert "attempt" not in part
    assert client.get(request_id).status().parts.running == 1


@ONE_KIND
def test_stream_ends_and_its_parts_run_elsewhere(serve: Serve, tmp_path: Path) -> None:
    held = Held(serve, tmp_path, Role.WORKER)
    held.gate.submit(["x", "y"])
    held.gate.headers = bearer(held.text)
    stream = Stream(held.gate)
    held.gate.headers = bearer(held.boss)
    stream.say(hello={"queue": held.gate.queue, "handlers": ["h"], "lease_ms": 4_000})
    number = stream.hear_of("grant")["parts"][0]["number"]
    held.take_away()
    stream.say(beat={"tickets": []})
    code, reason = stream.closed()
    assert (code, reason[:7]) == (1008, "401 KEY")
    taken = {held.gate.take(wait_s=50).json["parts"][0]["number"] for _ in range(2)}
    assert number in taken


@ONE_KIND
def test_stream_that_waits_for_parts_gets_none(serve: Serve, tmp_path: Path) -> None:
    held = Held(serve, tmp_path, Role.WORKER)
    held.gate.headers = bearer(held.text)
    stream = Stream(held.gate)
    held.gate.headers = bearer(held.boss)
    stream.say(hello={"queue": held.gate.queue, "handlers": ["h"]})
    stream.hear_of("welcome")
    held.take_away()
    held.gate.submit(["x"])
    code, reason = stream.closed()
    assert (code, reason[:7]) == (1008, "401 KEY")
    assert held.gate.take().status == 200


@ONE_KIND
@pytest.mark.parametrize("what", ["wait?wait_s=50", "results?follow=1"])
def test_followers_are_told_nothing_more(serve: Serve, tmp_path: Path, what: str) -> None:
    held = Held(serve, tmp_path, Role.LOADER)
    request_id = held.gate.submit(["x"])
    answer = held.call("GET", f"/v1/requests/{request_id}/{what}")
    held.take_away()
    found = answer()
    if what.startswith("wait"):
        assert found.status == 401
    else:
        assert found.lines[-1]["is_over"] is False


@ONE_KIND
def test_file_that_is_on_its_way_is_cut(serve: Serve, tmp_path: Path, client: Client) -> None:
    held = Held(serve, tmp_path, Role.LOADER)
    name = held.gate.queue
    head = f"PUT /v1/requests/{name}/input?handler=h&format=lines&queue={name}"
    with socket.create_connection(("127.0.0.1", held.gate.port), 20) as raw:
        head += f" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {held.text}\r\n"
        raw.sendall(f"{head}Content-Length: 100000000\r\n\r\n".encode())
        raw.sendall(b"a line\n" * 300_000)

        def is_there() -> bool:
            try:
                return client.get(name).status().parts.total > 0
            except RequestUnknown:
                return False

        wait_until(is_there)
        held.take_away()
        raw.sendall(b"a line\n" * 300_000)
        assert raw.recv(1_000).startswith(b"HTTP/1.1 401")
    assert client.get(name).status().state.is_live


def test_what_a_key_may_is_looked_up_again(tmp_path: Path) -> None:
    file = tmp_path / "streamq.keys"
    text = keys.add_key(file, "mill", Role.WORKER, ["a"])
    access = Access(file)

    def caller() -> Any:
        return access._current().named("mill").caller  # type: ignore[union-attr]

    before = caller()
    assert not access.is_over(before)
    assert access.has_key(f"Bearer {text}")
    content = file.read_text()
    for old, new in (
        ("worker", "reader"),
        ('["a"]', '["a", "b"]'),
        (keys.digest_of_key(text), keys.digest_of_key("other")),
        ("[[keys]]", "[[keys]]\nexpires = 2020-01-01T00:00:00Z"),
        ('name = "mill"', 'name = "bob"'),
    ):
        file.write_text(content.replace(old, new))
        access.look_again()
        assert access.is_over(before), new
        with pytest.raises(Problem, match="401 KEY"):
            access.check_again(before)
    file.write_text(content.replace("[[keys]]", "[[keys]]\nwaits = 7"))
    access.look_again()
    assert not access.is_over(before)
    assert not Access().is_over(LOCAL)
