"""Sweeping a queue: what is missing comes back, what has ended goes."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import permutations

import msgspec
import pytest

from streamq import Client, Connection, Janitor, Protocol, ServerBusy, ServerUnreachable, State
from streamq.protocol.keys import QueueKeys, token_list_of
from streamq.protocol.replies import Audit, Tokens
from streamq.queue.fleet import WorkerDetails
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker, indexes, make_due, refuse, tokens
from tests.support.waiting import wait_until

HOUR_MS = 3_600_000


def set_score(protocol: Protocol, key: str, request_id: str, score: int) -> None:
    protocol.connection.redis.zadd(key, {request_id: score})


def test_lost_tokens_are_out_again_after_one_sweep(
    client: Client, protocol: Protocol, queue: str, sweep: Callable[[], int]
) -> None:
    ids = [client.submit([b"x"] * 20, handler="h", queue=queue, limit=n).id for n in (1, 3, 20)]
    while protocol.take(queue, ("h",), 0.01):
        pass

    sweep()

    assert [tokens(protocol, queue).count(request_id) for request_id in ids] == [1, 3, 8]


def test_a_sweep_pushes_no_token_that_is_out(
    client: Client, protocol: Protocol, queue: str, sweep: Callable[[], int]
) -> None:
    client.submit([b"x"] * 20, handler="h", queue=queue, limit=5)
    protocol.take(queue, ("h",), 1)

    for _ in range(3):
        sweep()

    assert len(tokens(protocol, queue)) == 5


def test_what_a_dead_worker_held_runs_again(
    driver: RequestByHand, client: Client, protocol: Protocol, queue: str, sweep: Callable[[], int]
) -> None:
    client.submit([b"a", b"b", b"c"], handler="h", queue=queue, id=driver.id, limit=1)
    protocol.take(queue, ("h",), 1)
    holder, grant = driver.claim(2, level=50)
    assert len(grant.parts) == 2
    driver.expire(holder)

    sweep()

    assert driver.leases() == {}
    assert tokens(protocol, queue) == [driver.id]
    assert sorted(Worker(protocol, queue).drain()) == [(driver.id, n) for n in (1, 2, 3)]


def test_more_leases_than_one_call_reaps(
    driver: RequestByHand, protocol: Protocol, queue: str
) -> None:
    protocol.mint(queue, driver.id, Tokens(), register="yes")
    driver.load(150, limit=150)
    for _ in range(150):
        driver.expire(driver.claim()[0])

    Janitor(protocol, queue).sweep()

    assert driver.leases() == {}
    assert len(driver.retry()) == 150


class TestSilence:
    """A holder whose lease has expired may only have been cut off."""

    @pytest.fixture
    def silent(self, driver: RequestByHand, protocol: Protocol, queue: str) -> str:
        """The holder of a lease that has expired."""
        protocol.mint(queue, driver.id, Tokens(), register="yes")
        driver.load(3)
        holder, _ = driver.claim()
        driver.pass_deadline(holder)
        return holder

    def test_is_looked_at_again_within_a_second_and_not_reaped(
        self, driver: RequestByHand, silent: str, sweep: Callable[[], int]
    ) -> None:
        assert sweep() <= 1_100

        assert (set(driver.leases()), driver.tries()) == ({silent}, {})

    def test_is_forgotten_when_the_holder_is_heard(
        self, driver: RequestByHand, silent: str, janitor: Janitor, sweep: Callable[[], int]
    ) -> None:
        sweep()
        driver.protocol.renew(driver.id, 20_000, {silent: None})

        sweep()

        assert (set(driver.leases()), driver.tries()) == ({silent}, {})
        assert driver.meta("suspected_ms") == ""
        assert janitor._suspects == {}, "it is not looked at every second any more"

    def test_that_lasts_is_death(
        self, driver: RequestByHand, silent: str, janitor: Janitor, sweep: Callable[[], int]
    ) -> None:
        sweep()
        driver.suspect(60_000, looked_ms=1_000)

        sweep()

        assert (driver.leases(), driver.tries()) == ({}, {1: "0 1 1 0 0"})
        assert janitor.reaped == 1

    def test_is_watched_also_when_other_looks_are_due_before(
        self, driver: RequestByHand, silent: str, janitor: Janitor, sweep: Callable[[], int]
    ) -> None:
        sweep()
        looked = driver.meta("looked_ms")
        driver.redis.zadd(QueueKeys(driver.queue).due, {driver.id: driver.now_ms() + HOUR_MS})

        def is_looked_at() -> bool:
            janitor.sweep()
            return driver.meta("looked_ms") > looked

        wait_until(is_looked_at)

    def test_is_watched_in_the_middle_of_a_long_sweep(
        self,
        driver: RequestByHand,
        silent: str,
        client: Client,
        protocol: Protocol,
        queue: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for _ in range(5):
            client.submit([b"x"], handler="h", queue=queue)
        looks: list[str] = []
        slow = Slow(protocol.connection, looks)
        monkeypatch.setattr("streamq.queue.janitor.WATCH_EVERY_S", 0.05)
        make_due(protocol, queue)
        set_score(protocol, QueueKeys(queue).due, driver.id, 0)

        Janitor(slow, queue).sweep()

        assert looks.count(driver.id) > 1

    def test_is_made_sure_of_by_a_janitor_that_sweeps_only_once(
        self,
        driver: RequestByHand,
        protocol: Protocol,
        queue: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        protocol.mint(queue, driver.id, Tokens(), register="yes")
        driver.load(3)
        driver.pass_deadline(driver.claim(lease_ms=1_000)[0])
        janitor, sweeps = Janitor(protocol, queue), []
        sweep = janitor.sweep

        def counted() -> int:
            sweeps.append(1)
            return sweep()

        monkeypatch.setattr(janitor, "sweep", counted)

        janitor.sweep_out()

        assert driver.leases() == {}
        assert len(sweeps) < 20, "it rests between two looks"

    def test_of_a_request_that_failed_is_not_forgotten_with_it(
        self, driver: RequestByHand, protocol: Protocol, queue: str, sweep: Callable[[], int]
    ) -> None:
        protocol.mint(queue, driver.id, Tokens(), register="yes")
        driver.load(3, max_failures=0)
        dead, _ = driver.claim()
        driver.give_up(2)

        sweep()
        assert indexes(protocol, queue, driver.id) == {"open", "due"}
        driver.expire(dead)
        sweep()

        assert driver.leases() == {}
        assert indexes(protocol, queue, driver.id) == {"closed"}


class Slow(Protocol):
    """Each look takes a tenth of a second."""

    def __init__(self, connection: Connection, looks: list[str]) -> None:
        super().__init__(connection)
        self.looks = looks

    def audit(self, request_id: str, pushed: int = 0) -> Audit:
        self.looks.append(request_id)
        time.sleep(0.1)
        return super().audit(request_id, pushed)


def test_ended_request_is_looked_at_once_more_and_then_kept_for_its_time(
    driver: RequestByHand, client: Client, protocol: Protocol, queue: str, sweep: Callable[[], int]
) -> None:
    client.submit([], handler="h", queue=queue, id=driver.id, keep="1h")
    closed = QueueKeys(queue).closed

    sweep()
    assert 0 < driver.redis.zscore(closed, driver.id) - driver.now_ms() <= 300_000
    set_score(protocol, closed, driver.id, 1)
    sweep()

    assert driver.redis.zscore(closed, driver.id) == int(driver.meta("finished_ms")) + HOUR_MS


def test_the_next_look_comes_when_a_lease_would_expire(
    driver: RequestByHand, protocol: Protocol, queue: str, sweep: Callable[[], int]
) -> None:
    protocol.mint(queue, driver.id, Tokens(), register="yes")
    driver.load(1)
    driver.claim(lease_ms=1_000)

    sweep()

    due = protocol.connection.redis.zscore(QueueKeys(queue).due, driver.id)
    assert driver.now_ms() < due <= driver.now_ms() + 1_000


def test_request_that_has_ended_is_closed_and_after_its_retention_forgotten(
    driver: RequestByHand, client: Client, protocol: Protocol, queue: str, sweep: Callable[[], int]
) -> None:
    request = client.submit([b"a"], handler="h", queue=queue, id=driver.id, keep="1h")
    Worker(protocol, queue).step()
    assert indexes(protocol, queue, driver.id) == {"open", "due"}

    sweep()

    assert indexes(protocol, queue, driver.id) == {"closed"}
    sweep()
    assert request.status().state is State.DONE
    driver.set_meta(keep_ms=0)
    set_score(protocol, QueueKeys(queue).closed, driver.id, 1)
    sweep()
    assert indexes(protocol, queue, driver.id) == set()
    assert driver.existing_keys() == set()


def test_request_is_not_forgotten_before_its_retention_whatever_the_index_says(
    driver: RequestByHand, client: Client, protocol: Protocol, queue: str, sweep: Callable[[], int]
) -> None:
    client.submit([], handler="h", queue=queue, id=driver.id, keep="1h")
    sweep()
    set_score(protocol, QueueKeys(queue).closed, driver.id, 1)

    sweep()

    closed = protocol.connection.redis.zscore(QueueKeys(queue).closed, driver.id)
    assert closed == int(driver.meta("finished_ms")) + HOUR_MS
    assert "meta" in driver.existing_keys()


def test_live_request_among_the_closed_goes_back_to_the_open(
    driver: RequestByHand, client: Client, protocol: Protocol, queue: str, sweep: Callable[[], int]
) -> None:
    client.submit([b"a"], handler="h", queue=queue, id=driver.id)
    keys = QueueKeys(queue)
    protocol.connection.redis.zrem(keys.open, driver.id)
    protocol.connection.redis.zrem(keys.due, driver.id)
    set_score(protocol, keys.closed, driver.id, 1)

    sweep()

    assert indexes(protocol, queue, driver.id) == {"open", "due"}


def test_request_that_was_never_opened_is_forgotten_after_an_hour_and_not_before(
    protocol: Protocol, queue: str, request_id: str, sweep: Callable[[], int]
) -> None:
    protocol.mint(queue, request_id, Tokens(), register="yes")
    registered = protocol.registered(queue, request_id)
    assert registered

    set_score(protocol, QueueKeys(queue).open, request_id, int(registered) - HOUR_MS + 60_000)
    sweep()
    assert indexes(protocol, queue, request_id) == {"open", "due"}
    set_score(protocol, QueueKeys(queue).open, request_id, int(registered) - HOUR_MS - 1)
    sweep()

    assert indexes(protocol, queue, request_id) == set()


def test_request_that_was_purged_while_a_worker_held_it_is_forgotten_with_the_next_look(
    client: Client, protocol: Protocol, queue: str, sweep: Callable[[], int]
) -> None:
    request = client.submit([b"x"], handler="h", queue=queue)
    request.cancel()
    request.purge()
    protocol.beat(queue, "w1", 60_000, requests=[request.id])

    sweep()

    assert indexes(protocol, queue, request.id) == set()


@pytest.mark.parametrize("junk", [b"\xff", b"", b"a b", b"x" * 65])
def test_what_can_be_no_request_is_taken_out_of_the_indexes_and_reported(
    protocol: Protocol,
    queue: str,
    sweep: Callable[[], int],
    caplog: pytest.LogCaptureFixture,
    junk: bytes,
) -> None:
    keys, redis = QueueKeys(queue), protocol.connection.redis
    for key in (keys.open, keys.due, keys.closed):
        redis.zadd(key, {junk: 0})

    janitor = Janitor(protocol, queue)
    janitor.sweep()

    assert not any(redis.exists(key) for key in (keys.open, keys.due, keys.closed))
    assert "is no request id" in caplog.text


def test_damaged_request_is_reported_once_and_the_others_are_looked_at(
    client: Client,
    protocol: Protocol,
    queue: str,
    sweep: Callable[[], int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    damaged, other = (client.submit([b"x"], handler="h", queue=queue) for _ in range(2))
    protocol.connection.redis.hset(protocol.keys(damaged.id).meta, "state", b"\xff")
    while protocol.take(queue, ("h",), 0.01):
        pass

    for _ in range(3):
        sweep()

    assert tokens(protocol, queue) == [other.id]
    assert caplog.text.count(f"request {damaged.id} is damaged") == 1


@pytest.mark.parametrize("index", ["due", "open", "closed"])
def test_index_of_another_type_is_put_aside(
    client: Client, protocol: Protocol, queue: str, index: str, sweep: Callable[[], int]
) -> None:
    key, redis = getattr(QueueKeys(queue), index), protocol.connection.redis
    redis.set(key, "not ours")

    Janitor(protocol, queue).sweep()

    assert redis.get(QueueKeys(queue).aside + index) == b"not ours"
    request = client.submit([b"x"], handler="h", queue=queue)
    assert indexes(protocol, queue, request.id) == {"open", "due"}


@pytest.mark.parametrize("order", [*permutations(("due", "open", "closed"))], ids="-".join)
def test_no_request_is_forgotten_when_one_index_after_the_other_is_spoilt(
    client: Client, protocol: Protocol, queue: str, order: tuple[str, ...]
) -> None:
    request = client.submit([b"x"], handler="h", queue=queue, delay="1h")
    protocol.connection.redis.unlink(QueueKeys(queue, to=token_list_of("h", 50)).tokens)

    for index in order:
        protocol.connection.redis.set(getattr(QueueKeys(queue), index), "not ours")
        Janitor(protocol, queue).sweep()

    assert indexes(protocol, queue, request.id) == {"open", "due"}


def test_several_may_put_the_same_key_aside_at_once(
    client: Client, protocol: Protocol, queue: str, url: str
) -> None:
    request = client.submit([b"x"], handler="h", queue=queue, delay="1h")
    others = [Protocol(Connection(url)) for _ in range(4)]
    renamed: list[str] = []
    errors: list[Exception] = []
    start = threading.Barrier(len(others))

    def put_aside(other: Protocol) -> None:
        start.wait()
        try:
            renamed.extend(other.set_aside(queue))
        except Exception as error:  # noqa: BLE001  whatever it may be
            errors.append(error)

    for _ in range(20):
        protocol.connection.redis.set(QueueKeys(queue).open, "not ours")
        threads = [threading.Thread(target=put_aside, args=(other,)) for other in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # What is whole again is not renamed by who comes late.
        assert indexes(protocol, queue, request.id) == {"open", "due"}

    for other in others:
        other.connection.close()
    assert errors == []
    assert renamed == [QueueKeys(queue).aside + "open"] * 20


def test_one_who_comes_after_that_hour_is_not_forgotten_with_it(
    client: Client, protocol: Protocol, queue: str, request_id: str
) -> None:
    # A janitor has seen a registration without a request, and is slow to act on it.
    protocol.mint(queue, request_id, Tokens(), register="yes")
    set_score(protocol, QueueKeys(queue).open, request_id, 1)
    [(_, score)] = protocol.tick(queue).due

    client.submit([b"a"], handler="h", queue=queue, id=request_id)

    assert not protocol.close(queue, request_id, score, 0)
    assert "open" in indexes(protocol, queue, request_id)


def test_request_of_another_queue_is_left_to_it(
    client: Client, protocol: Protocol, queue: str, sweep: Callable[[], int]
) -> None:
    stranger = client.submit([b"x"] * 5, handler="h", queue=f"{queue}-other")
    protocol.mint(queue, stranger.id, Tokens(), register="yes")

    sweep()

    assert tokens(protocol, queue) == []
    assert protocol.ids(queue) == []
    assert protocol.ids(f"{queue}-other") == [stranger.id]


def test_request_that_is_redriven_is_not_closed_by_a_slow_janitor(
    client: Client, protocol: Protocol, queue: str, request_id: str
) -> None:
    request = client.submit([b"a"], handler="h", queue=queue, id=request_id)
    Worker(protocol, queue, refuse).step()
    make_due(protocol, queue)
    [(_, score)] = protocol.tick(queue).due
    purge_at = protocol.audit(request_id).purge_at

    assert request.retry() == 1

    assert not protocol.close(queue, request_id, score, purge_at)
    assert indexes(protocol, queue, request_id) == {"open", "due"}


def test_a_delayed_start_and_a_retry_come_in_their_time(
    driver: RequestByHand, client: Client, protocol: Protocol, queue: str, sweep: Callable[[], int]
) -> None:
    client.submit([b"a"], handler="h", queue=queue, id=driver.id, delay="1h")
    sweep()
    assert tokens(protocol, queue) == []

    driver.set_meta(hold_ms=1)
    sweep()

    assert tokens(protocol, queue) == [driver.id]


def test_two_at_once_do_no_more_than_one(
    client: Client, protocol: Protocol, queue: str, driver: RequestByHand
) -> None:
    ids = [client.submit([b"x"] * 9, handler="h", queue=queue, limit=3).id for _ in range(8)]
    ended = [client.submit([], handler="h", queue=queue, keep=0).id for _ in range(8)]
    while protocol.take(queue, ("h",), 0.01):
        pass
    go = threading.Barrier(4)

    def sweep() -> None:
        janitor = Janitor(protocol, queue)
        go.wait()
        for _ in range(5):
            make_due(protocol, queue)
            janitor.sweep()

    threads = [threading.Thread(target=sweep) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(tokens(protocol, queue)) == sorted(ids * 3)
    assert {status.id for status in client.list(queue)} == set(ids)
    assert client.list(queue, ended=True) == []
    assert all(indexes(protocol, queue, request_id) == set() for request_id in ended)


class Flaky(Protocol):
    """Some requests are on a node that is away."""

    def __init__(self, connection: Connection, away: set[str], error: type[Exception]) -> None:
        super().__init__(connection)
        self.away = away
        self.error = error

    def audit(self, request_id: str, pushed: int = 0) -> Audit:
        if request_id in self.away:
            raise self.error("away")
        return super().audit(request_id, pushed)

    def audit_all(
        self, ids: Sequence[str], is_away: Callable[[str], object] = lambda _: None
    ) -> dict[str, Audit]:
        return super().audit_all([each for each in ids if each not in self.away], is_away)


@pytest.mark.parametrize("error", [ServerBusy, ServerUnreachable])
def test_one_request_that_cannot_be_looked_at_does_not_stop_the_others(
    client: Client,
    protocol: Protocol,
    queue: str,
    error: type[Exception],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The sweep comes to the first of them first.
    ids = sorted(client.submit([b"x"], handler="h", queue=queue).id for _ in range(4))
    while protocol.take(queue, ("h",), 0.01):
        pass
    make_due(protocol, queue)
    away = protocol.node_of(ids[0]) if error is ServerUnreachable else ""

    with caplog.at_level(logging.WARNING):
        Janitor(Flaky(protocol.connection, {ids[0]}, error), queue).sweep()

    assert sorted(tokens(protocol, queue)) == [
        each for each in ids[1:] if not away or protocol.node_of(each) != away
    ]
    assert ids[0] in caplog.text


def test_when_nobody_can_be_looked_at_the_sweep_says_so(
    client: Client, protocol: Protocol, queue: str
) -> None:
    ids = {client.submit([b"x"], handler="h", queue=queue).id for _ in range(4)}
    make_due(protocol, queue)

    janitor = Janitor(Flaky(protocol.connection, ids, ServerUnreachable), queue)
    if protocol.connection.is_cluster:  # other requests may be on nodes that are well
        janitor.sweep()
        assert janitor._looked == []
    else:
        with pytest.raises(ServerUnreachable):
            janitor.sweep()


def test_lists_of_an_earlier_version_go_after_an_hour(protocol: Protocol, queue: str) -> None:
    former, ours = (QueueKeys(queue, to=to).tokens for to in ("50", "h:50"))
    for key in (former, ours):
        protocol.connection.redis.lpush(key, "a")
    janitor = Janitor(protocol, queue)
    janitor.sweep()
    assert protocol.connection.redis.llen(former) == 1

    janitor._former_at = 0
    janitor.sweep()

    assert [protocol.connection.redis.llen(key) for key in (former, ours)] == [0, 1]
    protocol.connection.redis.lpush(former, "b")
    janitor.sweep()
    assert protocol.connection.redis.llen(former) == 1, "and not before another hour"


def test_lists_that_nobody_uses_are_forgotten_once_an_hour(
    protocol: Protocol, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []
    monkeypatch.setattr(protocol, "forget_lists", lambda name, _: forgotten.append(name))
    janitor = Janitor(protocol, queue)
    janitor._former_at = 0
    for _ in range(2):
        janitor.sweep()

    assert forgotten == [queue]


def test_who_sweeps_out_waits_while_somebody_is_silent(
    protocol: Protocol, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    janitor = Janitor(protocol, queue)
    waits, slept = iter((0, 30, 500)), list[float]()

    def sweep() -> int:
        wait_ms = next(waits)
        janitor._suspects = {"r": (0.0, 0.0)} if wait_ms == 30 else {}
        return wait_ms

    monkeypatch.setattr(janitor, "sweep", sweep)
    monkeypatch.setattr("streamq.queue.janitor.time.sleep", slept.append)
    janitor.sweep_out()

    assert slept == [0.0, 0.03]


class TestHeartbeats:
    """Whoever reaps asks which pools live."""

    @pytest.fixture
    def dead(self, driver: RequestByHand, protocol: Protocol, queue: str) -> RequestByHand:
        """A request whose holder is dead, and a pool that lives."""
        protocol.mint(queue, driver.id, Tokens(), register="yes")
        driver.load(3)
        driver.expire(driver.claim(holder="0123456789abcdef.0-0-1")[0])
        details = msgspec.json.encode(WorkerDetails(name="host.1", pool="fedcba9876543210"))
        protocol.beat(queue, "host.1", HOUR_MS, details)
        return driver

    @pytest.mark.parametrize("name", ["workers", "worker:host.1"])
    def test_that_cannot_be_read_keep_no_part_back(
        self, dead: RequestByHand, queue: str, sweep: Callable[[], int], name: str
    ) -> None:
        key = QueueKeys(queue, spoilt=name).spoilt
        dead.redis.delete(key)
        dead.redis.set(key, "not ours")

        sweep()

        assert (dead.leases(), dead.tries()) == ({}, {1: "0 1 1 0 0"})
        if name == "workers":
            assert dead.redis.type(key) == b"none", "it is put aside"

    def test_are_read_once_for_many_reaps(
        self,
        dead: RequestByHand,
        client: Client,
        protocol: Protocol,
        queue: str,
        janitor: Janitor,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for _ in range(5):
            request = client.submit([b"x"], handler="h", queue=queue)
            other = RequestByHand(protocol, queue, request.id)
            other.expire(other.claim()[0])
        reads: list[str] = []
        beats = protocol.beats

        def noted(queue: str) -> dict[str, tuple[float, bytes]]:
            reads.append(queue)
            return beats(queue)

        monkeypatch.setattr(protocol, "beats", noted)
        make_due(protocol, queue)

        janitor.sweep()

        assert (janitor.reaped, reads) == (6, [queue])
        janitor._beats_at -= 1.1
        janitor._heard()
        assert len(reads) == 2

    def test_silence_goes_on_after_they_were_read(
        self, dead: RequestByHand, janitor: Janitor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        janitor.sweep()
        before = janitor._heard()["fedcba9876543210"]
        janitor.ahead_ms += 500

        assert 0 <= before < 5_000
        assert 500 <= janitor._heard()["fedcba9876543210"] - before < 5_000
