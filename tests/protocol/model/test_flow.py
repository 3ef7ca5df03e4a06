"""Flows, explored exhaustively: with all rules the hand-over holds, and it breaks without any one.

``pytest tests/protocol/model -s`` prints the number of states. ``make model`` explores the
configurations of ``BIG``, too. What breaks without the rule of a gap in the calls (F7) lies
behind 131,140 states: here the way there is gone, and ``make model`` looks for it.
``tests/flows/test_failover.py`` has it on servers.
"""

import pytest

from tests.protocol.model.explore import STUCK, STUCK_CLEAN, explore
from tests.protocol.model.flow import (
    BLIND,
    DOUBLED,
    GROUP,
    HALF,
    LOST,
    MISCOUNT,
    OVER_WINDOW,
    STARVED,
    TWO_JOINS,
    WRONG_END,
    WRONG_ITEM,
    Budget,
    Flow,
    Terms,
)

M2 = ("map", "map")
SJ = ("spread", "map", "join")
CONFIGS = {
    "map map": Terms(M2),
    "map map, limit 2": Terms(M2, limit=2),
    "map map, sealed late": Terms(M2, inputs=1, seal=True),
    "map map, no input": Terms(M2, inputs=0, seal=True),
    "map map, crash": Terms(M2, budget=Budget(crashes=1)),
    "map map, late": Terms(M2, budget=Budget(late=1)),
    "map map, crash late": Terms(M2, inputs=1, budget=Budget(crashes=1, late=1)),
    "map map, stall late": Terms(M2, inputs=1, budget=Budget(stalls=1, late=1)),
    "map map, stall limit 2": Terms(M2, limit=2, budget=Budget(stalls=1)),
    "map map, lost": Terms(M2, budget=Budget(lost=1)),
    "map map, fail redrive": Terms(M2, budget=Budget(fails=1, redrives=1)),
    "map map, limit 2, fail redrive": Terms(M2, limit=2, budget=Budget(fails=1, redrives=1)),
    "map map, batch 2, fail redrive": Terms(
        M2, limit=2, batch=2, inputs=3, budget=Budget(fails=1, redrives=1)
    ),
    "map map, poison": Terms(M2, inputs=1, budget=Budget(crashes=1, poison=1, redrives=1)),
    "map map, batch 2 more": Terms(M2, batch=2, more=True, inputs=3),
    "map map, more, roll": Terms(
        M2, inputs=2, workers=2, more=True, limit=2, budget=Budget(rolls=1)
    ),
    "map map, more, roll, stall": Terms(
        M2, inputs=2, workers=2, limit=2, budget=Budget(rolls=1, stalls=1)
    ),
    "map drop map": Terms(("map", "map"), budget=Budget(drops=1)),
    "window": Terms(M2, inputs=3, window=1, limit=2),
    "window, fail": Terms(M2, inputs=3, window=1, limit=2, budget=Budget(fails=1)),
    "window, drop": Terms(
        ("map", "map", "map"), inputs=2, window=1, limit=1, budget=Budget(drops=1)
    ),
    "window, poison": Terms(M2, inputs=2, window=1, limit=1, budget=Budget(crashes=1, poison=1)),
    "window, crash": Terms(M2, inputs=2, window=1, limit=2, budget=Budget(crashes=1)),
    "window, spread": Terms(SJ, inputs=2, window=2, limit=1),
    "window, reduce": Terms(("map", "reduce"), inputs=2, window=1),
    "spread join": Terms(SJ, inputs=1, limit=2),
    "spread join, two": Terms(SJ, inputs=2, limit=1, workers=2),
    "spread join, crash": Terms(SJ, inputs=1, limit=2, budget=Budget(crashes=1)),
    "spread join, late": Terms(SJ, inputs=1, limit=2, budget=Budget(late=1)),
    "spread join, late late": Terms(SJ, inputs=1, limit=1, workers=1, budget=Budget(late=2)),
    "spread join, stall late": Terms(SJ, inputs=1, limit=1, budget=Budget(stalls=1, late=1)),
    "spread join, fail": Terms(SJ, inputs=1, limit=2, budget=Budget(fails=1)),
    "spread join, fail fail redrive redrive": Terms(
        SJ, inputs=1, limit=1, budget=Budget(fails=2, redrives=2)
    ),
    "spread join, fail redrive, run": Terms(
        SJ, inputs=1, limit=2, policy="run", budget=Budget(fails=1, redrives=1)
    ),
    "spread join, poison redrive": Terms(
        SJ, inputs=1, limit=1, budget=Budget(crashes=1, poison=1, redrives=1)
    ),
    "spread drop join": Terms(
        ("spread", "map", "map", "join"),
        inputs=1,
        limit=1,
        workers=1,
        budget=Budget(drops=1, fails=1),
    ),
    "spread join map, fail redrive": Terms(
        ("spread", "map", "join", "map"), inputs=1, limit=1, budget=Budget(fails=1, redrives=1)
    ),
    "spread without join": Terms(
        ("spread", "map"), inputs=2, limit=2, budget=Budget(late=1, crashes=1)
    ),
    "reduce": Terms(("map", "reduce"), inputs=2, limit=2),
    "reduce, none": Terms(("map", "reduce"), inputs=0, seal=True),
    "reduce, crash late": Terms(
        ("map", "reduce"), inputs=2, limit=1, budget=Budget(crashes=1, late=1)
    ),
    "reduce, fail redrive": Terms(
        ("map", "reduce"), inputs=2, limit=1, budget=Budget(fails=1, redrives=2)
    ),
    "reduce, fail fail redrive, run": Terms(
        ("map", "reduce"), inputs=2, policy="run", budget=Budget(fails=2, redrives=1)
    ),
}
BIG = {
    "big: map map map, crash late stall": Terms(
        ("map", "map", "map"), inputs=2, limit=1, budget=Budget(crashes=1, late=1, stalls=1)
    ),
    "big: map map, 3 inputs 3 workers": Terms(
        M2, inputs=3, workers=3, limit=2, budget=Budget(crashes=1, late=1)
    ),
    "big: map map, batch 2, more": Terms(
        M2, inputs=3, batch=2, more=True, limit=2, budget=Budget(late=1, stalls=1)
    ),
    "big: spread join, 2 inputs, crash late": Terms(
        SJ, inputs=2, limit=1, budget=Budget(crashes=1, late=1)
    ),
    "big: spread join, crash late stall": Terms(
        SJ, inputs=1, limit=2, budget=Budget(crashes=1, late=1, stalls=1)
    ),
    "big: spread join, everything": Terms(
        SJ, inputs=1, limit=2, budget=Budget(crashes=1, late=1, fails=1, poison=1, redrives=2)
    ),
    "big: spread join, roll": Terms(SJ, inputs=1, limit=2, budget=Budget(rolls=1)),
    "big: reduce, everything": Terms(
        ("map", "reduce"),
        inputs=2,
        limit=2,
        budget=Budget(crashes=1, late=1, fails=1, poison=1, redrives=2),
    ),
    "big: reduce, roll": Terms(
        ("map", "reduce"), inputs=2, limit=1, budget=Budget(rolls=1, fails=1, redrives=1)
    ),
    "big: window, everything": Terms(
        ("map", "map", "map"),
        inputs=3,
        window=1,
        limit=2,
        budget=Budget(crashes=1, late=1, fails=1),
    ),
}

