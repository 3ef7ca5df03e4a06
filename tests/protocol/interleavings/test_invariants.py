"""Every invariant of the protocol, after every step of random interleavings on a real server.

``STREAMQ_TEST_EXAMPLES=20`` runs twenty times as many examples, chosen anew in each run. A failure
comes with the steps that lead to it, made as few as could be found.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from streamq import Janitor, Protocol, Request, State
from streamq.protocol.replies import Tokens
from tests.protocol.interleavings.machine import Machine
from tests.support.by_hand import RequestByHand

TIMES = int(os.environ.get("STREAMQ_TEST_EXAMPLES", "1"))
EXAMPLES = {"valkey": 45, "redis": 15, "cluster": 15}
STEPS = 100
CHANCES = 6
# The longest run has to meet all of these: one that does not has tested less than it says.
MET = (
    *("claim ok", "claim empty", "claim limit", "claim level", "claim paused", "claim held"),
    *("finish ok", "finish over", "finish lost", "finish late", "fail retry", "fail failed"),
    *("handback ok", "release over", "release lost", "crashes", "lost replies", "late calls"),
    *("stalls", "reaped", "mercy", "charged", "poison", "alone", "given up", "failed early"),
    *("redriven", "reopened", "cancelled", "tokens lost", "crashes between calls", "purged"),
    *("repeated", "calm examples", "claim lost", "former", "watched"),
    *("keep ok", "keep lost"),
)


# What hypothesis may take to make a failure small comes on top of the run itself.
@pytest.mark.timeout(120 * TIMES + 600)
def test_invariants_hold_whatever_happens(protocol: Protocol, kind: str) -> None:
    tally: Counter[str] = Counter()
    began = time.monotonic()

    explore(protocol, tally, EXAMPLES[kind] * TIMES, is_random=TIMES > 1)
    for _ in range(CHANCES):
        if kind != "valkey" or not missed(tally):
            break
        # What happens depends on how quick the machine is, too: rare events get more chances.
        explore(protocol, tally, EXAMPLES[kind] * TIMES // 3, is_random=True)

    seconds = time.monotonic() - began
    print(f"{kind}: {tally['steps']} steps, {tally['calls']} calls, {seconds:.1f} s")
    print(dict(sorted(tally.items())))
    assert tally["steps"] > EXAMPLES[kind] * TIMES * STEPS * 0.6
    if kind == "valkey":
        assert missed(tally) == []


def explore(protocol: Protocol, tally: Counter[str], examples: int, *, is_random: bool) -> None:
    run_state_machine_as_test(
        lambda: Machine(protocol, tally),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            derandomize=not is_random,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def missed(tally: Counter[str]) -> list[str]:
    return [event for event in MET if not tally[event]]


class DisturbedRetry(Protocol):
    """Lets a janitor sweep just before failed parts are taken back."""

    def redrive(self, request_id: str, numbers: Iterable[int]) -> tuple[int, State, Tokens]:
        Janitor(self, self.inspect(request_id).text("queue")).sweep()
        return super().redrive(request_id, numbers)


def test_request_closed_while_it_is_redriven_is_registered_again(driver: RequestByHand) -> None:
    driver.protocol.mint(driver.queue, driver.id, Tokens(), register="yes")
    driver.load(1)
    driver.give_up(1)

    Request(DisturbedRetry(driver.protocol.connection), driver.id).retry()

    assert driver.meta("state") == "open"
    assert driver.protocol.ids(driver.queue) == [driver.id]
    assert driver.protocol.ids(driver.queue, closed=True) == []
