"""What a janitor knows of itself: how far the clocks are apart, what it did, when to come again."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from streamq import Client, Damaged, Janitor, Protocol, ServerUnreachable, State
from streamq.protocol.keys import QueueKeys
from streamq.protocol.replies import Audit, Tick, Tokens
from streamq.queue import janitor as module
from streamq.queue.janitor import janitor_samples
from tests.conftest import ONE_KIND
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker, indexes, make_due, tokens
from tests.support.waiting import wait_until

pytestmark = ONE_KIND


@pytest.fixture
def janitor(protocol: Protocol, queue: str) -> Janitor:
    return Janitor(protocol, queue, every_ms=500)


def numbers(janitor: Janitor, name: str) -> list[object]:
    return [value for _, value in janitor_samples([janitor])[name]]


def test_knows_how_far_the_servers_clock_is_ahead(protocol: Protocol, janitor: Janitor) -> None:
    janitor.sweep()

    seconds, micros = protocol.connection.redis.time()
    assert seconds * 1e3 + micros / 1e3 - time.monotonic() * 1e3 == pytest.approx(
        janitor.ahead_ms, abs=2_000
    )


def test_says_when_to_come_again(client: Client, queue: str, janitor: Janitor) -> None:
    assert 0 < janitor.sweep() <= 5_000

    client.submit([b"x"], handler="h", queue=queue, delay="0.3s")
    janitor.sweep()

    assert 0 <= janitor.sweep() <= 500


def test_counts_what_it_took_back(driver: RequestByHand, protocol: Protocol, queue: str) -> None:
    janitor = Janitor(protocol, queue)
    assert numbers(janitor, "streamq_janitor_reaped_parts_total") == [0]
    driver.load(5)
    protocol.mint(queue, driver.id, Tokens(), register="yes")
    holder, _ = driver.claim(3)
    driver.expire(holder)

    def is_reaped() -> bool:
        make_due(protocol, queue)
        janitor.sweep()
        return janitor.reaped > 0

    wait_until(is_reaped, 20)

    assert janitor.reaped == 3
    assert numbers(janitor, "streamq_janitor_reaped_parts_total") == [3]


def test_counts_what_it_closed_by_how_it_ended(
    client: Client, protocol: Protocol, queue: str
) -> None:
    janitor = Janitor(protocol, queue)
    for _ in range(2):
        client.submit([b"x"], handler="h", queue=queue)
    client.submit([b"x"], handler="h", queue=queue).cancel()
    Worker(protocol, queue).drain()
    # The worker looks after its queue with a janitor of its own: these are ours to close.
    for _ in range(3):
        client.submit([], handler="h", queue=queue)
    make_due(protocol, queue)

    janitor.sweep()

    assert janitor.closed == {State.DONE: 3}
    told = janitor_samples([janitor])["streamq_requests_total"]
    assert [labels for labels, _ in told] == [
        {"queue": queue, "state": state} for state in ("done", "failed", "cancelled")
    ]
    assert [value for _, value in told] == [3, 0, 0]


def test_counts_once_what_it_closed_though_it_looks_again(
    client: Client, protocol: Protocol, queue: str
) -> None:
    """The answer of the first call may have been lost, or another janitor was first."""
    janitor = Janitor(protocol, queue)
    request = client.submit([], handler="h", queue=queue)
    score = protocol.registered(queue, request.id)
    assert score is not None
    tick = protocol.tick(queue)

    for _ in range(3):
        janitor.look(request.id, score, tick)

    assert janitor.closed == {State.DONE: 1}


def test_says_when_the_slowest_of_several_has_swept(protocol: Protocol, queue: str) -> None:
    first, second = Janitor(protocol, queue), Janitor(protocol, queue)
    name = "streamq_janitor_last_success_timestamp_seconds"
    begun = time.time()
    first.sweep()

    assert begun <= first.swept_at <= time.time()
    assert janitor_samples([first, second])[name] == [({}, 0.0)]
    second.sweep()
    assert janitor_samples([first, second])[name] == [({}, first.swept_at)]


class Away(Protocol):
    """Some requests are on a node that is away, and the queue's own may be damaged."""

    away: frozenset[str] = frozenset()
    is_damaged = False

    def audit(self, request_id: str, pushed: int = 0) -> Audit:
        if request_id in self.away:
            raise ServerUnreachable("away")
        return super().audit(request_id, pushed)

    def audit_all(
        self, ids: Sequence[str], is_away: Callable[[str], object] = lambda _: None
    ) -> dict[str, Audit]:
        return super().audit_all([each for each in ids if each not in self.away], is_away)

    def tick(self, queue: str, **options: Any) -> Tick:  # type: ignore[override]
        if self.is_damaged:
            raise Damaged("spoilt")
        return super().tick(queue, **options)