#: Where the rule of a gap in the calls matters, and the shortest way to that: the server hands
#: number 1 of stage 1 to w1 as one item, forgets that, and hands it to w0 as another.
GAP = Terms(M2, inputs=3, workers=2, more=True, limit=2, budget=Budget(rolls=1))
WAY_TO_A_GAP = (
    "w0 claims stage 0: [0]",
    "w0 sends PASS of stage 0 and asks for more",
    "server executes PASS 1 of w0, stage 0 [0]",
    "w1 claims stage 1: [0]",
    "w0 sends PASS of stage 0",
    "w1 sends PASS of stage 1 and asks for more",
    "replica cut off",
    "server executes PASS 2 of w0, stage 0 [1]",
    "server executes PASS 1 of w1, stage 1 [0]",
    "w1 sends PASS of stage 1",
    "rollback",
    "w0 claims stage 0: [2]",
    "w0 sends PASS of stage 0",
    "server executes PASS 1 of w0, stage 0 [2]",
    "w0 claims stage 1: [1]",
    "server executes PASS 2 of w1, stage 1 [1]",
)

#: Rules that are left out: the configuration, and what is to break in it.
WITHOUT: dict[tuple[str, ...], list[tuple[str, tuple[str, ...]]]] = {
    ("one-script",): [("map map, crash", (LOST, MISCOUNT))],
    ("one-script", "hand-first"): [("map map, crash", (DOUBLED,))],
    ("ack-gate",): [("map map, late", (DOUBLED, MISCOUNT))],
    ("mercy-passes",): [("map map, stall limit 2", (LOST,))],
    ("count-last",): [("map map, limit 2", (WRONG_END, HALF))],
    ("origin-check",): [("map map, more, roll, stall", (WRONG_ITEM,))],
    ("mint-next",): [("map map", (STARVED,))],
    ("mint-prev",): [("window", (STARVED,))],
    ("mint-prev-fail",): [("window, fail", (STARVED,))],
    ("reserve",): [("window", (OVER_WINDOW,))],
    ("inbox-free",): [("window, reduce", (STUCK, STUCK_CLEAN))],
    ("fail-counts",): [("spread join, fail", (GROUP,))],
    ("reap-counts",): [("spread join, poison redrive", (GROUP,))],
    ("drop-counts",): [("spread drop join", (GROUP,))],
    ("one-join",): [("spread join, fail fail redrive redrive", (TWO_JOINS,))],
    ("not-after-join",): [
        ("spread join, fail redrive, run", ()),
        ("reduce, fail fail redrive, run", ()),
    ],
    ("keep-inbox",): [("spread join, crash", (BLIND,)), ("reduce, crash late", (BLIND, LOST))],
    ("join-last",): [
        ("spread join, fail fail redrive redrive", (BLIND,)),
        ("reduce, fail redrive", (BLIND,)),
    ],
    ("open-all",): [("map map, fail redrive", (HALF,))],
    ("forget-all-tokens",): [("map map, batch 2, fail redrive", (STARVED,))],
}


