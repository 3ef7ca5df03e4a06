"""Putting the parts of a request into the server: while they run, again, at once, and badly."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

import pytest
from redis import Redis

from streamq import (
    Client,
    Connection,
    InvalidValue,
    LoadGap,
    PartTooLarge,
    Protocol,
    RequestEnded,
    RequestExists,
    RequestUnknown,
    ServerBehind,
    ServerFull,
    ServerUnreachable,
    State,
)
from streamq.model import Policy
from streamq.protocol.keys import QueueKeys
from streamq.servers.local import LocalServer
from tests.driver import Driver
from tests.simulated import Worker, indexes, tokens, working
from tests.waiting import wait_until

on_one_kind = pytest.mark.parametrize("kind", ["valkey"])
Submit = Callable[..., Any]


@pytest.fixture
def submit(client: Client, queue: str, request_id: str) -> Submit:
    """Submit payloads under the test's id to the test's queue."""

    def submit(payloads: Iterable[Any], **options: Any) -> Any:
        given = {"handler": "h", "queue": queue, "id": request_id, **options}
        return client.submit(payloads, **given)

    return submit


def numbered(count: int) -> list[bytes]:
    return [b"payload %d" % n for n in range(1, count + 1)]


def parts_in(driver: Driver) -> list[tuple[bytes, bytes]]:
    """Entry ids and payloads of the parts that are in the server."""
    found = driver.redis.xrange(driver.keys.parts)
    return [(id_, payload) for id_, fields in found for payload in fields.values()]


def entries(payloads: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    return [(b"%d-0" % n, payload) for n, payload in enumerate(payloads, 1)]


def state_of(driver: Driver) -> dict[str, Any]:
    """Everything the server has of the request, to see that nothing changed."""
    redis, keys = driver.redis, QueueKeys(driver.queue)
    indexed = {key: redis.zscore(key, driver.id) for key in (keys.open, keys.due, keys.closed)}
    return {**driver.snapshot(), **indexed, "tokens": tokens(driver.protocol, driver.queue)}


def assert_is_gone(driver: Driver) -> None:
    assert driver.existing_keys() == set()
    assert indexes(driver.protocol, driver.queue, driver.id) == set()


class TestStreaming:
    def test_first_part_is_finished_before_the_second_is_made(
        self, submit: Submit, protocol: Protocol, queue: str, driver: Driver
    ) -> None:
        seen: list[Any] = []

        def payloads() -> Iterator[bytes]:
            yield b"a"
            wait_until(driver.results)
            seen.append(driver.meta("state"))
            yield b"b"

        with working(Worker(protocol, queue)):
            request = submit(payloads())
            status = request.wait(timeout=5)

        assert seen == ["loading"]
        assert (status.state, status.parts.done) == (State.DONE, 2)
        assert list(request.results()) == [(1, b"A"), (2, b"B")]

    def test_parts_run_while_thousands_follow(
        self, submit: Submit, protocol: Protocol, queue: str, driver: Driver
    ) -> None:
        def payloads() -> Iterator[bytes]:
            yield from numbered(3_000)[:2_000]
            wait_until(driver.results)
            yield from numbered(3_000)[2_000:]

        with working(Worker(protocol, queue)):
            status = submit(payloads()).wait(timeout=10)

        assert (status.state, status.parts.done, status.records.done) == (State.DONE, 3_000, 3_000)

    def test_request_does_not_end_while_more_may_come(
        self, submit: Submit, protocol: Protocol, queue: str, driver: Driver
    ) -> None:
        def payloads() -> Iterator[bytes]:
            for n in range(1, 4):
                yield b"x"
                # All there is, is finished.
                wait_until(lambda: len(driver.results()) == n)  # noqa: B023  it ends before n changes
                assert (driver.left(), driver.meta("state")) == (1, "loading")

        with working(Worker(protocol, queue)):
            status = submit(payloads()).wait(timeout=5)

        assert (status.state, status.parts.done) == (State.DONE, 3)

    @pytest.mark.parametrize("payloads", [[], iter(())], ids=["list", "iterator"])
    def test_empty_request_ends_when_it_is_sealed(
        self, submit: Submit, driver: Driver, payloads: Iterable[bytes]
    ) -> None:
        with driver.published() as published:
            status = submit(payloads).status()

        assert (status.state, status.parts.total, status.finished_ms is None) == ("done", 0, False)
        assert published == ["done"]

    def test_payloads_are_bytes_as_they_are_and_else_json(
        self, submit: Submit, driver: Driver
    ) -> None:
        submit([b"\xff\0", "text", {"a": [1, None]}, 7, b""])

        payloads = [payload for _, payload in parts_in(driver)]
        assert payloads == [b"\xff\0", b'"text"', b'{"a":[1,null]}', b"7", b""]

    @on_one_kind
    def test_calls_stay_small_whatever_the_parts(
        self, client: Client, submit: Submit, driver: Driver
    ) -> None:
        calls: list[tuple[int, int]] = []

        class Counting(Protocol):
            def append(self, *args: Any) -> Any:
                calls.append((args[3], sum(len(value) for value in args[4])))
                return super().append(*args)

        client._protocol = Counting(client._protocol.connection)

        submit([b"x" * size for size in [1] * 1_200 + [700_000] * 4])

        assert sum(parts for parts, _ in calls) == 1_204
        assert max(parts for parts, _ in calls) <= 500
        assert max(size for _, size in calls) < 2 * 2**20


class TestAgain:
    @pytest.mark.parametrize("count", [0, 3, 1_200])
    def test_same_submission_makes_no_second_request(
        self, submit: Submit, driver: Driver, count: int
    ) -> None:
        submit(numbered(count))
        before = state_of(driver)

        request = submit(iter(numbered(count)), delay="1s")

        assert request.id == driver.id
        assert state_of(driver) == before

    def test_nor_does_it_after_the_end(
        self, submit: Submit, driver: Driver, protocol: Protocol, queue: str
    ) -> None:
        submit(numbered(3))
        Worker(protocol, queue).drain()
        before = state_of(driver)

        status = submit(numbered(3)).wait(timeout=5)

        assert status.parts.done == 3
        assert state_of(driver) == before
        assert indexes(protocol, queue, driver.id) == {"closed"}

    @pytest.mark.parametrize(
        "payloads",
        [[], [b"a"], [b"a", b"x"], [b"x", b"b"], [b"a", b"b", b"c"], [b"ab", b""]],
        ids=repr,
    )
    @pytest.mark.parametrize("is_finished", [False, True])
    @on_one_kind
    def test_other_payloads_are_refused_and_nothing_changes(
        self,
        submit: Submit,
        driver: Driver,
        protocol: Protocol,
        queue: str,
        payloads: list[bytes],
        is_finished: bool,
    ) -> None:
        submit([b"a", b"b"])
        if is_finished:
            Worker(protocol, queue).drain()
        before = state_of(driver)

        with pytest.raises(RequestExists, match=driver.id):
            submit(payloads)

        assert state_of(driver) == before

    @pytest.mark.parametrize(
        "option",
        [
            {"handler": "other"},
            {"queue": "other"},
            {"level": 3},
            {"limit": 3},
            {"rate": "3/s"},
            {"retries": 0},
            {"backoff": "3s"},
            {"timeout": "3s"},
            {"max_failures": 3},
            {"keep": "3d"},
            {"poison": 1},
        ],
        ids=lambda option: next(iter(option)),
    )
    @on_one_kind
    def test_other_options_are_refused_and_nothing_changes(
        self, submit: Submit, driver: Driver, protocol: Protocol, option: dict[str, Any]
    ) -> None:
        submit([b"a"])
        before = state_of(driver)

        with pytest.raises(RequestExists, match="other options"):
            submit([b"a"], **option)

        assert state_of(driver) == before
        assert indexes(protocol, "other", driver.id) == set()

    def test_one_that_was_cancelled_is_not_begun_anew(
        self, submit: Submit, driver: Driver, protocol: Protocol
    ) -> None:
        submit([b"a"]).cancel()

        assert submit([b"a"]).status().state is State.CANCELLED
        with pytest.raises(RequestExists):
            submit([b"a", b"b"])


class Killed(BaseException):
    """The process is gone: nothing after it runs."""


class Mortal(Protocol):
    """Its process is killed at the n-th call, before or after that reached the server."""

    def __init__(self, connection: Connection, calls: int, *, is_done: bool) -> None:
        super().__init__(connection)
        do, left = self._do, [calls]

        def dying(call: Any) -> Any:
            left[0] -= 1
            if left[0] < 0 or (left[0] == 0 and not is_done):
                raise Killed
            reply = do(call)
            if left[0] == 0:
                raise Killed
            return reply

        self._do = dying


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
            driver = Driver(protocol, queue, f"{request_id}-{calls}")
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
        self, url: str, driver: Driver, protocol: Protocol, queue: str
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


def run_loader(url: str, driver: Driver, kill_after: int | None) -> None:
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


class TestAtTheSameTime:
    def test_twice_the_same_makes_one(
        self, submit: Submit, driver: Driver, protocol: Protocol, queue: str
    ) -> None:
        payloads = numbered(2_000)
        shapes: list[Callable[[list[bytes]], Iterable[bytes]]] = [list, iter, iter, list]

        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(lambda make: submit(make(payloads)).id, shapes))

        assert done == [driver.id] * 4
        assert parts_in(driver) == entries(payloads)
        assert (driver.left(), driver.meta("state")) == (2_000, "open")
        assert len(set(Worker(protocol, queue, most=500).drain())) == 2_000
        assert driver.meta("state") == "done"

    def test_of_two_with_other_payloads_one_wins_whole(
        self, client: Client, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        def attempt(driver: Driver, payloads: list[bytes], go: threading.Barrier) -> bool:
            go.wait()
            try:
                client.submit(iter(payloads), handler="h", queue=queue, id=driver.id)
            except RequestExists:
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            for n in range(10):
                driver = Driver(protocol, queue, f"{request_id}-{n}")
                rivals = [numbered(700), [b"other", *numbered(700 + 100 * (n - 5))]]
                go = threading.Barrier(2)
                won = list(pool.map(lambda p, d=driver, g=go: attempt(d, p, g), rivals))

                assert won.count(True) == 1
                assert parts_in(driver) == entries(rivals[won.index(True)])
                assert driver.meta("state") == "open"
                assert "open" in indexes(protocol, queue, driver.id)

    def test_of_two_in_other_queues_the_loser_leaves_no_trace(
        self, url: str, client: Client, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        """The one comes between the other's look and its opening."""
        other = f"{queue}-other"

        class Late(Protocol):
            def open(self, *args: Any) -> Any:
                client.submit([b"a"], handler="h", queue=queue, id=request_id)
                return super().open(*args)

        with Client(url) as outer:
            outer._protocol = Late(outer._protocol.connection)
            with pytest.raises(RequestExists):
                outer.submit([b"a"], handler="h", queue=other, id=request_id)

        assert indexes(protocol, other, request_id) == set()
        assert "open" in indexes(protocol, queue, request_id)


