"""index.lua: which parts have which keys."""

import pytest

from streamq import Protocol
from streamq.errors import RequestUnknown
from tests.support.by_hand import RequestByHand


@pytest.fixture
def opened(driver: RequestByHand) -> RequestByHand:
    driver.open()
    return driver


def kept(driver: RequestByHand) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = driver.redis.hgetall(driver.keys.keys)
    return found


def test_parts_are_kept_by_their_key_in_order(opened: RequestByHand) -> None:
    again = opened.protocol.index(opened.id, [1, "a", 2, "b", 3, "a", 12, "a"])

    assert (again, kept(opened)) == (2, {b"a": b"1 3 12", b"b": b"2"})


def test_said_again_it_changes_nothing(opened: RequestByHand) -> None:
    for _ in range(2):
        assert opened.protocol.index(opened.id, [1, "a", 11, "b"]) == 0

    # 1 is a part of the number 11, and yet another part.
    assert opened.protocol.index(opened.id, [1, "b"]) == 1
    assert kept(opened) == {b"a": b"1", b"b": b"11 1"}


def test_of_one_key_a_hundred_parts_are_kept(opened: RequestByHand) -> None:
    pairs = [value for number in range(1, 200) for value in (number, "same")]

    assert opened.protocol.index(opened.id, pairs) == 198
    assert kept(opened)[b"same"].split() == [b"%d" % number for number in range(1, 101)]


def test_parts_that_were_never_added_are_forgotten(opened: RequestByHand) -> None:
    """A load that goes on may give their numbers to others."""
    opened.append(2)
    many = [value for number in range(3, 3_000) for value in (number, f"k{number}")]
    opened.protocol.index(opened.id, [1, "a", 2, "b", 3, "a", 4, "c"])
    for first in range(0, len(many), 1_000):
        opened.protocol.index(opened.id, many[first : first + 1_000])

    opened.protocol.forget_unadded(opened.id)

    assert kept(opened) == {b"a": b"1", b"b": b"2"}


def test_nothing_is_left_of_a_request_that_is_gone(protocol: Protocol, request_id: str) -> None:
    driver = RequestByHand(protocol, "q", request_id)
    with pytest.raises(RequestUnknown):
        protocol.index(request_id, [1, "a"])

    assert kept(driver) == {}
