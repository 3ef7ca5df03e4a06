"""``streamq top``: what it shows in which room, what keys do, and what it costs the server."""

import fcntl
import json
import re
import struct
import subprocess
import termios
from typing import Any

import pytest
from rich.cells import cell_len

from cli.commands.top import DOWN, UP, split_top_keys, top_frame
from streamq import Client, Protocol
from streamq.model import PartCounts, RecordCounts, State, Status
from streamq.protocol.replies import Tokens
from streamq.queue import watching
from streamq.queue.fleet import WorkerDetails
from streamq.queue.watching import View, Watch, Watched
from tests.cli.common import ALL_KINDS, beat
from tests.support.by_hand import HANDLER, RequestByHand
from tests.support.command import COMMAND, Streamq, Terminal, environment
from tests.support.secure import as_role
from tests.support.waiting import wait_until

pytestmark = pytest.mark.commands


def watched(number: int, **changes: Any) -> Watched:
    records = changes.pop("records", RecordCounts(100_000, number, 0))
    rate = changes.pop("rate", 1.0)
    values: dict[str, Any] = {
        "id": f"request-{number:03d}",
        "queue": "q",
        "handler": "clean_every_row",
        "state": State.OPEN,
        "paused": False,
        "level": 50,
        "limit": 8,
        "parts": PartCounts(10_000, 9_000, 8, 0, 992, 0),
        "records": records,
        "created_ms": 1_000 + number,
        "started_ms": 1_000,
        "finished_ms": None,
        "rate": rate,
        "eta_s": 10.0,
        "labels": {"user": str(number), "project": "a-long-name"},
    }
    status = Status(**(values | changes))
    return Watched(status=status, rate=rate, eta_s=status.eta_s)


def view(*requests: Watched, workers: int = 3) -> View:
    fleet = [
        WorkerDetails(name=f"host.{n}", handlers=["h"], slots=8, busy=n) for n in range(workers)
    ]
    return View(
        queue="q",
        requests=list(requests),
        open=len(requests),
        levels={10: 3, 50: 12_345},
        workers=fleet,
    )


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 10)])
@pytest.mark.parametrize("number", [0, 1, 5, 200])
@pytest.mark.parametrize("workers", [0, 1, 500])
def test_a_frame_fits_its_terminal(width: int, height: int, number: int, workers: int) -> None:
    found = top_frame(view(*map(watched, range(number)), workers=workers), "n", width, height)

    assert len(found.lines) == height
    assert max(map(len, found.lines)) <= width
    assert found.lines[-1].startswith("n newest  p progress")
    assert len(found.shown) >= min(number, 3)


def test_a_frame_of_80_columns_has_every_column_of_every_request() -> None:
    lines = top_frame(view(watched(7, rate=1234.5)), "n", 80, 24).lines

    assert lines[0] == "streamq top - queue q, 1 request open, by newest"
    assert lines[1] == "3 workers, 3 of 24 slots busy"
    assert lines[2] == "tokens waiting by level  10: 3, 50: 12k"
    headers = " ".join(lines[3].split())
    assert headers == "ID STATE LV HANDLER LABEL PARTS RECS RATE ETA FAIL RUN"
    assert lines[4].split()[:3] == ["request-007", "open", "50"]
    assert lines[4].split()[5:] == ["992/10k", "100k", "1,234/s", "10s", "0", "8/8"]
    assert "project=" in lines[4]


def test_keys_sort_and_scroll() -> None:
    found = view(
        watched(1, rate=5.0, records=RecordCounts(100, 90, 0), level=60),
        watched(2, rate=9.0, records=RecordCounts(100, 10, 3), level=40),
        watched(3, rate=1.0, records=RecordCounts(100, 50, 9), level=50),
    )

    def order(key: str) -> list[int]:
        return [int(name[-3:]) for name in top_frame(found, key, 80, 24).shown]

    assert [order(key) for key in "nprfl"] == [
        [3, 2, 1],
        [1, 3, 2],
        [2, 1, 3],
        [3, 2, 1],
        [2, 3, 1],
    ]
    many = view(*map(watched, range(100)))
    top = top_frame(many, "n", 80, 24)
    down = top_frame(many, "n", 80, 24, first=10)
    end = top_frame(many, "n", 80, 24, first=10_000)
    assert top.shown[10:] == down.shown[: len(top.shown) - 10]
    assert end.shown[-1] == "request-000"
    assert end.first == 100 - len(end.shown)
    assert f"  10 above, {90 - len(down.shown)} below" in down.lines


def test_characters_that_take_two_columns_move_nothing() -> None:
    wide, plain = top_frame(
        view(watched(2, labels={"a": "日本" * 30}), watched(1)), "n", 80, 24
    ).lines[4:6]

    assert cell_len(wide) == len(plain) <= 80
    assert wide.endswith(" 8/8")


def test_keys_as_terminals_send_them() -> None:
    assert split_top_keys("p\x1b[A\x1bOBq") == ["p", UP, DOWN, "q"]
    assert split_top_keys("") == [""]


