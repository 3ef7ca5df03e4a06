"""Calls of workers at a gateway: each once, repeated, late, and at another gateway."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from streamq import Client, Protocol
from streamq.errors import InvalidValue, ServerUnreachable, StreamqError
from streamq.gateway.courier import FIRST_LEASE_MS, FUSE_MS
from streamq.gateway.desk import Desk
from streamq.gateway.dispatch import MOST_LINES, MOST_LINES_OF_KEY
from streamq.gateway.messages import (
    Ask,
    Beat,
    Done,
    Failed,
    Granted,
    Held,
    Leave,
    Report,
    Value,
)
from streamq.gateway.problems import Problem
from streamq.gateway.roles import LOCAL, Caller, Role
from streamq.gateway.ticket import BadTicket
from streamq.protocol.replies import Renewed
from streamq.queue.request import Request
from tests.conftest import ONE_KIND
from tests.support.by_hand import RequestByHand
from tests.support.waiting import wait_until

Desks = Callable[[], Desk]


@pytest.fixture
def request_(client: Client, queue: str, request_id: str) -> Request:
    """A request of five parts, nothing of which has run."""
    payloads = [b"a", b"b", b"c", b"d", b"e"]
    return client.submit(payloads, handler="h", queue=queue, id=request_id, retries=1, backoff=0)


@pytest.fixture
def ask(queue: str) -> Ask:
    return Ask(queue=queue, handlers=["h"], wait_s=10, quantum_ms=60_000)


def _left_ms(driver: RequestByHand, holder: str) -> float:
    """How long a lease stands, by the clock of this machine, which is the server's."""
    return driver.leases()[holder] - time.time() * 1e3


