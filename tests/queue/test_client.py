"""Following requests and steering them."""

import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from streamq import (
    Client,
    InvalidValue,
    Protocol,
    Request,
    RequestEnded,
    RequestOpen,
    RequestUnknown,
    ServerUnreachable,
    State,
    WaitTimeout,
)
from streamq.model import Failure, Part
from streamq.protocol.replies import Terms, Token
from streamq.records.encoding import encode_result
from streamq.servers.local import LocalServer
from tests.support.by_hand import Driver
from tests.support.simulated import Worker, indexes, make_due, refuse, tokens, wait_for_keys_to_go
from tests.support.waiting import wait_until

on_one_kind = pytest.mark.parametrize("kind", ["valkey"])


@pytest.fixture
def worker(protocol: Protocol, queue: str) -> Worker:
    return Worker(protocol, queue)


@pytest.fixture
def request_(client: Client, queue: str, request_id: str) -> Request:
    """A request of five parts, nothing of which has run."""
    payloads = [b"a", b"b", b"c", b"d", b"e"]
    return client.submit(payloads, handler="h", queue=queue, id=request_id, retries=3)


@pytest.fixture
def done(request_: Request, worker: Worker) -> Request:
    """The same, after its end, and closed by the janitor."""
    worker.drain()
    return request_


def finish(driver: Driver, holder: str, *numbers: int, most: int = 0) -> None:
    results = [value for n in numbers for value in (n, encode_result([b"r%d" % n]))]
    call = driver.call(holder)
    driver.protocol.finish(driver.id, holder, call, results, len(numbers), Terms(most))


def refusing(*numbers: int) -> Callable[[Part], bytes]:
    """A handler that fails for some parts."""

    def handle(part: Part) -> bytes:
        return refuse(part) if part.number in numbers else part.payload.upper()

    return handle


