"""The command ``streamq serve``: a whole job by curl, bad calls, and its stop."""

import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamq import Client
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate, shouted
from tests.support.command import run
from tests.support.waiting import allowed_s, wait_until

pytestmark = ONE_KIND

PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"


def test_whole_job_by_curl_as_the_page_says(gate: Gate, queue: str, request_id: str) -> None:
    section = PAGE.read_text().partition("\n## A job by curl\n")[2].partition("\n## ")[0]
    submit, worker, follow, results = re.findall(r"^```\w*\n(.*?)^```$", section, re.M | re.S)
    # As on the page, but at this gateway, queue and request.
    names = {
        "localhost:8470": gate.url,
        '"words"': f'"{request_id}"',
        "/words": f"/{request_id}",
        '"handler': f'"queue":"{queue}","handler',
    }

    def said(text: str) -> list[str]:
        for word, meant in names.items():
            text = text.replace(word, meant)
        return ["bash", "-euc", text]

    made = subprocess.run(said(submit), capture_output=True, check=True, timeout=60)
    assert json.loads(made.stdout)["state"] == "open"
    working = subprocess.Popen(said(worker), start_new_session=True)
    try:
        told = subprocess.run(
            said(follow), capture_output=True, check=True, timeout=60, text=True
        ).stdout
    finally:
        os.killpg(working.pid, signal.SIGKILL)
        working.wait()
    assert told.endswith(results)
    decoder = json.JSONDecoder()
    _, at = decoder.raw_decode(told)
    ended, _ = decoder.raw_decode(told, at)
    assert (ended["state"], ended["parts"]["done"]) == ("done", 3)


class TestRequests:
    def test_the_same_submission_again_makes_no_second_request(
        self, gate: Gate, request_id: str
    ) -> None:
        body = {"id": request_id, "handler": "h", "queue": gate.queue, "parts": [1, 2]}
        first, again = gate.post("/v1/requests", body), gate.post("/v1/requests", body)
        assert (first.status, again.status) == (201, 200)
        other = gate.post("/v1/requests", {**body, "parts": [1, 3]})
        assert (other.status, other.json["code"]) == (409, "EXISTS")

    def test_without_an_id_a_warning_says_what_a_repeat_would_do(self, gate: Gate) -> None:
        reply = gate.post("/v1/requests", {"handler": "h", "queue": gate.queue, "parts": ["x"]})
        assert "makes another request" in reply.headers["warning"]

    def test_payloads_and_results_come_as_they_were_given(self, gate: Gate) -> None:
        given = ["a", {"sku": 1}, None, {"text": "plain"}, {"base64": "AAH/"}]
        request_id = gate.submit(given)
        told, results = [], [{"json": [1]}, {"text": "t"}, {"base64": "/w=="}, {"lines": "l"}, None]
        reply = gate.take().json
        while reply.get("ticket"):
            (part,) = reply["parts"]
            told.append({name: part[name] for name in ("json", "text", "base64") if name in part})
            done = [{"part": part["number"], "result": results[part["number"] - 1]}]
            said = {"ticket": reply["ticket"], "done": done, "next": gate.ask()}
            reply = gate.post("/v1/report", said).json
        assert told == [
            {"json": "a"},
            {"json": {"sku": 1}},
            {"json": None},
            {"text": "plain"},
            {"base64": "AAH/"},
        ]
        *lines, _ = gate.get(f"/v1/requests/{request_id}/results").lines
        assert [line["result"] for line in lines] == results

    def test_results_are_read_page_by_page_while_it_runs(self, gate: Gate) -> None:
        request_id = gate.submit(["a", "b", "c", "d"])
        path = f"/v1/requests/{request_id}/results"
        granted = gate.take().json
        for _ in range(3):
            said = {"ticket": granted["ticket"], "done": shouted(granted), "next": gate.ask()}
            granted = gate.post("/v1/report", said).json
        first = gate.get(f"{path}?most=2").lines
        assert [line.get("part") for line in first] == [1, 2, None]
        assert first[-1] == {"next": 3, "state": "open", "is_over": False}
        second = gate.get(f"{path}?from=3").lines
        assert [line.get("part") for line in second] == [3, None]
        gate.post("/v1/report", {"ticket": granted["ticket"], "done": shouted(granted)})
        last = gate.get(f"{path}?from=4&follow=1").lines
        assert [line.get("part") for line in last] == [4, None]
        assert last[-1] == {"next": 5, "state": "done", "is_over": True}

    def test_wait_tells_whether_it_has_ended(self, gate: Gate, client: Client) -> None:
        request_id = gate.submit(["a"])
        path = f"/v1/requests/{request_id}/wait"
        assert gate.get(f"{path}?wait_s=0.1").status == 202
        client.get(request_id).cancel()
        assert (gate.get(path).status, gate.get(path).json["state"]) == (200, "cancelled")


