"""The fault suite's own instruments: what a door counts, and how the page is written."""

import time
from pathlib import Path

import msgspec

from streamq import Connection, Protocol
from streamq.servers.local import LocalServer
from tests.faults.gauges import Gauges, Rule
from tests.faults.program import report, spins
from tests.faults.proxy import Proxy
from tests.faults.verdict import Figures
from tests.support.by_hand import RequestByHand

PAGE = """words
<!-- figures: single -->
old
<!-- end -->
more words
<!-- figures: cluster -->
kept
<!-- end -->
<!-- figures: stories -->
kept
<!-- end -->
"""


def test_door_counts_each_result_once_and_sees_what_is_refused() -> None:
    with LocalServer.start(port=0) as server:
        door = Proxy(int(server.url.rpartition(":")[2]))
        driver = RequestByHand(Protocol(Connection(f"redis://127.0.0.1:{door.port}")), "q", "r")
        driver.load(3)
        holder, _ = driver.claim(2)
        driver.finish(holder, [1, 2], most=1, call=1)
        driver.finish(holder, [1, 2], most=1, call=1)  # the same call again
        driver.finish("another", [3], call=1)  # who has no lease

        assert sorted(door.given.values()) == [1, 2]
        assert (door.counted, door.granted) == (2, 1)
        door.close()


def figures(**changes: object) -> bytes:
    known = {"scenario": "stall", "subject": "streamq", "server": "valkey", "seed": 1}
    return msgspec.json.encode(
        msgspec.convert(known | {"parts": 10, "limit": 4} | changes, Figures)
    )


def test_more_tokens_than_claims_are_spinning_and_so_are_news_more_than_once_a_second() -> None:
    calm = {"took_s": 20.0, "claims": 100, "pops": 146, "news": 28}

    def found(**changes: object) -> list[str]:
        return spins(msgspec.json.decode(figures(**(calm | changes)), type=Figures))

    assert found() == []
    assert found(pops=147) == ["A9 119 tokens popped for 100 claims"]
    assert found(pops=147, faults=1) == []
    assert found(pops=147, news=29) == ["A9 29 news popped in 20.0 s"]


def test_page_of_a_run_cut_short_has_what_there_is(tmp_path: Path) -> None:
    results, page = tmp_path / "figures", tmp_path / "page.md"
    page.write_text(PAGE)
    failed = figures(scenario="spin", parts=0, broken=["it could not be run: no disk"])
    results.write_bytes(b"\n".join([figures(again=7), figures(seed=2, again=5), failed, b'{"sc']))

    report(results, page)

    text = page.read_text()
    assert "| a pool stopped for 7 s, taken for dead after 6 s | 2 | 10 | 0 | 0 | 7 |" in text
    assert "Of 3 runs of streamq 2 kept every promise." in text
    assert "* spin on valkey, seed 1: it could not be run: no disk" in text
    assert "old" not in text.split("more words")[0].splitlines()
    assert text.startswith("words\n")
    assert text.endswith(PAGE[PAGE.index("more words") :])


def test_page_keeps_what_the_old_design_did_where_it_was_not_run_again(tmp_path: Path) -> None:
    results, page = tmp_path / "figures", tmp_path / "page.md"
    page.write_text(PAGE)
    results.write_bytes(
        figures(again=7) + b"\n" + figures(subject="seed", lost=3, told=1, waiters=3)
    )
    report(results, page)

    results.write_bytes(figures(again=8))
    report(results, page)

    (row,) = (line for line in page.read_text().splitlines() if "stopped for 7 s" in line)
    assert row.startswith(
        "| a pool stopped for 7 s, taken for dead after 6 s | 1 | 10 | 0 | 0 | 8 |"
    )
    assert row.endswith("| 3 | 0 | 0 | 0 / 4 | 0.00 | 1 of 3 |")


def test_quarter_without_a_sample_tells_nothing_of_growth() -> None:
    gauges = Gauges()
    for at, value in ((0.0, 40.0), (6.0, 42.0), (9.0, 43.0)):
        gauges.began = time.monotonic() - at
        gauges.note("seldom", value, Rule(0.1, 4.0, "MiB"))
    gauges.note("grows", 60.0, Rule(0.1, 4.0, "MiB"))
    gauges.began = time.monotonic()
    gauges.note("grows", 40.0, Rule(0.1, 4.0, "MiB"))

    seldom, grows = gauges.rows(10.0)

    assert seldom.medians == [40.0, 40.0, 42.0, 43.0]
    assert (seldom.is_flat, grows.is_flat) == (True, False)