class TestPayloadsThatFail:
    @staticmethod
    def failing(error: Exception, after: int) -> Iterator[bytes]:
        yield from numbered(after)
        raise error

    @pytest.mark.parametrize("after", [0, 1, 1_200])
    def test_error_of_a_generator_passes_and_nothing_is_left(
        self, submit: Submit, driver: Driver, after: int
    ) -> None:
        with pytest.raises(ZeroDivisionError):
            submit(self.failing(ZeroDivisionError(), after))

        assert_is_gone(driver)

    @pytest.mark.parametrize("error", [RequestUnknown("x"), ServerUnreachable("x")])
    def test_also_when_it_looks_like_one_of_ours(
        self, submit: Submit, driver: Driver, error: Exception
    ) -> None:
        with pytest.raises(type(error), match=r"^x$"):
            submit(self.failing(error, 600))

        assert_is_gone(driver)

    def test_part_too_large_is_named_and_nothing_is_left(
        self, url: str, submit: Submit, driver: Driver, queue: str
    ) -> None:
        with pytest.raises(PartTooLarge, match="part 601 has 1048577 bytes, more than the 1048576"):
            submit([*numbered(600), b"x" * (2**20 + 1), b"more"])
        assert_is_gone(driver)

        with (
            Client(url, max_part="1KB") as strict,
            pytest.raises(PartTooLarge, match="part 1 has 1002 bytes, more than the 1000"),
        ):
            strict.submit(["x" * 1_000], handler="h", queue=queue, id=driver.id)
        assert_is_gone(driver)

    @pytest.mark.parametrize(
        "value", [object(), {1, object()}, "\ud800"], ids=["object", "set", "str"]
    )
    def test_part_that_is_no_json_is_named_and_nothing_is_left(
        self, submit: Submit, driver: Driver, value: object
    ) -> None:
        cyclic: list[Any] = []
        cyclic.append(cyclic)
        for payload in (value, cyclic):
            with pytest.raises(InvalidValue, match="part 3 cannot be written as JSON"):
                submit([b"a", b"b", payload])
            assert_is_gone(driver)

    def test_workers_may_have_begun(
        self, submit: Submit, driver: Driver, protocol: Protocol, queue: str
    ) -> None:
        def payloads() -> Iterator[bytes]:
            yield b"a"
            wait_until(driver.results)
            raise ZeroDivisionError

        with working(Worker(protocol, queue)), pytest.raises(ZeroDivisionError):
            submit(payloads())

        assert_is_gone(driver)
        assert Worker(protocol, queue).drain() == []

    def test_request_of_an_earlier_run_stays_and_can_still_be_completed(
        self, client: Client, submit: Submit, driver: Driver
    ) -> None:
        whole = client._protocol
        # It looked, registered, opened, and appended once.
        client._protocol = Mortal(whole.connection, 4, is_done=True)
        with pytest.raises(Killed):
            submit(numbered(900))
        client._protocol = whole
        assert driver.meta("total") == "500"

        with pytest.raises(ZeroDivisionError):
            submit(self.failing(ZeroDivisionError(), 850))

        assert driver.meta("state") == "loading"
        submit(numbered(900))
        assert parts_in(driver) == entries(numbered(900))

    def test_one_cancelled_meanwhile_stays_cancelled(self, submit: Submit, driver: Driver) -> None:
        def payloads() -> Iterator[bytes]:
            yield b"a"
            driver.protocol.cancel(driver.id)
            yield from numbered(10)

        with pytest.raises(RequestEnded, match="cancelled"):
            submit(payloads())

        assert driver.meta("state") == "cancelled"

    def test_interrupt_leaves_what_can_be_gone_on_with(
        self, client: Client, submit: Submit, driver: Driver, queue: str
    ) -> None:
        def payloads() -> Iterator[bytes]:
            yield from numbered(100)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            submit(payloads())
        with pytest.raises(KeyboardInterrupt):
            client.submit(payloads(), handler="h", queue=queue)

        # Without an id nobody could go on.
        assert [status.id for status in client.list(queue)] == [driver.id]
        submit(numbered(100))
        assert parts_in(driver) == entries(numbered(100))