@contextmanager
def in_thread(do: Callable[[], Any]) -> Generator[Future[Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(do)


class TestStatus:
    def test_names_are_those_that_were_promised(self, request_: Request) -> None:
        found = msgspec.to_builtins(request_.status())

        assert " ".join(found) == (
            "id queue handler state paused level limit parts records "
            "created_ms started_ms finished_ms rate eta_s"
        )
        assert " ".join(found["parts"]) == "total waiting running retry done failed"
        assert " ".join(found["records"]) == "total done failed"

    def test_of_a_request_that_waits(self, request_: Request, queue: str) -> None:
        status = request_.status()

        assert (status.id, status.queue, status.handler) == (request_.id, queue, "h")
        assert (status.state, status.paused, status.level, status.limit) == ("open", False, 50, 8)
        assert msgspec.structs.astuple(status.parts) == (5, 5, 0, 0, 0, 0)
        assert msgspec.structs.astuple(status.records) == (5, 0, 0)
        assert abs(status.created_ms / 1e3 - time.time()) < 60
        assert (status.started_ms, status.finished_ms, status.eta_s) == (None, None, None)

    def test_of_one_that_runs(self, request_: Request, driver: Driver) -> None:
        first, _ = driver.claim(3)
        finish(driver, first, 1)
        holder, _ = driver.claim(1)
        driver.fail(holder, 2, kind="abandon")
        driver.release(holder)
        holder, _ = driver.claim(1)
        driver.fail(holder, 3, kind="retry", delay_ms=60_000)
        driver.claim(1)

        status = request_.status()

        assert msgspec.structs.astuple(status.parts) == (5, 1, 1, 1, 1, 1)
        assert msgspec.structs.astuple(status.records) == (5, 1, 1)
        assert status.started_ms is not None

    def test_parts_in_a_batch_run_one_at_a_time(self, request_: Request, driver: Driver) -> None:
        driver.claim(4)

        assert msgspec.structs.astuple(request_.status().parts) == (5, 4, 1, 0, 0, 0)

    def test_of_one_that_is_done(self, done: Request) -> None:
        status = done.status()

        assert status.state is State.DONE
        assert msgspec.structs.astuple(status.parts) == (5, 0, 0, 0, 5, 0)
        assert status.finished_ms is not None
        assert status.eta_s is None

    def test_rate_and_time_left(self, request_: Request, driver: Driver) -> None:
        holder, _ = driver.claim(2)
        finish(driver, holder, 1, 2)
        driver.set_meta(started_ms=driver.now_ms() - 1_000)

        status = request_.status()

        assert status.rate == pytest.approx(2.0, rel=0.3)
        assert status.eta_s == pytest.approx(1.5, rel=0.4)


class TestGetAndList:
    def test_get(self, client: Client, request_: Request) -> None:
        assert client.get(request_.id).status().parts.total == 5
        assert repr(request_) == f"Request({request_.id!r})"

    @on_one_kind
    def test_unknown_request(self, client: Client, protocol: Protocol) -> None:
        with pytest.raises(RequestUnknown, match="no such request"):
            client.get("nobody")
        ghost = Request(protocol, "nobody")
        for do in (
            ghost.status,
            ghost.wait,
            ghost.pause,
            ghost.resume,
            ghost.cancel,
            ghost.retry,
            ghost.purge,
            lambda: ghost.set(level=1),
            lambda: list(ghost.results()),
        ):
            with pytest.raises(RequestUnknown):
                do()
        assert ghost.errors() == []

    @pytest.mark.parametrize("name", ["", "a}b", "{a", "a\n", "x" * 65, None, 7], ids=repr)
    @on_one_kind
    def test_name_that_cannot_be(self, client: Client, name: Any) -> None:
        with pytest.raises(InvalidValue, match="request id"):
            client.get(name)
        with pytest.raises(InvalidValue, match="queue"):
            client.list(name)

    def test_list_has_those_that_run_oldest_first(
        self, client: Client, queue: str, driver: Driver
    ) -> None:
        ids = [client.submit([b"x"], handler="h", queue=queue).id for _ in range(3)]
        for n, request_id in enumerate(ids):
            key = driver.protocol.keys(request_id).meta
            driver.redis.hset(key, "created_ms", 10 - n)

        assert [status.id for status in client.list(queue)] == ids[::-1]
        assert client.list(queue, ended=True) == []
        assert client.list(f"{queue}-other") == []

    def test_one_that_has_ended_is_listed_so_at_once_and_after_the_janitor(
        self, client: Client, queue: str, request_: Request, worker: Worker
    ) -> None:
        other = client.submit([b"x"], handler="h", queue=queue, delay="1h")
        request_.cancel()

        for _ in range(2):
            assert [status.id for status in client.list(queue)] == [other.id]
            assert [status.id for status in client.list(queue, ended=True)] == [request_.id]
            worker.drain()

    def test_list_is_not_cut_short_by_a_server_that_is_gone(self) -> None:
        with LocalServer.start() as server, Client(server.url) as client:
            client.submit([b"x"], handler="h")
            ids = client._protocol.ids("default")

            class Gone(Protocol):
                def ids(self, queue: str, *, closed: bool = False) -> list[str]:
                    server.kill()
                    return ids

            client._protocol = Gone(client._protocol.connection)
            with pytest.raises(ServerUnreachable):
                client.list()


class TestWait:
    def test_for_one_that_has_ended_already(self, done: Request) -> None:
        assert done.wait(timeout=0).state is State.DONE

    def test_is_told_of_the_end(
        self, request_: Request, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("streamq.queue.request.LOOK_EVERY_S", 60)
        holder, _ = driver.claim(5)

        with in_thread(lambda: request_.wait(timeout=20)) as waiting:
            wait_until(lambda: is_heard(driver))
            begin = time.monotonic()
            finish(driver, holder, 1, 2, 3, 4, 5)
            status = waiting.result()

        assert status.state is State.DONE
        assert time.monotonic() - begin < 10

    @pytest.mark.parametrize("end", ["cancel", "fail"])
    def test_is_told_of_every_kind_of_end(
        self, client: Client, queue: str, driver: Driver, end: str
    ) -> None:
        request = client.submit([b"a"], handler="h", queue=queue, id=driver.id, max_failures=0)

        with in_thread(lambda: request.wait(timeout=20)) as waiting:
            wait_until(lambda: is_heard(driver))
            if end == "cancel":
                request.cancel()
            else:
                driver.give_up(1)
            status = waiting.result()

        assert status.state == {"cancel": State.CANCELLED, "fail": State.FAILED}[end]

    def test_finds_an_end_of_which_it_was_not_told(self, request_: Request, driver: Driver) -> None:
        with in_thread(lambda: request_.wait(timeout=20)) as waiting:
            wait_until(lambda: is_heard(driver))
            driver.set_meta(state="done", finished_ms=driver.now_ms())
            begin = time.monotonic()

            assert waiting.result().state is State.DONE
        assert time.monotonic() - begin < 5

    def test_survives_the_loss_of_its_subscription(
        self, request_: Request, driver: Driver, worker: Worker
    ) -> None:
        at = {"target_nodes": "primaries"} if hasattr(driver.redis, "get_primaries") else {}
        with in_thread(lambda: request_.wait(timeout=20)) as waiting:
            wait_until(lambda: is_heard(driver))
            for _ in range(3):
                driver.redis.execute_command("CLIENT KILL", "TYPE", "pubsub", **at)
            worker.drain()

            assert waiting.result().state is State.DONE

    @pytest.mark.parametrize("timeout", [0.2, "200ms"])
    def test_is_over_in_time(self, request_: Request, timeout: str | float) -> None:
        begin = time.monotonic()

        with pytest.raises(WaitTimeout, match=request_.id):
            request_.wait(timeout=timeout)

        assert 0.2 <= time.monotonic() - begin < 1.5
        with pytest.raises(TimeoutError):
            request_.wait(timeout=0)

    @on_one_kind
    @pytest.mark.parametrize("timeout", ["soon", -1, True], ids=repr)
    def test_time_that_cannot_be(self, request_: Request, timeout: Any) -> None:
        with pytest.raises(InvalidValue, match="timeout"):
            request_.wait(timeout=timeout)
        with pytest.raises(InvalidValue, match="timeout"):
            list(request_.results(timeout=timeout))

    def test_goes_on_over_a_restart_of_the_server_and_so_do_results(self) -> None:
        with tempfile.TemporaryDirectory(prefix="sq") as home:
            server = LocalServer.start(home, persist=True)
            try:
                client = Client(server.url)
                request = client.submit([b"a", b"b"], handler="h")
                driver = Driver(client._protocol, "default", request.id)
                finish(driver, driver.claim()[0], 1)
                read: list[tuple[int, Any]] = []
                with ThreadPoolExecutor(3) as pool:
                    waiting = pool.submit(request.wait, 30)
                    impatient = pool.submit(request.wait, 1.5)
                    reading = pool.submit(lambda: read.extend(request.results(timeout=30)))
                    wait_until(lambda: is_heard(driver, 2) and read)
                    server.kill()
                    server.stop()
                    with pytest.raises(WaitTimeout):
                        impatient.result()
                    server = LocalServer.start(home, persist=True)
                    Worker(client._protocol, "default").drain()

                    assert waiting.result().state is State.DONE
                    reading.result()
                    assert read == [(1, b"r1"), (2, b"B")]
                client.close()
            finally:
                server.stop()


def is_heard(driver: Driver, by: int = 1) -> bool:
    """Whether so many have subscribed to the request's end."""
    channel = driver.keys.events
    at: dict[str, Any] = {}
    if hasattr(driver.redis, "get_node_from_key"):
        at = {"target_nodes": driver.redis.get_node_from_key(channel)}
    [(_, count)] = driver.redis.execute_command("PUBSUB SHARDNUMSUB", channel, **at)
    return bool(count == by)


class TestResults:
    def test_come_in_input_order_while_it_runs(self, request_: Request, driver: Driver) -> None:
        results = request_.results(timeout=5)
        holders = [driver.claim()[0] for _ in range(5)]

        finish(driver, holders[0], 1)
        assert next(results) == (1, b"r1")
        finish(driver, holders[2], 3)
        finish(driver, holders[1], 2)
        assert [next(results), next(results)] == [(2, b"r2"), (3, b"r3")]
        assert request_.status().state is State.OPEN
        finish(driver, holders[4], 5)
        finish(driver, holders[3], 4)

        assert list(results) == [(4, b"r4"), (5, b"r5")]

    def test_come_while_it_loads(
        self, client: Client, queue: str, driver: Driver, worker: Worker
    ) -> None:
        seen: list[tuple[int, Any]] = []

        def payloads() -> Iterator[bytes]:
            yield b"a"
            wait_until(lambda: worker.step())
            seen.append(next(client.get(driver.id).results(timeout=5)))
            yield b"b"

        client.submit(payloads(), handler="h", queue=queue, id=driver.id)

        assert seen == [(1, b"A")]

    def test_parts_that_failed_have_none(
        self, request_: Request, protocol: Protocol, queue: str, driver: Driver
    ) -> None:
        results = request_.results(timeout=5)
        driver.give_up(1)
        holder, _ = driver.claim(1)
        finish(driver, holder, 2)
        assert next(results) == (2, b"r2")

        Worker(protocol, queue, refusing(4)).drain()

        assert list(results) == [(3, b"C"), (5, b"E")]

    def test_end_with_a_request_that_was_cancelled(self, request_: Request, driver: Driver) -> None:
        holder, _ = driver.claim(2)
        finish(driver, holder, 2)
        request_.cancel()

        assert list(request_.results(timeout=5)) == [(2, b"r2")]

    def test_thousands_and_large_ones(self, client: Client, protocol: Protocol, queue: str) -> None:
        request = client.submit([b"%d" % n for n in range(1_600)], handler="h", queue=queue)
        Worker(protocol, queue, lambda part: part.payload * 2_000, most=200).drain()

        results = list(request.results())

        assert results == [(n + 1, b"%d" % n * 2_000) for n in range(1_600)]
        assert list(request.results()) == results

    def test_nothing_new_for_too_long(self, request_: Request) -> None:
        begin = time.monotonic()

        with pytest.raises(WaitTimeout, match=r"no result for 0\.2 s"):
            list(request_.results(timeout=0.2))

        assert 0.2 <= time.monotonic() - begin < 1.5

    def test_what_retries_yielded_comes_after_the_others_each_after_the_last(
        self, request_: Request, protocol: Protocol, queue: str
    ) -> None:
        for fail in [(1, 2, 4), (1, 2), *[(1,)] * 10]:
            Worker(protocol, queue, refusing(*fail)).drain()
            assert request_.retry() == len(fail)
        Worker(protocol, queue).drain()

        first = [(3, b"C"), (5, b"E")]
        assert list(request_.results()) == [*first, (4, b"D"), (2, b"B"), (1, b"A")]

    def test_also_of_a_retry_while_it_runs(
        self, request_: Request, driver: Driver, worker: Worker
    ) -> None:
        driver.give_up(1)

        assert request_.retry() == 1
        worker.drain()

        assert list(request_.results()) == [(n, b"ABCDE"[n - 1 : n]) for n in (2, 3, 4, 5, 1)]

    def test_errors_are_sorted_by_part(
        self, request_: Request, protocol: Protocol, queue: str, driver: Driver
    ) -> None:
        for number in (5, 4, 3, 2, 1):
            driver.redis.hset(
                driver.keys.failed, number, msgspec.json.encode([Failure(error=f"E{number}")])
            )
        assert [e.error for e in request_.errors()] == ["E1", "E2", "E3", "E4", "E5"]
        driver.redis.unlink(driver.keys.failed)

        Worker(protocol, queue, refusing(2, 4)).drain()

        assert request_.errors() == [
            Failure(error="ValueError", message=f"no {n}", part=n, attempts=1) for n in (2, 4)
        ]
        assert request_.wait().parts.failed == 2


class TestSteering:
    def test_pause_and_resume(
        self, request_: Request, driver: Driver, protocol: Protocol, queue: str, worker: Worker
    ) -> None:
        request_.pause()

        assert request_.status().paused
        assert driver.claim()[1].word == "paused"
        worker.drain()
        assert worker.ran == []
        request_.resume()
        assert len(tokens(protocol, queue)) == 5
        assert not request_.status().paused
        worker.drain()
        assert request_.wait(timeout=5).state is State.DONE

    def test_set_of_the_level_moves_it_in_the_queue(
        self, request_: Request, protocol: Protocol, queue: str
    ) -> None:
        request_.set(level=7)

        assert request_.status().level == 7
        taken = [protocol.take(queue, ("h",), 0.01) for _ in range(5)]
        assert taken == [Token(request_.id, "h", 7)] * 5

    def test_set_of_the_limit_counts_at_once(
        self, request_: Request, driver: Driver, protocol: Protocol, queue: str
    ) -> None:
        request_.set(limit=1)
        driver.claim()
        assert driver.claim()[1].word == "limit"
        while protocol.take(queue, ("h",), 0.01):
            driver.claim(level=50)

        request_.set(limit=3)

        assert len(tokens(protocol, queue)) == 2
        assert [driver.claim()[1].word for _ in range(3)] == ["ok", "ok", "limit"]

    def test_set_of_the_rate(self, request_: Request, driver: Driver) -> None:
        request_.set(rate="1/h")
        assert [driver.claim()[1].word for _ in range(2)] == ["ok", "held"]

        request_.set(rate="off")

        assert driver.claim()[1].word == "ok"

    @pytest.mark.parametrize(
        "option",
        [{"level": 100}, {"level": True}, {"limit": 0}, {"limit": 1.5}, {"rate": "x"}, {"rate": 0}],
        ids=str,
    )
    @on_one_kind
    def test_set_of_what_cannot_be(
        self, request_: Request, driver: Driver, option: dict[str, Any]
    ) -> None:
        before = driver.snapshot()

        with pytest.raises(InvalidValue, match=next(iter(option))):
            request_.set(**option)

        assert driver.snapshot() == before

    def test_cancel(self, request_: Request, driver: Driver, worker: Worker) -> None:
        holder, _ = driver.claim(3)
        finish(driver, holder, 1, 2, most=1)

        assert request_.cancel() == 3

        assert request_.cancel() == 3
        status = request_.wait(timeout=0)
        assert (status.state, status.parts.running, status.parts.done) == ("cancelled", 0, 2)
        assert worker.drain() == []

    def test_what_has_ended_cannot_be_steered(self, done: Request, driver: Driver) -> None:
        before = driver.snapshot()

        for do in (done.pause, done.resume, done.cancel, lambda: done.set(level=1)):
            with pytest.raises(RequestEnded, match="is done"):
                do()

        assert driver.snapshot() == before

    def test_retry_runs_what_failed(
        self, request_: Request, protocol: Protocol, queue: str, worker: Worker
    ) -> None:
        Worker(protocol, queue, refusing(2, 4)).drain()
        assert indexes(protocol, queue, request_.id) == {"closed"}

        assert request_.retry() == 2

        assert request_.status().state is State.OPEN
        assert indexes(protocol, queue, request_.id) == {"open", "due"}
        assert sorted(worker.drain()) == [(request_.id, 2), (request_.id, 4)]
        status = request_.wait(timeout=5)
        assert (status.state, status.parts.done, status.parts.failed) == ("done", 5, 0)
        assert request_.errors() == []

    def test_retry_of_thousands(self, client: Client, protocol: Protocol, queue: str) -> None:
        request = client.submit([b"x"] * 1_200, handler="h", queue=queue, limit=1)
        Worker(protocol, queue, refuse).drain()
        assert request.status().parts.failed == 1_200

        assert request.retry() == 1_200

        assert len(Worker(protocol, queue).drain()) == 1_200
        assert request.status().state is State.DONE

    def test_retry_of_a_request_that_failed_early_runs_the_rest_too(
        self, client: Client, protocol: Protocol, queue: str, driver: Driver
    ) -> None:
        request = client.submit(
            [b"a", b"b", b"c"], handler="h", queue=queue, id=driver.id, max_failures=0
        )
        driver.give_up(1)
        assert request.wait(timeout=0).state is State.FAILED

        assert request.retry() == 1

        assert sorted(Worker(protocol, queue).drain()) == [(request.id, n) for n in (1, 2, 3)]
        assert request.status().state is State.DONE

    def test_retry_of_nothing_changes_nothing(
        self, done: Request, protocol: Protocol, queue: str, worker: Worker
    ) -> None:
        before = done.status()

        assert done.retry() == 0

        assert done.status() == before
        assert worker.drain() == []
        assert indexes(protocol, queue, done.id) == {"closed"}

    def test_retry_of_what_was_cancelled(
        self, request_: Request, protocol: Protocol, queue: str, worker: Worker
    ) -> None:
        request_.cancel()

        with pytest.raises(RequestEnded, match="cancelled"):
            request_.retry()

        worker.drain()
        assert indexes(protocol, queue, request_.id) == {"closed"}


class TestPurge:
    @pytest.mark.parametrize("is_closed", [False, True])
    def test_leaves_nothing_and_the_id_is_free(
        self,
        client: Client,
        request_: Request,
        protocol: Protocol,
        queue: str,
        worker: Worker,
        is_closed: bool,
    ) -> None:
        request_.cancel()
        if is_closed:
            worker.drain()

        request_.purge()

        wait_for_keys_to_go(protocol, request_.id)
        assert indexes(protocol, queue, request_.id) == set()
        with pytest.raises(RequestUnknown):
            request_.status()
        assert client.list(queue, ended=True) == []
        again = client.submit([b"other"], handler="h2", queue=queue, id=request_.id)
        assert again.status().parts.total == 1

    def test_of_a_live_request_is_refused_and_changes_nothing(
        self, request_: Request, driver: Driver, protocol: Protocol, queue: str
    ) -> None:
        before = driver.snapshot()

        with pytest.raises(RequestOpen, match="is open"):
            request_.purge()

        assert driver.snapshot() == before
        assert indexes(protocol, queue, request_.id) == {"open", "due"}

    def test_one_registered_anew_meanwhile_stays_in_the_index(
        self, url: str, client: Client, request_: Request, protocol: Protocol, queue: str
    ) -> None:
        class Slow(Protocol):
            def close(self, *args: Any) -> bool:
                client.submit([b"new"], handler="h", queue=queue, id=request_.id)
                return super().close(*args)

        request_.cancel()

        Request(Slow(protocol.connection), request_.id).purge()

        assert client.get(request_.id).status().parts.total == 1
        assert indexes(protocol, queue, request_.id) == {"open", "due"}

    @pytest.mark.parametrize("keep", ["1ms", 0, 0.001])
    def test_comes_by_itself_after_the_retention(
        self, client: Client, protocol: Protocol, queue: str, worker: Worker, keep: str | float
    ) -> None:
        request = client.submit([b"a", b"b"], handler="h", queue=queue, keep=keep)
        while worker.step():
            pass
        assert request.wait(timeout=5).state is State.DONE

        def is_swept() -> bool:
            worker.sweep()
            return not indexes(protocol, queue, request.id)

        wait_until(is_swept)

        wait_for_keys_to_go(protocol, request.id)
        assert tokens(protocol, queue) == []
        with pytest.raises(RequestUnknown):
            request.wait(timeout=5)

    def test_does_not_come_before(self, done: Request, protocol: Protocol, queue: str) -> None:
        make_due(protocol, queue)
        Worker(protocol, queue).drain()

        assert done.status().parts.done == 5
        assert indexes(protocol, queue, done.id) == {"closed"}


@on_one_kind
def test_a_client_can_be_shared_by_threads(client: Client, protocol: Protocol, queue: str) -> None:
    def run(n: int) -> list[tuple[int, Any]]:
        request = client.submit([b"%d" % n] * 20, handler="h", queue=queue)
        request.wait(timeout=20)
        return list(request.results())

    stop = threading.Event()

    def work() -> None:
        worker = Worker(protocol, queue)
        while not stop.is_set():
            worker.step(0.05)

    with ThreadPoolExecutor(10) as pool:
        workers = [pool.submit(work) for _ in range(2)]
        found = list(pool.map(run, range(8)))
        stop.set()
        for each in workers:
            each.result()

    assert found == [[(k, b"%d" % n) for k in range(1, 21)] for n in range(8)]
