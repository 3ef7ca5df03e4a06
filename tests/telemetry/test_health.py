"""Health of a pool and of a janitor: over HTTP, in metrics, and to systemd."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamq import Client, Protocol
from streamq.servers.local import LocalServer
from streamq.telemetry.health import STUCK_S, HealthServer, HealthSource
from streamq.telemetry.metrics import METRICS
from tests.conftest import KINDS
from tests.faults.proxy import Proxy
from tests.support.fleet import Fleet
from tests.support.secure import as_role
from tests.support.waiting import wait_until

pytestmark = pytest.mark.commands
HERE = "127.0.0.1:0"
_LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="[^"]*",?)*)\})? (\S+)')


@pytest.fixture(params=KINDS[:1])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Asked:
    """The answers of one address."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as got:
                return got.status, got.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Each sample by its name and labels, as they are written."""
        found = {}
        for line in self.get("/metrics")[1].splitlines():
            if not line.startswith("#"):
                matched = _LINE.fullmatch(line)
                assert matched, line
                found[line.rpartition(" ")[0]] = float(matched[3])
        return found


def health_of(said: str) -> Asked | None:
    found = re.search(r"health on http://[^:]+:(\d+)", said)
    return Asked(int(found[1])) if found else None


@pytest.fixture
def pool(fleet: Fleet) -> "subprocess.Popen[bytes]":
    return fleet.ready("-p", "2", "--health-port", HERE)


@pytest.fixture
def asked(fleet: Fleet, pool: "subprocess.Popen[bytes]") -> Asked:
    found = health_of(fleet.errors(pool))
    assert found
    return found


def test_pool_is_alive_and_ready_until_it_is_quiet(
    asked: Asked, pool: "subprocess.Popen[bytes]"
) -> None:
    assert wait_until(lambda: asked.get("/readyz") == (200, "ok\n"))
    assert asked.get("/livez") == (200, "ok\n")
    assert asked.get("/livez?verbose") == (200, "ok\n")
    assert asked.get("/nothing")[0] == 404

    pool.send_signal(signal.SIGUSR1)

    wait_until(lambda: asked.get("/readyz")[0] == 503)
    assert asked.get("/livez")[0] == 200


def test_pool_without_a_server_is_alive_and_not_ready(tmp_path: Path, queue: str) -> None:
    server = LocalServer.start(port=0)
    fleet = Fleet(server.url, queue, tmp_path)
    asked = health_of(fleet.errors(fleet.ready("--health-port", HERE)))
    assert asked
    wait_until(lambda: asked.get("/readyz")[0] == 200)

    server.stop()

    wait_until(lambda: asked.get("/readyz")[0] == 503, 15)
    wait_until(lambda: asked.get("/scale")[0] == 503, 15)
    assert asked.get("/livez") == (200, "ok\n")
    metrics = asked.metrics()
    assert metrics["streamq_server_up"] == 0
    assert metrics['streamq_server_errors_total{kind="ServerUnreachable"}'] > 0
    assert not [name for name in metrics if name.startswith("streamq_queue")]
    fleet.end()


def test_counts_are_of_what_was_run_and_outlive_a_process(
    asked: Asked, fleet: Fleet, pool: "subprocess.Popen[bytes]", client: Client, queue: str
) -> None:
    client.submit(["a", "b", "c"], handler="shout", queue=queue).wait(10)
    client.submit([1, "no number"], handler="doubled", queue=queue).wait(10)
    # A result is counted by the server a moment before it is counted here.
    wait_until(lambda: asked.metrics().get('streamq_parts_total{handler="doubled",state="failed"}'))

    def counts() -> dict[str, float]:
        return {name: n for name, n in asked.metrics().items() if "_total{handler" in name and n}

    wanted = {
        'streamq_parts_total{handler="shout",state="done"}': 3,
        'streamq_records_total{handler="shout",state="done"}': 3,
        'streamq_parts_total{handler="doubled",state="done"}': 1,
        'streamq_parts_total{handler="doubled",state="failed"}': 1,
        'streamq_records_total{handler="doubled",state="done"}': 1,
        'streamq_records_total{handler="doubled",state="failed"}': 1,
    }
    wait_until(lambda: counts() == wanted)
    assert asked.metrics()['streamq_part_duration_seconds_count{handler="shout"}'] == 3

    for pid in fleet.children(pool):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: asked.metrics()["streamq_process_deaths_total"] == 2)
    assert counts() == wanted


class Waits:
    """The waits of a handler's parts, as a pool tells them."""

    def __init__(self, asked: Asked, handler: str) -> None:
        self._asked = asked
        self._handler = handler

    def _read(self, what: str, more: str = "") -> float:
        name = f'streamq_part_wait_seconds_{what}{{handler="{self._handler}"{more}}}'
        return self._asked.metrics().get(name, 0)

    def count(self) -> float:
        return self._read("count")

    def sum(self) -> float:
        return self._read("sum")

    def up_to(self, seconds: str) -> float:
        return self._read("bucket", f',le="{seconds}"')