def run(steps: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(steps)


async def take(desk: Desk, ask: Ask) -> Granted:
    granted = (await desk.take(LOCAL, ask)).granted
    assert granted
    return granted


async def report(desk: Desk, said: Report, caller: Caller = LOCAL) -> Granted:
    granted = (await desk.report(caller, said)).granted
    assert granted
    return granted


def done(granted: Granted, **more: Any) -> Report:
    """A report that all parts of a grant are done: each yields its payload."""
    results = [Done(part.number, Value(text=str(part.text))) for part in granted.parts]
    return Report(ticket=granted.ticket, done=results, **more)


def briefly(ask: Ask) -> Ask:
    """What is asked for with a report: when nothing is left, the test waits no longer than this."""
    return msgspec.structs.replace(ask, wait_s=2)


def results(request: Request) -> list[tuple[int, Any]]:
    return list(request.results(timeout=5))


def numbers(granted: Granted) -> list[int]:
    return [part.number for part in granted.parts]


class TestTaking:
    def test_parts_are_run_one_after_another_until_the_end(
        self, desks: Desks, request_: Request, ask: Ask
    ) -> None:
        async def work() -> list[str]:
            desk = desks()
            granted, seen = await take(desk, ask), []
            while granted.parts:
                seen += [str(part.text) for part in granted.parts]
                granted = await report(desk, done(granted, next=briefly(ask)))
            assert (granted.word, granted.counted) == ("done", 1)
            return seen

        assert run(work()) == ["a", "b", "c", "d", "e"]
        assert results(request_) == [(1, "a"), (2, "b"), (3, "c"), (4, "d"), (5, "e")]

    def test_batches_grow_up_to_what_was_asked_for(
        self, desks: Desks, client: Client, queue: str, ask: Ask
    ) -> None:
        client.submit([b"x"] * 200, handler="h", queue=queue)
        ask.most = 30

        async def work() -> list[int]:
            desk = desks()
            granted, sizes = await take(desk, ask), []
            while granted.parts:
                sizes.append(len(granted.parts))
                granted = await report(desk, done(granted, next=briefly(ask)))
            return sizes

        sizes = run(work())
        assert sum(sizes) == 200
        assert (sizes[0], max(sizes)) == (1, 30)

    def test_worker_goes_on_at_its_pace_with_the_next_lease_of_the_request(
        self, desks: Desks, client: Client, queue: str, ask: Ask
    ) -> None:
        client.submit([b"x"] * 200, handler="h", queue=queue)
        client.submit([b"y"] * 200, handler="h", queue=queue)
        ask.most, ask.name = 30, "mill"

        async def work() -> list[tuple[str, int]]:
            desk = desks()
            granted, sizes = await take(desk, ask), []
            while granted.parts:
                sizes.append((granted.request, len(granted.parts)))
                ticket = desk.open(LOCAL, granted.ticket)
                # Its turn is over: the same report asks for another lease.
                late = msgspec.structs.replace(ticket, late_ms=0)
                granted.ticket = desk._signer.seal(late)
                granted = await report(desk, done(granted, next=briefly(ask)))
            return sizes

        sizes = run(work())
        assert sum(size for _, size in sizes) == 400
        for request in {name for name, _ in sizes}:
            mine = [size for name, size in sizes if name == request]
            # One part tells how long parts take. A batch grows to four times the last, up to 30.
            assert mine[0] == 1
            assert max(mine) == 30
            assert sorted(mine[:-1]) == mine[:-1]

    @pytest.mark.parametrize("seconds", [-3_600, -2, 2, 3_600])
    def test_turn_ends_though_the_clock_has_jumped(
        self,
        desks: Desks,
        request_: Request,
        ask: Ask,
        monkeypatch: pytest.MonkeyPatch,
        seconds: int,
    ) -> None:
        ask.quantum_ms = 500

        async def work() -> None:
            desk = desks()
            said = done(await take(desk, ask), next=Ask(queue=ask.queue))
            now_ms = time.time() * 1e3 + seconds * 1e3
            monkeypatch.setattr("streamq.gateway.desk._now_of_desk_ms", lambda: round(now_ms))
            granted = await report(desk, said)
            assert (granted.word, granted.counted, granted.parts) == ("over", 1, [])

        run(work())
        assert request_.status().parts.done == 1

    def test_clocks_that_are_a_little_apart_take_nothing_from_a_turn(
        self, desks: Desks, request_: Request, ask: Ask, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def work() -> None:
            desk = desks()
            said = done(await take(desk, ask), next=Ask(queue=ask.queue))
            now_ms = time.time() * 1e3 - 500
            monkeypatch.setattr("streamq.gateway.desk._now_of_desk_ms", lambda: round(now_ms))
            assert (await report(desk, said)).parts

        run(work())
        assert request_.status().parts.done == 1

    def test_nothing_comes_in_time(self, desks: Desks, ask: Ask) -> None:
        ask.wait_s = 0.05
        assert run(desks().take(LOCAL, ask)).granted is None

    def test_one_that_waits_is_woken_by_a_submission(
        self, desks: Desks, client: Client, queue: str, ask: Ask
    ) -> None:
        async def work() -> Granted:
            desk = desks()
            waiting = asyncio.ensure_future(take(desk, ask))
            while not desk.waiting:
                await asyncio.sleep(0)
            await asyncio.to_thread(client.submit, [b"x"], handler="h", queue=queue)
            return await waiting

        assert run(work()).parts[0].text == "x"

    def test_the_first_who_waits_is_the_first_who_gets(
        self, desks: Desks, client: Client, queue: str, ask: Ask
    ) -> None:
        async def work() -> list[int]:
            desk, order = desks(), list[int]()

            async def wait(place: int) -> None:
                await take(desk, ask)
                order.append(place)

            waiting = []
            for place in range(1, 4):
                waiting.append(asyncio.ensure_future(wait(place)))
                while desk.waiting < place:
                    await asyncio.sleep(0)
            for _ in waiting:
                await asyncio.to_thread(client.submit, [b"x"], handler="h", queue=queue)
            await asyncio.gather(*waiting)
            return order

        assert run(work()) == [1, 2, 3]

    def test_limit_of_a_request_holds(
        self, desks: Desks, client: Client, queue: str, ask: Ask
    ) -> None:
        client.submit([b"x"] * 10, handler="h", queue=queue, limit=2)

        async def work() -> list[Granted | None]:
            desk = desks()
            ask.wait_s = 0.5
            taken = await asyncio.gather(*(desk.take(LOCAL, ask) for _ in range(4)))
            return [handed.granted for handed in taken]

        assert sum(granted is not None for granted in run(work())) == 2

    def test_grant_that_nobody_was_told_of_goes_back_unspent(
        self, desks: Desks, request_: Request, ask: Ask
    ) -> None:
        async def work() -> Granted:
            desk = desks()
            undo = (await desk.take(LOCAL, ask)).undo
            undo()
            await asyncio.to_thread(wait_until, lambda: request_.status().parts.running == 0)
            return await take(desk, ask)

        granted = run(work())
        assert (numbers(granted), granted.parts[0].attempt) == ([1], 1)
        assert request_.status().parts.running == 1

    def test_lease_is_short_until_the_answer_is_out(
        self, desks: Desks, driver: RequestByHand, request_: Request, ask: Ask
    ) -> None:
        async def work() -> None:
            handed = await desks().take(LOCAL, ask)
            assert handed.ticket
            holder = handed.ticket.holder
            assert _left_ms(driver, holder) <= FIRST_LEASE_MS
            assert f"{holder}#" not in driver.holders()
            handed.delivered(lambda: False)
            await asyncio.to_thread(
                wait_until, lambda: _left_ms(driver, holder) > FIRST_LEASE_MS + 5_000
            )
            assert driver.holders()[f"{holder}#"] == "1"

        run(work())

    def test_lease_stays_short_when_its_answer_was_lost(
        self, desks: Desks, driver: RequestByHand, request_: Request, ask: Ask
    ) -> None:
        async def work() -> None:
            desk = desks()
            lost, heard = await desk.take(LOCAL, ask), await desk.take(LOCAL, ask)
            assert lost.ticket
            assert heard.ticket
            holders = lost.ticket.holder, heard.ticket.holder
            lost.delivered(lambda: True)
            heard.delivered(lambda: False)
            await asyncio.to_thread(
                wait_until, lambda: _left_ms(driver, holders[1]) > FIRST_LEASE_MS + 5_000
            )
            assert _left_ms(driver, holders[0]) <= FIRST_LEASE_MS
            assert f"{holders[0]}#" not in driver.holders()

        run(work())

    def test_fuse_makes_a_lease_short_and_a_beat_makes_it_long_again(
        self, desks: Desks, driver: RequestByHand, request_: Request, ask: Ask
    ) -> None:
        async def work() -> None:
            desk = desks()
            handed = await desk.take(LOCAL, ask)
            assert handed.ticket
            assert handed.granted
            ticket, text = handed.ticket, handed.granted.ticket
            await desk.beat(LOCAL, Beat([Held(text, 1)]))
            assert _left_ms(driver, ticket.holder) > FUSE_MS + 5_000
            desk.courier.broke({text: (ticket, 1)})
            await asyncio.to_thread(wait_until, lambda: _left_ms(driver, ticket.holder) <= FUSE_MS)
            await desk.beat(LOCAL, Beat([Held(text, 1)]))
            assert _left_ms(driver, ticket.holder) > FUSE_MS + 5_000

        run(work())

    def test_calls_of_a_key_that_wait_are_counted(self, desks: Desks, ask: Ask) -> None:
        few = Caller("few", Role.WORKER, waits=2)
        ask.wait_s = 0.3

        async def work() -> list[Any]:
            desk = desks()
            waits = [desk.take(few, ask) for _ in range(3)] + [desk.take(LOCAL, ask)]
            first = await asyncio.gather(*waits, return_exceptions=True)
            return [*first, await desk.take(few, ask)]

        found = run(work())
        assert [getattr(each, "status", 204) for each in found] == [204, 204, 429, 204, 204]

    def test_one_who_leaves_while_it_waits_is_given_nothing(
        self, desks: Desks, client: Client, queue: str, ask: Ask
    ) -> None:
        async def work() -> Granted:
            desk = desks()
            waiting = asyncio.ensure_future(take(desk, ask))
            while not desk.waiting:
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await asyncio.to_thread(client.submit, [b"x"], handler="h", queue=queue)
            return await take(desk, ask)

        assert run(work()).parts[0].attempt == 1

    @pytest.mark.parametrize(
        "changes",
        [
            {"handlers": []},
            {"handlers": ["a b"]},
            {"levels": "x"},
            {"levels": "1" * 5_000},
            {"levels": "0-99," * 1_000_000 + "5"},
            {"queue": "other"},
        ],
        ids=lambda changes: f"{changes!r:.30}",
    )
    def test_ask_that_cannot_be_is_refused(
        self, desks: Desks, ask: Ask, changes: dict[str, Any]
    ) -> None:
        for name, value in changes.items():
            setattr(ask, name, value)
        with pytest.raises(InvalidValue):
            run(desks().take(LOCAL, ask))


class TestReporting:
    def test_the_same_report_again_at_another_gateway_is_the_same_call(
        self, desks: Desks, request_: Request, ask: Ask
    ) -> None:
        async def work() -> None:
            first, second = desks(), desks()
            said = done(await take(first, ask), next=briefly(ask))
            once = await report(first, said)
            again = await report(second, said)
            assert (numbers(once), once.counted) == ([2], 1)
            assert (numbers(again), again.counted) == ([2], 0)
            last = await report(second, done(again))
            assert (last.word, last.counted) == ("over", 1)

        run(work())
        parts = request_.status().parts
        assert (parts.done, parts.waiting, parts.running) == (2, 3, 0)

    def test_failures_are_counted_once_however_often_they_are_told(
        self, desks: Desks, request_: Request, ask: Ask
    ) -> None:
        async def work() -> None:
            desk = desks()
            granted = await take(desk, ask)
            failed = [Failed(part=1, kind="abandon", error="Bad", message="no")]
            said = Report(ticket=granted.ticket, failed=failed, next=briefly(ask))
            answers = [await report(desk, said) for _ in range(3)]
            assert [numbers(each) for each in answers] == [[2]] * 3

        run(work())
        assert request_.status().parts.failed == 1
        (failure,) = request_.errors()
        assert (failure.part, failure.error, failure.message) == (1, "Bad", "no")

    def test_failed_part_runs_again_and_knows_its_attempt(
        self, desks: Desks, request_: Request, ask: Ask
    ) -> None:
        async def work() -> list[tuple[int, int]]:
            desk, seen = desks(), []
            granted = await take(desk, ask)
            while granted.parts:
                (part,) = granted.parts
                seen.append((part.number, part.attempt))
                if part.number == 2:
                    failed = [Failed(part=2, after_ms=0)]
                    said = Report(ticket=granted.ticket, failed=failed, next=briefly(ask))
                else:
                    said = done(granted, next=briefly(ask))
                granted = await report(desk, said)
            return seen

        seen = run(work())
        assert sorted(seen) == [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (5, 1)]
        assert request_.status().parts.failed == 1

    def test_part_that_is_not_named_goes_back(
        self, desks: Desks, client: Client, queue: str, ask: Ask
    ) -> None:
        request = client.submit([b"x"] * 9, handler="h", queue=queue)
        ask.most = 4

        async def work() -> Granted:
            desk = desks()
            granted = await take(desk, ask)
            while len(granted.parts) < 2:
                granted = await report(desk, done(granted, next=briefly(ask)))
            said = done(granted)
            del said.done[1:]
            assert (await report(desk, said)).word == "over"
            return await take(desk, ask)

        assert run(work()).parts[0].attempt == 1
        status = request.status()
        assert status.parts.done + status.parts.waiting + status.parts.retry < 9

    def test_old_ticket_changes_nothing(self, desks: Desks, request_: Request, ask: Ask) -> None:
        async def work() -> None:
            desk = desks()
            old = done(await take(desk, ask), next=briefly(ask))
            second = await report(desk, old)
            third = await report(desk, done(second, next=briefly(ask)))
            late = await report(desk, old)
            assert (late.word, late.parts, late.counted) == ("late", [], 0)
            assert (await report(desk, done(third))).counted == 1

        run(work())
        assert request_.status().parts.done == 3

    def test_crashed_part_is_charged_and_others_count(
        self, desks: Desks, client: Client, queue: str, ask: Ask
    ) -> None:
        request = client.submit([b"x"] * 9, handler="h", queue=queue, poison=1)
        ask.most = 4

        async def work() -> tuple[int, int]:
            desk = desks()
            granted = await take(desk, ask)
            while len(granted.parts) < 2:
                granted = await report(desk, done(granted, next=briefly(ask)))
            said = done(granted)
            said.crashed = said.done.pop().part
            for _ in range(2):
                assert (await report(desk, said)).word in ("lost", "over")
            return said.crashed, granted.parts[0].number

        crashed, counted = run(work())
        (failure,) = request.errors()
        assert (failure.part, failure.error) == (crashed, "Poison")
        assert request.status().parts.done >= counted

    def test_too_large_result_fails_its_part_alone(
        self, desks: Desks, request_: Request, ask: Ask
    ) -> None:
        async def work() -> None:
            desk = desks()
            granted = await take(desk, ask)
            result = Value(text="x" * (2**22 + 1))
            said = Report(ticket=granted.ticket, done=[Done(1, result)], next=briefly(ask))
            assert numbers(await report(desk, said)) == [2]

        run(work())
        assert [each.error for each in request_.errors()] == ["ResultTooLarge"]

    @pytest.mark.parametrize(
        "said",
        [
            {"done": [Done(2)]},
            {"done": [Done(1), Done(1)]},
            {"done": [Done(1)], "failed": [Failed(part=1)]},
            {"done": [Done(1)], "crashed": 1},
            {"back": [7]},
            {"done": [Done(1, Value())]},
            {"done": [Done(1, Value(text="a", base64="YQ=="))]},
            {"done": [Done(1, Value(base64="?"))]},
        ],
    )
    def test_report_that_cannot_be_changes_nothing(
        self, desks: Desks, request_: Request, ask: Ask, said: dict[str, Any]
    ) -> None:
        async def work() -> None:
            desk = desks()
            granted = await take(desk, ask)
            with pytest.raises(InvalidValue):
                await report(desk, Report(ticket=granted.ticket, **said))

        run(work())
        parts = request_.status().parts
        assert (parts.running, parts.done, parts.failed) == (1, 0, 0)

    def test_ticket_of_another_caller_is_refused(
        self, desks: Desks, request_: Request, ask: Ask
    ) -> None:
        async def work() -> None:
            desk = desks()
            said = done(await take(desk, ask))
            with pytest.raises(BadTicket):
                await report(desk, said, Caller("other", Role.WORKER))

        run(work())


@ONE_KIND
class TestDifferentWishes:
    """Workers who ask for different handlers: for each such set the gateway has a line."""

    def test_key_waits_in_so_many_lines_and_leaves_room_for_others(
        self, desks: Desks, request_: Request, ask: Ask
    ) -> None:
        greedy = Caller("greedy", Role.WORKER)

        def wishing(number: int) -> Ask:
            return msgspec.structs.replace(ask, handlers=[f"other{number}"])

        async def work() -> None:
            desk = desks()
            waiting = [
                asyncio.ensure_future(desk.take(greedy, wishing(number)))
                for number in range(MOST_LINES_OF_KEY)
            ]
            while desk.waiting < MOST_LINES_OF_KEY:
                await asyncio.sleep(0)
            with pytest.raises(Problem, match="429 MANY"):
                await desk.take(greedy, wishing(99))
            again = asyncio.ensure_future(desk.take(greedy, wishing(0)))
            granted = (await desk.take(Caller("modest", Role.WORKER), ask)).granted
            assert granted
            assert granted.parts[0].number == 1
            desk.stop_waiting()
            await asyncio.gather(again, *waiting)

        run(work())

    def test_lines_that_nobody_waits_in_make_room(
        self, desks: Desks, request_: Request, ask: Ask
    ) -> None:
        async def work() -> None:
            desk = desks()
            for number in range(MOST_LINES):
                wish = msgspec.structs.replace(ask, handlers=[f"other{number}"], wait_s=0)
                assert (await desk.take(LOCAL, wish)).granted is None
            granted = None
            while granted is None:
                with suppress(Problem):  # until the threads of the others have ended
                    granted = await take(desk, ask)
                await asyncio.sleep(0.05)
            assert granted.parts[0].number == 1

        run(work())


class TestLiving:
    def test_beat_renews_and_tells_what_nobody_wants(
        self, desks: Desks, request_: Request, ask: Ask
    ) -> None:
        ask.lease_s = 600

        async def work() -> None:
            desk = desks()
            granted = await take(desk, ask)
            said = Beat([Held(granted.ticket, 1)])
            verdict = await desk.beat(LOCAL, said)
            assert (verdict.unwanted, verdict.paused) == ([], [])
            await asyncio.to_thread(request_.pause)
            verdict = await desk.beat(LOCAL, said)
            assert (verdict.unwanted, verdict.paused) == ([], [granted.ticket])
            await asyncio.to_thread(request_.cancel)
            verdict = await desk.beat(LOCAL, said)
            assert (verdict.unwanted, verdict.paused) == ([granted.ticket], [])

        run(work())

    def test_ticket_that_is_not_valid_harms_no_other(
        self, desks: Desks, request_: Request, driver: RequestByHand, ask: Ask
    ) -> None:
        async def work() -> None:
            desk = desks()
            granted = await take(desk, ask)
            (holder,) = driver.leases()
            assert _left_ms(driver, holder) <= FIRST_LEASE_MS
            verdict = await desk.beat(LOCAL, Beat([Held("t1.x.y"), Held(granted.ticket, 1)]))
            assert verdict.unwanted == ["t1.x.y"]
            assert _left_ms(driver, holder) > FIRST_LEASE_MS
            assert (await desk.leave(LOCAL, Leave(["t1.x.y", granted.ticket]))).released == 1
            with pytest.raises(BadTicket):
                await desk.beat(LOCAL, Beat([Held("t1.x.y")]))

        run(work())
        assert request_.status().parts.running == 0

    @ONE_KIND
    def test_node_that_is_away_holds_up_no_leases_of_others(
        self,
        desks: Desks,
        request_: Request,
        protocol: Protocol,
        client: Client,
        queue: str,
        ask: Ask,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # Of a cluster, as far as the gateway can see: one node answers, and one does not.
        whole, away = protocol.renew_all, client.submit([b"x"], handler="other", queue=queue)
        tried: list[str] = []

        def renew_all(
            lease_ms: int, shares: Sequence[tuple[str, dict[str, int | None]]]
        ) -> list[Renewed | StreamqError]:
            tried.extend(request_id for request_id, _ in shares)
            if away.id in tried[-len(shares) :]:
                raise ServerUnreachable("this node is away")
            return whole(lease_ms, shares)

        monkeypatch.setattr(protocol, "renew_all", renew_all)
        monkeypatch.setattr(protocol, "node_of", lambda name: name)
        stands = RequestByHand(protocol, queue, request_.id)

        async def work() -> None:
            desk = desks()
            of_away = msgspec.structs.replace(ask, handlers=["other"])
            first = [await desk.take(LOCAL, of_away), await desk.take(LOCAL, ask)]
            for each in first:
                each.delivered(lambda: False)
            (holder,) = stands.leases()
            while _left_ms(stands, holder) <= FIRST_LEASE_MS:
                await asyncio.sleep(0.02)
            stands.redis.zadd(stands.keys.leases, {holder: round(time.time() * 1e3) + 500})
            said = Beat([Held(each.granted.ticket, 1) for each in first if each.granted])
            assert (await desk.beat(LOCAL, said)).unwanted == []
            assert _left_ms(stands, holder) > FIRST_LEASE_MS
            with pytest.raises(ServerUnreachable):
                await desk.beat(LOCAL, Beat(said.tickets[:1]))

        run(work())
        assert tried[0] == away.id

    def test_leave_gives_everything_back_at_once(
        self, desks: Desks, request_: Request, ask: Ask
    ) -> None:
        async def work() -> None:
            desk = desks()
            granted = await take(desk, ask)
            for _ in range(2):
                assert (await desk.leave(LOCAL, Leave([granted.ticket]))).released == 1
            assert (await take(desk, ask)).parts[0].attempt == 1

        run(work())
        assert request_.status().parts.running == 1

    def test_calls_that_wait_are_answered_when_the_gateway_stops(
        self, desks: Desks, ask: Ask
    ) -> None:
        async def work() -> list[Any]:
            desk = desks()
            waiting = [asyncio.ensure_future(desk.take(LOCAL, ask)) for _ in range(3)]
            while desk.waiting < 3:
                await asyncio.sleep(0)
            desk.stop_waiting()
            return [handed.granted for handed in await asyncio.gather(*waiting)]

        assert run(work()) == [None] * 3

    @ONE_KIND
    def test_parts_of_a_worker_that_died_run_again(
        self, desks: Desks, request_: Request, ask: Ask
    ) -> None:
        ask.lease_s = 0.5

        async def work() -> None:
            desk = desks()
            (await desk.take(LOCAL, ask)).delivered(lambda: False)
            seen: list[tuple[int, bool]] = []
            while (1, True) not in seen:
                granted = await take(desk, ask)
                seen += [(part.number, part.alone) for part in granted.parts]
                await report(desk, done(granted))

        run(work())
        wait_until(lambda: request_.status().parts.running == 0)
