"""Putting the parts of a request into the server: while they run, again, at once, and badly."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

import pytest

from streamq import (
    Client,
    InvalidValue,
    PartTooLarge,
    Protocol,
    RequestEnded,
    RequestExists,
    RequestUnknown,
    ServerUnreachable,
    State,
)
from streamq.model import Policy
from streamq.protocol.keys import QueueKeys
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
from tests.support.simulated import Worker, indexes, tokens, working
from tests.support.waiting import wait_until

on_one_kind = pytest.mark.parametrize("kind", ["valkey"])


def state_of(driver: RequestByHand) -> dict[str, Any]:
    """Everything the server has of the request, to see that nothing changed."""
    redis, keys = driver.redis, QueueKeys(driver.queue)
    indexed = {key: redis.zscore(key, driver.id) for key in (keys.open, keys.due, keys.closed)}
    return {**driver.snapshot(), **indexed, "tokens": tokens(driver.protocol, driver.queue)}


class TestStreaming:
    def test_first_part_is_finished_before_the_second_is_made(
        self, submit: Submit, protocol: Protocol, queue: str, driver: RequestByHand
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
        self, submit: Submit, protocol: Protocol, queue: str, driver: RequestByHand
    ) -> None:
        def payloads() -> Iterator[bytes]:
            yield from numbered(3_000)[:2_000]
            wait_until(driver.results)
            yield from numbered(3_000)[2_000:]

        with working(Worker(protocol, queue)):
            status = submit(payloads()).wait(timeout=10)

        assert (status.state, status.parts.done, status.records.done) == (State.DONE, 3_000, 3_000)

    def test_request_does_not_end_while_more_may_come(
        self, submit: Submit, protocol: Protocol, queue: str, driver: RequestByHand
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
        self, submit: Submit, driver: RequestByHand, payloads: Iterable[bytes]
    ) -> None:
        with driver.published() as published:
            status = submit(payloads).status()

        assert (status.state, status.parts.total, status.finished_ms is None) == ("done", 0, False)
        assert published == ["done"]

    def test_payloads_are_bytes_as_they_are_and_else_json(
        self, submit: Submit, driver: RequestByHand
    ) -> None:
        submit([b"\xff\0", "text", {"a": [1, None]}, 7, b""])

        payloads = [payload for _, payload in parts_in(driver)]
        assert payloads == [b"\xff\0", b'"text"', b'{"a":[1,null]}', b"7", b""]

    @on_one_kind
    def test_calls_stay_small_whatever_the_parts(
        self, client: Client, submit: Submit, driver: RequestByHand
    ) -> None:
        calls: list[tuple[int, int]] = []

        class Counting(Protocol):
            def append(self, *args: Any) -> Any:
                calls.append((args[4], sum(len(value) for value in args[5])))
                return super().append(*args)

        client._protocol = Counting(client._protocol.connection)

        submit([b"x" * size for size in [1] * 1_200 + [700_000] * 4])

        assert sum(parts for parts, _ in calls) == 1_204
        assert max(parts for parts, _ in calls) <= 500
        assert max(size for _, size in calls) < 2 * 2**20


class TestAgain:
    @pytest.mark.parametrize("count", [0, 3, 1_200])
    def test_same_submission_makes_no_second_request(
        self, submit: Submit, driver: RequestByHand, count: int
    ) -> None:
        submit(numbered(count))
        before = state_of(driver)

        request = submit(iter(numbered(count)), delay="1s")

        assert request.id == driver.id
        assert state_of(driver) == before

    def test_nor_does_it_after_the_end(
        self, submit: Submit, driver: RequestByHand, protocol: Protocol, queue: str
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
        driver: RequestByHand,
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
        self, submit: Submit, driver: RequestByHand, protocol: Protocol, option: dict[str, Any]
    ) -> None:
        submit([b"a"])
        before = state_of(driver)

        with pytest.raises(RequestExists, match="other options"):
            submit([b"a"], **option)

        assert state_of(driver) == before
        assert indexes(protocol, "other", driver.id) == set()

    def test_one_that_was_cancelled_is_not_begun_anew(
        self, submit: Submit, driver: RequestByHand, protocol: Protocol
    ) -> None:
        submit([b"a"]).cancel()

        assert submit([b"a"]).status().state is State.CANCELLED
        with pytest.raises(RequestExists):
            submit([b"a", b"b"])


class TestAtTheSameTime:
    def test_twice_the_same_makes_one(
        self, submit: Submit, driver: RequestByHand, protocol: Protocol, queue: str
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
        def attempt(driver: RequestByHand, payloads: list[bytes], go: threading.Barrier) -> bool:
            go.wait()
            try:
                client.submit(iter(payloads), handler="h", queue=queue, id=driver.id)
            except RequestExists:
                return False
            return True

        with ThreadPoolExecutor(2) as pool:
            for n in range(10):
                driver = RequestByHand(protocol, queue, f"{request_id}-{n}")
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
        self, submit: Submit, driver: RequestByHand, after: int
    ) -> None:
        with pytest.raises(ZeroDivisionError):
            submit(self.failing(ZeroDivisionError(), after))

        assert_is_gone(driver)

    @pytest.mark.parametrize("error", [RequestUnknown("x"), ServerUnreachable("x")])
    def test_also_when_it_looks_like_one_of_ours(
        self, submit: Submit, driver: RequestByHand, error: Exception
    ) -> None:
        with pytest.raises(type(error), match=r"^x$"):
            submit(self.failing(error, 600))

        assert_is_gone(driver)

    def test_part_too_large_is_named_and_nothing_is_left(
        self, url: str, submit: Submit, driver: RequestByHand, queue: str
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
        self, submit: Submit, driver: RequestByHand, value: object
    ) -> None:
        cyclic: list[Any] = []
        cyclic.append(cyclic)
        for payload in (value, cyclic):
            with pytest.raises(InvalidValue, match="part 3 cannot be written as JSON"):
                submit([b"a", b"b", payload])
            assert_is_gone(driver)

    def test_workers_may_have_begun(
        self, submit: Submit, driver: RequestByHand, protocol: Protocol, queue: str
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
        self, client: Client, submit: Submit, driver: RequestByHand
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

    def test_one_cancelled_meanwhile_stays_cancelled(
        self, submit: Submit, driver: RequestByHand
    ) -> None:
        def payloads() -> Iterator[bytes]:
            yield b"a"
            driver.protocol.cancel(driver.id)
            yield from numbered(10)

        with pytest.raises(RequestEnded, match="cancelled"):
            submit(payloads())

        assert driver.meta("state") == "cancelled"

    def test_interrupt_leaves_what_can_be_gone_on_with(
        self, client: Client, submit: Submit, driver: RequestByHand, queue: str
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


class TestBadInput:
    def test_a_dict_of_which_only_the_keys_would_go(self, submit: Submit) -> None:
        with pytest.raises(InvalidValue, match="one dict, of which only the keys would be"):
            submit({"a": 1, "b": 2})

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
        self, submit: Submit, driver: RequestByHand, option: str, value: Any
    ) -> None:
        named = {"id": "request id"}.get(option, option)

        with pytest.raises(InvalidValue, match=named):
            submit([b"a"], **{option: value})

        assert driver.protocol.ids(driver.queue) == []
        assert_is_gone(driver)

    @pytest.mark.parametrize("payloads", [b"abc", "abc", 7, None], ids=repr)
    @on_one_kind
    def test_payloads_that_are_not_many(
        self, submit: Submit, driver: RequestByHand, payloads: Any
    ) -> None:
        with pytest.raises(InvalidValue, match="payloads are one"):
            submit(payloads)

        assert_is_gone(driver)

    @on_one_kind
    def test_two_times_to_start(self, submit: Submit, driver: RequestByHand) -> None:
        with pytest.raises(InvalidValue, match="either delay or start_at"):
            submit([b"a"], delay="1s", start_at=1.0)

        assert_is_gone(driver)

    @pytest.mark.parametrize(
        "options", [{"prefix": "a}b"}, {"prefix": ""}, {"max_part": 0}, {"max_part": "x"}], ids=str
    )
    def test_client_that_cannot_be(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidValue, match=next(iter(options))):
            Client("local://", **options)


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


def test_one_of_many_is_not_closed_by_a_janitor_that_saw_the_end_of_a_former_one(
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
