"""Durations, sizes, rates and names as people write them."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamq import units
from streamq.errors import InvalidValue


@pytest.mark.parametrize("value", ["a", "A-Z_0.9", "x" * 64, "-", "..."])
def test_name_that_can_be_part_of_a_key(value: str) -> None:
    assert units.name(value, "id") == value


@pytest.mark.parametrize(
    "value",
    ["", "a}b", "{a", "a\n", "a b", "x" * 65, "ä", "a:b", "a*", "a\0", None, 7, b"a", ["a"]],
    ids=repr,
)
def test_name_that_cannot(value: Any) -> None:
    with pytest.raises(InvalidValue, match=r"request id .* 1 to 64 characters"):
        units.name(value, "request id")


def test_whole_number_in_its_range() -> None:
    assert units.whole(0, "level", 0, 99) == 0
    assert units.whole(99, "level", 0, 99) == 99
    assert units.whole(10**9, "limit", 1) == 10**9


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (100, "out of range: 0 to 99"),
        (-1, "out of range: 0 to 99"),
        (True, "not a whole number"),
        (1.5, "not a whole number"),
        (1.0, "not a whole number"),
        ("5", "not a whole number"),
        (None, "not a whole number"),
    ],
    ids=repr,
)
def test_number_that_is_not(value: Any, says: str) -> None:
    with pytest.raises(InvalidValue, match=f"level .* {says}"):
        units.whole(value, "level", 0, 99)


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        ("30s", 30_000),
        ("5m", 300_000),
        ("2h", 7_200_000),
        ("7d", 604_800_000),
        ("250ms", 250),
        ("1.5s", 1_500),
        (" 10 s ", 10_000),
        ("1h30m", 5_400_000),
        ("90 min", 5_400_000),
        ("1.5h", 5_400_000),
        ("1 h 30 min", 5_400_000),
        ("2 days 1 second", 172_801_000),
        ("1m500ms", 60_500),
        ("10", 10_000),
        (10, 10_000),
        (0.25, 250),
        (0, 0),
        ("0s", 0),
    ],
    ids=repr,
)
def test_duration(value: str | float, ms: int) -> None:
    assert units.duration_ms(value) == ms


@pytest.mark.parametrize(
    "value",
    [
        *("", "s", "-1s", "1 fortnight", "1S", "1s 2m", "1e3s", "99999999d", "9" * 400),
        *("1h30", "1h1h", "30m1h", "1 2", "1h,30m", "1M", "1.2.3s", "1h-30m", "h1", "1" * 50 + "!"),
        *(-1, 1e12, float("nan"), float("inf"), 10**400, True, None, [1]),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_duration_that_cannot_be(value: Any) -> None:
    with pytest.raises(InvalidValue, match="keep"):
        units.duration_ms(value, "keep")


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("256KiB", 2**18),
        ("1MiB", 2**20),
        ("2GB", 2 * 10**9),
        ("1.5 kb", 1_500),
        ("7B", 7),
        ("64k", 2**16),
        ("64K", 2**16),
        ("64 KiB", 2**16),
        ("1M", 2**20),
        ("1.5g", 3 * 2**29),
        ("7", 7),
        (7, 7),
    ],
    ids=repr,
)
def test_size(value: str | int, size: int) -> None:
    assert units.size_bytes(value) == size


@pytest.mark.parametrize(
    "value",
    [
        "",
        "0",
        "0.2B",
        "1 TiB",
        "-1",
        "KiB",
        "9" * 400,
        0,
        -1,
        True,
        1.5,
        None,
        "1M 5k",
        "1e3",
        "5s",
    ],
    ids=lambda value: repr(value)[:20],
)
def test_size_that_cannot_be(value: Any) -> None:
    with pytest.raises(InvalidValue, match="bytes"):
        units.size_bytes(value, "bytes")


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        ("100/s", 10.0),
        ("30/m", 2_000.0),
        ("1000/h", 3_600.0),
        ("0.5/s", 2_000.0),
        ("1 / s", 1e3),
        ("30/min", 2e3),
    ],
)
def test_rate_is_the_time_between_two(value: str, ms: float) -> None:
    assert units.rate_ms(value) == ms


@pytest.mark.parametrize(
    "value",
    [
        "",
        "100",
        "/s",
        "0/s",
        "-1/s",
        "nan/s",
        "inf/s",
        "1/d",
        "1/s/s",
        "x/s",
        "1e-300/h",
        100,
        None,
    ],
    ids=repr,
)
def test_rate_that_cannot_be(value: Any) -> None:
    with pytest.raises(InvalidValue, match="rate"):
        units.rate_ms(value)


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (None, (-1, -1.0)),
        (0, (0, -1.0)),
        ("10", (10, -1.0)),
        ("2%", (-1, 2.0)),
        ("0.5%", (-1, 0.5)),
    ],
    ids=repr,
)
def test_tolerance(value: str | int | None, bounds: tuple[int, float]) -> None:
    assert units.tolerated_failures(value) == bounds


@pytest.mark.parametrize(
    "value", ["", "-1", "101%", "-1%", "%", "nan%", "x", -1, 1.5, True, [3]], ids=repr
)
def test_tolerance_that_cannot_be(value: Any) -> None:
    with pytest.raises(InvalidValue, match="max_failures"):
        units.tolerated_failures(value)


@pytest.mark.parametrize("value", ["now", -1, True, None, float("nan"), float("inf")], ids=repr)
def test_moment_that_cannot_be(value: Any) -> None:
    with pytest.raises(InvalidValue, match="start_at"):
        units.moment_s(value, "start_at")


@pytest.mark.parametrize("parse", [units.duration_ms, units.size_bytes, units.rate_ms])
def test_an_error_shows_how_it_is_written(parse: Callable[[str], object]) -> None:
    with pytest.raises(InvalidValue, match="'much': write "):
        parse("much")


@pytest.mark.parametrize(
    ("parse", "value", "says"),
    [
        (units.duration_ms, "5x", "timeout '5x': there is no unit 'x'; write 90s"),
        (units.duration_ms, "1h30", "timeout '1h30': 30 has no unit; write 90s"),
        (units.duration_ms, "30m1h", "timeout '30m1h': larger units come first, as in 1h30m"),
        (units.size_bytes, "5q", "timeout '5q': there is no unit 'q'; write 64k"),
        (units.size_bytes, "1M5k", "timeout '1M5k': write one number and its unit: 64k"),
    ],
)
def test_an_error_says_what_is_wrong(
    parse: Callable[[str, str], object], value: str, says: str
) -> None:
    with pytest.raises(InvalidValue, match=re.escape(says)):
        parse(value, "timeout")


_SPACES = st.sampled_from(["", " ", "  "])
_UNITS = {
    86_400_000: ("d", "day", "days"),
    3_600_000: ("h", "hr", "hours"),
    60_000: ("m", "min", "minutes"),
    1_000: ("s", "sec", "seconds"),
    1: ("ms", "milliseconds"),
}


@given(st.data(), st.lists(st.sampled_from(sorted(_UNITS)), min_size=1, unique=True))
def test_a_duration_is_the_sum_of_its_amounts(data: st.DataObject, chosen: list[int]) -> None:
    text, ms = data.draw(_SPACES), 0
    for unit_ms in sorted(chosen, reverse=True):
        amount = data.draw(st.integers(0, 2_000))
        unit = data.draw(st.sampled_from(_UNITS[unit_ms]))
        text += f"{amount}{data.draw(_SPACES)}{unit}{data.draw(_SPACES)}"
        ms += amount * unit_ms

    assert units.duration_ms(text) == ms


@given(st.integers(1, 2**20), st.integers(0, 2), _SPACES)
def test_a_size_is_its_number_of_units(amount: int, power: int, space: str) -> None:
    for unit in (("", "K", "M")[power], ("B", "KiB", "MiB")[power]):
        assert units.size_bytes(f"{amount}{space}{unit}") == amount * 1024**power
        assert units.size_bytes(f"{amount}{space}{unit.lower()}") == amount * 1024**power
    assert units.size_bytes(f"{amount}{space}{('B', 'KB', 'MB')[power]}") == amount * 1000**power


@given(st.text(st.sampled_from("0123456789. hmsdkKMBi-"), max_size=30) | st.text(max_size=30))
def test_any_text_is_a_value_or_a_clear_refusal(text: str) -> None:
    for parse in (units.duration_ms, units.size_bytes):
        said = ""
        try:
            assert 0 <= parse(text, "window") <= 2**53
        except InvalidValue as error:
            said = str(error)
        assert said.startswith("window ") or not said


def test_labels_are_ordered_by_name() -> None:
    assert units.labels({"user": "62", "env": ""}) == (("env", ""), ("user", "62"))
    assert units.label("a=b=c") == ("a", "b=c")


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ({f"n{number}": "" for number in range(9)}, "9 are more than the 8 of a request"),
        ({"": "x"}, "the name of a label '' is not 1 to 64 characters"),
        ({"x" * 65: ""}, "is not 1 to 64 characters"),
        ({"user": "x" * 257}, "the label user has 257 characters, more than the 256 of one"),
        ({"user": 62}, "the label user is 62, which is no text"),
        ({"user": "a\x1b[2J"}, "the label user has characters that cannot be shown"),
        (["user=62"], 'give names and values, such as {"user": "62"}'),
    ],
)
def test_labels_that_are_refused(labels: Any, why: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(why)):
        units.labels(labels)


def test_a_label_needs_a_value() -> None:
    with pytest.raises(InvalidValue, match="--label 'user': write NAME=VALUE, such as user=62"):
        units.label("user")


@pytest.mark.parametrize(
    "read",
    [
        units.duration_ms,
        units.size_bytes,
        units.rate_ms,
        units.tolerated_failures,
        lambda text: units.name(text, "id"),
        lambda text: units.request_id(text, "shop"),
        units.place,
        units.label,
    ],
)
@pytest.mark.parametrize("piece", ["1h", "9", "1 "])
def test_megabytes_are_refused_at_once_in_few_words(read: Callable[[str], Any], piece: str) -> None:
    begun = time.thread_time()
    with pytest.raises(InvalidValue) as refused:
        read(piece * 5_000_000)
    assert time.thread_time() - begun < 0.5
    assert len(str(refused.value)) < 300