def test_three_that_are_away_are_passed_over(
    client: Client, protocol: Protocol, queue: str
) -> None:
    ids = [client.submit([b"x"], handler="h", queue=queue).id for _ in range(6)]
    redis = protocol.connection.redis
    redis.unlink(*redis.scan_iter(f"*{{q:{queue}}}:tokens:*", count=10_000))
    make_due(protocol, queue)
    flaky = Away(protocol.connection)
    flaky.away = frozenset(ids[:3])

    Janitor(flaky, queue).sweep()

    assert sorted(tokens(protocol, queue)) == sorted(ids[3:])


class Nodes(Away):
    """Two nodes: one does not answer, the other is well."""

    def node_of(self, request_id: str) -> str:
        return "away" if request_id in self.away else "well"


def test_node_that_is_away_holds_up_no_look_at_another(
    client: Client, protocol: Protocol, queue: str
) -> None:
    ids = sorted(client.submit([b"x"], handler="h", queue=queue).id for _ in range(8))
    redis = protocol.connection.redis
    redis.unlink(*redis.scan_iter(f"*{{q:{queue}}}:tokens:*", count=10_000))
    nodes = Nodes(protocol.connection)
    nodes.away = frozenset(ids[:6])  # those that a sweep comes to first
    janitor = Janitor(nodes, queue)

    for _ in range(2):
        make_due(protocol, queue)
        janitor.sweep()

    assert sorted(tokens(protocol, queue)) == ids[6:]


class Eager(Janitor):
    """Looks at its suspects whenever it may."""

    def _watch(self, tick: Tick) -> Iterator[module.Look]:
        for request_id, (score, _) in list(self._suspects.items()):
            yield request_id, partial(self.look, request_id, score, tick)


def test_suspect_that_is_looked_at_again_and_again_is_given_back_once(
    client: Client, protocol: Protocol, queue: str
) -> None:
    """What a sweep tells the next tick is bounded by what the last one lent."""
    ids = [client.submit([b"x"], handler="h", queue=queue).id for _ in range(5)]
    for id_ in ids:
        holder, _ = RequestByHand(protocol, queue, id_).claim()
        RequestByHand(protocol, queue, id_).pass_deadline(holder, 1)
    make_due(protocol, queue)
    janitor = Eager(protocol, queue)

    janitor.sweep()

    assert len(janitor._suspects) == 5
    assert sorted(janitor._looked) == sorted(ids)


