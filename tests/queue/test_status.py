"""What the client tells of a request, and which requests it finds."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from streamq import (
    Client,
    InvalidValue,
    Protocol,
    Request,
    RequestUnknown,
    ServerUnreachable,
    State,
)
from streamq.queue.options import policy_of_options
from streamq.servers.local import LocalServer
from tests.queue.common import finish
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker

on_one_kind = pytest.mark.parametrize("kind", ["valkey"])


class TestStatus:
    def test_names_are_those_that_were_promised(self, request_: Request) -> None:
        found = msgspec.to_builtins(request_.status())

        assert " ".join(found) == (
            "id queue handler state paused level limit parts records "
            "created_ms started_ms finished_ms rate eta_s labels held_until_ms rate_limit "
            "max_failures max_percent retried results keep_ms weight "
            "canary waits_for_release deadline_ms reason callbacks"
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

    def test_of_one_that_runs(self, request_: Request, driver: RequestByHand) -> None:
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

    def test_parts_in_a_batch_run_one_at_a_time(
        self, request_: Request, driver: RequestByHand
    ) -> None:
        driver.claim(4)

        assert msgspec.structs.astuple(request_.status().parts) == (5, 4, 1, 0, 0, 0)

    def test_of_one_that_is_done(self, done: Request) -> None:
        status = done.status()

        assert status.state is State.DONE
        assert msgspec.structs.astuple(status.parts) == (5, 0, 0, 0, 5, 0)
        assert status.finished_ms is not None
        assert status.eta_s is None

    def test_rate_and_time_left(self, request_: Request, driver: RequestByHand) -> None:
        holder, _ = driver.claim(2)
        finish(driver, holder, 1, 2)
        driver.set_meta(started_ms=driver.now_ms() - 1_000)

        status = request_.status()

        assert status.rate == pytest.approx(2.0, rel=0.3)
        assert status.eta_s == pytest.approx(1.5, rel=0.4)


class TestForPrograms:
    def test_a_status_as_plain_values(self, request_: Request) -> None:
        told = request_.status().to_dict()

        assert json.loads(json.dumps(told)) == told
        assert dict(request_.status()) == told, "which is how FastAPI makes JSON of a value"
        assert (told["id"], told["state"], told["parts"]["total"]) == (request_.id, "open", 5)

    @on_one_kind
    def test_a_client_says_where_it_is_connected(self, url: str) -> None:
        with Client(url) as plain, Client(url, prefix="mine") as other:
            assert repr(plain) == f"Client('{url}')"
            assert repr(other) == f"Client('{url}', prefix='mine')"


class TestLabels:
    def test_are_kept_with_the_request(self, client: Client, queue: str, request_id: str) -> None:
        labels = {"user": "62", "note": 'für "x"'}
        for payloads, id_ in (([b"a"], None), ([b"a"], request_id)):  # in one call, and in several
            request = client.submit(payloads, handler="h", queue=queue, id=id_, labels=labels)

            assert request.status().labels == labels

    def test_do_not_tell_one_submission_from_another(
        self, client: Client, queue: str, request_id: str
    ) -> None:
        client.submit([b"a"], handler="h", queue=queue, id=request_id, labels={"job": "1"})
        again = client.submit([b"a"], handler="h", queue=queue, id=request_id, labels={"job": "2"})
        without = client.submit([b"a"], handler="h", queue=queue, id=request_id)

        assert again.status().labels == without.status().labels == {"job": "1"}

    def test_a_policy_without_labels_is_told_as_before_there_were_any(self) -> None:
        assert policy_of_options(handler="h").digest == "a09cb257224947c053194f9ad08a9225"

    def test_that_are_refused_submit_nothing(
        self, client: Client, queue: str, request_id: str
    ) -> None:
        with pytest.raises(InvalidValue, match="user is 62, which is no text"):
            client.submit(
                [b"a"],
                handler="h",
                queue=queue,
                id=request_id,
                labels={"user": 62},  # type: ignore[dict-item]
            )
        with pytest.raises(RequestUnknown):
            client.get(request_id)


class TestGetAndList:
    def test_one_that_is_not_there_is_named(self, client: Client, request_id: str) -> None:
        with pytest.raises(
            RequestUnknown, match=f"^{request_id}: no such request, or it was purged"
        ):
            client.get(request_id)

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
        self, client: Client, queue: str, driver: RequestByHand
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
