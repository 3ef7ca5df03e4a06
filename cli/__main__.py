"""``python -m streamq.cli``."""

from . import main

main()
