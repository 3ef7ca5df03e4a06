"""Workers on a stream: WebSocket sessions of a real gateway."""

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamq import Client
from streamq.gateway import keys
from streamq.gateway.courier import FUSE_MS
from streamq.gateway.roles import Role
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.support.by_hand import RequestByHand
from tests.support.waiting import allowed_s, wait_until

pytestmark = ONE_KIND
client_library = pytest.importorskip("websockets.sync.client")


class Stream:
    """One stream of a worker."""

    def __init__(self, gate: Gate, **more: Any) -> None:
        url = gate.url.replace("http", "ws") + "/v1/work"
        self.socket = client_library.connect(
            url, additional_headers=gate.headers | more, subprotocols=["streamq.v1.json"]
        ).__enter__()
        self._seq = 0

    def say(self, **message: Any) -> int:
        self._seq += 1
        self.socket.send(json.dumps({"seq": self._seq, **message}))
        return self._seq

    def hear(self, timeout: float = 20) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.socket.recv(timeout))
        return found

    def hear_of(self, word: str) -> Any:
        """The next message of a kind; others are passed over."""
        while word not in (message := self.hear()):
            pass
        return message[word]

    def answer(self, seq: int) -> dict[str, Any]:
        """The answer to a message; grants that come meanwhile are passed over."""
        while (message := self.hear()).get("re") != seq:
            pass
        return message

    def closed(self) -> tuple[int, str]:
        with pytest.raises(Exception, match=r".") as ended:  # noqa: PT012
            while True:
                self.hear()
        close: Any = getattr(ended.value, "rcvd", None)
        return (close.code, close.reason) if close else (0, "")


@pytest.fixture
def hello(queue: str) -> dict[str, Any]:
    return {"queue": queue, "handlers": ["h"], "slots": 2, "most": 1}


def done(grant: dict[str, Any]) -> dict[str, Any]:
    parts = [{"part": part["number"], "result": {"text": "ok"}} for part in grant["parts"]]
    return {"ticket": grant["ticket"], "done": parts}


def test_whole_job_on_one_stream_with_credit_of_two_slots(
    gate: Gate, hello: dict[str, Any], client: Client
) -> None:
    request_id = gate.submit(["a", "b", "c", "d"], limit=10)
    stream = Stream(gate)
    welcome = stream.answer(stream.say(hello=hello))["welcome"]
    assert welcome == {"beat_ms": 3_000, "lease_ms": 20_000, "unwanted": []}
    grants = [stream.hear_of("grant"), stream.hear_of("grant")]
    with pytest.raises(TimeoutError):  # no slot is free
        stream.hear(0.5)
    seen = [part["json"] for grant in grants for part in grant["parts"]]
    while grants:
        answer = stream.answer(stream.say(report=done(grants.pop(0))))
        assert answer["grant"]["counted"] == 1
        if len(seen) < 4:
            grant = stream.hear_of("grant")
            seen += [part["json"] for part in grant["parts"]]
            grants.append(grant)
    assert sorted(seen) == ["a", "b", "c", "d"]
    wait_until(lambda: client.get(request_id).status().state == "done")


def test_more_parts_of_a_lease_come_with_the_report(gate: Gate, hello: dict[str, Any]) -> None:
    gate.submit(["a", "b"])
    stream = Stream(gate)
    stream.say(hello=hello | {"slots": 1, "quantum_ms": 60_000})
    grant = stream.hear_of("grant")
    report = done(grant) | {"next": {"most": 5}}
    following = stream.answer(stream.say(report=report))["grant"]
    assert [part["json"] for part in following["parts"]] == ["b"]


def test_stream_that_breaks_lights_the_fuse_and_a_reconnect_puts_it_out(
    gate: Gate, serve: Callable[..., Gate], driver: RequestByHand, hello: dict[str, Any]
) -> None:
    gate.submit(["a"], id=driver.id)
    stream = Stream(gate)
    stream.say(hello=hello)
    grant = stream.hear_of("grant")
    held = {"ticket": grant["ticket"], "part": 1}
    assert stream.answer(stream.say(beat={"tickets": [held]}))["verdict"]["unwanted"] == []
    (holder,) = driver.leases()

    def left_ms() -> float:
        return driver.leases()[holder] - time.time() * 1e3

    assert left_ms() > FUSE_MS + 5_000
    stream.socket.socket.close()
    wait_until(lambda: left_ms() <= FUSE_MS)
    again = Stream(gate)
    welcome = again.answer(again.say(hello=hello | {"holding": [held]}))["welcome"]
    assert (welcome["unwanted"], left_ms() > FUSE_MS + 5_000) == ([], True)
    assert again.answer(again.say(report=done(grant)))["grant"]["counted"] == 1


def test_parts_of_a_worker_that_died_run_again_within_ten_seconds(
    gate: Gate, hello: dict[str, Any]
) -> None:
    gate.submit(["a"])
    stream = Stream(gate)
    stream.say(hello=hello)
    grant = stream.hear_of("grant")
    stream.answer(stream.say(beat={"tickets": [{"ticket": grant["ticket"], "part": 1}]}))
    begun = time.monotonic()
    stream.socket.socket.close()
    granted = gate.take(wait_s=30).json
    assert granted["parts"][0]["alone"]
    assert time.monotonic() - begun < allowed_s(12)  # 9 s, and what a busy machine takes


