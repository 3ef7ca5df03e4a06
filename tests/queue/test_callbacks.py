"""Callbacks: what is started when a request has ended, once, whoever dies when."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from streamq import (
    Client,
    InvalidValue,
    Janitor,
    Protocol,
    Request,
    RequestExists,
    RequestOpen,
    RequestUnknown,
    Start,
    State,
    SubmissionLate,
    Webhook,
)
from streamq.protocol.keys import QueueKeys
from streamq.queue import starting_callbacks
from streamq.queue.starting_callbacks import FENCE_MS, settle_callbacks
from tests.support.by_hand import HOUR_MS, RequestByHand
from tests.support.simulated import Ran, Worker, make_due, refuse


@pytest.fixture
def parent(client: Client, queue: str, request_id: str) -> Request:
    """Two parts, and a callback for each event."""
    return client.submit(
        [b"x", b"y"], handler="h", queue=queue, id=request_id,
        then="h", on_failure=Start(handler="h"), finally_=Start(handler="h", payloads=[1, 2]),
    )  # fmt: skip


def finish(request: Request, protocol: Protocol, queue: str) -> None:
    """All parts are done, and no janitor has looked since."""
    by_hand = RequestByHand(protocol, queue, request.id)
    holder, _ = by_hand.claim(9)
    assert by_hand.finish(holder, [1, 2]).word == "done"


def runs(ran: Iterable[Ran]) -> list[str]:
    return sorted(request_id for request_id, _ in ran)


class TestEnds:
    def test_then_is_told_of_an_end_and_comes_first(
        self, parent: Request, worker: Worker, protocol: Protocol, client: Client, queue: str
    ) -> None:
        worker.handler = lambda part: part.payload
        client.submit([b"crowd"] * 3, handler="h", queue=queue, level=1)
        finish(parent, protocol, queue)

        worker.sweep()
        ran = worker.drain()

        name = parent.id
        assert [each for each, _ in ran[:3]] == [f"{name}.then", *[f"{name}.finally"] * 2]
        told = json.loads(dict(client.get(f"{name}.then").results())[1])
        assert (told["id"], told["event"], told["state"], told["run"]) == (name, "then", "done", 0)
        assert told["parts"] == {"total": 2, "done": 2, "failed": 0}
        assert client.get(f"{name}.then").status().level == 0

    def test_cancelled_one_has_failed(
        self, parent: Request, worker: Worker, protocol: Protocol
    ) -> None:
        parent.cancel()

        name = parent.id
        assert runs(worker.drain()) == [f"{name}.failure", *[f"{name}.finally"] * 2]
        assert [each.id for each in parent.callbacks(5)] == [f"{name}.failure", f"{name}.finally"]

    def test_redriven_one_ends_again(
        self, parent: Request, worker: Worker, protocol: Protocol, queue: str
    ) -> None:
        name = parent.id
        worker.handler = lambda part: refuse(part) if part.payload == b"y" else part.payload
        assert f"{name}.then" in runs(worker.drain())
        parent.retry()

        assert runs(worker.drain()) == [name, *[f"{name}.finally.1"] * 2, f"{name}.then.1"]
        assert [each.id for each in parent.status().callbacks if each.id] == [
            f"{name}.then.1",
            f"{name}.finally.1",
        ]

    def test_worker_that_sees_the_end_asks_for_a_look_at_once(
        self, parent: Request, protocol: Protocol, queue: str
    ) -> None:
        by_hand = RequestByHand(protocol, queue, parent.id)
        holder, _ = by_hand.claim(9)

        grant = by_hand.finish(holder, [1, 2])

        assert 0 < by_hand.now_ms() - grant.tokens.look_ms + 1 < 5_000

    def test_empty_one_ends_too(
        self, client: Client, queue: str, request_id: str, worker: Worker
    ) -> None:
        client.submit([], handler="h", queue=queue, id=request_id, then="h")

        assert runs(worker.drain()) == [f"{request_id}.then"]


class TestRules:
    def test_k1_two_who_found_the_debt_start_it_once(
        self, parent: Request, protocol: Protocol, queue: str, worker: Worker
    ) -> None:
        finish(parent, protocol, queue)
        found = protocol.inspect(parent.id)
        settle_callbacks(protocol, parent.id)

        for call in found.calls:  # another janitor read the debt before it was struck
            if call.fits(found.state):
                starting_callbacks._start_callback(protocol, found, call, 0)

        assert runs(worker.drain()) == [*[f"{parent.id}.finally"] * 2, f"{parent.id}.then"]

    def test_k2_one_that_dies_before_it_strikes_the_debt_leaves_the_debt(
        self, parent: Request, protocol: Protocol, queue: str, worker: Worker
    ) -> None:
        finish(parent, protocol, queue)
        with pytest.raises(Died):
            settle_callbacks(dying(protocol, 1, before=True), parent.id)

        assert protocol.inspect(parent.id).is_owed
        assert len(worker.drain()) == 3

    def test_k3_one_that_slept_for_a_minute_is_refused(
        self, parent: Request, protocol: Protocol, queue: str
    ) -> None:
        finish(parent, protocol, queue)
        found = protocol.inspect(parent.id)
        found.fields["now_ms"] = str(found.count("now_ms") - FENCE_MS - 1_000)

        with pytest.raises(SubmissionLate):
            starting_callbacks._start_callback(protocol, found, found.calls[0], 0)

        with pytest.raises(RequestUnknown):
            protocol.inspect(f"{parent.id}.then")

    def test_k4_it_outlives_an_attempt_whatever_its_retention(
        self, client: Client, queue: str, request_id: str, protocol: Protocol, worker: Worker
    ) -> None:
        parent = client.submit([b"x"], handler="h", queue=queue, id=request_id, keep=0, then="h")
        worker.drain()
        child = RequestByHand(protocol, queue, f"{parent.id}.then")
        assert child.meta("state") == "done"

        with pytest.raises(RequestOpen, match="kept for 10 minutes"):
            Request(protocol, child.id).purge()
        assert protocol.purge(child.id) > child.now_ms() + 500_000

        child.set_meta(finished_ms=child.now_ms() - HOUR_MS)
        assert protocol.purge(child.id) == -1, "its parent has to be asked"
        assert protocol.purge(child.id, is_asked=True) == 0

    def test_k4_it_stays_while_its_parent_owes_it(
        self, client: Client, queue: str, request_id: str, protocol: Protocol, worker: Worker
    ) -> None:
        parent = client.submit([b"x"], handler="h", queue=queue, id=request_id, then="h")
        worker.drain()
        child = RequestByHand(protocol, queue, f"{parent.id}.then")
        child.set_meta(finished_ms=child.now_ms() - HOUR_MS, keep_ms=0)
        by_hand = RequestByHand(protocol, queue, parent.id)
        by_hand.set_meta(settled=0)  # the janitor that started it died before it struck the debt
        child.redis.zadd(QueueKeys(queue).closed, {child.id: 1})

        Janitor(protocol, queue).sweep()
        assert child.meta("state") == "done"
        again_ms = child.redis.zscore(QueueKeys(queue).closed, child.id) - child.now_ms()
        assert 50_000 < again_ms <= 61_000

        make_due(protocol, queue)
        by_hand.set_meta(settled=1)
        child.redis.zadd(QueueKeys(queue).closed, {child.id: 1})
        Janitor(protocol, queue).sweep()
        assert child.meta("state") == ""

    def test_k4_another_request_under_the_id_of_its_parent_does_not_owe_it(
        self, client: Client, queue: str, request_id: str, protocol: Protocol, worker: Worker
    ) -> None:
        parent = client.submit([b"x"], handler="h", queue=queue, id=request_id, then="h")
        worker.drain()
        by_hand = RequestByHand(protocol, queue, parent.id)
        by_hand.set_meta(settled=0)
        assert starting_callbacks.parent_owes(protocol, f"{parent.id}.then")

        by_hand.set_meta(created_ms=int(by_hand.meta("created_ms")) + 1)

        assert not starting_callbacks.parent_owes(protocol, f"{parent.id}.then")
        protocol.purge(parent.id, force=True)
        assert not starting_callbacks.parent_owes(protocol, f"{parent.id}.then")

    def test_owed_one_is_neither_closed_nor_purged(
        self, parent: Request, protocol: Protocol, queue: str
    ) -> None:
        finish(parent, protocol, queue)
        by_hand = RequestByHand(protocol, queue, parent.id)
        by_hand.set_meta(keep_ms=0)

        assert protocol.audit(parent.id).purge_at == 0
        with pytest.raises(RequestOpen, match="not started"):
            protocol.purge(parent.id)
        with pytest.raises(RequestOpen, match="not started"):
            parent.purge()


class Died(BaseException):
    """A janitor dies here."""


def dying(protocol: Protocol, call: int, *, before: bool) -> Protocol:
    """The same, but its user dies before or after the call of this number."""
    mortal, count = Protocol(protocol.connection), iter(range(1_000))

    def die_if_due(is_before: bool, number: int) -> None:
        if (is_before, number) == (before, call):
            raise Died

    def wrapped(make: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **options: Any) -> Any:
            number = next(count)
            die_if_due(True, number)
            reply = make(*args, **options)
            die_if_due(False, number)
            return reply

        return do

    def in_order(calls: Iterator[Any], otherwise: Any = ()) -> list[Any]:
        return [mortal._do(each) for each in calls]

    mortal._do = wrapped(mortal._do)
    mortal._do_in_order = in_order  # type: ignore[assignment]
    return mortal


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("call", range(12))
def test_death_at_any_call_of_a_look_starts_each_once(
    parent: Request, protocol: Protocol, queue: str, worker: Worker, call: int, before: bool
) -> None:
    """audit, inspect, three calls for each of two callbacks, settle, audit, close."""
    finish(parent, protocol, queue)
    make_due(protocol, queue)
    try:
        Janitor(dying(protocol, call, before=before), queue).sweep()
        died = False
    except Died:
        died = True

    ran = worker.drain()

    assert died or call > 10, "the look makes fewer calls than this test believes"
    assert runs(ran) == [*[f"{parent.id}.finally"] * 2, f"{parent.id}.then"]
    assert parent.status().state is State.DONE
    assert not protocol.inspect(parent.id).is_owed


class TestBad:
    def test_id_that_a_callback_would_have_is_taken(
        self, client: Client, queue: str, request_id: str
    ) -> None:
        client.submit([b"x"], handler="h", queue=queue, id=f"{request_id}.then")

        with pytest.raises(RequestExists, match=rf"{request_id}\.then is there already"):
            client.submit([b"x"], handler="h", queue=queue, id=request_id, then="h")
        with pytest.raises(RequestUnknown):
            client.get(request_id)

    def test_the_same_submission_finds_the_first(
        self, parent: Request, client: Client, queue: str, worker: Worker
    ) -> None:
        worker.drain()
        again = client.submit(
            [b"x", b"y"], handler="h", queue=queue, id=parent.id,
            then="h", on_failure=Start(handler="h"), finally_=Start(handler="h", payloads=[1, 2]),
        )  # fmt: skip
        assert again.status().state is State.DONE
        with pytest.raises(RequestExists, match="other options"):
            client.submit([b"x", b"y"], handler="h", queue=queue, id=parent.id)

    @pytest.mark.parametrize(
        ("target", "says"),
        [
            ("", "handler ''"),
            ("no name", "handler 'no name'"),
            ("ftp://host/x", "is no URL"),
            (Webhook("https://host/a b"), "is no URL"),
            (Start(handler="h", payloads=[]), "0 payloads"),
            (Start(handler="h", payloads=[1] * 501), "501 payloads"),
            (Start(handler="h", payloads=[{1j}]), "cannot be written as JSON"),
            (Start(handler="h", level=100), "level 100"),
            (7, "is a int"),
        ],
    )
    def test_bad_target_is_refused(
        self, client: Client, queue: str, target: Any, says: str
    ) -> None:
        with pytest.raises(InvalidValue, match=says):
            client.submit([b"x"], handler="h", queue=queue, then=target)

    def test_id_that_leaves_no_room_is_refused(self, client: Client, queue: str) -> None:
        with pytest.raises(InvalidValue, match="the id of a callback"):
            client.submit([b"x"], handler="h", queue=queue, id="a" * 60, then="h")

    def test_failed_submission_starts_nothing(
        self, client: Client, queue: str, request_id: str, worker: Worker
    ) -> None:
        def payloads() -> Iterator[bytes]:
            yield b"x"
            raise ValueError("no more")

        with pytest.raises(ValueError, match="no more"):
            client.submit(payloads(), handler="h", queue=queue, id=request_id, finally_="h")

        assert not [each for each in runs(worker.drain()) if each.endswith("finally")]

    def test_damaged_ones_are_reported_and_nobody_else_is_held_up(
        self, parent: Request, protocol: Protocol, queue: str, worker: Worker, client: Client
    ) -> None:
        finish(parent, protocol, queue)
        RequestByHand(protocol, queue, parent.id).set_meta(calls="{")
        other = client.submit([b"x"], handler="h", queue=queue)

        worker.drain()

        assert other.wait(5).state is State.DONE


class TestThatCannotBeStartedNow:
    def test_full_server_keeps_no_other_request_from_being_looked_at(
        self, parent: Request, client: Client, protocol: Protocol, queue: str
    ) -> None:
        finish(parent, protocol, queue)
        behind = client.submit([b"x"], handler="h", queue=queue, id=f"{parent.id}-behind")
        other = RequestByHand(protocol, queue, behind.id)
        other.expire(other.claim()[0])
        make_due(protocol, queue)
        janitor = Janitor(protocol, queue)

        with other.full_server():
            janitor.sweep()

            assert set(other.retry()) == {1}
            assert parent.status().callbacks
            with pytest.raises(RequestUnknown):
                protocol.inspect(f"{parent.id}.then")

        make_due(protocol, queue)
        janitor.sweep()
        assert protocol.inspect(f"{parent.id}.then").state is State.OPEN
