"""What people and programs read: colours, spans, rates, tables."""

import subprocess

import pytest

from cli import render
from tests.support.by_hand import RequestByHand
from tests.support.command import COMMAND, Terminal, environment

pytestmark = pytest.mark.commands


@pytest.mark.parametrize(("variables", "has_colour"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_only_for_those_who_want_it(
    variables: dict[str, str], has_colour: bool, url: str, submitted: RequestByHand
) -> None:
    with Terminal() as terminal:
        shown = subprocess.run(
            [*COMMAND, "ls", "--queue", submitted.queue, "--url", url],
            env=environment(**variables),
            stdin=terminal.file,
            stdout=terminal.file,
            timeout=60,
            check=False,
        )
        text = terminal.seen()

    assert shown.returncode == 0
    assert ("\x1b[" in text) == has_colour
    assert "open" in text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "0ms"),
        (999, "999ms"),
        (1_400, "1s"),
        (60_000, "1m"),
        (85_000, "1m25s"),
        (7_500_000, "2h05m"),
        (604_800_000, "7d"),
    ],
)
def test_spans(ms: float, text: str) -> None:
    assert render.span(ms) == text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [(1234.5, "1,234/s"), (12.5, "12.5/s"), (0.5, "30/m"), (0.001, "3.6/h"), (0.0, "0/h")],
)
def test_rates(per_second: float, text: str) -> None:
    assert render.rate(per_second) == text


def test_a_table_lets_no_text_move_the_cursor() -> None:
    text = render.table(("NAME", ">COUNT"), [("a\x1b[2Jb\nc", "1"), ("é", "1000")])

    assert text.splitlines() == [
        "NAME          COUNT",
        r"a\x1b[2Jb\nc      1",
        "é              1000",
    ]