def test_bye_gives_all_back_at_once(gate: Gate, hello: dict[str, Any]) -> None:
    gate.submit(["a"])
    stream = Stream(gate)
    stream.say(hello=hello)
    stream.hear_of("grant")
    stream.say(bye={})
    granted = gate.take(wait_s=3).json
    assert (granted["parts"][0]["number"], "alone" in granted["parts"][0]) == (1, False)


def test_bye_gives_nothing_to_the_free_slots_of_the_one_who_goes(
    gate: Gate, hello: dict[str, Any]
) -> None:
    gate.submit(["a"])
    for _ in range(20):
        stream = Stream(gate)
        stream.say(hello=hello | {"slots": 9})
        stream.hear_of("grant")
        stream.say(bye={})
    granted = gate.take(wait_s=3).json
    assert (granted["parts"][0]["number"], "alone" in granted["parts"][0]) == (1, False)


def test_want_drains_and_gives_again(gate: Gate, hello: dict[str, Any]) -> None:
    stream = Stream(gate)
    stream.answer(stream.say(hello=hello | {"slots": 0}))
    gate.submit(["a"])
    with pytest.raises(TimeoutError):
        stream.hear(0.5)
    stream.say(want={"slots": 1})
    assert stream.hear_of("grant")["parts"][0]["number"] == 1


def test_stop_asks_streams_to_go_and_is_not_held_up(gate: Gate, hello: dict[str, Any]) -> None:
    stream = Stream(gate)
    stream.answer(stream.say(hello=hello))
    gate.process.terminate()
    assert stream.hear_of("go_away")["within_ms"] > 0
    stream.say(bye={})
    stream.socket.close()
    assert gate.process.wait(20) == 0


def test_slot_is_free_again_whose_ticket_is_of_no_use_any_more(
    serve: Callable[..., Gate], tmp_path: Path, hello: dict[str, Any]
) -> None:
    file = tmp_path / "streamq.keys"
    text = keys.add_key(file, "al", Role.OPERATOR)
    gate = serve("--keys", str(file))
    gate.headers = {"Authorization": f"Bearer {text}"}
    gate.submit(["a", "b"], limit=10)
    stream = Stream(gate)
    stream.say(hello=hello | {"slots": 1})
    grant = stream.hear_of("grant")
    # With another secret no ticket of before is valid.
    secret = keys.read_key_file(file).secret
    file.write_text(file.read_text().replace(secret, secret[::-1]))
    gate.process.send_signal(signal.SIGHUP)
    wait_until(lambda: gate.post("/v1/leave", {"tickets": [grant["ticket"]]}).status == 410)
    assert stream.answer(stream.say(report=done(grant)))["error"]["code"] == "TICKET"
    assert stream.hear_of("grant")["parts"]


def test_reconnect_with_tickets_of_no_use_is_told_so(gate: Gate, hello: dict[str, Any]) -> None:
    stream = Stream(gate)
    said = hello | {"holding": [{"ticket": "t1.x.y"}]}
    assert stream.answer(stream.say(hello=said))["welcome"]["unwanted"] == ["t1.x.y"]


class TestBadStreams:
    def test_messages_that_cannot_be(self, gate: Gate, hello: dict[str, Any]) -> None:
        for text, code in (("{", 1007), ('{"hello":{}}', 1007), ('{"beat":{}}', 1008)):
            stream = Stream(gate)
            stream.socket.send(text)
            assert stream.closed()[0] == code
        stream = Stream(gate)
        stream.answer(stream.say(hello=hello))
        wrong = stream.answer(stream.say(report={"ticket": "t1.x.y"}))
        assert (wrong["error"]["status"], wrong["error"]["code"]) == (410, "TICKET")
        assert stream.answer(stream.say())["error"]["code"] == "INVALID"
        assert "verdict" in stream.answer(stream.say(beat={}))

    def test_who_may_not(self, serve: Callable[..., Gate], tmp_path: Path, queue: str) -> None:
        file = tmp_path / "streamq.keys"
        worker = keys.add_key(file, "w", Role.WORKER, ["elsewhere"])
        reader = keys.add_key(file, "r", Role.READER)
        gate = serve("--keys", str(file))
        said = []
        for text in ("sqk_x", reader, worker):
            stream = Stream(gate, Authorization=f"Bearer {text}")
            with suppress(Exception):  # the gateway may have hung up already
                stream.say(hello={"queue": queue, "handlers": ["h"]})
            said.append(stream.closed()[1][:8])
        assert said == ["401 KEY:", "403 ROLE", "403 ROLE"]

    def test_page_of_another_site_may_not(self, gate: Gate) -> None:
        stream = Stream(gate, Origin="http://evil.example")
        code, reason = stream.closed()
        assert (code, reason[:8]) == (1008, "403 SITE")
