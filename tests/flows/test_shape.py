"""Which flows there can be, and what follows from the kinds of their stages."""

import pytest

from streamq.errors import Damaged, InvalidValue
from streamq.flows.shape import Shape


@pytest.mark.parametrize(
    "text",
    [
        "map",
        "spread,map,join",
        "spread,join",
        "spread,spread,map,join,map",
        "spread,join,spread,join",
        "map,spread,map,join,reduce,map",
        ",".join(["map"] * 16),
    ],
)
def test_can_be(text: str) -> None:
    Shape.read(text).check()

    assert Shape.read(text).text == text


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        ([], "needs a stage"),
        (["map"] * 17, "17 stages, more than the 16"),
        (["map", "join"], "stage 2 is a join, and its spread is missing"),
        (["spread", "spread", "join", "join"], "joins do not nest"),
        (["reduce"], "cannot begin with a reduce"),
        (["join"], "cannot begin with a join"),
        (["spread", "reduce", "join"], "stage 2 is a reduce between a spread and its join"),
        (["map", "reduce", "reduce"], "at most one reduce"),
    ],
)
def test_cannot_be(kinds: list[str], why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        Shape(tuple(kinds)).check()  # type: ignore[arg-type]


def test_facts_of_each_stage() -> None:
    shape = Shape.read("map,spread,map,join,reduce,map")

    assert [shape.facts(stage) for stage in range(1, 7)] == [
        "map parts 1 0 0 5 6",
        "spread parts 2 4 0 5 6",
        "map join 3 4 1 5 6",
        "join reduce 4 0 0 5 6",
        "reduce parts 5 0 0 0 6",
        "map end 6 0 0 0 6",
    ]


@pytest.mark.parametrize("text", ["", "sort", "map,,map", "map+never", "\udcff"])
def test_text_that_is_none_is_damaged(text: str) -> None:
    with pytest.raises(Damaged, match="the shape of a flow cannot be read"):
        Shape.read(text)
