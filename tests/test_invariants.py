"""Every invariant of the protocol, after every step of random interleavings on a real server."""

import os
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from streamq import Protocol
from tests.stateful.machine import Machine

#: Long runs: so many times the examples, and chosen anew in each run.
TIMES = int(os.environ.get("STREAMQ_TEST_EXAMPLES", "1"))
EXAMPLES = {"valkey": 150, "redis": 60, "cluster": 40}
STEPS = 60


@pytest.mark.timeout(300 * TIMES)
def test_invariants_hold_whatever_happens(protocol: Protocol, kind: str) -> None:
    tally: Counter[str] = Counter()
    began = time.monotonic()

    run_state_machine_as_test(
        lambda: Machine(protocol, tally),  # type: ignore[arg-type]
        settings=settings(
            max_examples=EXAMPLES[kind] * TIMES,
            stateful_step_count=STEPS,
            derandomize=TIMES == 1,
            database=None,
            print_blob=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

    print(f"{kind}: {time.monotonic() - began:.1f} s, {dict(sorted(tally.items()))}")
    assert tally["steps"] >= EXAMPLES[kind] * TIMES * STEPS / 2