def test_sweep_that_takes_long_ends_and_what_it_did_not_come_to_is_due_soon(
    client: Client, protocol: Protocol, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = sorted(client.submit([b"x"], handler="h", queue=queue).id for _ in range(5))
    make_due(protocol, queue)
    monkeypatch.setattr(module, "MOST_SWEEP_S", 0.0)
    janitor = Janitor(protocol, queue, every_ms=500)

    janitor.sweep()

    assert janitor._looked == ids[:1]
    looked: set[str] = set()

    def has_come_to_all() -> bool:
        janitor.sweep()
        looked.update(janitor._looked)
        return looked == set(ids)

    wait_until(has_come_to_all, 10)


def test_damage_that_is_not_one_of_a_type_is_told(protocol: Protocol, queue: str) -> None:
    spoilt = Away(protocol.connection)
    spoilt.is_damaged = True

    with pytest.raises(Damaged, match="spoilt"):
        Janitor(spoilt, queue).sweep()


def test_remembers_only_so_many_damaged_requests(
    client: Client,
    protocol: Protocol,
    queue: str,
    janitor: Janitor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "MOST_REPORTED", 2)
    for _ in range(3):
        request = client.submit([b"x"], handler="h", queue=queue)
        protocol.connection.redis.hset(protocol.keys(request.id).meta, "state", b"\xff")

    def sweep() -> int:
        caplog.clear()
        make_due(protocol, queue)
        with caplog.at_level(logging.WARNING):
            janitor.sweep()
        return caplog.text.count("is damaged")

    assert sweep() == 3
    # All three did not fit in: it has forgotten the first two of them.
    assert sweep() >= 2


@pytest.mark.parametrize("index", ["due", "closed"])
def test_what_can_be_no_request_is_taken_out_wherever_it_is(
    protocol: Protocol, queue: str, janitor: Janitor, index: str
) -> None:
    keys, redis = QueueKeys(queue), protocol.connection.redis
    redis.zadd(getattr(keys, index), {b"a b": 7})

    wait_until(lambda: (janitor.sweep(), not redis.exists(keys.open, keys.due, keys.closed))[1])


def test_request_of_another_queue_is_in_no_index_of_this_one(
    client: Client, protocol: Protocol, queue: str, janitor: Janitor
) -> None:
    stranger = client.submit([b"x"], handler="h", queue=f"{queue}-other")
    protocol.mint(queue, stranger.id, Tokens(), register="yes")
    make_due(protocol, queue)

    janitor.sweep()

    assert indexes(protocol, queue, stranger.id) == set()


@pytest.fixture
def sweep_all(protocol: Protocol, queue: str, janitor: Janitor) -> Callable[[], None]:
    def sweep() -> None:
        make_due(protocol, queue)
        janitor.sweep()

    return sweep


def test_registration_that_came_to_nothing_leaves_no_trace(
    protocol: Protocol, queue: str, request_id: str, sweep_all: Callable[[], None]
) -> None:
    protocol.mint(queue, request_id, Tokens(), register="yes")
    protocol.connection.redis.zadd(QueueKeys(queue).open, {request_id: 1})

    sweep_all()

    assert indexes(protocol, queue, request_id) == set()


def test_counts_once_what_a_heartbeat_made_open_again(
    driver: RequestByHand, client: Client, protocol: Protocol, queue: str
) -> None:
    """Who holds a cancelled request says so until it has heard of the end."""
    janitor = Janitor(protocol, queue)
    client.submit([b"x"], handler="h", queue=queue, id=driver.id)
    driver.claim()
    client.get(driver.id).cancel()

    for _ in range(3):
        protocol.beat(queue, "w1", 15_000, b"{}", 0, [driver.id])
        make_due(protocol, queue)
        janitor.sweep()

    assert janitor.closed == {State.CANCELLED: 1}


def test_look_alone_knows_the_servers_clock_and_keeps_what_it_knows(
    driver: RequestByHand, protocol: Protocol, queue: str, janitor: Janitor
) -> None:
    driver.load(1)
    tick = Tick(driver.now_ms(), 0, [], [])

    janitor.look(driver.id, 0, tick)
    ahead_ms = janitor.ahead_ms
    janitor.look(driver.id, 0, Tick(tick.now_ms + 60_000, 0, [], []))

    assert tick.now_ms - time.monotonic() * 1e3 == pytest.approx(ahead_ms, abs=5_000)
    assert janitor.ahead_ms == ahead_ms


@pytest.mark.parametrize(
    ("looks", "first"),
    [((), 0), ((0,), 0), ((7,), 7), ((7, 0), 7), ((0, 7), 7), ((7, 5), 5), ((5, 7), 5)],
)
def test_next_look_is_the_first_that_a_request_wants(
    janitor: Janitor, looks: tuple[int, ...], first: int
) -> None:
    for look_ms in looks:
        janitor._expect(look_ms)

    assert janitor._next_look_ms == first
