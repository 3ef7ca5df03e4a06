"""Health and metrics of a gateway, at a port of their own."""

import functools
import random
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from streamq.telemetry.metrics import METRICS
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate
from tests.support.command import run
from tests.support.waiting import wait_until
from tests.telemetry.test_health import Asked, health_of

pytestmark = ONE_KIND
HERE = "127.0.0.1:0"


def is_ready(port: int) -> bool:
    try:
        return Asked(port).get("/readyz") == (200, "ok\n")
    except OSError:
        return False


def asked_of(gate: Gate) -> Asked:
    found = wait_until(lambda: health_of(gate.log))
    assert found
    return found


def test_metrics_count_calls_parts_and_who_waits(serve: Callable[..., Gate], queue: str) -> None:
    gate = serve("--health-port", HERE)
    asked = asked_of(gate)
    wait_until(lambda: asked.get("/readyz") == (200, "ok\n"))
    assert asked.get("/livez") == (200, "ok\n")
    request_id = gate.submit(["a", "b", "c"])
    # One part at first: nobody knows how long it takes. Then the other two.
    ask = gate.ask(most=3, quantum_ms=60_000)
    granted = gate.post("/v1/take", ask).json
    report = {"ticket": granted["ticket"], "done": [{"part": granted["parts"][0]["number"]}]}
    granted = gate.post("/v1/report", report | {"next": ask}).json
    failed, _ = (part["number"] for part in granted["parts"])
    failure = {"part": failed, "kind": "abandon", "error": "E", "message": "no"}
    report = {"ticket": granted["ticket"], "failed": [failure]}
    assert gate.post("/v1/report", report).status == 200
    assert gate.get("/v1/requests/unheard-of").status == 404

    metrics = asked.metrics()
    told = {name: metrics[name] for name in metrics if name.startswith("streamq_gateway_parts")}
    assert told == {
        f'streamq_gateway_parts_total{{state="{state}"}}': count
        for state, count in (("handed", 3), ("done", 1), ("failed", 1), ("back", 1), ("crashed", 0))
    }
    assert metrics['streamq_gateway_calls_total{route="take",status="200"}'] == 1
    assert metrics['streamq_gateway_calls_total{route="status",status="404"}'] == 1
    assert metrics['streamq_gateway_call_duration_seconds_count{route="report"}'] == 2
    for name in ("calls_waiting", "streams", "uploads", "watchers"):
        assert metrics[f"streamq_gateway_{name}"] == 0
    assert metrics["streamq_server_up"] == 1
    assert metrics[f'streamq_queue_parts{{queue="{queue}",state="failed"}}'] in (0, 1)
    text = asked.get("/metrics")[1]
    assert request_id not in text
    types = dict(re.findall(r"# TYPE (\S+) (\S+)", text))
    assert {name: METRICS[name].kind for name in types} == types
    assert {name for name in METRICS if "gateway" in name} <= set(types)


def first_of_two_free_ports() -> int:
    """A port that is free, as is the next, and that no connection is given by the system.

    Whoever connects to a port of that range before anybody listens there may reach itself.
    """
    while True:
        port = random.randrange(12_000, 30_000)
        with socket.socket() as one, socket.socket() as other, suppress(OSError):
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
            return port


def test_health_needs_no_key_and_processes_have_ports_in_a_row(
    serve: Callable[..., Gate], tmp_path: Path
) -> None:
    keys = tmp_path / "streamq.keys"
    assert run("serve", "key", "a", "--role", "reader", "--keys", str(keys)).returncode == 0
    port = first_of_two_free_ports()
    gate = serve("--health-port", f"127.0.0.1:{port}", "-p", "2", "--keys", str(keys))
    for each in (port, port + 1):
        wait_until(functools.partial(is_ready, each), 60)
    assert gate.get("/v1/session").status == 401
    found = 'streamq_gateway_calls_total{route="whoami",status="401"}'
    assert sum(Asked(each).metrics().get(found, 0) for each in (port, port + 1)) == 1
