"""append.lua: (absent) -> waiting."""

from collections.abc import Callable

import pytest

from streamq.errors import LoadGap, RequestEnded, RequestUnknown, ServerFull
from streamq.protocol.replies import Tokens
from tests.support.by_hand import RequestByHand, cancelled, failed


def test_number_of_a_part_is_the_id_of_its_entry(driver: RequestByHand) -> None:
    driver.open()

    driver.append(2)
    driver.append(1, first=3)

    entries = driver.redis.xrange(driver.keys.parts)
    assert [id_ for id_, _ in entries] == [b"1-0", b"2-0", b"3-0"]


def test_large_numbers_are_ids_too(driver: RequestByHand) -> None:
    driver.open()
    driver.set_meta(total=12_345_678_901)

    driver.append(2, first=12_345_678_902)

    assert driver.entries() == [12_345_678_902, 12_345_678_903]


def test_parts_counts_and_cursor_move_in_one_step(driver: RequestByHand) -> None:
    driver.open()

    total, cursor, _ = driver.protocol.append(
        driver.id, 1, "", "at 90", 7, [b"abc", b"5", b"de", b"2"]
    )

    assert (total, cursor) == (2, "at 90")
    assert driver.left() == 3
    assert [driver.meta(f) for f in ("total", "bytes", "records", "cursor")] == [
        "2",
        "5",
        "7",
        "at 90",
    ]


def test_counts_of_several_runs_add_up(driver: RequestByHand) -> None:
    driver.open()

    driver.append(2, records=3, size=10)
    driver.append(3, first=3, records=4, size=20)

    assert [driver.meta(f) for f in ("total", "bytes", "records", "cursor")] == [
        "5",
        "80",
        "18",
        "c5",
    ]


def test_payload_and_origin_reach_the_holder_as_they_were(driver: RequestByHand) -> None:
    driver.open()
    payload, about = bytes(range(256)), b"2 in.csv 17"

    driver.protocol.append(driver.id, 1, "", "c", 2, [payload, about])

    part = driver.claim()[1].parts[0]
    assert (part.payload, part.about, part.attempt, part.partial) == (payload, about, 1, b"")


def test_run_of_parts_that_is_there_already_changes_nothing(driver: RequestByHand) -> None:
    driver.open()
    driver.append(3)
    driver.append(2, first=4)
    before = driver.snapshot()

    total, cursor, tokens = driver.protocol.append(driver.id, 1, "", "c3", 3, [b"x", b"1"] * 3)

    assert (total, cursor, bool(tokens)) == (5, "c5", False)
    assert driver.snapshot() == before


@pytest.mark.parametrize(("first", "count"), [(5, 1), (3, 2), (1, 4)], ids=str)
def test_parts_that_do_not_follow_are_refused(
    driver: RequestByHand, first: int, count: int
) -> None:
    driver.open()
    driver.append(3)
    before = driver.snapshot()

    with pytest.raises(LoadGap, match=f"the next part is 4, not {first}"):
        driver.append(count, first=first)

    assert driver.snapshot() == before


def test_parts_cut_elsewhere_are_refused(driver: RequestByHand) -> None:
    """Two loaders that cut parts of other sizes: as many parts, but up to another place."""
    driver.open()
    driver.append(3, cursor="at 300")
    before = driver.snapshot()

    with pytest.raises(LoadGap, match="the load stands at at 300, not at at 90"):
        driver.append(1, first=4, after="at 90", cursor="at 120")

    assert driver.snapshot() == before


def test_other_parts_of_the_same_numbers_are_refused(driver: RequestByHand) -> None:
    driver.open()
    driver.append(3, cursor="at 300")
    before = driver.snapshot()

    with pytest.raises(LoadGap, match="the next part is 4, not 1"):
        driver.append(3, after="", cursor="at 90")

    assert driver.snapshot() == before


def sealed(driver: RequestByHand) -> None:
    driver.protocol.seal(driver.id, 1, "c1")


@pytest.mark.parametrize("become", [sealed, cancelled, failed])
def test_request_that_loads_no_more_takes_no_part(
    driver: RequestByHand, become: Callable[[RequestByHand], None]
) -> None:
    driver.open(max_failures=0)
    driver.append(1)
    become(driver)
    before = driver.snapshot()

    with pytest.raises(RequestEnded, match="takes no more parts"):
        driver.append(1, first=2)

    assert driver.snapshot() == before


def test_parts_sent_again_after_the_seal_are_no_error(driver: RequestByHand) -> None:
    driver.load(3)
    before = driver.snapshot()

    driver.append(3)

    assert driver.snapshot() == before


def test_of_a_request_nobody_opened_leaves_no_key(driver: RequestByHand) -> None:
    with pytest.raises(RequestUnknown):
        driver.append(1)

    assert driver.existing_keys() == set()


def test_tokens_are_those_missing_from_what_could_start(driver: RequestByHand) -> None:
    driver.open(limit=7, level=9)

    tokens = [driver.append(3, first=first) for first in (1, 4, 7, 10)]

    assert tokens == [Tokens(3, "h:09"), Tokens(3, "h:09"), Tokens(1, "h:09"), Tokens(0, "h:09")]
    assert driver.meta("out") == "7"


def test_at_most_eight_tokens_are_out(driver: RequestByHand) -> None:
    driver.open(limit=1_000)

    assert driver.append(100).count == 8
    assert driver.append(100, first=101).count == 0


def test_paused_request_gets_no_tokens(driver: RequestByHand) -> None:
    driver.open()
    driver.protocol.pause(driver.id)

    assert not driver.append(3)


def test_delayed_request_gets_a_look_at_its_start_instead_of_tokens(driver: RequestByHand) -> None:
    driver.open(delay_ms=60_000)

    first, second = driver.append(3), driver.append(3, first=4)

    assert first == Tokens(0, "h:50", int(driver.meta("hold_ms")))
    assert second == Tokens(0, "h:50", 0)


def test_full_server_pushes_back_on_loaders(driver: RequestByHand) -> None:
    driver.open()
    before = driver.snapshot()

    with driver.full_server(), pytest.raises(ServerFull):
        driver.append(1)

    assert driver.snapshot() == before


def test_any_number_of_parts(driver: RequestByHand) -> None:
    driver.open()

    driver.append(10_000)

    assert (driver.meta("total"), driver.left()) == ("10000", 10_001)
    assert driver.entries()[-1] == 10_000