class TestServerThatFails:
    def test_parts_lost_in_a_failover_are_submitted_again(
        self, submit: Submit, driver: Driver
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


class TestBadInput:
    NAMES = ("", "a}b", "{a", "a\n", "x" * 65, 7, b"a")

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            *(("id", value) for value in NAMES),
            *(("queue", value) for value in (*NAMES, None)),
            *(("handler", value) for value in (*NAMES, None)),
            *(("level", value) for value in (100, -1, True, 1.5, "5", None)),
            *(("limit", value) for value in (0, -1, True, 1.5, None)),
            *(("rate", value) for value in ("", "fast", "0/s", "100", "1/d", 100)),
            *(("delay", value) for value in ("soon", -1, "1y", True, 1e12)),
            *(("start_at", value) for value in ("noon", -1, True, float("nan"))),
            *(("keep", value) for value in ("for ever", -1, None)),
            *(("max_failures", value) for value in (-1, "101%", "some", 1.5, True)),
            *(("retries", value) for value in (-1, True, "3")),
            *(("backoff", value) for value in ("x", None)),
            *(("timeout", value) for value in ("x", -1)),
            *(("poison", value) for value in (0, True)),
            *(("durable", value) for value in (-1, True, 1.5)),
        ],
        ids=lambda value: repr(value)[:20],
    )
    @on_one_kind
    def test_is_refused_by_name_and_changes_nothing(
        self, submit: Submit, driver: Driver, option: str, value: Any
    ) -> None:
        named = {"id": "request id"}.get(option, option)

        with pytest.raises(InvalidValue, match=named):
            submit([b"a"], **{option: value})

        assert driver.protocol.ids(driver.queue) == []
        assert_is_gone(driver)

    @pytest.mark.parametrize("payloads", [b"abc", "abc", 7, None], ids=repr)
    @on_one_kind
    def test_payloads_that_are_not_many(
        self, submit: Submit, driver: Driver, payloads: Any
    ) -> None:
        with pytest.raises(InvalidValue, match="payloads are one"):
            submit(payloads)

        assert_is_gone(driver)

    @on_one_kind
    def test_two_times_to_start(self, submit: Submit, driver: Driver) -> None:
        with pytest.raises(InvalidValue, match="either delay or start_at"):
            submit([b"a"], delay="1s", start_at=1.0)

        assert_is_gone(driver)

    @pytest.mark.parametrize(
        "options", [{"prefix": "a}b"}, {"prefix": ""}, {"max_part": 0}, {"max_part": "x"}], ids=str
    )
    def test_client_that_cannot_be(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidValue, match=next(iter(options))):
            Client("local://", **options)


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
        self, client: Client, driver: Driver, submit: Submit, options: dict[str, Any]
    ) -> None:
        with driver.full_server(), pytest.raises(ServerFull):
            submit([b"a"], **options)

        assert_is_gone(driver)
        assert client._protocol.ids(driver.queue) == []


