"""The census of a queue, reasons, notices, tables, and the map, from a real server."""

import secrets
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamq import Client, Protocol, Request
from streamq.dashboard import notices, rows, why
from streamq.dashboard.census import Census, limit_of_stages, records_foreseen
from streamq.dashboard.input_map import MOST_CELLS, read_map
from streamq.dashboard.samplers import CensusesForSamplers, HealthSampler, sampler_of_topic
from streamq.dashboard.timeline import Timeline
from streamq.flows.flow import Flow, Stage
from streamq.model import Part, PartCounts, Policy, RecordCounts, Spec
from streamq.protocol import glances
from streamq.protocol.keys import RequestKeys
from streamq.protocol.replies import Terms
from streamq.records.splitting import Cursor, sizes_of_inputs
from tests.support.by_hand import CAN_RUN
from tests.support.simulated import Worker
from tests.support.waiting import wait_until


def odd_fails(part: Part) -> bytes:
    if part.number % 2:
        raise ValueError(f"no {part.number}")
    return b"yes"


def submit(client: Client, queue: str, parts: int, **options: object) -> Request:
    given: dict[str, object] = {"handler": "h", "queue": queue, "retries": 0, **options}
    return client.submit(list(range(parts)), **given)  # type: ignore[arg-type]


def held(protocol: Protocol, request: Request, most: int) -> str:
    """Claim parts of a request, and keep them."""
    holder = f"pool.process-0-{secrets.token_hex(4)}"
    protocol.claim(request.id, holder, Terms(most), CAN_RUN, level=-1)
    return holder


