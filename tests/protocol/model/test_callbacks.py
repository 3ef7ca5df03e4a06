"""Callbacks: with the four rules each is started once; without any one it is not."""

import pytest

from tests.protocol.model.callbacks import NEVER, TWICE, Callbacks, Rule
from tests.protocol.model.explore import explore


def test_with_all_rules_it_is_started_once() -> None:
    explored = explore(Callbacks())

    assert explored.violation is None
    assert explored.states > 50, "there was something to explore"


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (Rule.DERIVED, TWICE),
        (Rule.PAID_LAST, NEVER),
        (Rule.FENCE, TWICE),
        (Rule.OUTLIVE, TWICE),
    ],
)
def test_without_a_rule_it_is_not(rule: Rule, kind: str) -> None:
    violation = explore(Callbacks(rule)).violation

    assert violation is not None
    assert violation.kind == kind