CASES = [(rules, name, kinds) for rules, broken in WITHOUT.items() for name, kinds in broken]


@pytest.mark.parametrize(
    "name",
    [*CONFIGS, *(pytest.param(name, marks=pytest.mark.model) for name in BIG)],
)
def test_with_all_rules_it_holds(name: str) -> None:
    exploration = explore(Flow((CONFIGS | BIG)[name]))

    print(f"{name}: {exploration.states} states")
    assert exploration.violation is None, str(exploration.violation)


@pytest.mark.parametrize(
    ("rules", "name", "kinds"), CASES, ids=[f"{'+'.join(rules)}-{name}" for rules, name, _ in CASES]
)
def test_without_a_rule_it_breaks(
    rules: tuple[str, ...], name: str, kinds: tuple[str, ...]
) -> None:
    violation = explore(Flow(CONFIGS[name].no(*rules))).violation

    assert violation is not None
    assert not kinds or violation.kind in kinds


@pytest.mark.parametrize(("rules", "broken"), [((), None), (("gap-check",), WRONG_ITEM)])
def test_call_after_a_gap_is_looked_at(rules: tuple[str, ...], broken: str | None) -> None:
    model = Flow(GAP.no(*rules))
    state = model.initial()
    for name in WAY_TO_A_GAP:
        assert model.broken(state) is None
        state = {step.name: after for step, after in model.steps(state)}[name]

    assert model.broken(state) == broken


@pytest.mark.model
def test_without_the_rule_of_a_gap_it_breaks() -> None:
    violation = explore(Flow(GAP.no("gap-check"))).violation

    assert violation is not None
    assert violation.kind == WRONG_ITEM
