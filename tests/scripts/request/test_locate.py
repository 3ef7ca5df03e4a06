"""locate.lua: where parts came from."""

from tests.support.by_hand import RequestByHand


def test_tells_of_parts_that_are_there(driver: RequestByHand) -> None:
    driver.open()
    driver.append(3, records=7)
    holder, _ = driver.claim()
    driver.finish(holder, [1])
    driver.give_up(2)
    before = driver.snapshot()

    found = driver.protocol.locate(driver.id, [3, 1, 2, 9])

    assert found == [b"7", b"", b"7", b""]
    assert driver.snapshot() == before


def test_of_a_request_that_is_gone_nothing_is_known(driver: RequestByHand) -> None:
    assert driver.protocol.locate(driver.id, [1]) == [b""]
    assert driver.protocol.locate(driver.id, []) == []
