"""Many requests in few round trips: each is one by itself all the same."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamq import (
    AsyncClient,
    Client,
    InvalidValue,
    PartlySubmitted,
    PartTooLarge,
    Protocol,
    RequestExists,
    RequestUnknown,
    ServerFull,
    ServerUnreachable,
    Start,
    State,
)
from streamq.driver.connection import Connection
from tests.support.simulated import Worker, indexes, tokens

Send = Callable[..., Any]


@pytest.fixture
def send(client: Client, queue: str) -> Send:
    """Submit many requests to the test's queue."""

    def send(requests: Any, **options: Any) -> Any:
        return client.submit_many(requests, **{"handler": "h", "queue": queue, **options})

    return send


@pytest.fixture
def ids(request_id: str) -> list[str]:
    return [f"{request_id}-{number}" for number in range(5)]


def results(request: Any) -> list[Any]:
    return [result for _, result in request.results()]


class TestNew:
    def test_each_runs(self, send: Send, protocol: Protocol, queue: str, ids: list[str]) -> None:
        sent = send({each: [b"a", b"b"] for each in ids}, labels={"user": "62"})
        Worker(protocol, queue).drain()

        assert [each.id for each in sent] == ids
        assert [each.status().state for each in sent] == [State.DONE] * 5
        assert [results(each) for each in sent] == [[b"A", b"B"]] * 5
        assert sent[4].status().labels == {"user": "62"}

    def test_each_gets_an_id(self, send: Send, protocol: Protocol, queue: str) -> None:
        sent = send([[b"a"], (b"b", "c")])
        Worker(protocol, queue).drain()

        assert len({each.id for each in sent}) == 2
        assert [each.status().parts.done for each in sent] == [1, 2]

    def test_they_are_registered_and_have_a_token_each(
        self, send: Send, protocol: Protocol, queue: str, ids: list[str]
    ) -> None:
        send({each: [b"a"] for each in ids})

        assert protocol.ids(queue) == ids
        assert sorted(tokens(protocol, queue)) == ids

    def test_none_has_a_token_before_its_time(
        self, send: Send, protocol: Protocol, queue: str, ids: list[str]
    ) -> None:
        sent = send({each: [b"a"] for each in ids}, delay="1h")

        assert tokens(protocol, queue) == []
        assert protocol.tick(queue).wait_ms >= 0
        assert all(each.status().state is State.OPEN for each in sent)

    def test_what_cannot_go_with_others(
        self, send: Send, protocol: Protocol, queue: str, ids: list[str]
    ) -> None:
        def made() -> Iterator[bytes]:
            yield from (b"x", b"y")

        none, many, iterator, small, large = ids
        sent = send(
            {
                none: [],
                many: [b"m"] * 700,
                iterator: made(),
                small: [b"s"],
                large: [b"l" * 700_000] * 2,
            }
        )
        Worker(protocol, queue).drain()

        assert [each.status().parts.done for each in sent] == [0, 700, 2, 1, 2]
        assert [each.id for each in sent] == ids

    def test_callbacks(self, send: Send, protocol: Protocol, queue: str, ids: list[str]) -> None:
        sent = send({each: [b"a"] for each in ids}, then=Start(handler="told"))

        assert all(each.status().state is State.OPEN for each in sent)
        assert protocol.inspect(ids[0]).known_count("owes") > 0

    def test_more_than_go_together(self, send: Send, protocol: Protocol, queue: str) -> None:
        sent = send([[b"a"]] * 450)
        Worker(protocol, queue).drain()

        assert len({each.id for each in sent}) == 450
        assert all(each.status().state is State.DONE for each in sent[::50])


