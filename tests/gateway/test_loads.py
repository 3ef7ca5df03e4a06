"""Loads call by call, commits, lists, errors and control, over HTTP."""

import concurrent.futures
from typing import Any

import pytest

from tests.conftest import ONE_KIND
from tests.gateway.common import Gate, Reply, shouted

pytestmark = ONE_KIND


def said(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.json.get("code", reply.json.get("state", ""))


@pytest.fixture
def loading(gate: Gate, request_id: str) -> str:
    """The path of a request that takes parts."""
    new = {"id": request_id, "handler": "h", "queue": gate.queue, "state": "loading"}
    assert said(gate.post("/v1/requests", new)) == (201, "loading")
    assert said(gate.post("/v1/requests", new)) == (200, "loading")
    return f"/v1/requests/{request_id}"


class TestLoad:
    def test_parts_come_call_by_call_and_run_before_the_end(self, gate: Gate, loading: str) -> None:
        body = {"first": 1, "parts": [{"text": "a"}, {"text": "b"}]}
        for _ in range(2):  # the same call again adds nothing
            assert gate.post(f"{loading}/parts", body).json == {"total": 2}
        granted = gate.take().json
        assert granted["parts"][0]["text"] == "a"
        assert gate.post(f"{loading}/parts", {"first": 3, "parts": ["c"]}).json == {"total": 3}
        early = gate.post(f"{loading}/seal", {"total": 4})
        assert (said(early), early.json["next"]) == ((409, "SHORT"), 4)
        for _ in range(2):
            assert said(gate.post(f"{loading}/seal", {"total": 3})) == (200, "open")
        assert said(gate.post(f"{loading}/parts", {"first": 4, "parts": ["d"]})) == (409, "ENDED")

    def test_gap_and_other_content_are_told_where_to_go_on(self, gate: Gate, loading: str) -> None:
        gate.post(f"{loading}/parts", {"first": 1, "parts": ["a", "b"]})
        for first, parts in ((4, ["d"]), (1, ["a", "x"]), (2, ["b", "c", "d"])):
            reply = gate.post(f"{loading}/parts", {"first": first, "parts": parts})
            assert (said(reply), reply.json["next"]) == ((409, "SHORT"), 3)
        assert gate.get(loading).json["parts"]["total"] == 2

    def test_bad_load(self, gate: Gate, request_id: str) -> None:
        bad: list[dict[str, Any]] = [
            {"id": None},
            {"parts": ["x"]},
            {"state": "done"},
            {"queue": "other"},
        ]
        new = {"id": request_id, "handler": "h", "queue": gate.queue, "state": "loading"}
        for changes in bad:
            assert said(gate.post("/v1/requests", new | changes)) == (400, "INVALID")

    def test_empty_and_too_many_parts(self, gate: Gate, loading: str) -> None:
        for parts in ([], ["x"] * 501):
            reply = gate.post(f"{loading}/parts", {"first": 1, "parts": parts})
            assert said(reply) == (400, "INVALID")


class TestResults:
    def test_committed_results_are_forgotten_once(self, gate: Gate) -> None:
        path = f"/v1/requests/{gate.submit(['a', 'b', 'c'])}"
        for _ in range(3):
            granted = gate.take().json
            gate.post("/v1/report", {"ticket": granted["ticket"], "done": shouted(granted)})
        for _ in range(2):
            assert gate.post(f"{path}/results/commit", {"through": 2}).json == {"through": 2}
        assert [line.get("part") for line in gate.get(f"{path}/results").lines] == [3, None]
        assert said(gate.post(f"{path}/results/commit", {"through": 1})) == (409, "FENCED")
        last = gate.post(f"{path}/results/commit", {"through": 3, "after": 2})
        assert last.json == {"through": 3}
        assert said(gate.post(f"{path}/results/commit", {"through": 4})) == (400, "INVALID")


class TestControl:
    def test_pause_resume_cancel_and_purge(self, gate: Gate) -> None:
        path = f"/v1/requests/{gate.submit(['a', 'b'])}"
        assert gate.post(f"{path}/pause", None).json == {"state": "open", "parts": 0}
        assert gate.get(path).json["paused"]
        assert gate.take(wait_s=0.1).status == 204
        gate.post(f"{path}/resume", None)
        assert gate.take().status == 200
        assert said(gate.call("DELETE", path)) == (409, "NOTENDED")
        assert gate.post(f"{path}/cancel", None).json == {"state": "cancelled", "parts": 2}
        assert gate.call("DELETE", path).status == 204
        assert said(gate.get(path)) == (404, "UNKNOWN")

    def test_level_limit_rate_and_weight_are_changed(self, gate: Gate) -> None:
        path = f"/v1/requests/{gate.submit(['a'])}"
        changed = gate.call("PATCH", path, {"level": 3, "limit": 40, "rate": "9/s", "weight": 2})
        assert [changed.json[name] for name in ("level", "limit", "weight")] == [3, 40, 2]
        assert said(gate.call("PATCH", path, {"level": 100})) == (400, "INVALID")
        gate.post(f"{path}/cancel", None)
        assert said(gate.call("PATCH", path, {"level": 3})) == (409, "ENDED")

    def test_errors_are_told_by_page_and_retried(self, gate: Gate) -> None:
        path = f"/v1/requests/{gate.submit(['a', 'b', 'c'], retries=0)}"
        for _ in range(3):
            granted = gate.take().json
            number = granted["parts"][0]["number"]
            failed = [{"part": number, "error": "Oh", "message": "no", "traceback": "at 1"}]
            gate.post("/v1/report", {"ticket": granted["ticket"], "failed": failed})
        page = gate.get(f"{path}/errors?most=2").json
        assert [each["part"] for each in page["errors"]] == [1, 2]
        assert page["errors"][0] | {"attempts": 1} == {
            "part": 1, "error": "Oh", "message": "no", "attempts": 1, "traceback": "at 1"
        }  # fmt: skip
        last = gate.get(f"{path}/errors?after={page['after']}").json
        assert ([each["part"] for each in last["errors"]], last["after"]) == ([3], None)
        assert gate.post(f"{path}/retry", None).json == {"state": "open", "parts": 3}

    def test_requests_are_listed_newest_first(self, gate: Gate) -> None:
        first, second = gate.submit(["a"]), gate.submit(["b"])
        gate.post(f"/v1/requests/{first}/cancel", None)
        path = f"/v1/requests?queue={gate.queue}"
        assert [each["id"] for each in gate.get(path).json["requests"]] == [second, first]
        assert [each["id"] for each in gate.get(f"{path}&ended=0").json["requests"]] == [second]
        only = gate.get(f"{path}&state=cancelled&handler=h&most=1").json
        assert [each["id"] for each in only["requests"]] == [first]
        assert said(gate.get(f"{path}&state=odd")) == (400, "INVALID")
        assert said(gate.get(f"{path}&handler=%C3%97")) == (400, "INVALID")

    def test_queues(self, gate: Gate) -> None:
        gate.submit(["a"])
        (queue,) = gate.get("/v1/queues").json
        assert (queue["name"], queue["open"]) == (gate.queue, 1)


def test_reads_are_answered_while_many_calls_wait(gate: Gate) -> None:
    with concurrent.futures.ThreadPoolExecutor(60) as callers:
        waiting = [callers.submit(gate.take, wait_s=3) for _ in range(60)]
        assert gate.get("/v1/queues", timeout=5).status == 200
        assert {call.result().status for call in waiting} == {204}