@pytest.fixture
def slow(fleet: Fleet) -> Asked:
    """A pool whose batches hold more than it can run in a quantum, so that some parts go back."""
    words = ("-p", "2", "--quantum", "20ms", "--health-port", HERE)
    asked = health_of(fleet.errors(fleet.ready(*words)))
    assert asked
    return asked


@pytest.mark.parametrize("handler", ["nap", "nap_async"])
def test_wait_of_each_part_is_counted_once(
    slow: Asked, client: Client, queue: str, handler: str
) -> None:
    client.submit(([0.001] * 20 + [0.05]) * 8, handler=handler, queue=queue).wait(30)

    waits = Waits(slow, handler)
    done = f'streamq_parts_total{{handler="{handler}",state="done"}}'
    wait_until(lambda: slow.metrics().get(done) == 168)
    assert waits.count() == waits.up_to("+Inf") == 168


def test_wait_begins_with_the_request(
    fleet: Fleet, client: Client, queue: str, protocol: Protocol
) -> None:
    request = client.submit(["a"] * 700, handler="shout", queue=queue)
    made = {"created_ms": request.status().created_ms - 7_000}
    protocol.connection.redis.hset(protocol.keys(request.id).meta, mapping=made)

    # One slot: it runs batch after batch under one lease.
    asked = health_of(fleet.errors(fleet.ready("--quantum", "60s", "--health-port", HERE)))
    assert asked
    request.wait(30)

    waits = Waits(asked, "shout")
    wait_until(lambda: waits.count() == 700)
    assert waits.up_to("5") == 0
    assert 7 * 700 <= waits.sum() < 60 * 700


def test_delay_is_no_wait(asked: Asked, client: Client, queue: str, protocol: Protocol) -> None:
    request = client.submit(["a"] * 3, handler="shout", queue=queue, delay="500ms")
    made = {"created_ms": request.status().created_ms - 3_600_000}
    protocol.connection.redis.hset(protocol.keys(request.id).meta, mapping=made)
    request.wait(30)

    waits = Waits(asked, "shout")
    wait_until(lambda: waits.count() == 3)
    assert waits.up_to("60") == 3
    assert waits.sum() < 60 * 3


@pytest.mark.parametrize("word", ["retry", "snooze", "hold"])
def test_wait_is_that_of_the_first_attempt(
    asked: Asked, client: Client, queue: str, word: str
) -> None:
    client.submit([word] * 3, handler="tells", queue=queue).wait(30)

    ran = 'streamq_part_duration_seconds_count{handler="tells"}'
    wait_until(lambda: asked.metrics().get(ran) == 6)
    assert Waits(asked, "tells").count() == 3


def test_wait_of_a_long_part_is_told_while_it_runs(
    asked: Asked, fleet: Fleet, client: Client, queue: str
) -> None:
    request = client.submit([30.0], handler="nap", queue=queue)
    wait_until(lambda: fleet.notes("S"))

    assert Waits(asked, "nap").count() == 1
    request.cancel()


