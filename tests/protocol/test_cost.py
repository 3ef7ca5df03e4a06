"""What a part costs, counted: round trips, the server's commands, bytes on the wire.

Nothing here is timed, so the bounds hold on every machine. Each stands between what was
counted when it was written, which is beside it, and twice that: a change that doubles a cost
fails, and one that lowers it may lower the bound.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from redis.connection import AbstractConnection

from streamq import Client, Connection, Protocol
from streamq.driver.lanes import Lane
from streamq.protocol.replies import Terms
from streamq.servers.local import LocalServer
from tests.faults.proxy import Proxy
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

PAYLOAD = b"x" * 100
PARTS = 4_000
OFFERS = ("parts cost",)
SINGLE = """
from streamq import App

app = App()


@app.handler
def echo(payload: bytes) -> bytes:
    return payload
"""


class Spent:
    """What one server did between two moments."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection.redis
        self._before = self._now()

    def stop(self, parts: int) -> "Spent":
        """Count from here on for so many parts."""
        now = self._now()
        spent = {name: value - self._before.get(name, 0) for name, value in now.items()}
        # What was spent on looking.
        spent["info"] = 0
        self.received = spent.pop("received") / parts
        self.sent = spent.pop("sent") / parts
        self.calls = {name: count / parts for name, count in spent.items() if count}
        self.commands = sum(self.calls.values())
        return self

    def of(self, *names: str) -> float:
        """Calls of the named commands for each part."""
        return sum(self.calls.get(name, 0.0) for name in names)

    def __repr__(self) -> str:
        net = f"{self.received:.0f} bytes in, {self.sent:.0f} out"
        return f"{self.commands:.3f} commands, {net}, {self.calls}"

    def _now(self) -> dict[str, int]:
        stats = self._redis.info("commandstats")
        found = {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
        net = self._redis.info("stats")
        return found | {
            "received": net["total_net_input_bytes"],
            "sent": net["total_net_output_bytes"],
        }


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """One of its own: whoever else used it would be counted."""
    with LocalServer.start() as server:
        yield server


@pytest.fixture
def url(server: LocalServer) -> str:
    return server.url


@pytest.fixture
def protocol(url: str) -> Iterator[Protocol]:
    connection = Connection(url)
    yield Protocol(connection)
    connection.close()


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often this thread has sent something to a server since the last time it asked."""
    mine = threading.get_ident()
    seen = [0]

    def count(owner: Any, method: str) -> None:
        send = getattr(owner, method)

        def counted(self: Any, *args: Any, **options: Any) -> Any:
            seen[0] += threading.get_ident() == mine
            return send(self, *args, **options)

        monkeypatch.setattr(owner, method, counted)

    def since() -> int:
        count, seen[0] = seen[0], 0
        assert count, "nothing was counted"
        return count

    count(AbstractConnection, "send_packed_command")
    count(Lane, "send")
    return since


def submit(client: Client, queue: str, parts: int, handler: str = "cost", limit: int = 1) -> str:
    return client.submit([PAYLOAD] * parts, handler=handler, queue=queue, limit=limit).id


def drain(protocol: Protocol, request_id: str, batch: int) -> None:
    terms, holder, call = Terms(batch), "holder", 0
    grant = protocol.claim(request_id, holder, terms, OFFERS)
    while grant.parts:
        results = [value for part in grant.parts for value in (part.number, PAYLOAD)]
        call += 1
        grant = protocol.finish(request_id, holder, call, results, len(grant.parts), terms)


class TestSubmission:
    def test_many_parts(
        self, client: Client, protocol: Protocol, queue: str, trips: Callable[[], int]
    ) -> None:
        submit(client, queue, 1)
        spent = Spent(protocol.connection)
        trips()

        submit(client, queue, PARTS)

        assert trips() <= 18  # 12: register, open, 8 chunks, seal, tokens
        spent.stop(PARTS)
        assert spent.commands <= 1.5, spent  # 1.02: one XADD each
        assert spent.received <= 180, spent  # 116 bytes
        assert spent.sent <= 10, spent

    def test_one_part(
        self, client: Client, protocol: Protocol, queue: str, trips: Callable[[], int]
    ) -> None:
        submit(client, queue, 1)
        spent = Spent(protocol.connection)
        trips()

        submit(client, queue, 1)

        assert trips() <= 3  # 2: register; open, append, seal and tokens at once
        spent.stop(1)
        assert spent.commands <= 48, spent  # 33
        assert spent.received <= 3_000, spent  # 2,000 bytes


class TestFinishing:
    def test_one_by_one(
        self, client: Client, protocol: Protocol, queue: str, trips: Callable[[], int]
    ) -> None:
        request_id = submit(client, queue, 200)
        drain(protocol, submit(client, queue, 1), 1)
        spent = Spent(protocol.connection)
        trips()

        drain(protocol, request_id, 1)

        assert trips() <= 300  # 201
        spent.stop(200)
        assert spent.commands <= 28, spent  # 19
        assert spent.received <= 1_150, spent  # 780 bytes
        assert spent.sent <= 290, spent  # 194 bytes

    def test_in_batches(
        self, client: Client, protocol: Protocol, queue: str, trips: Callable[[], int]
    ) -> None:
        request_id = submit(client, queue, PARTS)
        drain(protocol, submit(client, queue, 1), 1)
        spent = Spent(protocol.connection)
        trips()

        drain(protocol, request_id, 250)

        assert trips() <= 26  # 17
        spent.stop(PARTS)
        assert spent.commands <= 0.16, spent  # 0.11
        assert spent.of("xack", "xdel", "hset") <= 0.03, spent  # 0.02: once a batch
        assert spent.received <= 180, spent  # 120 bytes
        assert spent.sent <= 200, spent  # 136 bytes


class TestPool:
    def test_a_lease_for_each_part(
        self, client: Client, protocol: Protocol, fleet: Fleet, queue: str
    ) -> None:
        """A part that takes longer than the quantum: token, claim, finish, token, each once."""
        fleet.ready("--quantum", "1ms", audit_ms=60_000)
        # The first take of a process is from all lists, whatever is in use.
        client.submit([0.0], handler="nap", queue=queue).wait(30)
        request = client.submit([0.002] * 200, handler="nap", queue=queue, limit=1)
        spent = Spent(protocol.connection)

        request.wait(60)

        spent.stop(200)
        assert spent.of("brpop") <= 1.5, spent  # 1.0
        assert spent.of("evalsha") <= 4.5, spent  # 3.0
        assert spent.commands <= 54, spent  # 36
        assert spent.received <= 8_000, spent  # 3,500 bytes: the names of the lists

    def test_lists_that_are_not_in_use_are_not_waited_at(
        self, client: Client, protocol: Protocol, fleet: Fleet, queue: str
    ) -> None:
        """With 25 handlers there are 2,500 lists, of which two are in use."""
        fleet.ready(audit_ms=60_000)
        client.submit([0.0], handler="nap", queue=queue).wait(30)
        waits: list[str] = []
        with protocol.connection.redis.monitor() as heard:
            client.submit([0.0], handler="nap", queue=queue).wait(30)
            client.submit([0.0], handler="echo", queue=queue, level=7).wait(30)
            while not any(":echo:07" in wait for wait in waits):
                command = heard.next_command()["command"]
                waits += [command] if command.startswith("BRPOP") else []

        lists = [len(wait.split()) - 2 for wait in waits]
        assert max(lists) <= 40, waits  # 28: news of each handler, and lists in use

    def test_batches_of_small_parts(
        self, client: Client, protocol: Protocol, fleet: Fleet, queue: str
    ) -> None:
        """With a long quantum batches are as large as they get, however slow the machine."""
        request = client.submit([PAYLOAD] * 5 * PARTS, handler="echo", queue=queue, limit=1)
        spent = Spent(protocol.connection)
        fleet.ready("--quantum", "60s", audit_ms=60_000)

        request.wait(60)

        spent.stop(5 * PARTS)
        assert spent.of("evalsha", "brpop") <= 0.0045, spent  # 0.0025: 512 parts a call
        assert spent.commands <= 0.12, spent  # 0.073
        assert spent.received <= 180, spent  # 123 bytes
        assert spent.sent <= 200, spent  # 136 bytes

    @pytest.mark.long
    @pytest.mark.parametrize("delay_s", [0.01, 0.04])
    def test_turns_on_a_slow_line(self, queue: str, tmp_path: Path, delay_s: float) -> None:
        """A batch that would arrive when the turn is over is not asked for, to go back unread."""
        with LocalServer.start(port=0) as server, Client(server.url) as client:
            door = Proxy(int(server.url.rpartition(":")[2]))
            door.delay_s = delay_s
            fleet = Fleet(f"redis://127.0.0.1:{door.port}", queue, tmp_path)
            request = client.submit([PAYLOAD] * 4 * PARTS, handler="echo", queue=queue, limit=1)
            spent = Spent(Connection(server.url))
            try:
                fleet.ready("--quantum", "50ms", audit_ms=60_000)
                request.wait(60)
                spent.stop(4 * PARTS)
            finally:
                fleet.end()
                door.close()

        # Two for each part that is handed out again: 0.01, and more on a machine that stalls; 1.0
        # or 1.9 if the last batch of every turn goes back.
        assert spent.of("hget") <= 0.5, spent

    def test_many_small_requests(
        self, client: Client, protocol: Protocol, fleet: Fleet, queue: str
    ) -> None:
        """Tokens that are left when their request has ended are not claimed with."""
        requests = [client.submit([PAYLOAD] * 10, handler="echo", queue=queue) for _ in range(100)]
        fleet.ready(audit_ms=60_000)
        requests[0].wait(30)
        spent = Spent(protocol.connection)

        requests[-1].wait(60)

        spent.stop(99)
        assert spent.of("brpop") <= 12, spent  # 8.0: the tokens of a request
        assert spent.of("evalsha") <= 8, spent  # 5.2; 12 with a claim for every token

    def test_many_small_requests_of_one_handler(
        self, client: Client, protocol: Protocol, fleet: Fleet, queue: str, tmp_path: Path
    ) -> None:
        """Its pace is known from others: a request that is small enough comes with one claim."""
        (tmp_path / "single.py").write_text(SINGLE)
        requests = [client.submit([PAYLOAD] * 10, handler="echo", queue=queue) for _ in range(100)]
        fleet.ready("--quantum", "60s", target="single:app", cwd=tmp_path, audit_ms=60_000)
        requests[0].wait(30)
        spent = Spent(protocol.connection)

        requests[-1].wait(60)

        spent.stop(99)
        # 1.0 and 2.0 (claim, finish), or up to 1.9 and 2.1 on a machine that answers late; without
        # the pace they are those of the test above.
        assert spent.of("brpop") <= 7, spent
        assert spent.of("evalsha") <= 4.7, spent

    def test_nothing_to_do(
        self, client: Client, protocol: Protocol, fleet: Fleet, queue: str
    ) -> None:
        """A slower machine asks less often, never more often."""
        fleet.ready("-p", "2", "-c", "4", audit_ms=5_000)
        client.submit([PAYLOAD], handler="echo", queue=queue).wait(30)
        wait_until(lambda: not protocol.ids(queue), 30)
        spent = Spent(protocol.connection)

        sleep(4)

        spent.stop(4)
        assert spent.of("brpop") <= 3.5, spent  # 2.0 a second: one for each process
        assert spent.of("evalsha") <= 1.5, spent  # 0.8 a second
        assert spent.received <= 14_000, spent  # 7,000 bytes a second
