"""Run the mutation tests: ``python -m tests.mutants --help``."""

from tests.mutants.program import main

main()