class TestAgain:
    def test_makes_none_twice(
        self, send: Send, protocol: Protocol, queue: str, ids: list[str]
    ) -> None:
        given = {each: [b"a", b"b"] for each in ids}
        send(given)
        Worker(protocol, queue).drain()
        before = [protocol.inspect(each).known_count("created_ms") for each in ids]

        sent = send(given)

        assert [each.status().parts.done for each in sent] == [2] * 5
        assert [protocol.inspect(each).known_count("created_ms") for each in ids] == before
        # A janitor would count their end a second time.
        assert all(indexes(protocol, queue, each) == {"closed"} for each in ids)

    def test_submits_what_is_missing(
        self, send: Send, client: Client, protocol: Protocol, queue: str, ids: list[str]
    ) -> None:
        first, cut_short, *_ = ids
        client.submit([b"a"], handler="h", queue=queue, id=first)

        class Cut(BaseException):
            pass

        def killed() -> Iterator[bytes]:
            yield b"a"
            raise Cut

        with pytest.raises(Cut):
            client.submit(killed(), handler="h", queue=queue, id=cut_short)

        sent = send({each: [b"a"] for each in ids})
        Worker(protocol, queue).drain()

        assert [each.status().state for each in sent] == [State.DONE] * 5

    def test_of_another_process_at_the_same_time(
        self,
        send: Send,
        client: Client,
        protocol: Protocol,
        queue: str,
        ids: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It came between our look and our call, was in pieces, and died before it sealed."""
        submit_apart = client.protocol.submit_apart

        def late(policy: Any, requests: Any) -> Any:
            request_id, cursor, entries = requests[0]
            protocol.register_all([(request_id, queue)])
            protocol.open(request_id, policy.digest, policy)
            protocol.append(request_id, 1, "", cursor, 1, entries)
            return submit_apart(policy, requests)

        monkeypatch.setattr(client.protocol, "submit_apart", late)
        sent = send({each: [b"a"] for each in ids})
        Worker(protocol, queue).drain()

        assert [each.status().state for each in sent] == [State.DONE] * 5

    def test_after_a_lost_answer_it_has_a_token(
        self,
        send: Send,
        client: Client,
        protocol: Protocol,
        queue: str,
        ids: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        do_apart = client.protocol._do_apart

        def lost(calls: Any) -> Any:
            found = do_apart(calls)
            if calls[0].script == "submit":
                raise ServerUnreachable("it answered, and nobody heard it")
            return found

        monkeypatch.setattr(client.protocol, "_do_apart", lost)
        send({each: [b"a"] for each in ids})

        assert sorted(tokens(protocol, queue)) == ids


class TestInPart:
    def test_says_which_and_why(
        self, send: Send, client: Client, protocol: Protocol, queue: str, ids: list[str]
    ) -> None:
        client.submit([b"other"], handler="h", queue=queue, id=ids[1])
        given: dict[str, Any] = {each: [b"a"] for each in ids}
        given[ids[3]] = [object()]

        with pytest.raises(PartlySubmitted) as caught:
            send(given)

        error = caught.value
        assert list(error.requests) == [ids[0], ids[2], ids[4]]
        assert isinstance(error.errors[ids[1]], RequestExists)
        assert isinstance(error.errors[ids[3]], InvalidValue)
        assert "2 of 5 requests were not submitted" in str(error)
        Worker(protocol, queue).drain()
        assert error.requests[ids[4]].status().state is State.DONE

    def test_leaves_nothing_of_those_refused(
        self,
        client: Client,
        send: Send,
        protocol: Protocol,
        queue: str,
        ids: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The server has no room for the parts."""
        do_apart = client.protocol._do_apart

        def full(calls: Any) -> Any:
            asked = [call.keys.id for call in calls]
            if calls[0].script != "submit" or ids[2] not in asked:
                return do_apart(calls)
            at = asked.index(ids[2])
            others = [*calls[:at], *calls[at + 1 :]]
            found = do_apart(others) if others else []
            return [*found[:at], ServerFull("no room"), *found[at:]]

        monkeypatch.setattr(client.protocol, "_do_apart", full)
        with pytest.raises(PartlySubmitted) as caught:
            send({each: [b"a"] for each in ids})

        assert list(caught.value.errors) == [ids[2]]
        assert ids[2] not in protocol.ids(queue)
        assert tokens(protocol, queue).count(ids[2]) == 0

    def test_too_large_a_part(self, send: Send, ids: list[str]) -> None:
        with pytest.raises(PartlySubmitted) as caught:
            send({ids[0]: [b"x" * (2**26 + 1)], ids[1]: [b"a"]})

        assert isinstance(caught.value.errors[ids[0]], PartTooLarge)
        assert list(caught.value.requests) == [ids[1]]

    def test_server_away_is_waited_for_once(
        self, send: Send, client: Client, ids: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def away(*_: Any) -> Any:
            asked.append(1)
            raise ServerUnreachable("nobody there")

        monkeypatch.setattr(client.protocol, "_do_apart", away)
        monkeypatch.setattr(client.protocol, "_do", away)
        with pytest.raises(PartlySubmitted) as caught:
            send([[b"a"]] * 450)

        assert len(caught.value.errors) == 450
        assert len(asked) <= 4


class TestRefused:
    @pytest.mark.parametrize(
        "options", [{"durable": 1}, {"id": "x"}, {"levle": 3}, {"level": 100}, {"handler": ""}]
    )
    def test_options(self, send: Send, protocol: Protocol, queue: str, options: Any) -> None:
        with pytest.raises(InvalidValue):
            send([[b"a"]], **options)

        assert protocol.ids(queue) == []

    @pytest.mark.parametrize("requests", ["text", b"bytes", 7])
    def test_no_requests(self, send: Send, requests: Any) -> None:
        with pytest.raises(InvalidValue, match="give a list"):
            send(requests)

    def test_none_at_all(self, send: Send) -> None:
        assert send([]) == []

    def test_id(self, send: Send, protocol: Protocol, queue: str) -> None:
        with pytest.raises(InvalidValue):
            send({"fine": [b"a"], "not fine": [b"a"]})

        assert protocol.ids(queue) == []


class TestCost:
    def test_round_trips(
        self, send: Send, client: Client, ids: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if client.protocol.connection.is_cluster:
            pytest.skip("there it is three to each node")
        send([[b"a"]])  # scripts are loaded
        trips: list[int] = []
        call_all = Connection.call_all
        call = Connection.call

        def counted(self: Connection, calls: Any) -> Any:
            trips.append(1)
            return call_all(self, calls)

        def counted_one(self: Connection, *words: Any) -> Any:
            trips.append(1)
            return call(self, *words)

        monkeypatch.setattr(Connection, "call_all", counted)
        monkeypatch.setattr(Connection, "call", counted_one)
        send([[b"a"]] * 200)

        assert len(trips) == 3


def test_async(url: str, protocol: Protocol, queue: str, ids: list[str]) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            given: dict[str, Any] = {each: [b"a"] for each in ids}
            sent = await client.submit_many(given, handler="h", queue=queue)
            assert [each.id for each in sent] == ids
            with pytest.raises(PartlySubmitted) as caught:
                await client.submit_many(
                    {ids[0]: [b"other"], ids[1]: [b"a"]}, handler="h", queue=queue
                )
            assert (await caught.value.requests[ids[1]].status()).parts.total == 1

    asyncio.run(main())
    with pytest.raises(RequestUnknown):
        protocol.inspect(f"{ids[0]}-none")
