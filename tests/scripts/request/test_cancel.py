"""cancel.lua: loading, open -> cancelled."""

import pytest

from streamq.errors import RequestEnded, RequestUnknown
from streamq.model import State
from streamq.protocol.lua import script_signature
from tests.support.by_hand import RequestByHand


@pytest.fixture
def busy(driver: RequestByHand) -> str:
    """Holds two of nine parts; one is done, one failed, one waits for its next attempt."""
    driver.load(9)
    holder, _ = driver.claim(5)
    driver.finish(holder, [1], 0, call=0)
    driver.fail(holder, 2, kind="abandon")
    driver.fail(holder, 3, delay_ms=60_000, partial=b"some")
    assert driver.existing_keys() == {*script_signature("purge")[0]} - {"gone", "keys", "pace"}
    return holder


def writes_of_cancel(driver: RequestByHand) -> dict[str, int]:
    """Commands that the server ran to cancel the request."""
    names = ("hset", "unlink", "del", "hdel", "xack", "xclaim", "xdel", "xtrim", "zrem")
    before = driver.commands(names)
    driver.protocol.cancel(driver.id)
    after = driver.commands(names)
    return {name: after[name] - before[name] for name in names if after[name] > before[name]}


def test_ends_the_request_at_once(driver: RequestByHand, busy: str) -> None:
    with driver.published() as published:
        dropped = driver.protocol.cancel(driver.id)

    assert dropped == 7
    assert (driver.meta("state"), published) == ("cancelled", ["cancelled"])
    assert 0 <= driver.now_ms() - int(driver.meta("finished_ms")) < 60_000


def test_keeps_only_what_was_finished(driver: RequestByHand, busy: str) -> None:
    driver.protocol.cancel(driver.id)

    assert driver.existing_keys() == {"meta", "results", "failed"}
    assert driver.results() == {"1": b"r1"}


def test_runs_as_many_commands_for_one_part_as_for_a_thousand(driver: RequestByHand) -> None:
    small, large = driver, RequestByHand(driver.protocol, driver.queue, f"{driver.id}-large")
    small.load(1)
    large.load(1_000)
    large.claim(500)

    writes = [writes_of_cancel(small), writes_of_cancel(large)]

    assert writes[0] == writes[1] == {"hset": 1, "unlink": 1}
    assert large.existing_keys() == {"meta"}


def test_twice_says_the_same(driver: RequestByHand, busy: str) -> None:
    driver.protocol.cancel(driver.id)
    before = driver.snapshot()

    with driver.published() as published:
        assert driver.protocol.cancel(driver.id) == 7

    assert (driver.snapshot(), published) == (before, [])


def test_load_ends_too(driver: RequestByHand) -> None:
    driver.open()
    driver.append(2)

    assert driver.protocol.cancel(driver.id) == 2

    with pytest.raises(RequestEnded, match="the request is cancelled"):
        driver.append(1, first=3)
    assert driver.protocol.seal(driver.id, 2, "c2")[0] == State.CANCELLED


def test_holders_are_told_and_can_change_nothing(driver: RequestByHand, busy: str) -> None:
    driver.protocol.cancel(driver.id)
    before = driver.snapshot()

    state, _, stands = driver.protocol.renew(driver.id, 20_000, {busy: 4})
    words = [
        driver.finish(busy, [4], 5).word,
        driver.fail(busy, 4).word,
        driver.handback(busy, [5]).word,
        driver.release(busy, crashed=4).word,
        driver.claim(holder=busy)[1].word,
    ]

    assert (state, stands) == (State.CANCELLED, {busy: False})
    assert words == ["cancelled"] * 5
    assert driver.snapshot() == before


def test_paused_request_may_be_cancelled(driver: RequestByHand) -> None:
    driver.load(1)
    driver.protocol.pause(driver.id)

    assert driver.protocol.cancel(driver.id) == 1


@pytest.mark.parametrize("state", ["done", "failed"])
def test_request_that_is_over_stays_as_it_is(driver: RequestByHand, state: str) -> None:
    driver.load(2, max_failures=0 if state == "failed" else -1)
    driver.give_up(1)
    if state == "done":
        holder, _ = driver.claim()
        driver.finish(holder, [2])
    before = driver.snapshot()

    with pytest.raises(RequestEnded, match=f"the request is {state}"):
        driver.protocol.cancel(driver.id)

    assert driver.snapshot() == before


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.protocol.cancel(driver.id)

    assert driver.existing_keys() == set()


def test_full_server_still_takes_it(driver: RequestByHand, busy: str) -> None:
    with driver.full_server():
        assert driver.protocol.cancel(driver.id) == 7
