"""The dashboard's routes: pages, files, the feed, and what operators change."""

import asyncio
import http.client
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from streamq import Client, Protocol
from streamq.gateway.dashboard import DashboardBoard
from streamq.queue.changes import read_changes
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.support.command import run
from tests.support.waiting import allowed_s, wait_until

pytestmark = ONE_KIND


class Stream:
    """A reader of the live feed."""

    def __init__(self, gate: Gate, *topics: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", gate.port, timeout=20)
        query = "&".join(f"topic={topic}" for topic in topics)
        self._connection.request("GET", f"/v1/live?{query}")
        self.answer = self._connection.getresponse()

    def events(self) -> Iterator[tuple[str, Any]]:
        event = ""
        for line in self.answer:
            word, _, rest = line.decode().rstrip("\n").partition(": ")
            if word == "event":
                event = rest
            elif word == "data":
                yield event, json.loads(rest)

    def until(self, kind: str) -> Any:
        return next(data for event, data in self.events() if event == kind)

    def close(self) -> None:
        self.answer.close()
        self._connection.close()


def test_pages_and_files(gate: Gate) -> None:
    for path in ("/", "/q/default", "/q/default/requests?state=open", "/r/nightly/failures"):
        page = gate.get(path)
        assert page.status == 200
        assert page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "frame-ancestors 'none'" in policy
        assert not re.search(r"unsafe|https?:|\*", policy)
    names = re.findall(r"/static/\w+/[\w.-]+", page.text)
    assert names
    for name in names:
        file = gate.get(name)
        assert file.status == 200
        assert "immutable" in file.headers["cache-control"]
    assert gate.get("/static/x/app.js").headers["cache-control"] == "no-cache"
    assert gate.get("/static/x/..%2Ffiles.py").status == 404
    assert gate.get("/static/x/nothing.js").status == 404


def test_stream_tells_hello_then_frames_and_says_bye_at_the_stop(gate: Gate) -> None:
    request_id = gate.submit(["a", "b"])
    stream = Stream(gate, f"q:{gate.queue}", f"r:{request_id}")
    assert stream.answer.getheader("content-type", "").startswith("text/event-stream")
    assert stream.until("hello") == {"role": "operator", "name": "local", "queues": [gate.queue]}
    assert stream.until("q")["told"]["open"] == 1
    begun = time.monotonic()
    gate.post(f"/v1/requests/{request_id}/cancel", None)
    while stream.until("r")["told"]["status"]["state"] != "cancelled":
        pass
    assert time.monotonic() - begun < allowed_s(10)
    gate.process.terminate()
    stream.until("bye")
    assert gate.process.wait(20) == 0
    stream.close()


def test_one_frame_for_those_who_cannot_stream(gate: Gate) -> None:
    reply = gate.get(f"/v1/live?once&topic=q:{gate.queue}&topic=w:{gate.queue}")
    assert reply.text.startswith("event: q\n")
    assert "event: w\n" in reply.text


def test_topics_that_are_none(gate: Gate) -> None:
    for query in ("", "?topic=z:1", "?topic=q:elsewhere", "?topic=t:default%3Fstate=odd"):
        reply = gate.get(f"/v1/live{query}")
        assert (reply.status, reply.json["code"]) == (400, "INVALID"), query


def test_changes_are_told_with_who_made_them(gate: Gate, url: str) -> None:
    request_id = gate.submit(["a", "b", "c"], limit=2)
    path = f"/v1/requests/{request_id}"
    assert gate.post(f"{path}/pause", None).status == 200
    assert gate.call("PATCH", path, {"limit": 5, "level": 3}).status == 200
    wait_until(lambda: len(changes(gate)) == 2)
    told = changes(gate)
    assert told == [
        ("local", "set level 50 to 3, limit 2 to 5", request_id),
        ("local", "pause", request_id),
    ]
    # A command writes to the same log, and so does what removes a request.
    run("resume", request_id, STREAMQ_URL=url)
    assert gate.post(f"{path}/cancel", None).status == 200
    assert gate.call("DELETE", path).status == 204
    wait_until(lambda: len(changes(gate)) == 5)
    told = changes(gate)
    assert [what for _, what, _ in told[:3]] == ["purge", "cancel", "resume"]
    assert "@" in told[2][0]


def test_changes_of_a_request_are_noted_in_their_order(
    client: Client, protocol: Protocol, queue: str
) -> None:
    request = client.submit([1], handler="h", queue=queue)
    pauses = [0.3, 0.0, 0.1]

    async def in_thread(work: Callable[[], Any]) -> Any:
        await asyncio.sleep(pauses.pop(0))  # threads are not equally quick
        return work()

    async def change() -> None:
        board = DashboardBoard(protocol, in_thread, [queue], queue_of={request.id: queue})
        for what in ("pause", "set limit 1 to 2", "resume"):
            board.changed("al", "", request.id, what)
        while board._noting:
            await asyncio.gather(*board._noting)
        board.feed.close()

    asyncio.run(change())
    told = [each.what for each in read_changes(protocol, queue)]
    assert told == ["resume", "set limit 1 to 2", "pause"]


def changes(gate: Gate) -> list[tuple[str, str, str]]:
    told = gate.get(f"/v1/changes?queue={gate.queue}").json
    return [(each["who"], each["what"], each["request"]) for each in told]


def test_retry_of_a_range_and_of_a_group(gate: Gate) -> None:
    request_id = gate.submit([f"p{n}" for n in range(1, 7)], retries=0)
    path = f"/v1/requests/{request_id}"

    def fail_what_runs() -> None:
        while (reply := gate.take(most=10, wait_s=0.5)).status == 200:
            failed = [
                {
                    "part": part["number"],
                    "kind": "abandon",
                    "error": "KeyError" if part["number"] < 4 else "Timeout",
                    "message": f"<b>{part['number']}</b>",
                    "traceback": "deep inside",
                }
                for part in reply.json["parts"]
            ]
            gate.post("/v1/report", {"ticket": reply.json["ticket"], "failed": failed})

    def failed() -> int:
        return int(gate.get(path).json["parts"]["failed"])

    fail_what_runs()
    wait_until(lambda: failed() == 6)
    found = gate.get(f"{path}/failures?from=2&to=3").json
    assert sorted(each["part"] for each in found) == [2, 3]
    assert {each["traceback"] for each in found} == {"deep inside"}
    assert gate.post(f"{path}/retry/some", {"first": 2, "last": 3}).json["parts"] == 2
    fail_what_runs()
    wait_until(lambda: failed() == 6)
    group = {"error": "Timeout", "pattern": "<b><n></b>"}
    assert gate.post(f"{path}/retry/some", group).json["parts"] == 3
    fail_what_runs()
    wait_until(lambda: failed() == 6)
    assert gate.post(f"{path}/retry/some", {}).json["parts"] == 0


def test_payload_is_shown(gate: Gate) -> None:
    request_id = gate.submit([{"text": "<script>alert(1)</script>"}])
    shown = gate.get(f"/v1/requests/{request_id}/payload?part=1").json
    assert (shown["text"], shown["bytes"]) == ("<script>alert(1)</script>", 25)
    assert gate.get(f"/v1/requests/{request_id}/payload?part=9").json["bytes"] == -1
    assert gate.get(f"/v1/requests/{request_id}/payload?part=x").status == 400