@ALL_KINDS
def test_top_once_tells_of_requests_levels_and_workers(
    streamq: Streamq, client: Client, submitted: RequestByHand, protocol: Protocol
) -> None:
    beat(protocol, submitted.queue)
    client.submit(
        [b"1"],
        handler=HANDLER,
        id=f"{submitted.id}-b",
        queue=submitted.queue,
        labels={"user": "62"},
    )
    submitted.claim()

    ran = streamq("top", "--once")
    told = json.loads(streamq("top", "--json").stdout)

    assert ran.returncode == 0, ran.stderr
    assert "\x1b" not in ran.stdout
    lines = ran.stdout.splitlines()
    assert lines[1] == "1 worker, 1 of 8 slots busy"
    assert lines[2].startswith("tokens waiting by level  50: ")
    assert [line.split()[:5] for line in lines[4:6]] == [
        [f"{submitted.id}-b", "open", "50", HANDLER, "user=62"],
        [submitted.id, "open", "50", HANDLER, "-"],
    ]
    assert lines[5].split()[-1] == "1/8"
    assert lines[-1].split() == ["1/8", "web-3.4711", HANDLER]
    assert [each["id"] for each in told["requests"]] == [f"{submitted.id}-b", submitted.id]
    assert told["workers"][0]["busy"] == 1
    assert list(told["levels"]) == ["50"]


def test_top_wants_a_terminal(streamq: Streamq) -> None:
    ran = streamq("top")

    assert (ran.returncode, "say --once or --json" in ran.stderr) == (2, True)


@pytest.mark.parametrize(("variables", "has_colour"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_top_in_a_terminal_of_80_by_24(
    variables: dict[str, str], has_colour: bool, url: str, submitted: RequestByHand
) -> None:
    env = environment(STREAMQ_URL=as_role(url, "top"), STREAMQ_QUEUE=submitted.queue, **variables)
    env.pop("COLUMNS")
    with Terminal() as terminal:
        fcntl.ioctl(terminal.file, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        before = termios.tcgetattr(terminal.file)
        files: dict[str, Any] = {"stdin": terminal.file, "stdout": terminal.file}
        with subprocess.Popen([*COMMAND, "top"], env=env, **files) as shown:
            wait_until(lambda: submitted.id in terminal.seen(), 20)
            terminal.type("f")
            wait_until(lambda: "by failures" in terminal.seen(), 10)
            terminal.type("q")
            assert shown.wait(10) == 0
        text = terminal.seen()
        assert termios.tcgetattr(terminal.file) == before
    assert "\x1b[?1049h" in text, "it uses the other screen"
    assert "\x1b[?1049l" in text, "and leaves it"
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9][0-9;]*m", text)) == has_colour


class TestCost:
    def look(self, watch: Watch, protocol: Protocol, shown: tuple[str, ...] = ()) -> dict[str, int]:
        """How many commands of each kind a look made."""

        def calls() -> dict[str, int]:
            stats = protocol.connection.redis.info("commandstats")
            return {name: stats[name]["calls"] for name in stats}

        before = calls()
        watch.look(shown)
        names = ("evalsha", "zrange", "zrevrange", "hget", "llen")
        after = calls()
        return {
            name: after.get(f"cmdstat_{name}", 0) - before.get(f"cmdstat_{name}", 0)
            for name in names
        }

    def test_a_look_costs_as_much_with_any_number_of_requests_and_workers(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        for number in range(130):
            each = RequestByHand(protocol, queue, f"{request_id}-{number}")
            protocol.mint(queue, each.id, Tokens(1, f"h{number}:50"), register="yes")
            each.open()
            beat(protocol, queue, name=f"web.{number}")
        watch = Watch(protocol, queue)
        assert {each.status.id for each in Watch(protocol, queue).look().requests} == {
            f"{request_id}-{number}" for number in range(70, 130)
        }, "the newest come first"

        cost = [self.look(watch, protocol) for _ in range(3)]

        assert [each["evalsha"] for each in cost] == [60, 60, 60]
        assert [each["hget"] for each in cost] == [60, 60, 60]
        assert [each["llen"] for each in cost] == [60, 60, 60]
        assert {each["zrange"] + each["zrevrange"] for each in cost} == {3}
        assert watching.MOST_COMMANDS == 184
        found = watch.look()
        assert not watch.unread
        assert (len(found.requests), len(found.workers), found.levels) == (130, 130, {50: 130})

    def test_what_is_on_the_screen_is_read_at_every_look(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        many = [RequestByHand(protocol, queue, f"{request_id}-{number}") for number in range(130)]
        for each in many:
            protocol.mint(queue, each.id, Tokens(), register="yes")
            each.open()
        watch = Watch(protocol, queue)
        for _ in range(3):
            watch.look()

        for level in range(3):
            many[7].set_meta(level=level)
            found = watch.look([many[7].id])

            (seen,) = [each for each in found.requests if each.status.id == many[7].id]
            assert seen.status.level == level


def test_speed_is_that_of_the_last_seconds(
    protocol: Protocol, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol.mint(driver.queue, driver.id, Tokens(), register="yes")
    driver.load(100)
    watch = Watch(protocol, driver.queue)
    now = driver.now_ms()
    driver.set_meta(started_ms=now - 1_000_000, records_done=50)
    (first,) = watch.look().requests
    known = watch._known[driver.id]
    known._points[0] = (known._points[0][0] - 5_000, 30)  # so it was 5 s ago

    (second,) = watch.look().requests

    assert first.rate == pytest.approx(0.05, rel=0.1)
    assert second.rate == pytest.approx(4.0, rel=0.1)
    assert second.eta_s == pytest.approx(12.5, rel=0.1)
    driver.set_meta(state="done", finished_ms=driver.now_ms())
    (ended,) = watch.look().requests
    assert (ended.status.state, ended.eta_s) == ("done", None)
    monkeypatch.setattr(watching, "ENDED_S", -1.0)
    assert watch.look().requests == []
    driver.set_meta(state="open")
    assert len(watch.look().requests) == 1, "it runs again"