class TestCensus:
    def test_rows_tell_what_inspect_tells(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        request = submit(client, queue, 30, limit=3, level=7, labels={"user": "62"})
        held(protocol, request, 5)
        census = Census(protocol, queue)
        census.look()
        found, told = census.requests[request.id].status, request.status()
        for name in ("parts", "records", "level", "limit", "state", "labels", "created_ms"):
            assert getattr(found, name) == getattr(told, name), name
        assert told.parts.running == 1
        assert census.levels() == [(7, 1, 29, 1)]

    def test_every_request_is_read_and_ended_ones_leave(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        requests = [submit(client, queue, 1) for _ in range(300)]
        census = Census(protocol, queue)
        for _ in range(50):
            census._looked_at = 0.0
            census.look()
            if not census.unread:
                break
        assert set(census.requests) == {each.id for each in requests}
        Worker(protocol, queue).drain()
        census._looked_at = 0.0
        census.look()
        assert not census.requests
        assert census.open == 0
        # What they came to counts for the speed of the queue.
        assert census.finished > 0


class TestReasons:
    def reason(self, protocol: Protocol, queue: str, request: Request) -> str:
        census = Census(protocol, queue)
        census.look()
        found = why.reason_held_back(request.status(), census)
        return found.code if found else ""

    def test_paused_held_nobody_and_ended(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        request = submit(client, queue, 3)
        assert self.reason(protocol, queue, request) == "nobody"
        request.pause()
        assert self.reason(protocol, queue, request) == "paused"
        later = submit(client, queue, 3, delay="1h")
        assert self.reason(protocol, queue, later) == "held"
        request.cancel()
        assert self.reason(protocol, queue, request) == ""

    def test_limit_rate_slots_and_handler(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        details = b'{"name":"w","handlers":["h"],"slots":1,"busy":1}'
        protocol.beat(queue, "w", 60_000, details, 20_000, [])
        request = submit(client, queue, 30, limit=1)
        held(protocol, request, 2)
        assert self.reason(protocol, queue, request) == "limit"
        assert self.reason(protocol, queue, submit(client, queue, 9, rate="1/s")) == "rate"
        assert self.reason(protocol, queue, submit(client, queue, 9)) == "slots"
        assert self.reason(protocol, queue, submit(client, queue, 9, level=90)) == "level"
        other = submit(client, queue, 9, handler="other")
        assert self.reason(protocol, queue, other) == "handler"
        census = Census(protocol, queue)
        census.look()
        assert [
            (each.code, each.request) for each in notices.notices_that_need_attention(census)
        ] == [("handler", other.id)]
        # What waits at better levels and cannot run is not in the way of others.
        submit(client, queue, 700, level=5).pause()
        submit(client, queue, 700, level=5, delay="1h")
        census = Census(protocol, queue)
        census.look()
        assert census.waiting_before(90) == 29 + 9 + 9

    def test_failing_requests_and_missing_workers_need_attention(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        request = submit(client, queue, 60)
        worker = Worker(protocol, queue, odd_fails, most=40)
        holder = f"w{secrets.token_hex(4)}"
        grant = protocol.claim(request.id, holder, Terms(40), CAN_RUN, level=50)
        for call, part in enumerate(grant.parts[:20], 1):
            worker._fail(request.id, holder, call, part, ValueError("x"))
        census = Census(protocol, queue)
        census.look()
        assert [each.code for each in notices.notices_that_need_attention(census)] == [
            "nobody",
            "failing",
        ]


class TestTables:
    def page(self, protocol: Protocol, queue: str, filters: str) -> list[str]:
        census = Census(protocol, queue)
        census.look()
        found = rows.page_of_rows(
            protocol, census, rows.EndedRows(protocol, queue), rows.Filters.of(filters)
        )
        return [row["id"] for row in found["rows"]]

    def test_filters_and_order(self, client: Client, protocol: Protocol, queue: str) -> None:
        word = secrets.token_hex(4)
        first = submit(client, queue, 3, id=f"{word}-a", level=10)
        wait_until(lambda: time.time() * 1e3 > first.status().created_ms + 1, 20)
        second = submit(client, queue, 9, id=f"{word}-b", handler="other")
        second.pause()
        assert self.page(protocol, queue, "") == [second.id, first.id]
        assert self.page(protocol, queue, "sort=oldest") == [first.id, second.id]
        assert self.page(protocol, queue, "state=paused") == [second.id]
        assert self.page(protocol, queue, "handler=h") == [first.id]
        assert self.page(protocol, queue, "level=10") == [first.id]
        assert self.page(protocol, queue, f"prefix={word}-b") == [second.id]
        # There is no such page any more, or never was: the last one is shown.
        assert sorted(self.page(protocol, queue, "page=99")) == sorted([first.id, second.id])
        first.cancel()
        assert self.page(protocol, queue, "state=cancelled") == [first.id]
        assert self.page(protocol, queue, "state=done") == []

    def test_flow_is_one_row_and_one_card(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        stages = [Stage(kind="map", handler=name) for name in ("h", "h2", "h3")]
        request = client.submit([1, 2, 3, 4], flow=Flow("f", stages), queue=queue)
        plain = submit(client, queue, 3)
        held(protocol, request, 1)
        census = Census(protocol, queue)
        census.look()
        found = rows.page_of_rows(protocol, census, rows.EndedRows(protocol, queue), rows.Filters())
        assert (found["count"], census.open) == (2, 2)
        row = next(each for each in found["rows"] if each["id"] == request.id)
        # Its later stages will get as much as the first has, as far as anybody can tell.
        assert (row["parts"].total, row["parts"].running) == (12, 1)
        assert (row["handler"], row["limit"]) == ("h → h2 → h3", request.status().limit)
        assert [(level, number) for level, number, _, _ in census.levels()] == [(50, 2)]
        # What its second stage has counts, too.
        protocol.connection.redis.hset(RequestKeys(f"{request.id}/2").meta, "total", 3)
        census = Census(protocol, queue)
        census.look()
        whole = {each.status.id: each.status for each in census.wholes()}
        assert whole.keys() == {request.id, plain.id}
        assert whole[request.id].parts.waiting == 3 + 3
        assert whole[request.id].limit == 2 * request.status().limit

    def test_flow_that_grows_is_foreseen(self) -> None:
        def stage(total: int, done: int, failed: int = 0, waiting: int = 1, limit: int = 4) -> Any:
            records = RecordCounts(total, done, failed)
            parts = PartCounts(total, waiting, 0, 0, done, failed)
            return SimpleNamespace(records=records, parts=parts, limit=limit)

        assert (
            records_foreseen([stage(100, 0), stage(0, 0)]) == 200
        )  # nothing is known of the second
        assert records_foreseen([stage(100, 10), stage(50, 0)]) == 100 + 500  # five of each
        assert records_foreseen([stage(100, 10), stage(50, 25), stage(5, 0)]) == 100 + 500 + 100
        assert records_foreseen([stage(100, 90, 10), stage(90, 90)]) == 190  # all is handed over
        # Only stages that have parts to run count.
        assert (
            limit_of_stages([stage(9, 9, 0, 0, 3), stage(9, 0, 0, 1, 5), stage(9, 0, 0, 1, 7)])
            == 12
        )
        assert limit_of_stages([stage(9, 9, 0, 0, 3), stage(9, 9, 0, 0, 5)]) == 3


class TestManyRequests:
    """What a page tells is bounded, whatever the queue holds."""

    def test_look_reads_two_pages_once_all_were_read(
        self, client: Client, protocol: Protocol, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("streamq.dashboard.census.PAGE", 10)
        requests = [submit(client, queue, 1) for _ in range(35)]
        census = Census(protocol, queue)
        census.look()
        while census.unread:
            census._looked_at = 1.0
            census.look()
        read: list[str] = []
        told = glances.glance_at_rows

        def rows_told(protocol: Protocol, ids: list[str], now_ms: int) -> Any:
            read.extend(ids)
            return told(protocol, ids, now_ms)

        monkeypatch.setattr("streamq.protocol.glances.glance_at_rows", rows_told)
        for _ in range(2):
            census._looked_at = 1.0
            census.look()
        # Those that were read longest ago come first: two looks read each of them.
        assert len(read) == 40
        assert set(read) == {each.id for each in requests}

    def test_health_tells_the_first_of_what_is_alike(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        for _ in range(HealthSampler.BOOKS + 5):
            submit(client, queue, 1)
        client.submit([1], handler="h", queue=queue, id=(spoilt := f"{queue}-spoilt"))
        protocol.connection.redis.hset(RequestKeys(spoilt).meta, "total", "many")
        health = sampler_of_topic(protocol, CensusesForSamplers(protocol), f"h:{queue}")
        told = [(each.check, each.verdict, each.says) for each in health.read()["findings"]]
        handlers = [says for check, _, says in told if check == "handler"]
        assert len(handlers) == HealthSampler.ALIKE + 1
        assert handlers[-1] == f"{HealthSampler.BOOKS + 5 - HealthSampler.ALIKE} more like these"
        assert any(spoilt in says for _, verdict, says in told if verdict == "fail")
        assert any("those of the 100 oldest of 105 requests" in says for _, _, says in told)

    def test_levels_tell_a_hundred_cards(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        for number in range(240):
            submit(client, queue, 1, level=number % 30)
        found = sampler_of_topic(protocol, CensusesForSamplers(protocol), f"v:{queue}").read()
        assert {len(each["cards"]) for each in found["levels"]} == {3}
        assert {each["requests"] for each in found["levels"]} == {8}


class TestMap:
    def test_parts_are_where_they_are(self, client: Client, protocol: Protocol, queue: str) -> None:
        request = submit(client, queue, 50, limit=2)
        assert read_map(protocol, request.id).marks == []
        held(protocol, request, 4)
        found = read_map(protocol, request.id)
        assert (found.total, found.size, found.cells, found.delivered) == (50, 1, 50, 4)
        assert found.marks == [(cell, 1, 0, 0) for cell in range(4)]

    def test_failures_are_marked_and_a_request_that_ended_is_drawn(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        request = submit(client, queue, 20)
        Worker(protocol, queue, odd_fails).drain()
        found = read_map(protocol, request.id)
        assert [mark[0] for mark in found.marks if mark[3]] == list(range(0, 20, 2))
        assert (found.failed, found.seen_failed, found.delivered) == (10, 10, 20)

    def test_a_large_request_has_two_thousand_cells(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        found = read_map(protocol, submit(client, queue, 4_500).id)
        assert found.cells <= MOST_CELLS
        assert (found.size, found.cells) == (3, 1_500)


def test_end_of_a_load_is_foreseen_where_its_files_are(
    client: Client, protocol: Protocol, queue: str, request_id: str, tmp_path: Path
) -> None:
    file = tmp_path / "in.txt"
    file.write_text("123456789\n" * 1_000)
    policy = Policy(handler="h", limit=9, spec=Spec(format="lines", files=(str(file),)))
    protocol.open(request_id, queue, policy)
    cursor = Cursor(offset=2_000, record=201).text
    _, _, tokens = protocol.append(request_id, 1, "", cursor, 200, [b"", b"1"] * 200)
    protocol.mint(queue, request_id, tokens)
    Worker(protocol, queue).drain()

    def read(censuses: CensusesForSamplers) -> Any:
        return sampler_of_topic(protocol, censuses, f"r:{request_id}").read()

    # A gateway does not have the files: it tells what is loaded, and foresees nothing.
    told = read(CensusesForSamplers(protocol))
    assert (told["foreseen"], told["ending"]) == (200, None)
    # The dashboard of a run does: a fifth was read.
    told = read(CensusesForSamplers(protocol, sizes_of_inputs))
    assert told["foreseen"] == 1_000
    assert told["ending"].likely > told["t"]
    file.unlink()
    assert read(CensusesForSamplers(protocol, sizes_of_inputs))["foreseen"] == 200


def test_handler_of_a_run_has_the_name_of_its_function(
    client: Client, protocol: Protocol, queue: str, request_id: str
) -> None:
    handler = f"clean-{request_id}"
    details = f'{{"name":"w","handlers":["{handler}"],"slots":1,"busy":1}}'.encode()
    protocol.beat(queue, "w", 60_000, details, 20_000, [])
    request = client.submit([1, 2], handler=handler, queue=queue, id=request_id)
    census = Census(protocol, queue)
    census.look()
    reason = why.reason_held_back(request.status(), census)
    assert reason
    assert reason.says == "the only slot that can run clean is busy"


def test_timeline_tells_who_serves_what(client: Client, protocol: Protocol, queue: str) -> None:
    details = b'{"name":"mill.7","pool":"pool","handlers":["h"],"slots":1,"busy":1}'
    protocol.beat(queue, "mill.7", 60_000, details, 20_000, [])
    request = submit(client, queue, 9)
    held(protocol, request, 2)
    census = Census(protocol, queue)
    census.look()
    assert Timeline(protocol).look(census)["slots"] == [("mill.7", "pro/0", request.id)]


def test_payload_is_cut(client: Client, protocol: Protocol, queue: str) -> None:
    request = client.submit([b"x" * 9_000], handler="h", queue=queue)
    _, text, size = glances.glance_at_payload(protocol, request.id, 1, 4_096)
    assert (len(text), size) == (4_096, 9_000)
    assert glances.glance_at_payload(protocol, request.id, 2, 10)[2] == -1


def test_only_chosen_parts_run_again(client: Client, protocol: Protocol, queue: str) -> None:
    request = submit(client, queue, 20)
    Worker(protocol, queue, odd_fails).drain()
    assert request.retry(parts=[1, 3, 4, 999]) == 2
    assert request.status().parts.failed == 8
