"""purge.lua: done, failed, cancelled -> (absent)."""

import pytest

from streamq.errors import RequestOpen
from streamq.protocol.lua import script_signature
from tests.support.by_hand import RequestByHand


@pytest.fixture
def ended(driver: RequestByHand) -> RequestByHand:
    """Failed before its end, with something under each of its keys; kept for a minute."""
    driver.load(9, max_failures=1, keep_ms=60_000)
    driver.protocol.index(driver.id, [1, "key"])
    holder, _ = driver.claim(5)
    driver.finish(holder, [1], 0, call=0)
    driver.fail(holder, 2, delay_ms=60_000, partial=b"some")
    driver.fail(holder, 3, kind="abandon")
    driver.release("another")
    driver.protocol.audit(driver.id)
    driver.fail(holder, 4, kind="abandon")
    assert driver.meta("state") == "failed"
    assert driver.existing_keys() == set(script_signature("purge")[0])
    return driver


def test_not_one_key_remains(ended: RequestByHand) -> None:
    assert ended.protocol.purge(ended.id, force=True) == 0

    assert ended.existing_keys() == set()


def test_waits_for_the_end_of_the_retention(ended: RequestByHand) -> None:
    before = ended.snapshot()

    purge_at = ended.protocol.purge(ended.id)

    assert purge_at == int(ended.meta("finished_ms")) + 60_000
    assert ended.snapshot() == before


def test_retention_that_is_over_is_not_waited_for(ended: RequestByHand) -> None:
    ended.set_meta(finished_ms=ended.now_ms() - 60_001)

    assert ended.protocol.purge(ended.id) == 0

    assert ended.existing_keys() == set()


def test_request_that_is_not_kept_goes_at_once(driver: RequestByHand) -> None:
    driver.load(0, keep_ms=0)

    assert driver.protocol.purge(driver.id) == 0

    assert driver.existing_keys() == set()


def test_cancelled_request_goes_too(driver: RequestByHand) -> None:
    driver.load(3)
    driver.protocol.cancel(driver.id)

    assert driver.protocol.purge(driver.id, force=True) == 0

    assert driver.existing_keys() == set()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("state", ["loading", "open"])
def test_request_that_still_runs_is_refused(driver: RequestByHand, state: str, force: bool) -> None:
    driver.load(3)
    driver.set_meta(state=state)
    before = driver.snapshot()

    with pytest.raises(RequestOpen, match=f"the request is {state}"):
        driver.protocol.purge(driver.id, force=force)

    assert driver.snapshot() == before


def test_twice_is_no_error(ended: RequestByHand) -> None:
    ended.protocol.purge(ended.id, force=True)

    assert ended.protocol.purge(ended.id) == 0


def test_full_server_still_forgets(ended: RequestByHand) -> None:
    with ended.full_server():
        ended.protocol.purge(ended.id, force=True)

    assert ended.existing_keys() == set()
