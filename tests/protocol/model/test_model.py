"""Tokens and leases, explored exhaustively: ours holds, and breaks without any one rule.

Every test says which kind of violation it expects, so that none passes by accident. A rule is
left out in a configuration that holds with it: ``test_ours_holds`` has all of them.

``pytest tests/protocol/model -s`` prints the number of states, and for what breaks the whole trace.
The configurations of ``LARGE`` take seconds each: ``make model`` explores them, ``make test`` does
not, because a change of the code cannot change their outcome.
"""

import pytest

from tests.protocol.model.explore import SPIN, STUCK, STUCK_CLEAN, explore
from tests.protocol.model.keyspace import (
    FORMER,
    HALF_ACK,
    IN_VAIN,
    LOST_PART,
    MISPLACED,
    OVER_LIMIT,
    STRANDED,
    TRESPASS,
    WRONG_END,
    Rule,
    Terms,
)
from tests.protocol.model.leases import ALIVE, OVERRUN, RUN_TWICE, STARVED, Protocol
from tests.protocol.model.naive import Naive, Seed
from tests.protocol.model.world import Budget, Config

TWO = Terms(limit=2)
TWO_ALONE = Terms(limit=2, batch=1)

CONFIGS = {
    "empty": Config(parts=0, chunk=1),
    "plain": Config(terms=TWO),
    "three parts": Config(parts=3, terms=TWO),
    "three workers": Config(parts=3, workers=3, terms=TWO),
    "load": Config(chunk=1),
    "load with room": Config(chunk=1, terms=TWO),
    "load, crash": Config(chunk=1, budget=Budget(crashes=1)),
    "crash, two janitors": Config(janitors=2, budget=Budget(crashes=1)),
    "crash, late": Config(workers=1, terms=TWO_ALONE, budget=Budget(crashes=1, late=1)),
    "late": Config(terms=TWO, budget=Budget(late=1)),
    "late, late": Config(budget=Budget(late=2)),
    "stall": Config(budget=Budget(stalls=1)),
    "stall with room": Config(terms=TWO, budget=Budget(stalls=1)),
    "stall, late": Config(terms=Terms(batch=1), budget=Budget(stalls=1, late=1)),
    "crash, stall, late": Config(parts=1, budget=Budget(crashes=1, stalls=1, late=1)),
    "stop, late": Config(budget=Budget(stops=1, late=1)),
    "fail": Config(terms=TWO, budget=Budget(fails=1)),
    "fail, redrive": Config(workers=1, terms=TWO, budget=Budget(fails=1, redrives=1)),
    "tokens": Config(chunk=1, terms=Terms(limit=2, cap=1), budget=Budget(lost=1, doubled=1)),
    "rollback": Config(parts=3, workers=1, budget=Budget(rollbacks=1)),
    "rollback, two workers": Config(budget=Budget(rollbacks=1)),
    "rollback, late": Config(workers=1, budget=Budget(rollbacks=1, late=1)),
    "outage": Config(terms=TWO, budget=Budget(outages=1)),
    "outage, crash": Config(terms=TWO_ALONE, budget=Budget(outages=2, crashes=1)),
    "doze, crash": Config(terms=TWO_ALONE, budget=Budget(dozes=1, crashes=1)),
    "reuse": Config(budget=Budget(reuses=1)),
    "reuse, late": Config(workers=1, budget=Budget(reuses=1, late=1)),
    "rollback, load": Config(workers=1, chunk=1, budget=Budget(rollbacks=1)),
}

#: Those with the most states; together they take most of the time.
LARGE = {
    "outage, crash",
    "three workers",
    "crash, stall, late",
    "doze, crash",
    "load, crash",
    "stall with room",
    "late, late",
    "stop, late",
    "fail",
    "reuse",
    "tokens",
    "crash, two janitors",
    "rollback, two workers",
    "late",
    "crash, late",
    "stall, late",
    "three parts",
    "rollback, load",
    "load with room",
}

