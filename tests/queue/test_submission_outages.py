"""Submissions that are killed, and servers that fail, are full, or have too few replicas."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis import Redis

from streamq import (
    Client,
    LoadGap,
    Protocol,
    ServerBehind,
    ServerFull,
    ServerUnreachable,
    State,
)
from streamq.protocol.keys import QueueKeys
from streamq.servers.local import LocalServer
from tests.queue.submitting import (
    Killed,
    Mortal,
    Submit,
    assert_is_gone,
    entries,
    numbered,
    parts_in,
)
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker, indexes
from tests.support.waiting import wait_until

on_one_kind = pytest.mark.parametrize("kind", ["valkey"])


class TestKilled:
    @pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize(
        ("kind", "make"),
        [("valkey", list), ("valkey", iter), ("redis", iter), ("cluster", list)],
        ids=lambda value: value if isinstance(value, str) else value.__name__,
    )
    def test_at_any_call_and_run_again_makes_the_same_parts(
        self,
        client: Client,
        protocol: Protocol,
        queue: str,
        request_id: str,
        make: Callable[[list[bytes]], Iterable[bytes]],
        is_done: bool,
    ) -> None:
        payloads = numbered(600)
        whole = client._protocol
        for calls in range(1, 100):
            driver = RequestByHand(protocol, queue, f"{request_id}-{calls}")
            options: dict[str, Any] = {"handler": "h", "queue": queue, "id": driver.id}
            client._protocol = Mortal(whole.connection, calls, is_done=is_done)
            try:
                client.submit(make(payloads), **options)
                break
            except Killed:
                client._protocol = whole
            client.submit(make(payloads), **options)

            assert parts_in(driver) == entries(payloads)
            assert (driver.left(), driver.meta("state")) == (600, "open")
            assert indexes(protocol, queue, driver.id) == {"open", "due"}
        assert calls > 5

        client._protocol = whole
        ran = Worker(protocol, queue, most=500).drain()
        assert len(ran) == len(set(ran)) == calls * 600
        assert all(status.state is State.DONE for status in client.list(queue, ended=True))

    @on_one_kind
    def test_with_signal_9_and_run_again_makes_the_same_parts(
        self, url: str, driver: RequestByHand, protocol: Protocol, queue: str
    ) -> None:
        draw = random.Random(driver.id)
        for kill_after in [*sorted(draw.sample(range(3_000), 4)), None]:
            run_loader(url, driver, kill_after)

        assert parts_in(driver) == entries(numbered(3_000))
        assert (driver.left(), driver.meta("state")) == (3_000, "open")
        assert len(set(Worker(protocol, queue, most=500).drain())) == 3_000
        assert driver.meta("state") == "done"


LOADER = """
import sys
from streamq import Client

def payloads():
    for n in range(1, 3001):
        if n % 50 == 0:
            print(n, flush=True)
        yield b"payload %d" % n

url, request_id, queue = sys.argv[1:]
with Client(url) as client:
    client.submit(payloads(), handler="h", queue=queue, id=request_id)