@pytest.mark.long
def test_wait_of_a_part_that_goes_back_unbegun_is_not_counted(queue: str, tmp_path: Path) -> None:
    with LocalServer.start(port=0) as server, Client(server.url) as client:
        door = Proxy(int(server.url.rpartition(":")[2]))
        fleet = Fleet(f"redis://127.0.0.1:{door.port}", queue, tmp_path)
        try:
            pool = fleet.ready("--health-port", HERE)
            asked = health_of(fleet.errors(pool))
            assert asked
            client.submit(["a"], handler="shout", queue=queue).wait(30)
            # The process is replaced while the reply to its claim is on the way.
            door.delay_s = 0.5
            request = client.submit(["a"], handler="shout", queue=queue)
            # A token of a list that is new comes with news: then it takes two round trips more.
            wait_until(lambda: request.status().parts.running, 20)
            pool.send_signal(signal.SIGHUP)
            wait_until(lambda: not request.status().parts.running)
            door.delay_s = 0
            request.wait(30)

            done = 'streamq_parts_total{handler="shout",state="done"}'
            wait_until(lambda: asked.metrics().get(done) == 2)
            assert Waits(asked, "shout").count() == 2
        finally:
            fleet.end()
            door.close()


def test_part_that_kills_its_process_is_counted_as_crashed(
    asked: Asked, fleet: Fleet, client: Client, queue: str
) -> None:
    request = client.submit([30.0], handler="nap", queue=queue)
    (note,) = wait_until(lambda: fleet.notes("S"))
    busy = wait_until(lambda: asked.metrics()["streamq_worker_slots_busy"])

    os.kill(note.pid, signal.SIGKILL)

    crashed = 'streamq_parts_total{handler="nap",state="crashed"}'
    wait_until(lambda: asked.metrics().get(crashed) == 1)
    assert busy == 1
    request.cancel()


def test_requests_are_counted_when_they_have_ended(
    asked: Asked, client: Client, queue: str
) -> None:
    for _ in range(3):
        client.submit(["a"], handler="shout", queue=queue).wait(10)
    client.submit(["a"], handler="unheard_of", queue=queue).cancel()
    client.submit(["a"], handler="unheard_of", queue=queue, level=9)
    client.submit(["a"], handler="unheard_of", queue=queue, level=90)

    def counts(name: str) -> dict[str, float]:
        found = asked.metrics().items()
        return {key.split('"')[3]: n for key, n in found if key.startswith(f"{name}{{") and n}

    wait_until(lambda: counts("streamq_requests_total") == {"done": 3, "cancelled": 1}, 15)
    # What is told of the queue may be some seconds old.
    wait_until(lambda: counts("streamq_queue_level_requests") == {"0-9": 1, "90-99": 1}, 15)
    assert asked.metrics()["streamq_server_roundtrip_seconds_count"] > 0


def test_every_metric_is_a_known_one_and_says_what_it_is(
    asked: Asked, client: Client, queue: str
) -> None:
    client.submit(["a"], handler="shout", queue=queue).wait(10)
    text = asked.get("/metrics")[1]

    types = dict(re.findall(r"# TYPE (\S+) (\S+)", text))
    assert {name: METRICS[name].kind for name in types} == types
    assert {name for name in METRICS if "gateway" not in name} == set(types)
    for name in asked.metrics():
        base = re.sub(r"_(bucket|sum|count)$", "", name.partition("{")[0])
        labels = set(re.findall(r"([a-z]+)=", name)) - {"le"}
        assert labels == set(filter(None, METRICS[base].labels.split(", ")))


def test_scale_is_the_slots_that_could_be_used(
    fleet: Fleet, client: Client, queue: str, asked: Asked
) -> None:
    first = client.submit([30.0] * 20, handler="nap", queue=queue, limit=5)
    client.submit([1] * 2, handler="nap", queue=queue, limit=8, delay="1h")
    client.submit([1] * 7, handler="unheard_of", queue=queue)
    paused = client.submit([1] * 7, handler="nap", queue=queue)
    paused.pause()

    unserved = f'streamq_queue_unserved_requests{{queue="{queue}"}}'
    # What is told may be some seconds old.
    wait_until(lambda: asked.metrics().get(unserved) == 1, 15)

    assert json.loads(asked.get("/scale")[1]) == {"value": 5}
    metrics = asked.metrics()
    assert metrics[f'streamq_queue_slots_wanted{{queue="{queue}"}}'] == 12, "of all handlers"
    assert metrics[f'streamq_queue_requests{{queue="{queue}",state="paused"}}'] == 1
    first.cancel()