def test_length_that_is_wrong(submit: Submit) -> None:
    class Odd(list[bytes]):
        def __len__(self) -> int:
            return 1

    request = submit(Odd(), id=None)

    assert (request.status().state, request.status().parts.total) == (State.DONE, 0)


def test_names_out_of_an_enumeration(submit: Submit) -> None:
    class Name(str, Enum):  # noqa: UP042  people have such
        HANDLER = "resize"

    class Number(int, Enum):
        LEVEL = 7

    status = submit([b"a"], handler=Name.HANDLER, level=Number.LEVEL).status()

    assert (status.handler, status.level) == ("resize", 7)


class TestDurable:
    @pytest.mark.parametrize("kind", ["cluster"])
    def test_returns_when_the_replicas_have_it(
        self, submit: Submit, driver: Driver, queue: str
    ) -> None:
        submit(numbered(1_000), durable=1)

        for key in (driver.keys.parts, driver.keys.meta, QueueKeys(queue).open):
            assert on_replica(driver.redis, key, "EXISTS", key) == 1
        assert on_replica(driver.redis, driver.keys.parts, "XLEN", driver.keys.parts) == 1_000
        wait_until(lambda: not driver.redis.exists(driver.keys.sync))

    @pytest.mark.parametrize("kind", ["cluster"])
    @pytest.mark.parametrize("slot", ["request", "queue"])
    def test_waits_for_the_replicas_of_both_slots(
        self, submit: Submit, driver: Driver, queue: str, slot: str
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
        self, client: Client, submit: Submit, driver: Driver
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
        self, submit: Submit, driver: Driver, wanted: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("streamq.queue.submission.REPLICAS_S", 0.2)

        with pytest.raises(ServerBehind) as failure:
            submit(numbered(10), durable=wanted)

        assert f"request {driver.id} is submitted, but after 0.2 s" in str(failure.value)
        assert f"of the {wanted} replicas" in str(failure.value)
        assert parts_in(driver) == entries(numbered(10))
        assert driver.meta("state") == "open"

    def test_is_not_asked_for_unless_it_is(self, submit: Submit, driver: Driver) -> None:
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


def test_one_of_many_is_not_closed_by_who_saw_the_end_of_a_former_one(
    client: Client, protocol: Protocol, queue: str, request_id: str
) -> None:
    client.submit([], handler="h", queue=queue, id=request_id)
    score = protocol.registered(queue, request_id)
    assert score is not None
    protocol.purge(request_id, force=True)  # and a janitor is about to close it
    policy = Policy(handler="h", queue=queue)

    protocol.submit_all([(request_id, policy, "", [b"x", b"1"])])

    assert not protocol.close(queue, request_id, score, 0)
    assert protocol.ids(queue) == [request_id]