#: Method, path, body; status and code of the answer.
BAD_CALLS: list[tuple[str, str, Any, int, str]] = [
    ("GET", "/v1/nothing", None, 404, "PATH"),
    ("PUT", "/v1/take", b"", 405, "METHOD"),
    ("GET", "/v1/requests/none", None, 404, "UNKNOWN"),
    ("GET", "/v1/requests/a%20b", None, 400, "INVALID"),
    ("GET", "/v1/requests/none/wait?wait_s=x", None, 400, "INVALID"),
    ("GET", "/v1/requests/none/wait?wait_s=51", None, 400, "INVALID"),
    ("GET", "/v1/requests/none/wait?wait_s=nan", None, 400, "INVALID"),
    ("GET", "/v1/requests/none/results?from=0", None, 400, "INVALID"),
    ("GET", "/v1/requests?handler=", None, 400, "INVALID"),
    ("POST", "/v1/requests", {"handler": "h", "parts": [0] * 20_001}, 400, "INVALID"),
    ("POST", "/v1/take", {"handlers": ["h"], "levels": "1" * 5_000}, 400, "INVALID"),
    ("POST", "/v1/take", b'{"handlers":["h"', 400, "INVALID"),
    ("POST", "/v1/take", b"\xff", 400, "INVALID"),
    ("POST", "/v1/take", b"[" * 100_000, 400, "INVALID"),
    ("POST", "/v1/take", b"", 400, "INVALID"),
    ("POST", "/v1/take", {}, 400, "INVALID"),
    ("POST", "/v1/take", {"handlers": ["h"], "more": 1}, 400, "INVALID"),
    ("POST", "/v1/take", {"handlers": ["h"], "most": 501}, 400, "INVALID"),
    ("POST", "/v1/take", {"handlers": ["h"], "queue": "other"}, 400, "INVALID"),
    ("POST", "/v1/report", {"ticket": "t1.x.y"}, 410, "TICKET"),
    ("POST", "/v1/report", {"ticket": ""}, 410, "TICKET"),
    ("POST", "/v1/beat", {"tickets": [{"ticket": "\ud800"}]}, 400, "INVALID"),
    ("POST", "/v1/leave", {"tickets": ["x"]}, 410, "TICKET"),
    ("POST", "/v1/requests", {"handler": "h", "parts": [{"base64": "?"}]}, 400, "INVALID"),
    ("POST", "/v1/requests", {"handler": "h", "parts": [], "level": 100}, 400, "INVALID"),
    ("POST", "/v1/requests", {"handler": "a b", "parts": [1]}, 400, "INVALID"),
]


def test_head_and_body_of_an_answer_come_together(gate: Gate) -> None:
    with socket.create_connection(("127.0.0.1", gate.port), 10) as raw:
        for _ in range(3):
            raw.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert raw.recv(10_000).endswith(b'\r\n\r\n{"status":"ok"}')


def test_gateway_that_stumbles_says_so_and_goes_on(serve: Callable[..., Gate]) -> None:
    gate = serve(hasty="from streamq.gateway.desk import Desk; Desk.beat = None")
    for _ in range(2):
        reply = gate.post("/v1/beat", {})
        assert (reply.status, reply.json["code"]) == (500, "ERROR")
    wait_until(lambda: "Traceback" in gate.log)
    assert gate.get("/livez").status == 200


