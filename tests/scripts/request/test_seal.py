"""seal.lua: loading -> open, or done without a part left to finish."""

import pytest

from streamq.errors import LoadGap, RequestExists, RequestUnknown
from streamq.model import State
from tests.support.by_hand import RequestByHand


@pytest.fixture
def loading(driver: RequestByHand) -> RequestByHand:
    """A request of three parts, all appended."""
    driver.open()
    driver.append(3)
    return driver


def test_drops_the_extra_one_of_the_counter(loading: RequestByHand) -> None:
    state, _ = loading.protocol.seal(loading.id, 3, "c3")

    assert (state, loading.meta("state"), loading.left()) == (State.OPEN, "open", 3)


def test_twice_changes_nothing(loading: RequestByHand) -> None:
    loading.protocol.seal(loading.id, 3, "c3")
    before = loading.snapshot()

    state, tokens = loading.protocol.seal(loading.id, 3, "c3")

    assert (state, bool(tokens)) == (State.OPEN, False)
    assert loading.snapshot() == before


def test_request_without_parts_is_done(driver: RequestByHand) -> None:
    driver.open()

    with driver.published() as published:
        state, tokens = driver.protocol.seal(driver.id, 0, "")

    assert (state, bool(tokens)) == (State.DONE, False)
    assert published == ["done"]
    assert 0 <= driver.now_ms() - int(driver.meta("finished_ms")) < 60_000
    assert driver.existing_keys() == {"meta", "left"}


def test_request_whose_parts_were_faster_than_its_load_is_done(loading: RequestByHand) -> None:
    holder, _ = loading.claim(3)
    assert loading.finish(holder, [1, 2, 3]).word == "over"
    assert loading.meta("state") == "loading"

    state, _ = loading.protocol.seal(loading.id, 3, "c3")

    assert (state, loading.left()) == (State.DONE, 0)
    assert loading.existing_keys() == {"meta", "left", "results"}


def test_too_many_failures_are_judged_at_the_end_of_the_load(driver: RequestByHand) -> None:
    driver.open(max_percent=10.0)
    driver.append(1)
    driver.give_up(1)
    assert driver.meta("state") == "loading"

    state, _ = driver.protocol.seal(driver.id, 1, "c1")

    assert state == State.FAILED


def test_request_that_failed_while_loading_stays_failed_and_is_sealed_once(
    driver: RequestByHand,
) -> None:
    driver.open(max_failures=0)
    driver.append(3)
    driver.give_up(1)
    assert (driver.meta("state"), driver.left()) == ("failed", 3)

    states = [driver.protocol.seal(driver.id, 3, "c3")[0] for _ in range(2)]

    assert states == [State.FAILED, State.FAILED]
    assert driver.left() == 2


@pytest.mark.parametrize("total", [2, 4])
def test_another_number_of_parts_is_refused(loading: RequestByHand, total: int) -> None:
    before = loading.snapshot()

    with pytest.raises(LoadGap, match=f"the server has 3 parts, not {total}"):
        loading.protocol.seal(loading.id, total, "c3")

    assert loading.snapshot() == before


def test_other_content_is_refused(loading: RequestByHand) -> None:
    before = loading.snapshot()

    with pytest.raises(RequestExists, match="other content"):
        loading.protocol.seal(loading.id, 3, "another cursor")

    assert loading.snapshot() == before


def test_other_content_is_refused_also_after_the_end(driver: RequestByHand) -> None:
    driver.load(1)
    holder, _ = driver.claim()
    driver.finish(holder, [1])

    with pytest.raises(RequestExists):
        driver.protocol.seal(driver.id, 1, "another cursor")


def test_cancelled_request_says_so_whatever_was_loaded(loading: RequestByHand) -> None:
    loading.protocol.cancel(loading.id)
    before = loading.snapshot()

    state, tokens = loading.protocol.seal(loading.id, 99, "another cursor")

    assert (state, bool(tokens)) == (State.CANCELLED, False)
    assert loading.snapshot() == before


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.protocol.seal(driver.id, 0, "")

    assert driver.existing_keys() == set()


def test_returns_tokens_that_are_missing(loading: RequestByHand) -> None:
    loading.set_meta(out=1)

    _, tokens = loading.protocol.seal(loading.id, 3, "c3")

    assert (tokens.count, tokens.to, loading.meta("out")) == (2, "h:50", "3")