def test_a_scrape_costs_the_server_no_call_of_its_own(asked: Asked, client: Client) -> None:
    asked.metrics()
    stats = client._protocol.connection.redis.info

    def looks() -> int:
        return int(stats("commandstats").get("cmdstat_zrange", {"calls": 0})["calls"])

    before = looks()
    for _ in range(50):
        asked.metrics()
        asked.get("/scale")
    # Tests beside this one list queues too, but not a hundred times.
    assert looks() - before < 100


def test_loop_that_does_not_turn_is_not_alive() -> None:
    ticked = [time.monotonic()]
    subject = HealthSource(lambda: ticked[0], lambda: "", dict, lambda: 0)
    server = HealthServer(HERE, subject)
    asked = Asked(server.port)

    assert asked.get("/livez")[0] == 200
    ticked[0] -= STUCK_S + 1
    assert asked.get("/livez")[0] == 503
    server.close()


@pytest.mark.parametrize("address", ["x", "70000", "127.0.0.1:", "{taken}"])
def test_address_where_nobody_can_listen(fleet: Fleet, address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = address.format(taken=f"127.0.0.1:{taken.getsockname()[1]}")
        pool = fleet.start("--health-port", address)

        assert pool.wait(15) == 2
    assert "--health-port" in fleet.errors(pool)
    assert "Traceback" not in fleet.errors(pool)


class Systemd:
    """The socket of a service manager, and what came in by it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self._words: list[str] = []

    def words(self) -> list[str]:
        """The first line of each message so far."""
        try:
            while True:
                self._words.append(self._socket.recv(4096).decode().partition("\n")[0])
        except BlockingIOError:
            return self._words

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    systemd = Systemd(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(systemd.path))
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    yield systemd
    systemd.close()


def test_systemd_is_told_ready_alive_and_stopping(systemd: Systemd, fleet: Fleet) -> None:
    pool = fleet.ready("-p", "2")
    wait_until(lambda: "READY=1" in systemd.words())
    wait_until(lambda: systemd.words().count("WATCHDOG=1") >= 3)

    pool.send_signal(signal.SIGTERM)

    assert pool.wait(15) == 0
    words = systemd.words()
    assert words.count("READY=1") == words.count("STOPPING=1") == 1
    assert set(words) == {"READY=1", "WATCHDOG=1", "STOPPING=1"}
    assert words.index("READY=1") < words.index("STOPPING=1")


def test_watchdog_hears_nothing_from_a_pool_that_stands_still(
    systemd: Systemd, fleet: Fleet
) -> None:
    pool = fleet.ready("--health-port", HERE)
    wait_until(lambda: "WATCHDOG=1" in systemd.words())

    os.kill(pool.pid, signal.SIGSTOP)
    stood = len(systemd.words())
    time.sleep(1)
    silent = len(systemd.words())
    os.kill(pool.pid, signal.SIGCONT)

    # One may have been on its way.
    assert silent - stood <= 1
    wait_until(lambda: len(systemd.words()) > silent + 1)


def test_watchdog_of_another_process_and_no_socket_are_no_trouble(
    systemd: Systemd, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_PID", "1")
    fleet.ready()
    wait_until(lambda: "READY=1" in systemd.words())
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/at/all")
    second = fleet.ready()

    assert "ready" in fleet.errors(second)
    assert set(systemd.words()) == {"READY=1"}


def test_janitor_tells_too(url: str, queue: str, systemd: Systemd, client: Client) -> None:
    client.submit([1] * 20, handler="unheard_of", queue=queue, limit=3)
    words: list[Any] = [sys.executable, "-m", "streamq.cli", "janitor", "--queue", queue]
    janitor = subprocess.Popen(
        [*words, "--health-port", HERE],
        env=os.environ | {"STREAMQ_URL": as_role(url, "janitor")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert janitor.stderr
    said = ""
    while not (asked := health_of(said)):
        line = janitor.stderr.readline()
        assert line, said
        said += line
    wait_until(lambda: {"READY=1", "WATCHDOG=1"} <= set(systemd.words()), 10)

    assert asked.get("/livez")[0] == asked.get("/readyz")[0] == 200
    assert json.loads(asked.get("/scale")[1]) == {"value": 3}
    wait_until(lambda: asked.metrics()["streamq_janitor_last_success_timestamp_seconds"])

    janitor.send_signal(signal.SIGTERM)
    assert janitor.wait(10) == 0
    assert "STOPPING=1" in systemd.words()
    janitor.stderr.close()
