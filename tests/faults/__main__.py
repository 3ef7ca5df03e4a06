"""Run the fault scenarios: ``python -m tests.faults run --help``."""

from tests.faults.program import main

main()