print("submitted", flush=True)
"""


def run_loader(url: str, driver: RequestByHand, kill_after: int | None) -> None:
    """Load in another process; kill it a moment after it has made so many payloads."""
    argv = [sys.executable, "-c", LOADER, url, driver.id, driver.queue]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line == "submitted\n":
                return
            if kill_after is not None and int(line) > kill_after:
                process.kill()
                return
    raise AssertionError("the loader ended without a word")


class TestServerThatFails:
    def test_parts_lost_in_a_failover_are_submitted_again(
        self, submit: Submit, driver: RequestByHand
    ) -> None:
        payloads = numbered(50)

        def take_back() -> Iterator[bytes]:
            """The server forgets what came after the first part."""
            redis, keys = driver.redis, driver.keys
            yield payloads[0]
            wait_until(lambda: driver.meta("total") == "1")
            cursor = driver.meta("cursor")
            [first] = redis.xrange(keys.parts)
            yield from payloads[1:30]
            wait_until(lambda: driver.meta("total") == "30")
            redis.unlink(keys.parts)
            redis.xgroup_create(keys.parts, "w", 0, mkstream=True)
            redis.xadd(keys.parts, first[1], id=first[0])
            redis.set(keys.left, 2)
            driver.set_meta(total=1, cursor=cursor)
            yield from payloads[30:]

        with pytest.raises(LoadGap, match=f"{driver.id} is submitted in part: submit the same"):
            submit(take_back())

        submit(payloads)
        assert parts_in(driver) == entries(payloads)
        assert driver.left() == 50

    def test_server_gone_is_said_with_the_way_to_go_on(self) -> None:
        with LocalServer.start() as server, Client(server.url) as client:

            def payloads() -> Iterator[bytes]:
                yield b"a"
                server.kill()
                yield from numbered(10)

            with pytest.raises(
                ServerUnreachable, match=r"Request x is .* in part: submit the same"
            ):
                client.submit(payloads(), handler="h", id="x")


class TestFullServer:
    @pytest.fixture
    def small(self) -> Generator[Client]:
        """A client of a server with room for a few MB."""
        with LocalServer.start() as server, Client(server.url) as client:
            redis = client._protocol.connection.redis
            used = redis.info("memory")["used_memory"]
            redis.config_set("maxmemory", used + 8 * 2**20)
            yield client

    def test_loading_stops_draining_goes_on_and_then_loading_too(self, small: Client) -> None:
        payloads = [bytes([65 + n % 26]) * 100_000 for n in range(200)]
        protocol = small._protocol

        with pytest.raises(ServerFull, match=r"drain it.*Request big is submitted in part"):
            small.submit(payloads, handler="h", id="big")

        worker = Worker(protocol, "default", lambda part: part.payload[:1], most=5)
        first = worker.drain()
        assert 0 < len(first) < 200
        request = None
        while request is None:
            try:
                request = small.submit(payloads, handler="h", id="big")
            except ServerFull:
                assert worker.drain()
        worker.drain()
        assert request.status().parts.done == 200
        assert [r for _, r in request.results()] == [payload[:1] for payload in payloads]

    def test_without_an_id_nothing_is_left(self, small: Client) -> None:
        with pytest.raises(ServerFull):
            small.submit([b"x" * 100_000] * 200, handler="h")

        assert small.list() == []
        assert small._protocol.ids("default") == []
        assert small.submit([b"x"], handler="h").status().parts.total == 1

    @pytest.mark.parametrize("options", [{}, {"id": None}])
    def test_nothing_is_opened(
        self, client: Client, driver: RequestByHand, submit: Submit, options: dict[str, Any]
    ) -> None:
        with driver.full_server(), pytest.raises(ServerFull):
            submit([b"a"], **options)

        assert_is_gone(driver)
        assert client._protocol.ids(driver.queue) == []


class TestDurable:
    @pytest.mark.parametrize("kind", ["cluster"])
    def test_returns_when_the_replicas_have_it(
        self, submit: Submit, driver: RequestByHand, queue: str
    ) -> None:
        submit(numbered(1_000), durable=1)

        for key in (driver.keys.parts, driver.keys.meta, QueueKeys(queue).open):
            assert on_replica(driver.redis, key, "EXISTS", key) == 1
        assert on_replica(driver.redis, driver.keys.parts, "XLEN", driver.keys.parts) == 1_000
        wait_until(lambda: not driver.redis.exists(driver.keys.sync))

    @pytest.mark.parametrize("kind", ["cluster"])
    @pytest.mark.parametrize("slot", ["request", "queue"])
    def test_waits_for_the_replicas_of_both_slots(
        self, submit: Submit, driver: RequestByHand, queue: str, slot: str
    ) -> None:
        key = driver.keys.meta if slot == "request" else QueueKeys(queue).open
        replica = int(on_replica(driver.redis, key, "INFO", "server")["process_id"])

        with ThreadPoolExecutor(1) as pool:
            os.kill(replica, signal.SIGSTOP)
            try:
                submitting = pool.submit(submit, numbered(10), durable=1)
                with pytest.raises(TimeoutError):
                    submitting.result(timeout=0.4)
                assert driver.meta("state") == "open"
            finally:
                os.kill(replica, signal.SIGCONT)
            submitting.result(timeout=5)

        assert on_replica(driver.redis, key, "EXISTS", key) == 1

    @on_one_kind
    def test_one_whose_seal_was_lost_meanwhile_is_sealed_again(
        self, client: Client, submit: Submit, driver: RequestByHand
    ) -> None:
        class FailingOver(Protocol):
            def replicas(self, *_: Any) -> int:
                driver.redis.hdel(driver.keys.meta, "sealed")
                driver.set_meta(state="loading")
                driver.redis.incr(driver.keys.left)
                return 1

        client._protocol = FailingOver(client._protocol.connection)

        submit(numbered(10), durable=1)

        assert (driver.meta("state"), driver.left()) == ("open", 10)

    @pytest.mark.parametrize(("kind", "wanted"), [("cluster", 2), ("valkey", 1), ("redis", 1)])
    def test_too_few_replicas_are_an_error_and_the_request_is_there(
        self, submit: Submit, driver: RequestByHand, wanted: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("streamq.queue.submission.REPLICAS_S", 0.2)

        with pytest.raises(ServerBehind) as failure:
            submit(numbered(10), durable=wanted)

        assert f"request {driver.id} is submitted, but after 0.2 s" in str(failure.value)
        assert f"of the {wanted} replicas" in str(failure.value)
        assert parts_in(driver) == entries(numbered(10))
        assert driver.meta("state") == "open"

    def test_is_not_asked_for_unless_it_is(self, submit: Submit, driver: RequestByHand) -> None:
        assert submit(numbered(3)).status().parts.total == 3


def on_replica(redis: Any, key: str, *words: Any) -> Any:
    """What the replica of the key's slot answers."""
    info = redis.info("replication", target_nodes=redis.get_node_from_key(key))
    where = info["slave0"]
    with (
        Redis(host=where["ip"], port=where["port"]) as replica,
        replica.pipeline(transaction=False) as pipe,
    ):
        return pipe.execute_command("READONLY").execute_command(*words).execute()[1]
