"""inspect.lua: everything that is counted of a request, at one moment."""

import pytest

from streamq.errors import RequestUnknown
from tests.support.by_hand import RequestByHand


def test_counts_are_of_one_moment(driver: RequestByHand) -> None:
    driver.open(level=7)
    driver.append(9, records=10)
    holder, _ = driver.claim(4)
    driver.claim()
    driver.finish(holder, [1, 2], 0, call=0, records=20)
    driver.fail(holder, 3, delay_ms=60_000)

    found = driver.protocol.inspect(driver.id).fields

    names = ("left", "leases", "retry", "results", "done", "records_done", "total", "records")
    assert [found[name] for name in names] == ["8", "2", "1", "2", "2", "20", "9", "90"]
    assert (found["state"], found["handler"], found["level"]) == ("loading", "h", "7")
    assert int(found["created_ms"]) <= int(found["now_ms"])


def test_changes_nothing(driver: RequestByHand) -> None:
    driver.load(3)
    driver.claim()
    before = driver.snapshot()

    driver.protocol.inspect(driver.id)

    assert driver.snapshot() == before


def test_cancelled_request_has_nothing_left(driver: RequestByHand) -> None:
    driver.load(3)
    driver.claim()
    driver.protocol.cancel(driver.id)

    found = driver.protocol.inspect(driver.id).fields

    names = ("state", "left", "leases", "retry", "results")
    assert [found[name] for name in names] == ["cancelled", "0", "0", "0", "0"]


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.protocol.inspect(driver.id)

    assert driver.existing_keys() == set()


def test_full_server_still_tells(driver: RequestByHand) -> None:
    driver.load(3)

    with driver.full_server():
        assert driver.protocol.inspect(driver.id).count("left") == 3
