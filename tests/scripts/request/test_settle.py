"""settle.lua: what a request owes after its end."""

import pytest

from streamq.errors import RequestUnknown
from tests.support.by_hand import RequestByHand, done


@pytest.fixture
def owing(driver: RequestByHand) -> RequestByHand:
    """Done, with callbacks that are not started."""
    driver.load(1)
    driver.set_meta(owes=2)
    done(driver)
    return driver


def created(driver: RequestByHand) -> int:
    return int(driver.meta("created_ms"))


def test_debt_is_struck_once(owing: RequestByHand) -> None:
    assert owing.protocol.audit(owing.id).owed == 1

    assert [owing.protocol.settle(owing.id, created(owing), 0) for _ in range(2)] == [True, False]

    assert owing.protocol.audit(owing.id).owed == 0
    assert owing.protocol.audit(owing.id).purge_at > 0


@pytest.mark.parametrize(("off", "run"), [(1, 0), (0, 1), (0, -1)])
def test_debt_of_another_end_is_not(owing: RequestByHand, off: int, run: int) -> None:
    before = owing.snapshot()

    assert not owing.protocol.settle(owing.id, created(owing) + off, run)

    assert owing.snapshot() == before


def test_live_request_owes_nothing(driver: RequestByHand) -> None:
    driver.load(1)
    driver.set_meta(owes=1)

    assert not driver.protocol.settle(driver.id, created(driver), 0)
    assert driver.protocol.audit(driver.id).owed == 0


def test_one_that_ends_again_owes_again(owing: RequestByHand) -> None:
    owing.protocol.settle(owing.id, created(owing), 0)
    owing.set_meta(redrives=1)

    assert owing.protocol.audit(owing.id).owed == 1
    assert owing.protocol.settle(owing.id, created(owing), 1)


def test_there_must_be_one(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.protocol.settle(driver.id, 0, 0)


def test_full_server_still_takes_it(owing: RequestByHand) -> None:
    with owing.full_server():
        assert owing.protocol.settle(owing.id, created(owing), 0)