WITHOUT = {
    Rule.ONE_LOCK: ("plain", RUN_TWICE),
    Rule.NUMBERED: ("plain", RUN_TWICE),
    Rule.REPEAT_RENEWS: ("stall, late", OVERRUN),
    Rule.FRESH_NAMES: ("late", RUN_TWICE),
    Rule.CLAIM_ONCE: ("crash, late", TRESPASS),
    Rule.RELEASE_LASTS: ("late", IN_VAIN),
    Rule.HAND_BACK_ALL: ("plain", STRANDED),
    Rule.HAND_BACK_DRY: ("plain", STRANDED),
    Rule.LEASE_OR_NOTHING: ("stall", TRESPASS),
    Rule.SAME_REQUEST: ("reuse", FORMER),
    Rule.RECOUNT: ("rollback", HALF_ACK),
    Rule.RENEW_ONLY_MOVES: ("stall", OVER_LIMIT),
    Rule.REAP_CHECKS: ("stall with room", RUN_TWICE),
    Rule.REAP_EMPTIES: ("crash, two janitors", STRANDED),
    Rule.REAP_WHOLE: ("stall with room", RUN_TWICE),
    Rule.GRACE: ("outage", ALIVE),
    Rule.GAP: ("outage, crash", ALIVE),
    Rule.OWN_GRACE: ("doze, crash", ALIVE),
    Rule.NO_IDLE_LEASE: ("load", STUCK_CLEAN),
    Rule.RETRY_AGREES: ("stall", MISPLACED),
    Rule.KEEP_ENTRY: ("fail, redrive", LOST_PART),
    Rule.FORGET_TOKENS: ("fail, redrive", STARVED),
    Rule.COUNT_REFUSED: ("plain", STARVED),
    Rule.AUDIT_LOWERS: ("fail", STARVED),
}

NAIVE = {
    "tokens are the limit, crash": (Seed(limit=1, crashes=1), STUCK),
    "tokens are the limit, push repeated": (Seed(parts=3, limit=1, doubled=1), OVERRUN),
    "unguarded counter": (Seed(limit=3, workers=3, guards_counter=False, stalls=1), WRONG_END),
    "push back on empty": (Seed(parts=1, drops_on_empty=False), SPIN),
}

MENDED = {
    "tokens are the limit, no fault": Seed(limit=1),
    "guarded counter": Seed(limit=3, workers=3, stalls=1),
    "drop on empty": Seed(parts=1),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.model if name in LARGE else ()) for name in CONFIGS],
)
def test_ours_holds(name: str) -> None:
    exploration = explore(Protocol(CONFIGS[name]))

    print(f"{name}: {exploration.states} states")
    assert exploration.violation is None, str(exploration.violation)


@pytest.mark.parametrize("rule", Rule)
def test_without_rule_breaks(rule: Rule) -> None:
    name, kind = WITHOUT[rule]

    violation = explore(Protocol(CONFIGS[name].without(rule))).violation

    print(f"{name}, without rule {rule}: {violation}")
    assert violation is not None
    assert violation.kind == kind


def test_without_a_janitor_a_crash_is_for_ever() -> None:
    violation = explore(Protocol(Config(janitors=0, budget=Budget(crashes=1)))).violation

    print(f"without a janitor: {violation}")
    assert violation is not None
    assert violation.kind == STUCK


@pytest.mark.parametrize("name", NAIVE)
def test_naive_breaks(name: str) -> None:
    seed, kind = NAIVE[name]

    violation = explore(Naive(seed)).violation

    print(f"{name}: {violation}")
    assert violation is not None
    assert violation.kind == kind


@pytest.mark.parametrize("name", MENDED)
def test_naive_holds_where_it_is_mended(name: str) -> None:
    violation = explore(Naive(MENDED[name])).violation

    assert violation is None, str(violation)
