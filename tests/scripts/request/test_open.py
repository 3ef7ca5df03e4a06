"""open.lua: (absent) -> loading."""

import pytest

from streamq.errors import RequestExists, ServerFull
from streamq.model import State
from streamq.protocol.replies import Opened
from tests.support.by_hand import RequestByHand


def test_creates_a_request_that_is_loading(driver: RequestByHand) -> None:
    opened = driver.open(level=7, limit=3)

    assert opened == Opened(True, State.LOADING, 0, "")
    assert driver.left() == 1
    assert driver.existing_keys() == {"meta", "parts", "left"}
    assert (driver.meta("queue"), driver.meta("level"), driver.meta("limit")) == (
        driver.queue,
        "7",
        "3",
    )
    assert 0 <= driver.now_ms() - int(driver.meta("created_ms")) < 60_000


def test_same_submission_finds_the_request_where_its_load_stands(driver: RequestByHand) -> None:
    driver.open()
    driver.append(3)
    before = driver.snapshot()

    opened = driver.open()

    assert opened == Opened(False, State.LOADING, 3, "c3")
    assert driver.snapshot() == before


def test_same_submission_finds_the_request_that_has_ended(driver: RequestByHand) -> None:
    driver.load(0)

    assert driver.open() == Opened(False, State.DONE, 0, "")


def test_another_submission_is_refused_and_changes_nothing(driver: RequestByHand) -> None:
    driver.open("one")
    before = driver.snapshot()

    with pytest.raises(RequestExists, match="taken by another submission"):
        driver.open("another", level=3)

    assert driver.snapshot() == before


def test_without_a_delay_nothing_is_held(driver: RequestByHand) -> None:
    driver.open()

    assert driver.meta("hold_ms") == "0"


def test_delay_is_counted_from_the_first_submission(driver: RequestByHand) -> None:
    driver.open(delay_ms=60_000)
    hold_ms = int(driver.meta("hold_ms"))

    driver.open(delay_ms=900_000)

    assert hold_ms == int(driver.meta("created_ms")) + 60_000
    assert driver.meta("hold_ms") == str(hold_ms)


def test_id_is_free_again_after_the_purge(driver: RequestByHand) -> None:
    driver.load(0, digest="one")
    driver.protocol.purge(driver.id, force=True)

    assert driver.open("another").is_new


def test_full_server_refuses_it_and_keeps_nothing(driver: RequestByHand) -> None:
    with driver.full_server(), pytest.raises(ServerFull):
        driver.open()

    assert driver.existing_keys() == set()