class TestBadCalls:
    def test_bad_call_is_told_what_is_wrong(self, gate: Gate) -> None:
        found = []
        for method, path, body, *_ in BAD_CALLS:
            if isinstance(body, dict) and path == "/v1/requests":
                body = {"queue": gate.queue, **body}
            reply = gate.call(method, path, body)
            assert reply.headers["content-type"] == "application/problem+json"
            assert reply.json["detail"]
            found.append((method, path, reply.status, reply.json["code"]))
        assert found == [(*call[:2], *call[3:]) for call in BAD_CALLS]

    def test_part_that_is_too_large_is_refused(self, gate: Gate) -> None:
        body = {"handler": "h", "queue": gate.queue, "parts": ["x" * (2**20 + 1)]}
        reply = gate.post("/v1/requests", body)
        assert (reply.status, reply.json["code"]) == (413, "LARGE")

    def test_body_that_is_too_large_is_refused_before_it_is_read(self, gate: Gate) -> None:
        with socket.create_connection(("127.0.0.1", gate.port), 10) as raw:
            head = b"POST /v1/take HTTP/1.1\r\nHost: localhost\r\nContent-Length: 17000000\r\n\r\n"
            raw.sendall(head)
            assert raw.recv(1_000).startswith(b"HTTP/1.1 413 ")

    def test_body_in_chunks_is_refused_when_it_is_too_large(self, gate: Gate) -> None:
        with socket.create_connection(("127.0.0.1", gate.port), 10) as raw:
            raw.sendall(
                b"POST /v1/take HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            chunk = b"%x\r\n%b\r\n" % (2**20, b" " * 2**20)
            with pytest.raises(OSError):  # noqa: PT012  the gateway hangs up in the middle
                for _ in range(64):
                    raw.sendall(chunk)
                raise OSError(raw.recv(1_000))
        assert gate.get("/livez").status == 200

    def test_garbage_instead_of_http_hurts_nobody(self, gate: Gate) -> None:
        with socket.create_connection(("127.0.0.1", gate.port), 10) as raw:
            raw.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20)
            assert b"400" in raw.recv(1_000)
        assert gate.get("/readyz").status == 200


class TestListening:
    def test_beyond_loopback_is_refused(self, url: str) -> None:
        ran = run("serve", "--url", url, "--listen", "0.0.0.0:0")
        assert ran.returncode == 2
        assert "anybody there could read and change everything" in ran.stderr

    def test_port_that_is_taken_is_named(self, gate: Gate, url: str) -> None:
        ran = run("serve", "--url", url, "--listen", f"127.0.0.1:{gate.port}")
        assert ran.returncode == 2
        assert f"cannot listen at 127.0.0.1:{gate.port}" in ran.stderr

    @pytest.mark.parametrize("address", ["8470", "127.0.0.1:", "x:y", "127.0.0.1:65536"])
    def test_address_that_is_none(self, url: str, address: str) -> None:
        assert run("serve", "--url", url, "--listen", address).returncode == 2


class TestStopping:
    def test_calls_that_wait_do_not_hold_it_up(self, gate: Gate) -> None:
        with concurrent.futures.ThreadPoolExecutor(20) as callers:
            waiting = [callers.submit(gate.take, wait_s=50) for _ in range(20)]
            wait_until(lambda: gate.get("/readyz").status == 200)
            time.sleep(0.3)  # until most calls wait: those that come later are answered, too
            begun = time.monotonic()
            assert gate.stop() == 0
            assert time.monotonic() - begun < allowed_s(10)
            assert {call.result().status for call in waiting} == {204}

    def test_caller_who_hangs_up_is_given_nothing(self, gate: Gate, client: Client) -> None:
        body = json.dumps(gate.ask()).encode()
        with socket.create_connection(("127.0.0.1", gate.port), 10) as raw:
            head = b"POST /v1/take HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(
                body
            )
            raw.sendall(head + body)
        request_id = gate.submit(["x"])
        granted = gate.take().json
        assert [(part["number"], part.get("attempt", 1)) for part in granted["parts"]] == [(1, 1)]
        assert client.get(request_id).status().parts.running == 1


def test_server_that_is_away_is_told_at_once(serve: Callable[..., Gate], tmp_path: Path) -> None:
    from streamq.servers.local import LocalServer

    server = LocalServer.start()
    gate = Gate(server.url, "default")
    try:
        server.stop()
        reply = gate.post("/v1/requests", {"handler": "h", "parts": [1]})
        assert (reply.status, reply.json["code"]) == (503, "AWAY")
        assert reply.headers["retry-after"] == "1"
        assert gate.take().status == 503
        assert gate.get("/livez").status == 200
        wait_until(lambda: gate.get("/readyz").status == 503, 20)
        assert gate.stop() == 0
    finally:
        gate.end()
