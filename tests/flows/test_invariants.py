"""Flows of random shape on real servers: the invariants hold after each step, whatever happens."""

import os
from collections import Counter

import pytest

from streamq import Protocol
from streamq.errors import ProtocolError
from tests.conftest import ONE_KIND
from tests.flows.rules import scripts_without
from tests.flows.simulation import Forgetful, Simulation

#: ``FUZZ_EXAMPLES`` asks for others, and for so many times more of them.
TIMES = int(os.environ.get("FUZZ_EXAMPLES", "1"))
EXAMPLES = {"valkey": 30, "redis": 10, "cluster": 6}
STEPS = 70
#: How often the slot forgets in an example of ``Forgetful``.
FAILOVERS = 10
MET = {
    "late calls", "deaths", "repeats", "mercy", "fail abandon", "fail retry", "stalls", "redriven",
    "refused", "failovers", "ends",
}  # fmt: skip


def simulate(
    protocol: Protocol,
    queue: str,
    request_id: str,
    seeds: range,
    kind: type[Simulation] = Simulation,
    steps: int = STEPS,
) -> Counter[str]:
    tally: Counter[str] = Counter()
    for seed in seeds:
        one = kind(protocol, queue, f"{request_id}.{seed}", seed, tally)
        try:
            one.run(steps)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return tally


@pytest.mark.timeout(60 * TIMES + 300)
def test_invariants_hold_whatever_happens(
    protocol: Protocol, queue: str, request_id: str, kind: str
) -> None:
    tally = simulate(protocol, queue, request_id, range(EXAMPLES.get(kind, 20) * TIMES))

    print(kind, dict(sorted(tally.items())))
    if kind == "valkey":
        assert {name for name in MET if not tally[name]} == set()


@pytest.mark.timeout(60 * TIMES + 300)
def test_each_item_keeps_its_result_though_the_slot_forgets_again_and_again(
    protocol: Protocol, queue: str, request_id: str, kind: str
) -> None:
    seeds = range((6 if kind == "valkey" else 3) * TIMES)
    tally = simulate(protocol, queue, request_id, seeds, Forgetful, FAILOVERS)

    assert tally["failovers"] == FAILOVERS * len(seeds)
    assert tally["mercy"] > 0


#: Rules whose absence the simulation notices by itself, and how many examples that takes. For the
#: other rules chance would have to be very lucky; ``test_rules.py`` and ``test_failover.py`` have
#: them.
NOTICED = {
    "F1 one script": 5,
    "F2 what was acknowledged": 40,
    "F3 mercy hands over": 40,
    "F4 counted last": 10,
    "F5 a failed child counts": 40,
}


@pytest.mark.parametrize("rule", NOTICED)
def test_a_rule_that_is_left_out_is_noticed(
    rule: str, protocol: Protocol, queue: str, request_id: str
) -> None:
    with scripts_without(rule), pytest.raises((AssertionError, ProtocolError)):
        simulate(protocol, queue, request_id, range(NOTICED[rule]))


#: The same of rules that only a failover brings out.
NOTICED_AFTER_FAILOVERS = {"F6 its own item": 8, "F7 no gap": 12}


@ONE_KIND
@pytest.mark.parametrize("rule", NOTICED_AFTER_FAILOVERS)
def test_a_rule_of_failovers_that_is_left_out_is_noticed(
    rule: str, protocol: Protocol, queue: str, request_id: str
) -> None:
    seeds = range(NOTICED_AFTER_FAILOVERS[rule])
    with scripts_without(rule), pytest.raises((AssertionError, ProtocolError)):
        simulate(protocol, queue, request_id, seeds, Forgetful, FAILOVERS)
