"""expire.lua: a request that is past its deadline fails."""

import pytest

from streamq.errors import RequestUnknown
from streamq.model import State
from tests.support.by_hand import RequestByHand, done


def test_it_fails_and_that_is_published(driver: RequestByHand) -> None:
    driver.load(2, deadline_ms=1)
    with driver.published() as heard:
        assert driver.protocol.expire(driver.id) is State.FAILED

    assert heard == ["failed"]
    assert (driver.meta("state"), driver.meta("reason")) == ("failed", "deadline")
    assert int(driver.meta("finished_ms")) <= driver.now_ms()


@pytest.mark.parametrize("deadline", [0, 2**45, "spoilt"])
def test_one_that_is_not_past_it_goes_on(driver: RequestByHand, deadline: int) -> None:
    driver.load(2)
    driver.set_meta(deadline_ms=deadline or 2**45)
    before = driver.snapshot()

    assert driver.protocol.expire(driver.id) is State.OPEN
    assert driver.snapshot() == before


def test_one_that_has_ended_stays_as_it_is(driver: RequestByHand) -> None:
    driver.load(1, deadline_ms=1)
    done(driver)

    assert driver.protocol.expire(driver.id) is State.DONE


def test_loading_one_takes_no_more_parts(driver: RequestByHand) -> None:
    driver.open(deadline_ms=1)

    assert driver.protocol.expire(driver.id) is State.FAILED


def test_there_must_be_one(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.protocol.expire(driver.id)
