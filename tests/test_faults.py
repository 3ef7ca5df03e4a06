"""The fault suite's own instruments: what a door counts, and how the page is written."""

from pathlib import Path

import msgspec

from streamq import Connection, Protocol
from streamq.server import LocalServer
from tests.driver import Driver
from tests.faults.program import report
from tests.faults.proxy import Proxy
from tests.faults.verdict import Figures

PAGE = """words
<!-- figures: single -->
old
<!-- end -->
more words
<!-- figures: cluster -->
kept
<!-- end -->
"""


def test_door_counts_each_result_once_and_sees_what_is_refused() -> None:
    with LocalServer.start(port=0) as server:
        door = Proxy(int(server.url.rpartition(":")[2]))
        driver = Driver(Protocol(Connection(f"redis://127.0.0.1:{door.port}")), "q", "r")
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


def test_page_of_a_run_cut_short_has_what_there_is(tmp_path: Path) -> None:
    results, page = tmp_path / "figures", tmp_path / "page.md"
    page.write_text(PAGE)
    failed = figures(scenario="spin", parts=0, broken=["it could not be run: no disk"])
    results.write_bytes(b"\n".join([figures(again=7), figures(seed=2, again=5), failed, b'{"sc']))

    report(results, page)

    text = page.read_text()
    assert "| a pool stopped for 3 s, leases stand 2 s | 2 | 10 | 0 | 0 | 7 |" in text
    assert "Of 3 runs of streamq 2 kept every promise." in text
    assert "* spin on valkey, seed 1: it could not be run: no disk" in text
    assert "old" not in text.split("more words")[0].splitlines()
    assert text.startswith("words\n")
    assert text.endswith(PAGE[PAGE.index("more words") :])
